"""The main job as a user does it: tune, look, validate, export, load; stop and resume."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tuner
from tuner.build import host_toolchain

ROOT = Path(__file__).parents[2]
SPEC = """
gemms:
  - {dtype: f32, layout: row, sizes: [{m: 48, n: 56, k: 64, weight: 3}, [4, 96, 128]]}
  - {dtype: bf16, trans: TN, epilogue: {bias: true, activation: gelu}, sizes: [[40, 33, 65]]}
"""


class Desk:
    """A folder to work in, with a compiler cache that the tests of this module share."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "TUNER_CACHE": str(cache)}
        (folder / "spec.yaml").write_text(SPEC)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tuner", *arguments],
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *arguments: str, code: int = 0) -> str:
        process = self.start(*arguments)
        output, errors = process.communicate(timeout=300)
        assert process.returncode == code, errors
        return output

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json"))

    def trials(self) -> int:
        with sqlite3.connect(self.folder / "results.db") as connection:
            query = "select count(*) from tuner_trial where outcome is not null"
            return int(connection.execute(query).fetchone()[0])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Desk:
    desk = Desk(tmp_path_factory.mktemp("desk"), cache)
    summary = json.loads(desk.run("tune", "spec.yaml", "--trials", "12", "--seed", "3", "--json"))
    assert summary["status"] == "finished"
    assert sum(summary["outcomes"].values()) == 36
    assert len(summary["winners"]) == 3
    return desk


def test_winners_are_listed_with_what_they_are(tuned: Desk) -> None:
    winners = tuned.json("best", "spec.yaml")
    assert [w["problem"]["name"] for w in winners] == [
        "f32_nn_56x48x64",
        "f32_nn_96x4x128",
        "bf16_bf16_bf16_bf16_f32_tn_bias_bf16_gelu_40x33x65",
    ]
    for winner in winners:
        assert 0 < winner["ci_low_ns"] <= winner["time_ns"] <= winner["ci_high_ns"]
        assert winner["time_ns"] <= winner["default_ns"]
        flops = 2 * math.prod(winner["problem"][size] for size in "mnk")
        assert winner["gflops"] == pytest.approx(flops / winner["time_ns"])
    listing = tuned.run("best", "spec.yaml")
    assert "all calls of spec.yaml, weighted" in listing
    for winner in winners:
        assert winner["candidate"]["name"] in listing


def test_status_and_show_agree_with_the_database(tuned: Desk) -> None:
    (run,) = tuned.json("status")
    assert (run["status"], run["unfinished"]) == ("finished", 0)
    assert sum(run["outcomes"].values()) == tuned.trials() == 36
    shown = tuned.json("show", "f32_nn_56x48x64")
    assert sum(shown["outcomes"].values()) == 12
    (winner,) = shown["winners"]
    assert winner["candidate"]["name"] in {f["candidate"]["name"] for f in winner["finalists"]}
    source = tuned.run("show", "f32_nn_56x48x64", "--source")
    assert winner["candidate"]["name"] in source
    assert "void " in source


def test_winners_pass_validation_again_and_are_compared(tuned: Desk) -> None:
    assert [v["outcome"] for v in tuned.json("validate", "spec.yaml")] == ["ok"] * 3
    compared = tuned.json("bench", "spec.yaml", "--rounds", "2")
    assert [("ratio" in c, "error" in c) for c in compared] == [(True, False)] * 2 + [(False, True)]
    assert compared[2]["error"] == "the device has no baseline for it"
    assert "NumPy" in compared[0]["baseline"]


def test_the_exported_library_computes_what_numpy_does(tuned: Desk) -> None:
    assert tuned.json("export", "library", "--spec", "spec.yaml")["problems"] == 3
    rng = np.random.default_rng(5)
    a = rng.standard_normal((48, 64), np.float32)
    b = rng.standard_normal((64, 56), np.float32)
    with tuner.load(tuned.folder / "library") as library:
        np.testing.assert_allclose(library.gemm(a, b), a @ b, rtol=1e-4, atol=1e-4)
    refused = tuned.start("export", "spec.yaml")
    _, errors = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert errors.startswith("tuner: ")


def test_the_programs_of_the_readme_run(tmp_path: Path, cache: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (python,) = re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)
    (c,) = re.findall(r"^```c\n(.*?)^```", readme, re.M | re.S)
    assert len(python.splitlines()) == 5
    assert len(c.splitlines()) <= 20
    desk = Desk(tmp_path, cache)
    desk.run("tune", str(ROOT / "problem_specs" / "quickstart.yaml"), "--trials", "2")
    desk.run("export", "tuned")
    command = [sys.executable, "-c", python]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert float(output) < 1e-3
    (tmp_path / "program.c").write_text(c)
    flags = ["-Ituned/include", "-Ltuned/lib", "-lwavetune", f"-Wl,-rpath,{tmp_path}/tuned/lib"]
    compiler = [*host_toolchain().command, "program.c", *flags, "-o", "program"]
    subprocess.run(compiler, cwd=tmp_path, env=desk.environment, check=True)
    output = subprocess.run(["./program"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    expected = sum((512 * p % 7) * (p % 5) for p in range(512))
    assert output.startswith(f"success: D[0] = {expected} by gemm_cpu")


def test_the_same_command_again_measures_nothing(tuned: Desk) -> None:
    before = tuned.trials()
    assert "nothing was left to do" in tuned.run("tune", "spec.yaml", "--trials", "12", "--seed", "3")
    assert tuned.trials() == before
    assert len(tuned.json("best")) == 3


def test_optuna_reads_the_studies(tuned: Desk) -> None:
    import optuna

    url = f"sqlite:///{tuned.folder / 'results.db'}"
    names = optuna.get_all_study_names(url)
    assert len(names) == 3
    study = optuna.load_study(study_name=names[0], storage=url)
    assert len(study.trials) == 12
    assert all(trial.params for trial in study.trials)


def test_another_protocol_or_team_inherits_nothing(tuned: Desk) -> None:
    tuned.run("tune", "spec.yaml", "--trials", "2", "--threads", "1", "--warm")
    shown = tuned.json("show", "f32_nn_56x48x64")
    assert sum(shown["outcomes"].values()) == 14
    assert [w["fingerprint"]["compute_units"] == 1 for w in shown["winners"]].count(True) == 1


def test_a_signal_ends_it_with_winners_and_the_same_command_resumes(tmp_path: Path, cache: Path) -> None:
    desk = Desk(tmp_path, cache)
    command = ["tune", "spec.yaml", "--trials", "30", "--strategy", "random"]
    process = desk.start(*command)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (tmp_path / "results.db").exists():
            try:
                if desk.trials() >= 3:
                    break
            except sqlite3.OperationalError:
                pass  # the tables are being made
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "interrupted in" in output
    assert "Traceback" not in errors
    kept = desk.trials()
    assert 3 <= kept < 90
    assert len(desk.json("best")) >= 1
    summary = json.loads(desk.run(*command, "--json"))
    assert summary["status"] == "finished"
    assert sum(summary["outcomes"].values()) == 90 - kept
    assert desk.trials() == 90
