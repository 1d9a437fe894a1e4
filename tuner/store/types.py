"""The values that the store takes and gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from tuner.device import Fingerprint
from tuner.generate import Candidate, KernelSource
from tuner.measure import Measurement, Protocol
from tuner.problem import GemmProblem


@dataclass(frozen=True)
class Trial:
    """One candidate on one problem. `measurement` is None for a trial that began and never ended."""

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
