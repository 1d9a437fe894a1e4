"""Kernels with one fault each take part in a real sweep: all are found out, and none wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.measure import Outcome
from tuner.problem import loads_spec
from tuner.store import Store
from tuner.sweep import Settings, Sweep

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
SPEC = """
gemms:
  - {dtype: f32, trans: NT, sizes: [[33, 34, 35]]}
  - {dtype: i8, sizes: [[33, 34, 35]]}
"""
WRONG = {
    "edge_index",
    "dropped_alpha",
    "ignored_beta",
    "short_k",
    "race",
    "stale_output",
    "wrong_transpose",
    "i8_overflow",
}
CRASHES = {"out_of_bounds", "segfault", "exit_zero"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[Outcome, str]]]:
    """Outcome and message of each fault, for each problem; and who won."""
    folder = tmp_path_factory.mktemp("sabotage")
    spec = loads_spec(SPEC, "sabotage")
    with pytest.MonkeyPatch.context() as patch, Store.open(folder / "results.db", create=True) as store:
        patch.setenv("TUNER_TEMPLATES", str(TEMPLATES))
        patch.setenv("TUNER_CACHE", str(folder / "cache"))
        settings = Settings(threads=2, strategy="exhaustive", templates=("sabotaged",))
        result = Sweep(spec, SPEC, settings, store).run()
        assert result.status == "finished"
        found: dict[str, dict[str, tuple[Outcome, str]]] = {"winners": {}}
        for winner in result.winners:
            found["winners"][winner.problem.name] = (Outcome.OK, str(winner.candidate.values["fault"]))
        for trial in store.all_trials():
            assert trial.measurement is not None
            name = next(p.name for p in spec.problems if p.id == trial.problem_id)
            outcomes = found.setdefault(name, {})
            measured = trial.measurement
            outcomes[str(trial.candidate.values["fault"])] = (measured.outcome, measured.message)
    return found


@pytest.mark.parametrize("fault", sorted(WRONG | CRASHES | {"endless_loop"}))
def test_each_fault_is_caught(results: dict[str, dict[str, tuple[Outcome, str]]], fault: str) -> None:
    problems = [name for name in results if name != "winners" and fault in results[name]]
    assert len(problems) == (1 if fault == "i8_overflow" else 2)
    for name in problems:
        outcome, message = results[name][fault]
        if fault == "wrong_transpose" and outcome is Outcome.CRASHED:
            assert "SIGSEGV" in message  # it read past the end of B before it could be wrong
        elif fault in WRONG:
            assert outcome is Outcome.WRONG_RESULT
            assert "expected" in message
        elif fault in CRASHES:
            assert outcome is Outcome.CRASHED
            assert "worker process" in message
        else:
            assert outcome is Outcome.TIMEOUT


def test_the_sound_kernel_wins_and_the_sweep_goes_on(
    results: dict[str, dict[str, tuple[Outcome, str]]],
) -> None:
    assert sorted(results["winners"]) == ["f32_nt_33x34x35", "i8_i8_i32_i32_i32_nn_33x34x35"]
    assert {fault for _, fault in results["winners"].values()} == {"none"}
    for name in results["winners"]:
        assert results[name]["none"] == (Outcome.OK, "")
