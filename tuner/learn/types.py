"""The values that the search takes and gives back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Origin(StrEnum):
    """Why a candidate was proposed."""

    DEFAULT = "default"
    ESTIMATE = "estimate"
    RANDOM = "random"
    MODEL = "model"
    CONTROL = "control"
    TPE = "tpe"
    EXHAUSTIVE = "exhaustive"


@dataclass(frozen=True)
class Proposal:
    """A row of the search space to measure next; `predicted_ns` is what the model expects, if it does."""

    row: int
    origin: Origin
    predicted_ns: float | None = None


@dataclass(frozen=True)
class Observation:
    """What was found for a row: nanoseconds, or None for a candidate that is invalid.

    `lower_bound` says that the race was stopped early: the time is real but imprecise.
    """

    row: int
    time_ns: float | None
    lower_bound: bool = False


@dataclass(frozen=True)
class Quality:
    """How a search went.

    `candidates` valid, `measured` of them, `skipped` = the difference, which the model judged not worth a
    build. The rest is about the control sample, which was drawn at random, predicted before it was
    measured, and is None where it has fewer than 5 members: Spearman's rank correlation of prediction
    and time, and the median relative error of the prediction. `control_beaten` is the share of
    control candidates that were slower than the best one found.
    """

    candidates: int
    measured: int
    skipped: int
    controls: int
    rank_correlation: float | None
    median_error: float | None
    control_beaten: float | None
