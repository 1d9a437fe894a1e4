"""The results database: every trial, and the winner of every problem on every device."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import Connection, RowMapping, Select, Table, bindparam, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from tuner.device import Fingerprint
from tuner.errors import StoreError
from tuner.generate import Candidate, KernelSource
from tuner.measure import Measurement, Outcome, Protocol, Provenance
from tuner.problem import GemmProblem
from tuner.store.database import Database
from tuner.store.schema import canary as canaries
from tuner.store.schema import candidate as candidates
from tuner.store.schema import device as devices
from tuner.store.schema import final as finals
from tuner.store.schema import problem as problems
from tuner.store.schema import protocol as protocols
from tuner.store.schema import run as runs
from tuner.store.schema import source as sources
from tuner.store.schema import trial as trials
from tuner.store.schema import winner as winners
from tuner.store.types import Canary, Finalist, Run, Trial, Winner

_RUNNING = "running"
_ENDINGS = ("finished", "interrupted", "failed")

# Statements of the two transactions that each trial pays for, built once.
_FIND_TRIAL = select(trials.c.id, trials.c.run_id, trials.c.outcome).where(
    trials.c.device_id == bindparam("device_id"),
    trials.c.problem_id == bindparam("problem_id"),
    trials.c.protocol_id == bindparam("protocol_id"),
    trials.c.candidate_id == bindparam("candidate_id"),
)
_RUN_KEY = select(runs.c.device_id, runs.c.protocol_id).where(runs.c.id == bindparam("run_id"))
_END_TRIAL = update(trials).where(trials.c.id == bindparam("trial_id"), trials.c.outcome.is_(None))
_EXISTS = {
    table.name: select(table.c.id).where(table.c.id == bindparam("id"))
    for table in (candidates, devices, problems, protocols, sources)
}

_CURRENT = select(func.max(winners.c.id)).group_by(
    winners.c.device_id, winners.c.problem_id, winners.c.protocol_id
)

_SELECT_TRIALS = select(trials, candidates).join(candidates)
_SELECT_WINNERS = (
    select(winners, devices, problems, protocols, candidates, sources)
    .select_from(winners.join(devices).join(problems).join(protocols).join(candidates).join(sources))
    .where(winners.c.id.in_(_CURRENT))
    .order_by(winners.c.id)
)


class Store:
    """Results in a database: SQLite in one file, or any server that SQLAlchemy reaches.

    **Durability.** What a method wrote is on the disk when it returns; a process that is killed at any
    moment loses at most the trial in flight.
    **Identity.** A trial is one candidate on one problem under one protocol on one device fingerprint. A
    change of any of the four makes another trial, so nothing stale is ever reused.
    **Concurrency.** Any number of processes may use the database, each with its own `Store`.
    **Errors.** Every method may raise `StoreError`: locked for long, full disk, read-only, damaged.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(cls, url_or_path: str | Path, *, create: bool = False, read_only: bool = False) -> Store:
        """Open a database by its path (SQLite) or its SQLAlchemy URL.

        `create` makes the file if there is none. Tables are made or brought up to date, unless the store is
        `read_only`: then nothing is written, so that a read-only file in a read-only folder is fine.

        Raises:
            StoreError: there is no such database, it is none, or it is from a newer wavetune.
        """
        return cls(Database.open(url_or_path, create=create, read_only=read_only))

    @property
    def url(self) -> str:
        """The SQLAlchemy URL, without its password."""
        return self._database.url.render_as_string(hide_password=True)

    @property
    def path(self) -> Path | None:
        """The SQLite file; None for a database on a server."""
        return self._database.path

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin_run(
        self,
        *,
        spec_name: str,
        spec_text: str,
        fingerprint: Fingerprint,
        protocol: Protocol,
        strategy: str,
        seed: int,
        version: str,
    ) -> int:
        """Record that a sweep begins; return the id of the run."""
        with self._database.writing() as connection:
            _keep(connection, devices, {"id": fingerprint.id, **asdict(fingerprint)})
            _keep(connection, protocols, {"id": protocol.id, **asdict(protocol)})
            row = {
                "spec_name": spec_name,
                "spec_text": spec_text,
                "device_id": fingerprint.id,
                "protocol_id": protocol.id,
                "strategy": strategy,
                "seed": seed,
                "version": version,
                "status": _RUNNING,
                "started_at": datetime.now(UTC),
            }
            return _insert(connection, runs, row)

    def end_run(self, run_id: int, status: str) -> None:
        """Record how a run ended: `finished`, `interrupted` or `failed`."""
        if status not in _ENDINGS:
            raise ValueError(f"a run ends as one of {', '.join(_ENDINGS)}, not {status}")
        with self._database.writing() as connection:
            ended = {"status": status, "ended_at": datetime.now(UTC)}
            connection.execute(update(runs).where(runs.c.id == run_id).values(ended))

    def start_trial(
        self,
        run_id: int,
        problem: GemmProblem,
        candidate: Candidate,
        origin: str,
        predicted_ns: float | None,
    ) -> int:
        """Record that a trial begins; return its id.

        It is on the disk before the candidate is launched, which may take the whole process down. A
        trial that began and never ended begins again: the same id, one more attempt.

        Raises:
            ValueError: this run has ended the trial before.
            StoreError: another run has, meanwhile.
        """
        try:
            with self._database.writing() as connection:
                key = _trial_key(connection, run_id, problem.id, candidate.id)
                found = connection.execute(_FIND_TRIAL, key).first()
                beginning = {
                    "run_id": run_id,
                    "origin": str(origin),
                    "predicted_ns": predicted_ns,
                    "started_at": datetime.now(UTC),
                }
                if found is None:
                    _keep(connection, problems, _problem_row(problem))
                    _keep(connection, candidates, {"id": candidate.id, **candidate.to_dict()})
                    return _insert(connection, trials, {**key, **beginning, "attempts": 1})
                if found.outcome is None:
                    again = update(trials).where(trials.c.id == found.id)
                    connection.execute(again.values(**beginning, attempts=trials.c.attempts + 1))
                    return int(found.id)
        except IntegrityError:
            raise self._shared(candidate.name) from None
        if found.run_id == run_id:
            raise ValueError(f"trial {found.id}, {candidate.name} on {problem.name}, has ended before")
        raise self._shared(candidate.name)

    def finish_trial(
        self, trial_id: int, measurement: Measurement, binary_sha256: str | None, build_seconds: float
    ) -> None:
        """Record what became of a trial.

        Raises:
            StoreError: another process has ended this trial.
        """
        ending = asdict(measurement)
        ending["outcome"] = measurement.outcome.value
        ending["provenance"] = measurement.provenance.value
        ending["samples_ns"] = pack(measurement.samples_ns)
        ending["ended_at"] = datetime.now(UTC)
        ending["binary_sha256"] = binary_sha256
        ending["build_seconds"] = build_seconds
        with self._database.writing() as connection:
            result = connection.execute(_END_TRIAL, {"trial_id": trial_id, **ending})
            if result.rowcount != 1:
                raise self._shared(f"trial {trial_id}")

    def trials(self, fingerprint_id: str, problem_id: str, protocol_id: str) -> list[Trial]:
        """All trials of a problem, in the order first begun, also those that never ended."""
        return self._trials(
            _SELECT_TRIALS.where(
                trials.c.device_id == fingerprint_id,
                trials.c.problem_id == problem_id,
                trials.c.protocol_id == protocol_id,
            )
        )

    def all_trials(
        self, *, problem_id: str | None = None, device_id: str | None = None, run_id: int | None = None
    ) -> Iterator[Trial]:
        """All trials that match what is given, in the order first begun."""
        query = _SELECT_TRIALS
        for column, wanted in (("problem_id", problem_id), ("device_id", device_id), ("run_id", run_id)):
            if wanted is not None:
                query = query.where(trials.c[column] == wanted)
        yield from self._trials(query)

    def set_winner(self, run_id: int, winner: Winner, finalists: Sequence[Finalist]) -> None:
        """Make `winner` the current one of its device, problem and protocol; earlier ones stay as history.

        Raises:
            ValueError: the trial is not one of these, did not end as `ok`, or was not measured.
        """
        key: dict[str, Any] = {
            "device_id": winner.fingerprint.id,
            "problem_id": winner.problem.id,
            "protocol_id": winner.protocol.id,
            "candidate_id": winner.candidate.id,
        }
        with self._database.writing() as connection:
            won = {
                **key,
                "id": winner.trial_id,
                "outcome": Outcome.OK.value,
                "provenance": Provenance.MEASURED.value,
            }
            if connection.execute(select(trials.c.id).filter_by(**won)).first() is None:
                raise ValueError(f"trial {winner.trial_id} cannot win: it must be one with {won}")
            source = winner.source
            if source.candidate.id != winner.candidate.id or source.type != winner.problem.type:
                raise ValueError(f"trial {winner.trial_id} cannot win: its source is of another candidate")
            text = {
                "id": source.id,
                "language": source.language,
                "symbol": source.symbol,
                "text": source.text,
            }
            _keep(connection, sources, text)
            row = {
                **key,
                "run_id": run_id,
                "trial_id": winner.trial_id,
                "source_id": source.id,
                "binary_sha256": winner.binary_sha256,
                "time_ns": winner.time_ns,
                "ci_low_ns": winner.ci_low_ns,
                "ci_high_ns": winner.ci_high_ns,
                "default_ns": winner.default_ns,
                "decided_at": winner.decided_at,
                "ties": list(winner.ties),
            }
            winner_id = _insert(connection, winners, row)
            for position, finalist in enumerate(finalists):
                place = {
                    "winner_id": winner_id,
                    "trial_id": finalist.trial_id,
                    "position": position,
                    "median_ns": finalist.median_ns,
                    "samples_ns": pack(finalist.samples_ns),
                }
                connection.execute(insert(finals), place)

    def winners(
        self,
        *,
        device_id: str | None = None,
        protocol_id: str | None = None,
        problem_ids: Container[str] | None = None,
    ) -> list[Winner]:
        """The current winners that match what is given, in the order decided."""
        query = _SELECT_WINNERS
        if device_id is not None:
            query = query.where(winners.c.device_id == device_id)
        if protocol_id is not None:
            query = query.where(winners.c.protocol_id == protocol_id)
        rows = self._rows(query)
        return [_winner(r) for r in rows if problem_ids is None or r[winners.c.problem_id] in problem_ids]

    def winner(self, problem_id: str, device_id: str, protocol_id: str) -> Winner | None:
        """The current winner of a problem, if it has one."""
        query = _SELECT_WINNERS.where(
            winners.c.problem_id == problem_id,
            winners.c.device_id == device_id,
            winners.c.protocol_id == protocol_id,
        )
        return next(map(_winner, self._rows(query)), None)

    def finalists(self, winner: Winner) -> list[Finalist]:
        """The finalists of the final round that decided on `winner`, in the order given then."""
        query = (
            select(finals, candidates)
            .select_from(finals.join(trials).join(candidates))
            .join(winners, finals.c.winner_id == winners.c.id)
            .where(winners.c.trial_id == winner.trial_id, winners.c.decided_at == winner.decided_at)
            .order_by(finals.c.position)
        )
        return [
            Finalist(
                row[finals.c.trial_id],
                _candidate(row),
                unpack(row[finals.c.samples_ns]),
                row[finals.c.median_ns],
            )
            for row in self._rows(query)
        ]

    def record_canary(self, run_id: int, problem_id: str, candidate: Candidate, time_ns: float) -> None:
        """Record a time of a candidate that is timed again and again to detect drift."""
        with self._database.writing() as connection:
            row = {
                "run_id": run_id,
                "problem_id": problem_id,
                "candidate_id": candidate.id,
                "time_ns": time_ns,
                "taken_at": datetime.now(UTC),
            }
            connection.execute(insert(canaries), row)

    def canaries(self, run_id: int) -> list[Canary]:
        """The canary times of a run, in the order taken."""
        query = select(canaries, candidates).join(candidates).where(canaries.c.run_id == run_id)
        return [
            Canary(
                row[canaries.c.problem_id], _candidate(row), row[canaries.c.time_ns], row[canaries.c.taken_at]
            )
            for row in self._rows(query.order_by(canaries.c.id))
        ]

    def runs(self) -> list[Run]:
        """All runs, the first one first."""
        query = select(runs, devices, protocols).select_from(runs.join(devices).join(protocols))
        counts = select(trials.c.run_id, trials.c.outcome, func.count()).group_by(
            trials.c.run_id, trials.c.outcome
        )
        with self._database.reading() as connection:
            rows = connection.execute(query.order_by(runs.c.id)).mappings().all()
            counted = connection.execute(counts).all()
        outcomes: dict[int, Counter[Outcome]] = {row[runs.c.id]: Counter() for row in rows}
        unfinished: Counter[int] = Counter()
        for run_id, outcome, count in counted:
            if outcome is None:
                unfinished[run_id] = count
            else:
                outcomes[run_id][Outcome(outcome)] = count
        return [
            Run(
                fingerprint=_fingerprint(row),
                protocol=_protocol(row),
                outcomes=outcomes[row[runs.c.id]],
                unfinished=unfinished[row[runs.c.id]],
                **_pick(row, runs, without=("device_id", "protocol_id")),
            )
            for row in rows
        ]

    def devices(self) -> list[Fingerprint]:
        """Every device that a run has used."""
        return [_fingerprint(row) for row in self._rows(select(devices))]

    def problems(self) -> list[GemmProblem]:
        """Every problem that has a trial, by type and size."""
        columns = (problems.c.type, problems.c.m, problems.c.n, problems.c.k, problems.c.id)
        return [_problem(row) for row in self._rows(select(problems).order_by(*columns))]

    def _rows(self, query: Select[Any]) -> Sequence[RowMapping]:
        with self._database.reading() as connection:
            return connection.execute(query).mappings().all()

    def _trials(self, query: Select[Any]) -> list[Trial]:
        return [_trial(row) for row in self._rows(query.order_by(trials.c.id))]

    def _shared(self, what: str) -> StoreError:
        return StoreError(
            f"a device must be tuned by one sweep at a time, but {what} has been measured by another one "
            f"that uses {self._database.name}; wait for it, and run the same command again"
        )


