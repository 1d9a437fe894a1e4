"""Operands and reference results: what is right passes, and what cannot be exact is not asked to be."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.measure.operands import Operands, extent, make_operands, matrices, reference
from tuner.problem import Activation, DType, Epilogue, GemmProblem, ProblemType, Transpose

I8 = ProblemType(dtype_a=DType.I8, dtype_b=DType.I8, dtype_c=DType.I32, dtype_d=DType.I32, compute=DType.I32)


def straight(operands: Operands) -> np.ndarray:
    """The result in f32 throughout, alpha and beta included, as a plain kernel computes it."""
    p = operands.problem
    a, b, c = (matrices(p, x, operands.memory[x]).astype(np.float32) for x in "abc")
    a = a if p.type.trans_a is Transpose.N else a.transpose(0, 2, 1)
    b = b if p.type.trans_b is Transpose.N else b.transpose(0, 2, 1)
    d = np.float32(p.alpha) * (a @ b)
    return d + np.float32(p.beta) * c if p.beta else d


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (0.5, -1.0), (-8.0, 0.125), (0.1, 0.0), (1.0, 0.3),
                                             (1 / 3, 1 / 3), (1e6, 0.0), (2.0**-20, 1.0)])  # fmt: skip
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("trans", ["NN", "TN", "NT", "TT"])
def test_a_plain_kernel_is_right(alpha: float, beta: float, exact: bool, trans: str) -> None:
    type = ProblemType(trans_a=Transpose(trans[0]), trans_b=Transpose(trans[1]))
    problem = GemmProblem.create(type, 64, 48, 33, batch_count=2, lda=70, ldc=65, alpha=alpha, beta=beta)
    operands = make_operands(problem, 7, exact)
    right, result = reference(operands), straight(operands)
    if right.tolerance is None:
        assert (result == right.values).all()
    else:
        assert (np.abs(result - right.values) <= right.tolerance).all()
        assert (right.tolerance < 1e-4 * np.abs(alpha) * 33 * 64 + 1e-3 * np.abs(beta)).all()


def test_only_what_is_exact_in_every_order_is_compared_bit_for_bit() -> None:
    def exact(type: ProblemType, alpha: float = 1.0, beta: float = 0.0) -> bool:
        problem = GemmProblem.create(type, 4, 5, 6, alpha=alpha, beta=beta)
        return reference(make_operands(problem, 1, exact=True)).tolerance is None

    assert exact(ProblemType())
    assert exact(ProblemType(), 0.5, -3.0)
    assert not exact(ProblemType(), 0.1)
    assert not exact(ProblemType(), 1.0, 1 / 3)
    assert not exact(ProblemType(epilogue=Epilogue(activation=Activation.SILU)))
    assert exact(I8, 1000.0, -77.0)


@pytest.mark.parametrize("dtype", [DType.F64, DType.F32, DType.F16, DType.BF16, DType.I8])
def test_all_but_the_operands_themselves_is_poison(dtype: DType) -> None:
    type = I8 if dtype is DType.I8 else ProblemType(*[Transpose.N] * 2, *[dtype] * 4, compute=(
        DType.F64 if dtype is DType.F64 else DType.F32))  # fmt: skip
    problem = GemmProblem.create(type, 3, 5, 7, batch_count=2, lda=4, ldb=9, stride_a=40)
    for exact in (True, False):
        memory = make_operands(problem, 3, exact).memory
        for name in "abc":
            cells = memory[name].astype(np.float64)
            assert len(cells) == extent(problem, name)
            poison = np.isnan(cells) | (cells == (-128 if name != "c" else -(2.0**31)))
            inside = np.zeros(len(cells), bool)
            matrices(problem, name, inside)[...] = name != "c"  # C is all poison where beta is 0
            assert poison[~inside].all()
            assert dtype is DType.I8 or not poison[inside].any()


def test_bytes_reach_both_of_their_ends() -> None:
    memory = make_operands(GemmProblem.create(I8, 100, 100, 100), 1, exact=True).memory
    assert [(memory[x].min(), memory[x].max()) for x in "ab"] == [(-128, 127)] * 2


def test_operands_are_a_function_of_the_seed() -> None:
    problem = GemmProblem.create(ProblemType(), 8, 8, 8, beta=1.0)
    a, b, c = (make_operands(problem, seed, exact=False).memory for seed in (1, 1, 2))
    assert all((a[x] == b[x]).all() and (a[x] != c[x]).any() for x in "abc")
