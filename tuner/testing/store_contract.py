"""What every store must do, whatever database is behind it.

Subclass `StoreContract` in a test module, with a fixture `database`: the path or URL of an empty one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.exc import IntegrityError

from tuner.device import Fingerprint
from tuner.errors import StoreError
from tuner.generate import Candidate, KernelSource
from tuner.measure import Measurement, Outcome, Protocol, Provenance
from tuner.problem import Activation, DType, Epilogue, GemmProblem, ProblemType, Transpose
from tuner.store import Finalist, Store, Winner, mirror_trials, optuna_storage

FINGERPRINT = Fingerprint("cpu", "A Processor", "x86_64-v3", 2, "none", "Linux x86_64", "zig 0.15.2 clang 20")
PROTOCOL = Protocol()
PROBLEM = GemmProblem.create(ProblemType(), 64, 48, 32)
BATCHED = GemmProblem.create(
    ProblemType(
        trans_a=Transpose.T,
        dtype_a=DType.BF16,
        dtype_b=DType.BF16,
        dtype_d=DType.BF16,
        epilogue=Epilogue(bias=DType.BF16, activation=Activation.GELU, scale_alpha_vec=True),
    ),
    2**33,
    1,
    7,
    batch_count=3,
    lda=9,
    stride_b=0,
    alpha=-0.1,
    beta=1 / 3,
)


def make_candidate(number: int = 0, template_hash: str = "5eed") -> Candidate:
    params = (("tile_m", 8 * (number + 1)), ("order", "mnk"), ("prefetch", True))
    return Candidate("gemm_cpu", template_hash, params, f"gemm_cpu_{number}")


def make_measurement(time_ns: float = 1000.5) -> Measurement:
    return Measurement(
        Outcome.OK,
        time_ns=time_ns,
        ci_low_ns=time_ns - 1 / 3,
        ci_high_ns=time_ns + 0.1,
        samples_ns=(time_ns + 0.1, time_ns, math.nextafter(time_ns, 0)),
        max_error=0.25,
        validate_seconds=0.011,
        benchmark_seconds=0.022,
    )


def begin_run(store: Store, fingerprint: Fingerprint = FINGERPRINT, protocol: Protocol = PROTOCOL) -> int:
    return store.begin_run(
        spec_name="quickstart",
        spec_text='name: "ünïcode"\n',
        fingerprint=fingerprint,
        protocol=protocol,
        strategy="model",
        seed=2**40,
        version="0.1.0",
    )


def add_trial(
    store: Store,
    run_id: int,
    number: int = 0,
    problem: GemmProblem = PROBLEM,
    measurement: Measurement | None = None,
) -> int:
    trial_id = store.start_trial(run_id, problem, make_candidate(number), "model", None)
    store.finish_trial(trial_id, measurement or make_measurement(), "ab" * 32, 0.5)
    return trial_id


def make_winner(trial_id: int, number: int = 0, problem: GemmProblem = PROBLEM) -> Winner:
    candidate = make_candidate(number)
    return Winner(
        problem=problem,
        fingerprint=FINGERPRINT,
        protocol=PROTOCOL,
        candidate=candidate,
        source=KernelSource(candidate, problem.type, "c", f"kernel_{number}", "int x = '\\'';  /* µ */\n"),
        binary_sha256="cd" * 32,
        trial_id=trial_id,
        time_ns=999.9,
        ci_low_ns=990.0,
        ci_high_ns=1010.0,
        default_ns=None,
        decided_at=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
        ties=("gemm_cpu_7", "gemm_cpu_9"),
    )


class StoreContract:
    @pytest.fixture
    def database(self) -> str | Path:
        raise NotImplementedError

    @pytest.fixture
    def store(self, database: str | Path) -> Iterator[Store]:
        with Store.open(database, create=True) as store:
            yield store

    def test_a_trial_comes_back_as_it_was(self, store: Store, database: str | Path) -> None:
        run_id = begin_run(store)
        before = datetime.now(UTC)
        trial_id = store.start_trial(run_id, BATCHED, make_candidate(3), "control", 123.25)
        measurement = replace(make_measurement(), raced=True, max_error=math.inf, message="a 'b' \"ç\"\n")
        store.finish_trial(trial_id, measurement, "ef" * 32, 1.5)
        with Store.open(database) as second:
            (trial,) = second.trials(FINGERPRINT.id, BATCHED.id, PROTOCOL.id)
            assert second.problems() == [BATCHED]
            assert second.devices() == [FINGERPRINT]
        assert trial.measurement == measurement
        assert (trial.id, trial.run_id, trial.problem_id) == (trial_id, run_id, BATCHED.id)
        assert trial.candidate == make_candidate(3)
        assert trial.candidate.id == make_candidate(3).id
        assert (trial.origin, trial.predicted_ns, trial.attempts) == ("control", 123.25, 1)
        assert (trial.binary_sha256, trial.build_seconds) == ("ef" * 32, 1.5)
        assert before <= trial.started_at <= datetime.now(UTC)

    @pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.OK])
    def test_a_failure_is_a_result_too(self, store: Store, outcome: Outcome) -> None:
        add_trial(store, begin_run(store), measurement=Measurement(outcome, message="why"))
        (trial,) = store.all_trials()
        assert trial.measurement == Measurement(outcome, message="why")

    @pytest.mark.parametrize("provenance", Provenance)
    def test_a_number_keeps_its_provenance(self, store: Store, provenance: Provenance) -> None:
        add_trial(store, begin_run(store), measurement=replace(make_measurement(), provenance=provenance))
        (trial,) = store.all_trials()
        assert trial.measurement is not None
        assert trial.measurement.provenance is provenance

    def test_a_trial_that_never_ended_begins_again(self, store: Store, database: str | Path) -> None:
        first = begin_run(store)
        trial_id = store.start_trial(first, PROBLEM, make_candidate(), "random", None)
        store.close()
        with Store.open(database) as second:
            (trial,) = second.trials(FINGERPRINT.id, PROBLEM.id, PROTOCOL.id)
            assert (trial.measurement, trial.attempts) == (None, 1)
            run_id = begin_run(second)
            assert second.start_trial(run_id, PROBLEM, make_candidate(), "model", 5.0) == trial_id
            (trial,) = second.all_trials()
            assert (trial.measurement, trial.attempts, trial.run_id) == (None, 2, run_id)
            second.finish_trial(trial_id, make_measurement(), None, 0.0)
            (trial,) = second.all_trials()
            assert (trial.measurement, trial.attempts) == (make_measurement(), 2)

    def test_a_trial_ends_once(self, store: Store) -> None:
        run_id = begin_run(store)
        trial_id = add_trial(store, run_id)
        with pytest.raises(ValueError, match="has ended before"):
            store.start_trial(run_id, PROBLEM, make_candidate(), "model", None)
        with pytest.raises(StoreError, match=r"one sweep at a time, but gemm_cpu_0 has been measured"):
            store.start_trial(begin_run(store), PROBLEM, make_candidate(), "model", None)
        with pytest.raises(StoreError, match=f"one sweep at a time, but trial {trial_id} "):
            store.finish_trial(trial_id, Measurement(Outcome.CRASHED), None, 0.0)
        (trial,) = store.all_trials()
        assert trial.measurement == make_measurement()

    def test_nothing_is_reused_under_another_identity(self, store: Store) -> None:
        other_driver = replace(FINGERPRINT, driver="565.57")
        warm = replace(PROTOCOL, cold=False)
        run_id = begin_run(store)
        new = {add_trial(store, run_id)}
        new.add(store.start_trial(run_id, PROBLEM, make_candidate(0, "another hash"), "model", None))
        new.add(store.start_trial(run_id, BATCHED, make_candidate(), "model", None))
        for run_id in (begin_run(store, other_driver), begin_run(store, FINGERPRINT, warm)):
            new.add(store.start_trial(run_id, PROBLEM, make_candidate(), "model", None))
        assert len(new) == 5
        assert len(store.trials(FINGERPRINT.id, PROBLEM.id, PROTOCOL.id)) == 2
        assert len(store.trials(other_driver.id, PROBLEM.id, PROTOCOL.id)) == 1
        assert len(store.trials(FINGERPRINT.id, PROBLEM.id, warm.id)) == 1
        assert store.trials(other_driver.id, BATCHED.id, PROTOCOL.id) == []
        assert sorted(store.devices(), key=lambda d: d.driver) == [other_driver, FINGERPRINT]

    def test_trials_are_filtered_and_in_order(self, store: Store) -> None:
        run_id = begin_run(store)
        ids = [add_trial(store, run_id, number) for number in (4, 0, 2)]
        other = begin_run(store)
        last = add_trial(store, other, 9, problem=BATCHED)
        assert [t.id for t in store.trials(FINGERPRINT.id, PROBLEM.id, PROTOCOL.id)] == ids
        assert [t.id for t in store.all_trials()] == [*ids, last]
        assert [t.id for t in store.all_trials(run_id=run_id)] == ids
        assert [t.id for t in store.all_trials(problem_id=BATCHED.id)] == [last]
        assert list(store.all_trials(device_id="none")) == []

    def test_runs_count_their_outcomes(self, store: Store) -> None:
        first, second = begin_run(store), begin_run(store)
        add_trial(store, first, 0)
        add_trial(store, first, 1)
        add_trial(store, first, 2, measurement=Measurement(Outcome.TIMEOUT))
        store.start_trial(first, PROBLEM, make_candidate(3), "model", None)
        store.end_run(first, "interrupted")
        one, two = store.runs()
        assert (one.id, one.status, two.id, two.status) == (first, "interrupted", second, "running")
        assert one.outcomes == {Outcome.OK: 2, Outcome.TIMEOUT: 1}
        assert (one.unfinished, two.unfinished, two.outcomes, two.ended_at) == (1, 0, {}, None)
        assert one.ended_at is not None
        assert one.ended_at - one.started_at < timedelta(minutes=1)
        assert (one.fingerprint, one.protocol) == (FINGERPRINT, PROTOCOL)
        assert (one.spec_name, one.spec_text) == ("quickstart", 'name: "ünïcode"\n')
        assert (one.strategy, one.seed, one.version) == ("model", 2**40, "0.1.0")
        with pytest.raises(ValueError, match="not done"):
            store.end_run(second, "done")

    def test_a_winner_comes_back_as_it_was(self, store: Store, database: str | Path) -> None:
        run_id = begin_run(store)
        ids = [add_trial(store, run_id, number) for number in range(3)]
        winner = make_winner(ids[1], 1)
        finalists = [Finalist(ids[n], make_candidate(n), (10.1 + n, 9.0), 9.55 + n / 3) for n in (1, 0, 2)]
        store.set_winner(run_id, winner, finalists)
        with Store.open(database, read_only=True) as second:
            assert second.winner(PROBLEM.id, FINGERPRINT.id, PROTOCOL.id) == winner
            assert second.winners() == [winner]
            assert second.finalists(winner) == finalists
            assert second.winner(BATCHED.id, FINGERPRINT.id, PROTOCOL.id) is None

    def test_the_last_winner_is_current_and_the_others_history(self, store: Store) -> None:
        run_id = begin_run(store)
        ids = [add_trial(store, run_id, number) for number in range(2)]
        old = make_winner(ids[0], 0)
        new = replace(
            make_winner(ids[1], 1), default_ns=2000.0, decided_at=old.decided_at - timedelta(days=1)
        )
        for winner in (old, new):
            finalist = Finalist(winner.trial_id, winner.candidate, (1.0,), 1.0)
            store.set_winner(run_id, winner, [finalist])
        assert store.winners() == [new]
        assert [f.trial_id for f in store.finalists(old)] == [ids[0]]
        again = replace(old, time_ns=1.0, decided_at=old.decided_at + timedelta(days=1))
        store.set_winner(run_id, again, [])
        assert store.winner(PROBLEM.id, FINGERPRINT.id, PROTOCOL.id) == again
        assert len(store.finalists(old)) == 1

    def test_winners_are_filtered(self, store: Store) -> None:
        run_id = begin_run(store)
        here = make_winner(add_trial(store, run_id))
        there = make_winner(add_trial(store, run_id, problem=BATCHED), problem=BATCHED)
        for winner in (here, there):
            store.set_winner(run_id, winner, [])
        assert store.winners(device_id=FINGERPRINT.id, protocol_id=PROTOCOL.id) == [here, there]
        assert store.winners(problem_ids={BATCHED.id}) == [there]
        assert store.winners(device_id="none") == []
        assert store.winners(protocol_id="none") == []

    def test_only_a_valid_measurement_wins(self, store: Store) -> None:
        run_id = begin_run(store)
        emulated = replace(make_measurement(), provenance=Provenance.EMULATED)
        wrong = add_trial(store, run_id, 0, measurement=Measurement(Outcome.WRONG_RESULT))
        fake = add_trial(store, run_id, 1, measurement=emulated)
        right = add_trial(store, run_id, 2)
        running = store.start_trial(run_id, PROBLEM, make_candidate(3), "model", None)
        mistaken = replace(make_winner(right, 2), source=make_winner(right, 1).source)
        for winner in (
            make_winner(wrong, 0),
            make_winner(fake, 1),
            make_winner(running, 3),
            make_winner(right, 1),
            make_winner(right, 2, problem=BATCHED),
            replace(make_winner(right, 2), protocol=replace(PROTOCOL, cold=False)),
            mistaken,
        ):
            with pytest.raises(ValueError, match="cannot win"):
                store.set_winner(run_id, winner, [])
        assert store.winners() == []

    def test_a_winner_is_recorded_whole_or_not_at_all(self, store: Store) -> None:
        run_id = begin_run(store)
        winner = make_winner(add_trial(store, run_id))
        finalist = Finalist(winner.trial_id, winner.candidate, (1.0,), 1.0)
        with pytest.raises(IntegrityError):
            store.set_winner(run_id, winner, [finalist, finalist])
        assert store.winners() == []

    def test_canaries_are_kept_in_order(self, store: Store) -> None:
        run_id, other = begin_run(store), begin_run(store)
        add_trial(store, run_id, 1)
        for time_ns in (3.5, 1.25, 2.0):
            store.record_canary(run_id, PROBLEM.id, make_candidate(1), time_ns)
        kept = store.canaries(run_id)
        assert [c.time_ns for c in kept] == [3.5, 1.25, 2.0]
        assert {(c.problem_id, c.candidate) for c in kept} == {(PROBLEM.id, make_candidate(1))}
        assert store.canaries(other) == []

    def test_two_stores_write_at_once(self, store: Store, database: str | Path) -> None:
        with Store.open(database) as second:
            mine, theirs = begin_run(store), begin_run(second)
            for number in range(5):
                a = store.start_trial(mine, PROBLEM, make_candidate(number), "model", None)
                b = second.start_trial(theirs, BATCHED, make_candidate(number), "model", None)
                second.finish_trial(b, make_measurement(), None, 0.0)
                store.finish_trial(a, make_measurement(), None, 0.0)
            assert len(list(store.all_trials())) == len(list(second.all_trials())) == 10

    def test_optuna_mirrors_trials_once(self, store: Store) -> None:
        add_trial(store, begin_run(store))
        distributions = {"tile_m": CategoricalDistribution((8, 16)), "order": CategoricalDistribution(("a",))}

        def mirrored(number: int) -> FrozenTrial:
            return create_trial(
                value=10.0 + number,
                params={"tile_m": 16, "order": "a"},
                distributions=distributions,  # type: ignore[arg-type]
                user_attrs={"tuner_trial_id": number, "outcome": "ok"},
            )

        failed = create_trial(state=TrialState.FAIL, user_attrs={"tuner_trial_id": 3})
        assert mirror_trials(store, "one", [mirrored(1), mirrored(2)]) == 2
        assert mirror_trials(store, "one", [mirrored(1), mirrored(2), failed]) == 1
        assert mirror_trials(store, "one", [mirrored(1), mirrored(2), failed]) == 0
        assert mirror_trials(store, "two", [mirrored(1)]) == 1
        storage = optuna_storage(store)
        study = optuna.load_study(study_name="one", storage=storage)
        assert [t.user_attrs["tuner_trial_id"] for t in study.trials] == [1, 2, 3]
        assert [t.value for t in study.trials] == [11.0, 12.0, None]
        assert study.best_trial.params == {"tile_m": 16, "order": "a"}
        assert study.best_trial.user_attrs["outcome"] == "ok"
        assert study.trials[2].state is TrialState.FAIL
        storage.remove_session()
        storage.engine.dispose()
        assert len(list(store.all_trials())) == 1
