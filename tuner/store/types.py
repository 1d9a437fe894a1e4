"""The values that the store takes and gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from tuner.device import Fingerprint
from tuner.generate import Candidate, KernelSource
from tuner.measure import Measurement, Outcome, Protocol
from tuner.problem import GemmProblem


@dataclass(frozen=True)
class Trial:
    """One candidate on one problem. `measurement` is None for a trial that began and never ended.

    `attempts` counts how often it began: more than once if the process was killed meanwhile.
    """

    id: int
    run_id: int
    problem_id: str
    candidate: Candidate
    origin: str
    started_at: datetime
    predicted_ns: float | None = None
    measurement: Measurement | None = None
    binary_sha256: str | None = None
    build_seconds: float = 0.0
    attempts: int = 1


@dataclass(frozen=True)
class Finalist:
    """A candidate of the interleaved final round, with its samples in the order of the rounds."""

    trial_id: int
    candidate: Candidate
    samples_ns: tuple[float, ...]
    median_ns: float


@dataclass(frozen=True)
class Winner:
    """The best valid candidate for a problem on a device.

    `source` is the kernel as it was measured, so that a later change of the template never changes
    what is exported. `ties` names the finalists that could not be told apart from it; `default_ns` is
    the time of the template's default in the same final round.
    """

    problem: GemmProblem
    fingerprint: Fingerprint
    protocol: Protocol
    candidate: Candidate
    source: KernelSource
    binary_sha256: str
    trial_id: int
    time_ns: float
    ci_low_ns: float
    ci_high_ns: float
    default_ns: float | None
    decided_at: datetime
    ties: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Run:
    """One call of the sweep.

    `status` is `finished`, `interrupted`, `failed` or, for one that goes on or was killed, `running`.
    `outcomes` counts the trials that it ended, and `unfinished` those that it began and never ended.
    """

    id: int
    spec_name: str
    spec_text: str
    fingerprint: Fingerprint
    protocol: Protocol
    strategy: str
    seed: int
    version: str
    status: str
    started_at: datetime
    ended_at: datetime | None
    outcomes: Mapping[Outcome, int]
    unfinished: int


@dataclass(frozen=True)
class Canary:
    """A time of the same candidate, taken again and again through a run to detect drift."""

    problem_id: str
    candidate: Candidate
    time_ns: float
    taken_at: datetime
