"""The device protocol: the only place that knows whether it is AMD, NVIDIA or CPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from tuner.identity import content_hash


@dataclass(frozen=True)
class Fingerprint:
    """The identity of a device together with the software that decides its speed.

    Measurements with different fingerprints are never mixed. `compute_units` counts the compute
    units, multiprocessors, or for `cpu` the threads that a kernel uses.
    """

    kind: str
    name: str
    arch: str
    compute_units: int
    driver: str
    runtime: str
    toolchain: str

    @cached_property
    def id(self) -> str:
        return content_hash(asdict(self))
