"""What a measurement is, and how it was taken."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from tuner.identity import content_hash


class Outcome(StrEnum):
    """What became of a candidate on a problem. Only `OK` can win."""

    OK = "ok"
    ILLEGAL = "illegal"
    BUILD_FAILED = "build_failed"
    LAUNCH_FAILED = "launch_failed"
    WRONG_RESULT = "wrong_result"
    TIMEOUT = "timeout"
    CRASHED = "crashed"


class Provenance(StrEnum):
    """Where a number comes from; the three are never mixed in one table without a label."""

    MEASURED = "measured"
    EMULATED = "emulated"
    PREDICTED = "predicted"


@dataclass(frozen=True)
class Protocol:
    """How a candidate is timed. Results taken under different protocols are never compared.

    `cold` rotates through copies of the operands that together exceed twice the last-level cache, so
    that each launch finds its operands in memory; warm repeats on the same operands.
    `precision` is the relative half-width of the median's 95 % confidence interval at which
    sampling ends; `min_samples`, `max_samples` and `max_seconds` bound it.
    """

    cold: bool = True
    precision: float = 0.01
    min_samples: int = 7
    max_samples: int = 200
    max_seconds: float = 0.5

    @property
    def id(self) -> str:
        return content_hash(asdict(self))


@dataclass(frozen=True)
class Measurement:
    """The result of validating and timing one candidate on one problem.

    Times are nanoseconds of one launch. `samples_ns` holds every sample in the order taken;
    `raced` says that sampling ended early because the candidate was clearly slower than the
    incumbent, which leaves a valid but less precise time.
    """

    outcome: Outcome
    provenance: Provenance = Provenance.MEASURED
    time_ns: float | None = None
    ci_low_ns: float | None = None
    ci_high_ns: float | None = None
    samples_ns: tuple[float, ...] = ()
    raced: bool = False
    message: str = ""
    max_error: float | None = None
    validate_seconds: float = 0.0
    benchmark_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
