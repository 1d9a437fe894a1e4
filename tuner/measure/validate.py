"""Validation: is the result right, everywhere, and nothing else touched?"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tuner.device import Buffer, Device, GemmCall, Kernel, LaunchError
from tuner.measure.operands import Operands, Reference, dtype_of, extent, make_operands, matrices, reference
from tuner.problem import DType, GemmProblem, ProblemType

WORKSPACE_ALIGNMENT = 64
_POISONS = (0xFF, 0x7B)  # 0xFF.. is a NaN in every float type


@dataclass(frozen=True)
class Verdict:
    """`message` is empty for a right result; `first_launch_ns` is the problem's first launch."""

    message: str
    max_error: float
    first_launch_ns: float


class Workspaces:
    """Guarded workspaces of the sizes that one kernel asks for, reused between its launches."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: dict[int, Buffer] = {}

    def for_call(self, kernel: Kernel, problem: GemmProblem) -> tuple[int, int]:
        """Return (address, bytes) of a workspace for this launch; (0, 0) if it needs none."""
        size = round_up(kernel.workspace_bytes(problem), WORKSPACE_ALIGNMENT)
        if size <= 0:
            return 0, 0
        if size > self._device.memory_bytes:
            raise LaunchError(f"asks for a workspace of {size:,} bytes")
        if size not in self._buffers:
            self._buffers[size] = self._device.guarded(size, WORKSPACE_ALIGNMENT)
        return self._buffers[size].address, size

    def intact(self) -> bool:
        return all(buffer.guards_intact() for buffer in self._buffers.values())

    def free(self) -> None:
        for buffer in self._buffers.values():
            buffer.free()
        self._buffers.clear()


class Case:
    """One problem with operands and reference results, resident on the device in guarded buffers.

    `check` may use each of the operand sets; they share buffers, so that a kernel that returns what
    it computed before for the same pointers is found out.
    """

    def __init__(self, device: Device, problem: GemmProblem, sets: list[Operands], in_place: bool = False):
        self.problem = problem
        self._device = device
        self._sets = [(operands, reference(operands)) for operands in sets]
        self._current = -1
        self._buffers: dict[str, Buffer] = {}
        for name, memory in sets[0].memory.items():
            self._buffers[name] = device.guarded(memory.nbytes, memory.itemsize)
        self._in_place = in_place
        dtype = problem.type.dtype_d
        self._d_bytes = extent(problem, "d") * dtype.nbytes
        if in_place:
            self._buffers["d"] = self._buffers["c"]
        else:
            self._buffers["d"] = device.guarded(self._d_bytes, dtype.nbytes)

    def run(
        self, kernel: Kernel, workspaces: Workspaces, index: int, poison: int, stagger: int = 0
    ) -> tuple[str, float, float]:
        """Launch once with operand set `index`; return (what is wrong, largest error, nanoseconds)."""
        operands, expected = self._sets[index]
        if index != self._current:
            for name, memory in operands.memory.items():
                self._buffers[name].protect(writable=True)
                self._buffers[name].write(memory)
                self._buffers[name].protect(writable=name == "c" and self._in_place)
            self._current = index
        filler = np.full(self._d_bytes, poison, np.uint8)
        if self._in_place:
            self._buffers["c"].write(operands.memory["c"])
            filler = operands.memory["c"].view(np.uint8).copy()
        else:
            self._buffers["d"].write(filler)
        addresses = {name: buffer.address for name, buffer in self._buffers.items()}
        address, size = workspaces.for_call(kernel, self.problem)
        start = time.perf_counter()
        self._device.launch(kernel, GemmCall(self.problem, addresses, address, size), stagger)
        elapsed = (time.perf_counter() - start) * 1e9
        damaged = [n for n, b in self._buffers.items() if not b.guards_intact()]
        if not workspaces.intact():
            damaged.append("the workspace")
        if damaged:
            return f"wrote outside {' and '.join(damaged)}", np.inf, elapsed
        result = self._buffers["d"].read(np.dtype(np.uint8))
        message, error = _compare(self.problem, result, filler, expected)
        return message, error, elapsed

    def free(self) -> None:
        for name, buffer in self._buffers.items():
            if name != "d" or not self._in_place:
                buffer.free()


class Validator:
    """Everything a kernel must get right before it may be timed on `problem`.

    First a battery of small problems of the same type, with odd sizes, padded leading dimensions,
    batches, alpha and beta, because the exported kernel will be called with sizes it was not tuned for;
    then `problem` itself, with integers bit for bit, and with reals within the error bound.
    """

    def __init__(self, device: Device, problem: GemmProblem) -> None:
        self.problem = problem
        self._device = device
        self._battery = [
            Case(
                device,
                small,
                [make_operands(small, seed, exact=True) for seed in (2 * i, 2 * i + 1)],
                in_place=small.type.dtype_c is small.type.dtype_d and i % 2 == 1 and small.ldc == small.ldd,
            )
            for i, small in enumerate(battery(problem.type))
        ]
        sets = [make_operands(problem, 1001, exact=True)]
        if not problem.type.compute.is_integer:
            sets.append(make_operands(problem, 1002, exact=False))
        # Separate buffers: rewriting large operands for each candidate would cost more than the launch.
        self._main = [Case(device, problem, [operands]) for operands in sets]

    def check(self, kernel: Kernel, give_up_ns: float = np.inf) -> Verdict:
        """Validate; a kernel whose first launch takes over `give_up_ns` is spared the repetitions."""
        workspaces = Workspaces(self._device)
        try:
            return self._check(kernel, workspaces, give_up_ns)
        finally:
            workspaces.free()

    def _check(self, kernel: Kernel, workspaces: Workspaces, give_up_ns: float) -> Verdict:
        worst = 0.0
        for case in self._battery:
            for stagger, (index, poison) in enumerate([(0, 0), (1, 1), (0, 1)]):
                message, error, elapsed = case.run(kernel, workspaces, index, _POISONS[poison], stagger)
                if message:
                    return Verdict(f"{case.problem.name}: {message}", error, elapsed)
        first = 0.0
        runs = [(case, _POISONS[0]) for case in self._main] + [(self._main[0], _POISONS[1])]
        for number, (case, poison) in enumerate(runs):
            stagger = 1 if number == len(runs) - 1 else 0
            message, error, elapsed = case.run(kernel, workspaces, 0, poison, stagger)
            worst = max(worst, error)
            first = elapsed if number == 0 else min(first, elapsed)
            if message:
                return Verdict(f"{case.problem.name}: {message}", worst, first)
            if elapsed > give_up_ns:
                break
        return Verdict("", worst, first)

    def free(self) -> None:
        for case in [*self._battery, *self._main]:
            case.free()


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def battery(type: ProblemType) -> list[GemmProblem]:
    """Small problems that reach the edges of tiles, of cache blocks and of the k loop."""
    integer = type.compute.is_integer
    half = 2.0 if integer else 0.5
    sizes: list[tuple[int, int, int, int, int, float, float]] = [
        # m, n, k, padding, batch_count, alpha, beta
        (1, 1, 1, 0, 1, 1.0, 0.0),
        (7, 5, 3, 3, 1, -2.0, 1.0),
        (67, 43, 129, 5, 1, half, 0.0),
        (64, 64, 64, 0, 1, 3.0, -1.0),
        (130, 1, 515, 0, 1, 1.0, 2.0),
        (1, 130, 515, 7, 1, half, 1.0),
        (33, 17, 1100, 1, 1, -1.0, 0.0),
        (20, 18, 40, 2, 3, 2.0, -1.0),
        (600, 9, 70, 0, 1, 1.0, 0.0),
        (9, 600, 70, 4, 1, -1.0, 3.0),
        (270, 130, 35, 0, 1, 1.0, 0.0),
        (50, 31, 2100, 0, 1, 1.0, 1.0),
    ]
    problems = []
    for m, n, k, padding, batch_count, alpha, beta in sizes:
        tight = GemmProblem.create(type, m, n, k)
        lds = {f"ld{x}": getattr(tight, f"ld{x}") + padding for x in "abcd"}
        padded = GemmProblem.create(type, m, n, k, **lds)
        strides = {f"stride_{x}": getattr(padded, f"stride_{x}") + 3 * padding for x in "abcd"}
        problems.append(replace(padded, batch_count=batch_count, alpha=alpha, beta=beta, **strides))
    return problems


def _compare(
    problem: GemmProblem, result: NDArray[np.uint8], filler: NDArray[np.uint8], expected: Reference
) -> tuple[str, float]:
    """Return what is wrong with `result`, and the largest error relative to the tolerance."""
    dtype = dtype_of(problem, "d")
    actual = matrices(problem, "d", result.view(dtype.numpy))
    if expected.tolerance is None:
        wrong = ~(actual == expected.values)
        error = float(np.inf) if wrong.any() else 0.0
    else:
        with np.errstate(invalid="ignore", over="ignore"):
            relative = np.abs(actual.astype(np.float64) - expected.values) / expected.tolerance
        wrong = ~(relative <= 1.0)
        error = float(np.inf) if not np.isfinite(relative).all() else float(relative.max())
    if wrong.any():
        batch, i, j = (int(x) for x in np.argwhere(wrong)[0])
        where = f"[{batch}][{i}, {j}]" if problem.batch_count > 1 else f"[{i}, {j}]"
        count = int(np.count_nonzero(wrong))
        return (
            f"D{where} is {actual[batch, i, j]}, expected {expected.values[batch, i, j]} "
            f"({count:,} of {wrong.size:,} elements are wrong)"
        ), error
    untouched = np.ones(extent(problem, "d"), np.bool_)
    matrices(problem, "d", untouched)[...] = False
    if untouched.any():
        cells = result.view(dtype.numpy).view(_unsigned(dtype))[untouched]
        before = filler.view(dtype.numpy).view(_unsigned(dtype))[untouched]
        if (cells != before).any():
            return "wrote between the columns of D", float(np.inf)
    return "", error


def _unsigned(dtype: DType) -> np.dtype[np.unsignedinteger]:
    return np.dtype(f"u{dtype.nbytes}")