def pack(samples: Sequence[float]) -> bytes:
    """Little-endian float64: exact, and less than half of JSON; `numpy.frombuffer(blob, "<f8")` reads it."""
    return struct.pack(f"<{len(samples)}d", *samples)


def unpack(blob: bytes) -> tuple[float, ...]:
    """The inverse of `pack`."""
    return struct.unpack(f"<{len(blob) // 8}d", blob)


def _keep(connection: Connection, table: Table, row: dict[str, Any]) -> None:
    """Insert a row that is identified by its contents, unless it is there."""
    if connection.execute(_EXISTS[table.name], {"id": row["id"]}).first() is None:
        try:
            with connection.begin_nested():
                connection.execute(insert(table), row)
        except IntegrityError:
            pass  # another process inserted the same row in between


def _insert(connection: Connection, table: Table, row: dict[str, Any]) -> int:
    result = connection.execute(insert(table), row)
    assert result.inserted_primary_key is not None
    return int(result.inserted_primary_key[0])


def _trial_key(connection: Connection, run_id: int, problem_id: str, candidate_id: str) -> dict[str, str]:
    run = connection.execute(_RUN_KEY, {"run_id": run_id}).one()
    return {
        "device_id": run.device_id,
        "problem_id": problem_id,
        "protocol_id": run.protocol_id,
        "candidate_id": candidate_id,
    }


