"""Manifests from strangers: each thing that can be wrong is one line, and nothing is loaded."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tuner.errors import LibraryError
from tuner.export import read_manifest, verify
from tuner.problem import GemmProblem, ProblemType

PROBLEM = GemmProblem.create(ProblemType(), 8, 8, 8)
CONTENTS = {"lib/libwavetune.so": b"not really", "kernels/k.c": b"void k(void) {}\n"}


def record(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def manifest() -> dict[str, Any]:
    return {
        "format": "wavetune library",
        "schema_version": 1,
        "wavetune": "0.1.0",
        "name": "wavetune",
        "id": "0123456789abcdef",
        "fingerprint": {
            "kind": "cpu",
            "name": "A Processor",
            "arch": "x86_64-v3",
            "compute_units": 2,
            "driver": "none",
            "runtime": "Linux x86_64",
            "toolchain": "cc 1.0",
        },
        "build": {"compiler": "cc 1.0", "kernel_flags": ["-O3"], "runtime_flags": ["-O3"]},
        "library": "lib/libwavetune.so",
        "fallback": "nearest",
        "kernels": [
            {
                "symbol": "k",
                "file": "kernels/k.c",
                "sha256": record(CONTENTS["kernels/k.c"])["sha256"],
                "type": PROBLEM.to_dict()["type"],
                "candidate": {"template": "t", "template_hash": "h", "name": "t_1", "params": {"nr": 1}},
            }
        ],
        "table": [{"problem": PROBLEM.to_dict(), "kernel": "k", "time_ns": 123.5}],
        "files": {name: record(data) for name, data in CONTENTS.items()},
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in CONTENTS.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(data)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest()))
    return tmp_path


def refused(check: Callable[[Path], object], folder: Path) -> str:
    with pytest.raises(LibraryError) as caught:
        check(folder)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def test_a_sound_manifest_is_read(folder: Path) -> None:
    read = verify(folder)
    assert read.table[0].problem == PROBLEM
    assert read.kernels[0].type == PROBLEM.type
    choice = read.lookup().find(PROBLEM)
    assert choice is not None
    assert choice.time_ns == 123.5


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(data: Any) -> None:
        *parents, last = path.split(".")
        for key in parents:
            data = data[int(key) if key.isdigit() else key]
        data[last] = value

    return edit


EDITS = {
    "another program's file": (change("format", "else"), "not the manifest of a wavetune library"),
    "a later version": (change("schema_version", 2), "schema version 1, but has 2"),
    "a version that is no number": (change("schema_version", "1" * 1000), "schema version 1"),
    "an unknown key": (change("extra", 1), "extra"),
    "a wrong type": (change("kernels", {}), "kernels"),
    "a size in words": (change("table.0.problem.m", "8"), "table.0.problem.m"),
    "half a size": (change("table.0.problem.m", 8.5), "table.0.problem.m"),
    "a size of nothing": (change("table.0.problem.m", 0), "m must be at least 1"),
    "a leading dimension too small": (change("table.0.problem.lda", 4), "lda must be at least 8"),
    "an unknown element type": (change("table.0.problem.type.dtype_a", "f99"), "dtype_a"),
    "a time of nothing": (change("table.0.time_ns", 0.0), "time_ns"),
    "a time that is no number": (change("table.0.time_ns", float("nan")), "time_ns"),
    "a kernel that is not there": (change("table.0.kernel", "other"), "no kernel other"),
    "a kernel for another type": (change("kernels.0.type.trans_a", "T"), "is not for f32_nn"),
    "a symbol that is none": (change("kernels.0.symbol", "a;b"), "kernels.0.symbol"),
    "a kernel with another hash": (change("kernels.0.sha256", "0" * 64), "kernels/k.c"),
    "a hash that is none": (change("files", {"kernels/k.c": {"bytes": 1, "sha256": "xyz"}}), "sha256"),
    "an enormous file": (change("files", {"kernels/k.c": {"bytes": 1 << 40, "sha256": "0" * 64}}), "bytes"),
    "a library that is not listed": (change("library", "lib/other.so"), "lib/other.so"),
    "a library above the folder": (change("library", "../lib.so"), "library"),
    "a library anywhere": (change("library", "/lib/x.so"), "library"),
    "a library by a detour": (change("library", "lib/../../x.so"), "library"),
    "a file above the folder": (change("files", {"../x": record(b"")}), "files"),
    "a hidden path": (change("files", {"lib/.x": record(b"")}), "files"),
    "a path with a newline": (change("files", {"lib/x\n": record(b"")}), "files"),
    "an empty table": (change("table", []), "at least one row"),
    "another rule": (change("fallback", "random"), "fallback"),
    "a name that is a path": (change("name", "../x"), "name"),
}


@pytest.mark.parametrize("case", EDITS)
def test_a_manifest_is_refused(folder: Path, case: str) -> None:
    edit, expected = EDITS[case]
    data = manifest()
    edit(data)
    (folder / "manifest.json").write_text(json.dumps(data))
    assert expected in refused(read_manifest, folder)


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", json.dumps(manifest())[:-40], "{" * 100_000, '{"a": ' + "9" * 5000 + "}", "\xff"],
    ids=["empty", "null", "list", "cut short", "deep", "long number", "not UTF-8"],
)
def test_what_is_no_json_object_is_refused(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    refused(read_manifest, folder)


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    assert "is not an exported library" in refused(read_manifest, tmp_path)
    assert "is not an exported library" in refused(read_manifest, tmp_path / "nowhere")


def test_a_manifest_that_is_a_link_is_refused(folder: Path) -> None:
    (folder / "manifest.json").rename(folder / "other.json")
    (folder / "manifest.json").symlink_to("other.json")
    assert "plain file" in refused(read_manifest, folder)


def test_a_changed_file_is_found(folder: Path) -> None:
    (folder / "kernels/k.c").write_bytes(CONTENTS["kernels/k.c"].replace(b"k", b"x"))
    assert "has changed since it was exported" in refused(verify, folder)


def test_a_file_of_another_size_is_found(folder: Path) -> None:
    (folder / "kernels/k.c").write_bytes(b"")
    assert "must have 16 bytes, but has 0" in refused(verify, folder)


def test_a_missing_file_is_found(folder: Path) -> None:
    (folder / "kernels/k.c").unlink()
    assert "cannot be read" in refused(verify, folder)


@pytest.mark.parametrize("link", ["kernels/k.c", "kernels"])
def test_a_link_is_found(folder: Path, link: str) -> None:
    elsewhere = folder / "elsewhere"
    (folder / link).rename(elsewhere)
    (folder / link).symlink_to(elsewhere)
    assert "is a link" in refused(verify, folder)


def test_importing_tuner_loads_nothing_else() -> None:
    code = "import sys, tuner; tuner.load; print({'numpy', 'pydantic', 'optuna'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
