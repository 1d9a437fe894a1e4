"""Validation and timing of candidates, each in a worker process."""

from tuner.measure.types import Measurement, Outcome, Protocol, Provenance

__all__ = ["Measurement", "Outcome", "Protocol", "Provenance"]
