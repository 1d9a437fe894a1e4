"""Which kernel serves which problem: the rule that the C runtime follows as well."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tuner.problem import Activation, DType, GemmProblem, ProblemType, Transpose

Size = tuple[int, int, int, int]
"""m, n, k and batch_count."""

DTYPE_CODES = {
    None: 0,
    DType.F64: 1,
    DType.F32: 2,
    DType.F16: 3,
    DType.BF16: 4,
    DType.I8: 5,
    DType.I32: 6,
    DType.FP8_E4M3: 7,
    DType.FP8_E5M2: 8,
}
TRANSPOSE_CODES = {Transpose.N: 0, Transpose.T: 1}
ACTIVATION_CODES = {Activation.NONE: 0, Activation.RELU: 1, Activation.GELU: 2, Activation.SILU: 3}


@dataclass(frozen=True)
class Choice:
    """A kernel for a problem. `exact` says whether its very size was tuned.

    `problem` is the tuned one and `time_ns` the time of the kernel on it.
    """

    symbol: str
    exact: bool
    problem: GemmProblem
    time_ns: float


@dataclass(frozen=True)
class Entry:
    """A tuned problem, the kernel that won and its time."""

    problem: GemmProblem
    symbol: str
    time_ns: float


class Table:
    """The tuned sizes of each type, one entry for each.

    Of entries that differ only in leading dimensions, strides, alpha or beta, the one that lies most
    densely in memory stands, then the one that does not read C.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        types: dict[ProblemType, dict[Size, Entry]] = {}
        for entry in sorted(entries, key=lambda e: (e.problem.type.name, size_of(e.problem), _padding(e))):
            types.setdefault(entry.problem.type, {}).setdefault(size_of(entry.problem), entry)
        self.types = types

    def __len__(self) -> int:
        return sum(map(len, self.types.values()))

    def find(self, problem: GemmProblem) -> Choice | None:
        """The kernel for a problem, or None where no size of its type was tuned.

        A size that was not tuned gets the kernel of the tuned one with the smallest product of the
        ratios, each 1 or more, of m, n, k and batch_count: the nearest on a logarithmic scale. Of
        several at the same distance it is the first in ascending order.
        """
        sizes = self.types.get(problem.type)
        if sizes is None:
            return None
        size = size_of(problem)
        exact = sizes.get(size)
        entry = exact or sizes[min(sizes, key=lambda tuned: distance(size, tuned))]
        return Choice(entry.symbol, exact is not None, entry.problem, entry.time_ns)


def size_of(problem: GemmProblem) -> Size:
    return (problem.m, problem.n, problem.k, problem.batch_count)


def distance(size: Size, tuned: Size) -> float:
    """How far two sizes are apart; 1.0 for equal ones. The same bits as in wavetune.c."""
    product = 1.0
    for x, y in zip(size, tuned, strict=True):
        product *= x / y if x > y else y / x
    return product


def type_code(type: ProblemType) -> int:
    """The number by which the C runtime knows a type: four bits for each thing it is made of."""
    fused = type.epilogue
    codes = [TRANSPOSE_CODES[type.trans_a], TRANSPOSE_CODES[type.trans_b]]
    codes += [DTYPE_CODES[d] for d in (type.dtype_a, type.dtype_b, type.dtype_c, type.dtype_d, type.compute)]
    codes += [DTYPE_CODES[fused.bias], ACTIVATION_CODES[fused.activation]]
    codes += [int(fused.scale_a), int(fused.scale_b), int(fused.scale_alpha_vec)]
    result = 0
    for code in codes:
        result = result << 4 | code
    return result


def _padding(entry: Entry) -> tuple[object, ...]:
    """Sorts the entries of one size, the most usual first."""
    p = entry.problem
    gaps = p.lda + p.ldb + p.ldc + p.ldd
    strides = p.stride_a + p.stride_b + p.stride_c + p.stride_d
    return (gaps, strides, p.beta != 0.0, p.beta, p.alpha != 1.0, p.alpha, entry.symbol)
