"""Devices: memory, launches and clocks, behind one protocol."""

from tuner.device.cpu import CpuDevice
from tuner.device.types import Baseline, Buffer, Device, Fingerprint, GemmCall, Kernel, LaunchError, Ring
from tuner.errors import DeviceError

__all__ = [
    "Baseline",
    "Buffer",
    "Device",
    "Fingerprint",
    "GemmCall",
    "Kernel",
    "LaunchError",
    "Ring",
    "open_device",
]


def open_device(kind: str, threads: int | None = None) -> Device:
    """Open a device by its kind; `threads` is for `cpu` and defaults to all processors allowed.

    Raises:
        DeviceError: there is no such device here.
    """
    if kind == "cpu":
        return CpuDevice(threads)
    raise DeviceError(f"device must be cpu, but is {kind}")
