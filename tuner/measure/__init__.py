"""Validation and timing of candidates, each in a worker process."""

from tuner.measure.operands import needed_bytes
from tuner.measure.statistics import median_interval, paired_ratio_interval
from tuner.measure.supervisor import Supervisor, WorkerLost
from tuner.measure.types import Measurement, Outcome, Protocol, Provenance

__all__ = [
    "Measurement",
    "Outcome",
    "Protocol",
    "Provenance",
    "Supervisor",
    "WorkerLost",
    "median_interval",
    "needed_bytes",
    "paired_ratio_interval",
]