def _problem_row(problem: GemmProblem) -> dict[str, Any]:
    sizes = {name: getattr(problem, name) for name in ("m", "n", "k", "batch_count")}
    definition = problem.to_dict()
    return {
        "id": problem.id,
        "name": problem.name,
        "type": problem.type.name,
        **sizes,
        "definition": definition,
    }


def _pick(row: RowMapping, table: Table, without: Container[str] = ("id",)) -> dict[str, Any]:
    return {column.name: row[column] for column in table.c if column.name not in without}


def _fingerprint(row: RowMapping) -> Fingerprint:
    return Fingerprint(**_pick(row, devices))


def _protocol(row: RowMapping) -> Protocol:
    return Protocol(**_pick(row, protocols))


def _problem(row: RowMapping) -> GemmProblem:
    return GemmProblem.from_dict(row[problems.c.definition])


def _candidate(row: RowMapping) -> Candidate:
    return Candidate.from_dict(_pick(row, candidates))


def _trial(row: RowMapping) -> Trial:
    measurement = None
    if row[trials.c.outcome] is not None:
        measurement = Measurement(
            outcome=Outcome(row[trials.c.outcome]),
            provenance=Provenance(row[trials.c.provenance]),
            time_ns=row[trials.c.time_ns],
            ci_low_ns=row[trials.c.ci_low_ns],
            ci_high_ns=row[trials.c.ci_high_ns],
            samples_ns=unpack(row[trials.c.samples_ns]),
            raced=row[trials.c.raced],
            message=row[trials.c.message],
            max_error=row[trials.c.max_error],
            validate_seconds=row[trials.c.validate_seconds],
            benchmark_seconds=row[trials.c.benchmark_seconds],
        )
    return Trial(
        id=row[trials.c.id],
        run_id=row[trials.c.run_id],
        problem_id=row[trials.c.problem_id],
        candidate=_candidate(row),
        origin=row[trials.c.origin],
        started_at=row[trials.c.started_at],
        predicted_ns=row[trials.c.predicted_ns],
        measurement=measurement,
        binary_sha256=row[trials.c.binary_sha256],
        build_seconds=row[trials.c.build_seconds] or 0.0,
        attempts=row[trials.c.attempts],
    )


def _winner(row: RowMapping) -> Winner:
    problem, candidate = _problem(row), _candidate(row)
    return Winner(
        problem=problem,
        fingerprint=_fingerprint(row),
        protocol=_protocol(row),
        candidate=candidate,
        source=KernelSource(candidate, problem.type, **_pick(row, sources)),
        binary_sha256=row[winners.c.binary_sha256],
        trial_id=row[winners.c.trial_id],
        time_ns=row[winners.c.time_ns],
        ci_low_ns=row[winners.c.ci_low_ns],
        ci_high_ns=row[winners.c.ci_high_ns],
        default_ns=row[winners.c.default_ns],
        decided_at=row[winners.c.decided_at],
        ties=tuple(row[winners.c.ties]),
    )
