"""`GemmProblem`: defaults, rules, identity."""

from __future__ import annotations

import json
import math

import pytest

from tuner.problem import (
    Activation,
    DType,
    Epilogue,
    GemmProblem,
    ProblemError,
    ProblemType,
    Transpose,
)

F32 = ProblemType()
I8 = ProblemType(dtype_a=DType.I8, dtype_b=DType.I8, dtype_c=DType.I32, dtype_d=DType.I32, compute=DType.I32)


def inputs(dtype: DType, other: DType | None = None, **rest: object) -> ProblemType:
    return ProblemType(dtype_a=dtype, dtype_b=other or dtype, **rest)  # type: ignore[arg-type]


def broken(error: pytest.ExceptionInfo[ProblemError]) -> list[str]:
    return [violation.field for violation in error.value.violations]


@pytest.mark.parametrize(("trans", "tight"), [("NN", (3, 7)), ("NT", (3, 5)), ("TN", (7, 7)), ("TT", (7, 5))])
def test_tight_leading_dimensions_are_the_stored_rows(trans: str, tight: tuple[int, int]) -> None:
    type = ProblemType(trans_a=Transpose(trans[0]), trans_b=Transpose(trans[1]))
    problem = GemmProblem.create(type, 3, 5, 7)
    assert (problem.lda, problem.ldb) == tight
    assert (problem.ldc, problem.ldd) == (3, 3)
    assert (problem.stride_a, problem.stride_b, problem.stride_d) == (21, 35, 15)


def test_every_broken_rule_is_named_at_once() -> None:
    with pytest.raises(ProblemError) as error:
        GemmProblem.create(F32, 4, 5, 6, batch_count=2, lda=3, ldb=5, stride_c=19, stride_d=0, beta=math.nan)
    assert broken(error) == ["beta", "lda", "ldb", "stride_c", "stride_d"]
    assert "lda must be at least 4, the tight leading dimension, but is 3" in str(error.value)


@pytest.mark.parametrize("name", ["m", "n", "k", "batch_count"])
def test_sizes_start_at_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, but is 0"):
        GemmProblem.create(F32, **{"m": 1, "n": 1, "k": 1, name: 0})


def test_a_padded_matrix_may_end_before_its_last_column_does() -> None:
    assert GemmProblem.create(F32, 4, 3, 2, batch_count=2, ldd=10, stride_d=24).stride_d == 24
    with pytest.raises(ProblemError, match="stride_d must be at least 24"):
        GemmProblem.create(F32, 4, 3, 2, batch_count=2, ldd=10, stride_d=23)


def test_a_batch_shares_operands_but_not_results() -> None:
    shared = GemmProblem.create(F32, 4, 5, 6, batch_count=2, stride_a=0, stride_b=0, stride_c=0)
    assert (shared.stride_a, shared.stride_b, shared.stride_c) == (0, 0, 0)
    with pytest.raises(ProblemError, match="stride_d"):
        GemmProblem.create(F32, 4, 5, 6, batch_count=2, stride_d=0)


@pytest.mark.parametrize(
    "type",
    [
        F32,
        I8,
        ProblemType(*[Transpose.N] * 2, *[DType.F64] * 5),
        inputs(DType.F32, compute=DType.F64, dtype_d=DType.F64),
        inputs(DType.BF16, dtype_c=DType.BF16, dtype_d=DType.BF16, epilogue=Epilogue(bias=DType.F32)),
        inputs(DType.F16, epilogue=Epilogue(bias=DType.F16, activation=Activation.GELU)),
        inputs(DType.FP8_E4M3, DType.FP8_E5M2, dtype_d=DType.BF16),
    ],
    ids=lambda type: type.name,
)
def test_usual_element_types_are_allowed(type: ProblemType) -> None:
    assert list(type.violations()) == []


