"""Template folders: what loads, and what is said about one that does not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tuner.errors import TemplateError
from tuner.generate import Target, Template, find_templates, load_template
from tuner.problem import DType, ProblemType

Write = Callable[..., Path]
CPU = Target("cpu", "x86_64-v3", (("simd_bytes", 32),))


def description(**changes: Any) -> dict[str, Any]:
    return {
        "name": "plain",
        "kind": "cpu",
        "language": "c",
        "kernel": "kernel.c.j2",
        "summary": "A plain GEMM.",
        "parameters": {"tile": {"values": [1, 2, 4], "short": "t", "doc": "Rows."}},
        "estimate_ns": "m * n * k / tile",
        "defaults": [{"tile": 2}],
        **changes,
    }


def tile(values: list[Any]) -> dict[str, Any]:
    return {"parameters": {"tile": {"values": values, "doc": "Rows."}}}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a folder with the given changes to `description`, and return its path."""

    def write(folder: str = "plain", **changes: Any) -> Path:
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        (path / "kernel.c.j2").write_text("void {{ symbol }}(void) {}\n")
        (path / "template.yaml").write_text(json.dumps(description(**changes)))
        return path

    return write


def error(folder: Path) -> str:
    with pytest.raises(TemplateError) as error:
        load_template(folder)
    return str(error.value).replace(str(folder.resolve()), "FOLDER")


