"""The worker process: what the machine cannot do is an error of one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.errors import DeviceError
from tuner.measure import Protocol, Supervisor
from tuner.problem import GemmProblem, ProblemType, loads_spec
from tuner.store import Store
from tuner.sweep import Settings, Sweep

APART = "{m: 8, n: 8, k: 8, batch_count: 2, stride_a: 1000000000000}"


def test_a_problem_that_memory_cannot_hold_is_refused_and_the_worker_goes_on() -> None:
    with Supervisor("cpu", 1, Protocol()) as supervisor:
        for layout in ({"batch_count": 2, "stride_a": 10**12}, {"batch_count": 2, "stride_b": 2**62},
                       {"lda": 2**31 - 1, "ldb": 2**40}):  # fmt: skip
            problem = GemmProblem.create(ProblemType(), 8, 8, 8, **layout)
            with pytest.raises(DeviceError, match=r"^f32_nn_8x8x8\w* needs about .* GiB, but only .*; make"):
                supervisor.prepare(problem)
        supervisor.prepare(GemmProblem.create(ProblemType(), 8, 8, 8))
        assert supervisor.restarts == 1


def test_a_sweep_passes_over_a_problem_that_memory_cannot_hold(tmp_path: Path) -> None:
    text = f"gemms: [{{sizes: [{APART}, [8, 8, 8]]}}]"
    with Store.open(tmp_path / "results.db", create=True) as store:
        result = Sweep(loads_spec(text, "s"), text, Settings(threads=1, trials=1), store).run()
    assert result.status == "finished"
    assert [winner.problem.name for winner in result.winners] == ["f32_nn_8x8x8"]