@pytest.mark.parametrize(
    ("type", "fields"),
    [
        (inputs(DType.I32), ["dtype_a"]),
        (inputs(DType.F16, DType.BF16), ["dtype_b"]),
        (inputs(DType.FP8_E4M3, DType.F16), ["dtype_b"]),
        (inputs(DType.I8), ["dtype_d", "dtype_c", "compute"]),
        (inputs(DType.F64), ["compute"]),
        (inputs(DType.F16, compute=DType.F16), ["compute"]),
        (inputs(DType.F32, dtype_d=DType.I8), ["dtype_d"]),
        (inputs(DType.F32, dtype_c=DType.F64), ["dtype_c"]),
        (inputs(DType.F32, epilogue=Epilogue(bias=DType.I8)), ["bias"]),
        (inputs(DType.FP8_E4M3, epilogue=Epilogue(bias=DType.FP8_E4M3)), ["bias"]),
        (ProblemType(*[Transpose.N] * 2, DType.I8, DType.I8, *[DType.I32] * 3,
                     Epilogue(bias=DType.F32, activation=Activation.GELU)), ["bias", "activation"]),
    ],
)  # fmt: skip
def test_meaningless_element_types_are_refused(type: ProblemType, fields: list[str]) -> None:
    assert [violation.field for violation in type.violations()] == fields
    with pytest.raises(ProblemError) as error:
        GemmProblem.create(type, 1, 1, 1)
    assert broken(error) == fields


def test_integers_are_scaled_by_whole_numbers() -> None:
    assert GemmProblem.create(I8, 1, 1, 1, alpha=2.0, beta=-1.0).beta == -1.0
    with pytest.raises(ProblemError) as error:
        GemmProblem.create(I8, 1, 1, 1, alpha=0.5, beta=math.inf)
    assert broken(error) == ["alpha", "beta"]


def test_a_problem_survives_json() -> None:
    type = inputs(DType.BF16, epilogue=Epilogue(bias=DType.F32, activation=Activation.RELU, scale_a=True))
    problem = GemmProblem.create(type, 3, 5, 7, batch_count=2, lda=9, alpha=0.5, beta=2.0)
    again = GemmProblem.from_dict(json.loads(json.dumps(problem.to_dict())))
    assert again == problem
    assert again.id == problem.id
    assert again.type.id == type.id


def test_identity_covers_what_a_kernel_sees() -> None:
    base = GemmProblem.create(F32, 8, 8, 8)
    others = [
        GemmProblem.create(F32, 8, 8, 9),
        GemmProblem.create(F32, 8, 8, 8, lda=9),
        GemmProblem.create(F32, 8, 8, 8, beta=1.0),
        GemmProblem.create(ProblemType(trans_a=Transpose.T), 8, 8, 8),
    ]
    assert len({problem.id for problem in [base, *others]}) == 5
    assert base.id == GemmProblem.create(F32, 8, 8, 8).id


def test_names_say_what_is_not_default() -> None:
    type = inputs(DType.BF16, trans_a=Transpose.T, epilogue=Epilogue(bias=DType.F32, scale_alpha_vec=True))
    problem = GemmProblem.create(type, 3, 5, 7, batch_count=2, lda=9, beta=0.5)
    assert problem.name == "bf16_bf16_f32_f32_f32_tn_sav_bias_f32_3x5x7_b2_beta0.5_lda9"
    assert GemmProblem.create(F32, 3, 5, 7).name == "f32_nn_3x5x7"


def test_work_and_traffic() -> None:
    problem = GemmProblem.create(F32, 3, 5, 7, batch_count=2)
    assert problem.flops == 2 * 3 * 5 * 7 * 2
    assert problem.min_bytes == (21 + 35 + 15) * 4 * 2
    assert GemmProblem.create(F32, 3, 5, 7, beta=1.0).min_bytes == (21 + 35 + 15 + 15) * 4


@pytest.mark.parametrize("dtype", list(DType))
def test_unit_roundoff_is_that_of_the_numpy_type(dtype: DType) -> None:
    if dtype.is_integer:
        assert dtype.epsilon == 0.0
        return
    one = dtype.numpy.type(1.0)
    tie = one + dtype.numpy.type(2 * dtype.epsilon)
    assert float(tie) == 1.0 + 2 * dtype.epsilon  # the next number after 1
    assert float(dtype.numpy.type(1.0 + dtype.epsilon)) == 1.0  # halfway rounds to even
