"""Timing of kernels that have passed validation."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.device import Buffer, Device, GemmCall, Kernel, Ring
from tuner.measure.operands import extent, make_operands
from tuner.measure.statistics import median_interval
from tuner.measure.types import Protocol
from tuner.measure.validate import WORKSPACE_ALIGNMENT, round_up
from tuner.problem import GemmProblem

_SAMPLE_NS = 20_000.0  # a sample shorter than this is dominated by the clock's own cost
_MAX_SETS = 512
_BLOCK = 5
_IDLE_SECONDS = 0.15
_ALIGNMENT = 4096


class Benchmark:
    """A ring of operand sets for one problem, on which kernels are timed in turn.

    Cold: the sets together exceed twice the last-level cache, so a launch finds none of its operands
    there. Warm: there is one set.
    """

    def __init__(self, device: Device, problem: GemmProblem, protocol: Protocol) -> None:
        self.problem, self.protocol = problem, protocol
        self._device = device
        operands = make_operands(problem, 2001, exact=False)
        sizes = {name: memory.nbytes for name, memory in operands.memory.items()}
        sizes["d"] = extent(problem, "d") * problem.type.dtype_d.nbytes
        offsets, set_bytes = {}, 0
        for name, size in sizes.items():
            offsets[name] = set_bytes
            set_bytes += round_up(size, _ALIGNMENT)
        count = math.ceil(2 * device.cache_bytes / set_bytes) + 1 if protocol.cold else 1
        count = max(1, min(count, _MAX_SETS, device.memory_bytes // set_bytes))
        self._arena = device.arena(set_bytes * count)
        image = np.zeros(set_bytes, np.uint8)
        for name, memory in operands.memory.items():
            image[offsets[name] : offsets[name] + memory.nbytes] = memory.view(np.uint8)
        self._arena.write(np.tile(image, count))
        base = self._arena.address
        self._calls = [
            GemmCall(problem, {n: base + i * set_bytes + o for n, o in offsets.items()}) for i in range(count)
        ]
        self._ring: Ring = device.ring(self._calls)
        self._next = 0
        self._workspace: Buffer | None = None
        self._workspace_bytes = 0

    def time(self, kernel: Kernel, incumbent_ns: float | None = None) -> tuple[list[float], bool]:
        """Sample until the protocol's precision or a bound is reached.

        Returns the samples in nanoseconds of one launch, and whether sampling ended early because
        every sample was at least a quarter slower than `incumbent_ns`.
        """
        protocol = self.protocol
        warm_up = float(self._sample(kernel, samples=1, group=1)[0])
        group = max(1, round(_SAMPLE_NS / max(warm_up, 1.0)))
        samples: list[float] = []
        spent = 0.0
        chunk = protocol.min_samples
        while True:
            chunk = min(chunk, protocol.max_samples - len(samples))
            # The first chunk of a slow kernel must not overrun the time allowed by much either.
            chunk = max(1, min(chunk, int(protocol.max_seconds * 1e9 / max(warm_up * group, 1.0)) + 1))
            taken = self._sample(kernel, chunk, group)
            samples.extend(float(t) for t in taken)
            spent += float(taken.sum()) * group / 1e9
            median, low, high = median_interval(samples)
            if incumbent_ns is not None and len(samples) >= 3 and min(samples) > 1.25 * incumbent_ns:
                return samples, True
            precise = len(samples) >= protocol.min_samples and high - low <= 2 * protocol.precision * median
            if precise or spent >= protocol.max_seconds or len(samples) >= protocol.max_samples:
                return samples, False
            chunk = max(4, len(samples) // 2)

    def interleave(self, kernels: Sequence[Kernel], rounds: int) -> list[list[float]]:
        """Time the kernels in turn, `rounds` times, so that drift meets all of them alike.

        Returns a list of `rounds` samples (ns) for each kernel. The order rotates, since a kernel
        inherits the caches that the one before it left behind.
        """
        groups = []
        for kernel in kernels:
            warm_up = float(self._sample(kernel, 1, 1)[0])
            groups.append(max(1, round(_SAMPLE_NS / max(warm_up, 1.0))))
        samples: list[list[float]] = [[] for _ in kernels]
        for turn in range(rounds):
            for offset in range(len(kernels)):
                index = (turn + offset) % len(kernels)
                samples[index].append(float(self._sample(kernels[index], 1, groups[index])[0]))
        return samples

    def compare(self, kernel: Kernel, rounds: int) -> tuple[str, list[float], list[float]] | None:
        """Time the device's baseline and a kernel in turn, in blocks of a few samples.

        Returns the baseline's name, the medians (ns) of its blocks and those of the kernel's; None
        where there is no baseline for the problem.
        """
        baseline = self._device.baseline(self._calls)
        if baseline is None:
            return None
        sample_ns = float(self._sample(kernel, 1, 1)[0])
        group = max(1, round(_SAMPLE_NS / sample_ns))
        theirs: list[float] = []
        ours: list[float] = []
        for _ in range(rounds):
            # The idle threads of the other side may spin for a while before they sleep.
            time.sleep(_IDLE_SECONDS)
            baseline.time(self._next, 1, group)
            theirs.append(float(np.median(baseline.time(self._next + group, _BLOCK, group))))
            self._next += (1 + _BLOCK) * group
            time.sleep(_IDLE_SECONDS)
            self._sample(kernel, 1, group)
            ours.append(float(np.median(self._sample(kernel, _BLOCK, group))))
        return baseline.name, theirs, ours

    def free(self) -> None:
        self._arena.free()
        if self._workspace is not None:
            self._workspace.free()
            self._workspace = None

    def _sample(self, kernel: Kernel, samples: int, group: int) -> NDArray[np.float64]:
        needed = round_up(kernel.workspace_bytes(self.problem), WORKSPACE_ALIGNMENT)
        if needed > self._workspace_bytes:
            if self._workspace is not None:
                self._workspace.free()
            self._workspace = self._device.arena(needed)
            self._workspace_bytes = needed
        address = self._workspace.address if self._workspace is not None else 0
        times = self._device.time(
            kernel, self._ring, (address, self._workspace_bytes), self._next, samples, group
        )
        self._next += samples * group
        return times
