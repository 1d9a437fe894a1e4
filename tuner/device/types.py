"""The device protocol: the only place that knows whether it is AMD, NVIDIA or CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tuner.build import Binary, Toolchain
from tuner.generate import Target
from tuner.identity import content_hash
from tuner.problem import GemmProblem

Array = NDArray[Any]


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


class LaunchError(Exception):
    """A candidate could not be loaded or launched: its fault, recorded as `launch_failed`."""


class Buffer(Protocol):
    """Device memory with guard zones on both sides.

    **Placement.** The last byte is as close to the upper guard as the device allows and the start is
    aligned to `alignment` only, so that a kernel that assumes more is found out.
    **Guards.** What a kernel wrote outside faults at once or is reported by `guards_intact`.
    """

    @property
    def address(self) -> int: ...

    def write(self, data: Array) -> None:
        """Copy a contiguous array of exactly the buffer's size to the device."""
        ...

    def read(self, dtype: np.dtype[Any]) -> Array:
        """Return the contents as a one-dimensional array on the host."""
        ...

    def protect(self, writable: bool) -> None:
        """Make kernels' writes to this buffer fault, where the device can; otherwise do nothing."""
        ...

    def guards_intact(self) -> bool: ...

    def free(self) -> None: ...


@dataclass(frozen=True)
class GemmCall:
    """The arguments of one launch: a problem and the device address of each operand.

    `addresses` has `a`, `b`, `c`, `d` and, where the epilogue has them, `bias`, `scale_a`, `scale_b`
    and `scale_alpha_vec`. `workspace_bytes` is what the kernel asked for.
    """

    problem: GemmProblem
    addresses: Mapping[str, int]
    workspace: int = 0
    workspace_bytes: int = 0


class Ring(Protocol):
    """Calls of one problem on different operands, which timed launches go through in turn."""

    def __len__(self) -> int: ...


class Baseline(Protocol):
    """The library that users of a device would call instead, on the calls of a ring.

    It computes the bare product op(A) op(B): what a fused epilogue saves is not held against it.
    """

    @property
    def name(self) -> str: ...

    def time(self, first: int, samples: int, group: int) -> NDArray[np.float64]:
        """As `Device.time`."""
        ...


class Kernel(Protocol):
    """A kernel that is loaded on a device."""

    def workspace_bytes(self, problem: GemmProblem) -> int: ...


class Device(Protocol):
    """One device, opened in a worker process.

    **Faults.** A call may end the process (illegal access, abort) or never return; whoever uses a
    device runs it in a process that can be lost. What the runtime reports as an error of the
    candidate is a `LaunchError`; what makes the device unusable is a `DeviceError`.
    **Identity.** `fingerprint` is stable between processes on the same machine and software.
    **Provenance.** `emulated` devices have no times: `time` raises `DeviceError`.
    """

    @property
    def fingerprint(self) -> Fingerprint: ...

    @property
    def target(self) -> Target: ...

    @property
    def toolchain(self) -> Toolchain: ...

    @property
    def emulated(self) -> bool: ...

    @property
    def shares_host(self) -> bool:
        """Whether builds on the host would disturb timings on this device."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Size of the last-level cache, which cold timings must exceed."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Memory that operands may use."""
        ...

    def load(self, binary: Binary) -> Kernel:
        """Load a binary after checking its hash. Raises `LaunchError`."""
        ...

    def unload(self, kernel: Kernel) -> None: ...

    def guarded(self, nbytes: int, alignment: int) -> Buffer: ...

    def arena(self, nbytes: int) -> Buffer:
        """Memory for timing: aligned and placed as an application's would be, without guards."""
        ...

    def launch(self, kernel: Kernel, call: GemmCall, stagger: int = 0) -> None:
        """Run the kernel once and wait for it. Raises `LaunchError`.

        With other values of `stagger` than 0 the threads of a team run one at a time between barriers, in
        an order that odd and even values reverse, which brings races to light. GPUs, which leave no such
        choice, ignore it.
        """
        ...

    def ring(self, calls: Sequence[GemmCall]) -> Ring:
        """Prepare calls for `time`, once for all kernels of a problem."""
        ...

    def time(
        self, kernel: Kernel, ring: Ring, workspace: tuple[int, int], first: int, samples: int, group: int
    ) -> NDArray[np.float64]:
        """Time `samples` groups of `group` launches; return nanoseconds of one launch, per group.

        Launch i of the sequence uses call `(first + i) % len(ring)`, all with one `workspace`
        (address, bytes).
        """
        ...

    def baseline(self, calls: Sequence[GemmCall]) -> Baseline | None:
        """The vendor's or the user's usual library on these calls; None where it has no such GEMM."""
        ...

    def close(self) -> None: ...