def test_a_template_is_what_it_declares(write: Write) -> None:
    template = load_template(
        write(
            kind=["cpu", "hip"],
            derived={"lanes": "simd_bytes // bytes_compute"},
            supports=[{"rule": "dtype_a == 'f32'", "reason": "it is for f32"}],
            constraints={"prune": [{"rule": "tile <= m", "reason": "padding"}]},
        )
    )
    assert template.kinds == ("cpu", "hip")
    assert template.parameters[0].values == (1, 2, 4)
    assert [c.kind for c in template.constraints] == ["prune"]
    assert template.derive({"tile": 1}, ProblemType(), CPU) == {"lanes": 8}
    assert template.unsupported(ProblemType(), CPU) is None
    assert template.unsupported(ProblemType(dtype_a=DType.F64), CPU) == "it is for f32"
    assert (
        template.unsupported(ProblemType(), Target("cuda", "sm_90")) == "it is for cpu and hip, not for cuda"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kind": "tpu"}, "kind.literal['cpu','hip','cuda']: Input should be 'cpu', 'hip' or 'cuda'"),
        ({"name": "Plain"}, "name: String should match pattern"),
        ({"nmae": "plain"}, "nmae: Extra inputs are not permitted"),
        ({"parameters": {}}, "parameters: Dictionary should have at least 1 item"),
        (tile([]), "parameters.tile.values: List should have at least 1 item"),
        (tile([1, 2, 1]), "parameters.tile: a value is listed twice"),
        (tile([1, True]), "parameters.tile: a value is listed twice"),
        (tile([2, "m"]), "parameters.tile: values mix words and numbers"),
        (tile(["a;b"]), "parameters.tile: `a;b` must be a plain word"),
        ({"parameters": {"m": {"values": [1], "doc": ""}}, "defaults": [{"m": 1}]}, "the name m is taken"),
        ({"derived": {"tile": 1}}, "the name tile is taken"),
        ({"derived": {"beta": 1}}, "the name beta is taken"),
        ({"derived": {"x": 1}, "features": {"x": 2}}, "the name x is taken"),
        ({"derived": {"x": "y", "y": "tile"}}, "x uses y, which must come before it; move it up"),
        ({"features": {"x": "x + 1"}}, "x uses x, which must come before it"),
        ({"derived": {"x": "tile.real"}}, "derived.x: `tile.real`: `tile.real` is not allowed"),
        ({"estimate_ns": "1 +"}, "estimate_ns: `1 +` is not an expression"),
        ({"supports": [{"rule": "f()", "reason": ""}]}, "supports[0].rule: `f()`"),
        ({"constraints": {"legal": [{"rule": "[]", "reason": ""}]}}, "legal[0].rule: `[]`"),
        ({"constraints": {"legal": [{"rule": "1"}]}}, "constraints.legal.0.reason: Field required"),
        ({"defaults": []}, "defaults: List should have at least 1 item"),
        ({"defaults": [{"tile": 3}]}, "defaults: plain: tile is one of 1, 2, 4, not 3"),
        ({"defaults": [{}]}, "defaults: plain: a value for tile is missing"),
        ({"defaults": [{"tile": 1, "x": 1}]}, "defaults: plain has no parameter x; it has: tile"),
        ({"kernel": "other.j2"}, "kernel: there is no file other.j2 in FOLDER"),
        ({"kernel": "../kernel.c.j2"}, "kernel: String should match pattern"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_told_with_its_key(write: Write, changes: dict[str, Any], expected: str) -> None:
    assert f"FOLDER/template.yaml: {expected}" in error(write(**changes))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: [",
        "a: 1\na: 2\n",
        "- " * 2000,
        'a: "\\U00110000"',
        "a: \x07",
        "a: !!python/name:os.system x",
        "5",
    ],
)
def test_a_description_that_is_not_one_is_a_template_error(write: Write, text: str) -> None:
    folder = write()
    (folder / "template.yaml").write_text(text)
    assert error(folder).startswith("FOLDER/template.yaml: ")


def test_missing_and_foreign_files_are_template_errors(write: Write, tmp_path: Path) -> None:
    assert "cannot be read" in error(tmp_path / "none")
    folder = write()
    (folder / "template.yaml").write_bytes(b"name: \xff")
    assert "cannot be read" in error(folder)


def test_the_hash_covers_all_that_rendering_reads(write: Write, tmp_path: Path) -> None:
    folder = write()
    hashes = [load_template(folder).hash]
    for path in (folder / "kernel.c.j2", folder / "part.j2", tmp_path / "common" / "part.j2"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("/* changed */")
        hashes.append(load_template(folder).hash)
    assert len(set(hashes)) == 4
    (tmp_path / "unrelated.txt").write_text("")
    assert load_template(folder).hash == hashes[-1]


def test_the_hash_covers_the_common_files_of_wavetune(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write()
    monkeypatch.setattr("tuner.generate.template.builtin_root", lambda: tmp_path / "builtin")
    before = load_template(folder).hash
    (tmp_path / "builtin" / "common").mkdir(parents=True)
    (tmp_path / "builtin" / "common" / "types.j2").write_text("/* changed */")
    assert load_template(folder).hash != before


def test_a_candidate_is_named_by_its_values(write: Write) -> None:
    parameters = {
        "tile": {"values": [1, 2], "short": "t", "doc": ""},
        "order": {"values": ["m", "n"], "doc": ""},
        "pack": {"values": [False, True], "short": "p", "doc": ""},
    }
    template = load_template(write(parameters=parameters, defaults=[{"tile": 1, "order": "m", "pack": True}]))
    candidate = template.candidate({"pack": False, "order": "n", "tile": 2})
    assert candidate.name == "plain_t2_ordern_p0"
    assert candidate.values == {"tile": 2, "order": "n", "pack": False}
    assert candidate.id != template.candidate({"pack": True, "order": "n", "tile": 2}).id
    assert type(candidate).from_dict(candidate.to_dict()) == candidate
    assert template.candidate({"pack": 0, "order": "n", "tile": 2}).values["pack"] is False


def test_templates_are_found_in_the_folders_of_the_user_first(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builtin = [template.name for template in find_templates()]
    write(name="a_first")
    monkeypatch.setenv("TUNER_TEMPLATES", str(tmp_path))
    assert [template.name for template in find_templates()] == ["a_first", *builtin]
    assert "a_first" not in [template.name for template in find_templates("hip")]
    write(folder="second", name="a_first")
    with pytest.raises(TemplateError, match=r"the name a_first is taken by"):
        find_templates()
    monkeypatch.setenv("TUNER_TEMPLATES", str(tmp_path / "none"))
    with pytest.raises(TemplateError, match=r"no such template folder; correct \$TUNER_TEMPLATES"):
        find_templates()


@pytest.mark.parametrize("template", find_templates(), ids=lambda template: template.name)
def test_templates_of_the_repository_say_what_they_are(template: Template) -> None:
    assert re.match(r"[A-Z].*\.$", template.summary)
    assert all(parameter.doc.endswith(".") for parameter in template.parameters)
    assert all(constraint.reason for constraint in template.constraints)
