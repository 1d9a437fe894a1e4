"""Devices: memory, launches and clocks, behind one protocol."""

from tuner.device.types import Fingerprint

__all__ = ["Fingerprint"]
