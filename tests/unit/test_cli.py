"""The command line without a kernel: help, bad input, documentation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tuner.cli import cli

ROOT = Path(__file__).parents[2]
COMMANDS = cli.list_commands(None)  # type: ignore[arg-type]


def tuner(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tuner", *arguments], capture_output=True, text=True, cwd=cwd, timeout=60
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_documented(command: str) -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert any(f"tuner {command}" in page.read_text("utf-8") for page in pages)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_option_has_help(command: str) -> None:
    found = cli.get_command(None, command)  # type: ignore[arg-type]
    assert found is not None
    assert found.help
    for parameter in found.params:
        assert parameter.param_type_name == "argument" or getattr(parameter, "help", None), parameter.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tunne"], "No such command"),
        (["tune"], "Missing argument"),
        (["tune", "none.yaml"], "none.yaml:1:1: file: does not exist"),
        (["tune", "bad.yaml"], "bad.yaml:2:5: gemms[0].dtyp: is not a key here"),
        (["tune", "good.yaml", "--threads", "0"], "--threads"),
        (["tune", "good.yaml", "--template", "nope"], "there is no template nope"),
        (["tune", "good.yaml", "--db", "."], "."),
        (["best", "--db", "none.db"], "there is no database none.db"),
        (["best", "--db", "good.yaml"], "good.yaml"),
        (["show", "x", "--db", "none.db"], "there is no database none.db"),
        (["status", "--db", "nope://x"], "nope"),
        (["export", "out", "--db", "none.db"], "there is no database none.db"),
        (["validate", "good.yaml", "--db", "none.db"], "there is no database none.db"),
        (["validate", "good.yaml", "--set", "mv=1"], "--set needs --template"),
        (["bench", "good.yaml", "--db", "none.db"], "there is no database none.db"),
        (["render", "nope"], "there is no template `nope`"),
        (["render", "gemm_cpu", "--set", "mv=77"], "mv is one of"),
        (["render", "gemm_cpu", "--set", "mv"], "--set takes NAME=VALUE"),
        (["render", "gemm_cpu", "--set", "mv=6", "--set", "nr=28"], "must fit in the registers"),
        (["render", "gemm_cpu", "--size", "1x2"], "--size must be MxNxK"),
        (["render", "gemm_cpu", "--dtype", "f23"], "must be one of"),
        (["templates", "nope"], "there is no template `nope`"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "good.yaml").write_text("gemms:\n  - sizes: [[8, 8, 8]]\n    dtype: f32\n")
    (tmp_path / "bad.yaml").write_text("gemms:\n  - dtyp: f32\n    sizes: [[8, 8, 8]]\n")
    result = tuner(*arguments, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert result.stderr.startswith("tuner: ")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_version_and_help_import_nothing_heavy() -> None:
    script = "import sys, tuner.cli; print(sorted({'sklearn', 'optuna', 'sqlalchemy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
    assert tuner("--version").stdout.startswith("wavetune, version ")


def test_schema_and_templates_print_json() -> None:
    schema = json.loads(tuner("schema").stdout)
    assert schema["title"] == "wavetune problem spec"


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m tuner schema | head -1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert result.stdout == "{\n"
    assert result.stderr == ""
