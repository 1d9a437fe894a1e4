"""Operands on the host, their memory layout, and the reference result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from tuner.problem import Activation, DType, GemmProblem, Transpose

Array = NDArray[Any]
F64 = NDArray[np.float64]


def extent(problem: GemmProblem, operand: str) -> int:
    """Elements between the first and the last one of an operand, batch included."""
    rows, cols = _shape(problem, operand)
    ld, stride = getattr(problem, f"ld{operand}"), getattr(problem, f"stride_{operand}")
    return int(stride * (problem.batch_count - 1) + ld * (cols - 1) + rows)


def matrices(problem: GemmProblem, operand: str, memory: Array) -> Array:
    """View the memory of an operand as an array of shape (batch_count, rows, columns)."""
    rows, cols = _shape(problem, operand)
    ld, stride = getattr(problem, f"ld{operand}"), getattr(problem, f"stride_{operand}")
    size = memory.itemsize
    return as_strided(memory, (problem.batch_count, rows, cols), (stride * size, size, ld * size))


def _shape(problem: GemmProblem, operand: str) -> tuple[int, int]:
    if operand == "a":
        shape = (problem.m, problem.k)
        return shape if problem.type.trans_a is Transpose.N else shape[::-1]
    if operand == "b":
        shape = (problem.k, problem.n)
        return shape if problem.type.trans_b is Transpose.N else shape[::-1]
    return (problem.m, problem.n)


def dtype_of(problem: GemmProblem, operand: str) -> DType:
    kind = problem.type
    match operand:
        case "a" | "b" | "c" | "d":
            return DType(getattr(kind, f"dtype_{operand}"))
        case "bias" if kind.epilogue.bias is not None:
            return kind.epilogue.bias
    return kind.compute


def needed_bytes(problem: GemmProblem) -> int:
    """Bytes that validation and timing take, roughly, on the host and on the device together.

    That is two sets of operands, padding included, in both places, and the reference in float64.
    """
    return 8 * sum(extent(problem, x) * dtype_of(problem, x).nbytes for x in "abcd")


@dataclass(frozen=True)
class Operands:
    """One set of input values: the memory of each operand, padding included.

    `exact` says that every intermediate value of every summation order is representable, so that
    there is one right result, bit for bit.
    """

    problem: GemmProblem
    memory: dict[str, Array]
    exact: bool


def make_operands(problem: GemmProblem, seed: int, exact: bool) -> Operands:
    """Make operands for `problem`: small integers if `exact`, else normally distributed reals.

    What lies between columns and matrices is NaN, or the extreme value of an integer type, and so is
    all of C where beta is 0: a kernel that lets any of it into the result is found out.
    """
    rng = np.random.default_rng(seed)
    epilogue = problem.type.epilogue
    memory: dict[str, Array] = {}
    for operand in ("a", "b", "c"):
        dtype = dtype_of(problem, operand)
        padding = np.iinfo(dtype.numpy).min if dtype.is_integer else np.nan
        cells = np.full(extent(problem, operand), padding, dtype.numpy)
        if operand != "c" or problem.beta != 0.0:
            view = matrices(problem, operand, cells)
            if exact or dtype.is_integer:
                limit = _integer_limit(problem, operand)
                low = -limit - (1 if limit == 127 else 0)
                view[...] = rng.integers(low, limit, view.shape, endpoint=True)
            else:
                view[...] = rng.standard_normal(view.shape, dtype=np.float32)
        memory[operand] = cells
    powers = np.array([0.5, 1.0, 2.0, -1.0]) if not problem.type.compute.is_integer else np.array([1, 2, -1])
    compute = problem.type.compute.numpy
    if epilogue.bias is not None:
        limit = 8 if exact or epilogue.bias.is_integer else 0
        values = (
            rng.integers(-limit, limit, problem.m, endpoint=True) if limit else rng.standard_normal(problem.m)
        )
        memory["bias"] = values.astype(epilogue.bias.numpy)
    if epilogue.scale_a:
        memory["scale_a"] = np.array([2], compute)
    if epilogue.scale_b:
        memory["scale_b"] = np.array([-1 if problem.type.compute.is_integer else 0.5], compute)
    if epilogue.scale_alpha_vec:
        memory["scale_alpha_vec"] = rng.choice(powers, problem.m).astype(compute)
    smooth = epilogue.activation in (Activation.NONE, Activation.RELU)
    exact = exact and smooth and _scales_exactly(problem.alpha) and _scales_exactly(problem.beta)
    return Operands(problem, memory, exact or problem.type.compute.is_integer)


def _scales_exactly(factor: float) -> bool:
    """Whether products with `factor` have few more digits: 0.1 rounds, in each kernel in its own way."""
    return abs(factor) <= 8 and float(8 * factor).is_integer()


def _integer_limit(problem: GemmProblem, operand: str) -> int:
    """The largest magnitude that keeps every partial sum exact in the compute type."""
    kind = problem.type
    if operand == "c":
        return 8
    if kind.compute is DType.I32:
        # 2**31, less room for alpha, the scales, beta * C and bias
        return min(127, int(math.sqrt(2**28 / problem.k)))
    digits = {DType.F64: 53, DType.F32: 24, DType.F16: 11}.get(kind.compute, 24)
    limit = int(math.sqrt(2.0 ** (digits - 5) / problem.k))
    return max(1, min(8, limit))


@dataclass(frozen=True)
class Reference:
    """The right result: `values` of shape (batch_count, m, n), and how far off one may be.

    `tolerance` is None where the result must agree bit for bit, else the componentwise bound
    `gamma (|alpha| |A| |B| + |beta C| + |bias|) + 2 u |D|`, gamma = (k + 8) u / (1 - (k + 8) u), u the unit
    roundoff of the compute type, then of the output type (Higham, Accuracy and Stability of
    Numerical Algorithms, 2nd ed., section 3.5), doubled for the error of an f64 reference itself.
    """

    values: Array
    tolerance: F64 | None


def reference(operands: Operands) -> Reference:
    """Compute the result in float64, which is exact for the integers of an exact check."""
    problem = operands.problem
    kind, epilogue = problem.type, problem.type.epilogue
    a = matrices(problem, "a", operands.memory["a"]).astype(np.float64)
    b = matrices(problem, "b", operands.memory["b"]).astype(np.float64)
    if kind.trans_a is Transpose.T:
        a = a.transpose(0, 2, 1)
    if kind.trans_b is Transpose.T:
        b = b.transpose(0, 2, 1)
    scale = np.full((problem.m, 1), problem.alpha)
    for name in ("scale_a", "scale_b", "scale_alpha_vec"):
        if name in operands.memory:
            scale = scale * operands.memory[name].astype(np.float64)[:, None]
    result = scale * (a @ b)
    magnitude = None if operands.exact else np.abs(scale) * (np.abs(a) @ np.abs(b))
    if problem.beta != 0.0:
        addend = problem.beta * matrices(problem, "c", operands.memory["c"]).astype(np.float64)
        result += addend
        magnitude = None if magnitude is None else magnitude + np.abs(addend)
    if "bias" in operands.memory:
        addend = operands.memory["bias"].astype(np.float64)[:, None]
        result += addend
        magnitude = None if magnitude is None else magnitude + np.abs(addend)
    result = activate(result, epilogue.activation)
    if magnitude is None:
        return Reference(_round(result, kind.dtype_d), None)
    steps = problem.k + 8
    unit = kind.compute.epsilon
    gamma = 2.0 * steps * unit / (1.0 - steps * unit)
    # The activations are smooth with a slope of at most 1.13; evaluating them costs a few roundings.
    tolerance = 1.13 * gamma * magnitude + (2 * kind.dtype_d.epsilon + 16 * unit) * np.abs(result)
    if epilogue.activation in (Activation.GELU, Activation.SILU):
        tolerance += 16 * unit * np.maximum(1.0, np.abs(result))
    # Rounding to a subnormal of the output type has an absolute error: its smallest number has the bits 1.
    smallest = np.ones((), f"u{kind.dtype_d.nbytes}").view(kind.dtype_d.numpy)
    return Reference(result, tolerance + max(np.finfo(np.float32).tiny, float(smallest)))


def activate(x: F64, activation: Activation) -> F64:
    """Apply an activation in float64."""
    match activation:
        case Activation.NONE:
            return x
        case Activation.RELU:
            return np.maximum(x, 0.0)
        case Activation.GELU:
            return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
        case Activation.SILU:
            with np.errstate(over="ignore"):
                return np.asarray(x / (1.0 + np.exp(-x)))


def _round(values: F64, dtype: DType) -> Array:
    if dtype is DType.I32:
        return values.astype(np.int64).astype(np.int32)  # wraps, as the kernels do
    with np.errstate(over="ignore"):
        return values.astype(dtype.numpy)
