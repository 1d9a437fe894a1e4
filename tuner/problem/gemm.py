"""What to compute: `D = act(alpha * op(A) * op(B) + beta * C + bias)` in BLAS column-major terms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from tuner.identity import content_hash
from tuner.problem.dtypes import DType


class Transpose(StrEnum):
    """`N`: op(X) = X. `T`: op(X) = X transposed."""

    N = "N"
    T = "T"


class Activation(StrEnum):
    """The function applied last to each element of D; gelu is the tanh form, as in hipBLASLt."""

    NONE = "none"
    RELU = "relu"
    GELU = "gelu"
    SILU = "silu"


@dataclass(frozen=True)
class Epilogue:
    """What is fused behind the product: `act(alpha * s_a * s_b * s_v[i] * AB + beta * C + bias[i])`.

    `bias` is the dtype of a vector of m elements (one per row of D), or None. `scale_a` and
    `scale_b` are device scalars, `scale_alpha_vec` a vector of m elements, all of the compute dtype.
    """

    bias: DType | None = None
    activation: Activation = Activation.NONE
    scale_a: bool = False
    scale_b: bool = False
    scale_alpha_vec: bool = False

    @property
    def name(self) -> str:
        """Short procedural name: `` (empty), `bias_gelu`, `sa_sb_sav_bias_bf16`..."""
        parts = []
        parts += ["sa"] if self.scale_a else []
        parts += ["sb"] if self.scale_b else []
        parts += ["sav"] if self.scale_alpha_vec else []
        parts += [f"bias_{self.bias}"] if self.bias else []
        parts += [self.activation.value] if self.activation is not Activation.NONE else []
        return "_".join(parts)


@dataclass(frozen=True)
class Violation:
    """A rule that a problem breaks: "`field` `rule`; `action`" is the sentence to show.

    `field` is an argument of `GemmProblem.create`, or an attribute of its type or epilogue.
    """

    field: str
    rule: str
    action: str


class ProblemError(ValueError):
    """A problem that cannot exist, with every rule it breaks."""

    def __init__(self, violations: list[Violation]) -> None:
        super().__init__("; ".join(f"{v.field} {v.rule}" for v in violations))
        self.violations = tuple(violations)


@dataclass(frozen=True)
class ProblemType:
    """Everything a kernel is compiled for; sizes, strides, alpha and beta are run-time arguments."""

    trans_a: Transpose = Transpose.N
    trans_b: Transpose = Transpose.N
    dtype_a: DType = DType.F32
    dtype_b: DType = DType.F32
    dtype_c: DType = DType.F32
    dtype_d: DType = DType.F32
    compute: DType = DType.F32
    epilogue: Epilogue = field(default_factory=Epilogue)

    @cached_property
    def id(self) -> str:
        return content_hash(asdict(self))

    @property
    def name(self) -> str:
        """Procedural name: `f32_nn`, `bf16_bf16_f32_tn_bias_bf16_gelu`; equal names, equal types."""
        dtypes = [self.dtype_a, self.dtype_b, self.dtype_c, self.dtype_d, self.compute]
        head = dtypes[0].value if len(set(dtypes)) == 1 else "_".join(d.value for d in dtypes)
        name = f"{head}_{self.trans_a}{self.trans_b}".lower()
        return f"{name}_{self.epilogue.name}" if self.epilogue.name else name

    def violations(self) -> Iterator[Violation]:
        """Yield each rule on element types that this type breaks.

        A and B share a type (the fp8 types may mix), the product is accumulated in f32 or f64 (i32 for
        i8), and nothing that is added or stored is wider than what it is accumulated in.
        """
        a, b, compute, bias = self.dtype_a, self.dtype_b, self.compute, self.epilogue.bias
        if a is DType.I32:
            yield Violation("dtype_a", "cannot be i32, which is for results alone", "use i8")
            return
        if b is not a and not (a.is_fp8 and b.is_fp8):
            rule = f"cannot be {b} where the other operand is {a}"
            yield Violation("dtype_b", rule, "use one type, since only the fp8 types mix")
            return
        if a.is_integer:
            for name in ("dtype_d", "dtype_c", "compute"):
                if getattr(self, name) is not DType.I32:
                    rule = f"must be i32 for i8 operands, but is {getattr(self, name)}"
                    yield Violation(name, rule, "use i32")
            if bias not in (None, DType.I32):
                yield Violation("bias", f"must be i32 for i8 operands, but is {bias}", "use i32")
            if self.epilogue.activation not in (Activation.NONE, Activation.RELU):
                rule = f"must be none or relu for i8 operands, but is {self.epilogue.activation}"
                yield Violation("activation", rule, "apply it after dequantizing")
            return
        if compute not in (DType.F32, DType.F64) or compute.nbytes < a.nbytes:
            rule = f"must be {'f64' if a is DType.F64 else 'f32 or f64'} for {a} operands, but is {compute}"
            yield Violation("compute", rule, "leave it out for the usual one")
            return
        for name, dtype in (("dtype_d", self.dtype_d), ("dtype_c", self.dtype_c), ("bias", bias)):
            if dtype is None:
                continue
            if dtype.is_integer or dtype.nbytes > compute.nbytes:
                rule = f"must be a floating-point type no wider than compute, {compute}, but is {dtype}"
                yield Violation(name, rule, f"use {compute}, or a narrower type")
            elif name == "bias" and dtype.is_fp8:
                yield Violation(name, f"cannot be {dtype}, too coarse to add", "use bf16, f16 or f32")

    def scope(self) -> dict[str, object]:
        """The names that template expressions may use, with plain str, int and bool values."""
        return {
            "trans_a": self.trans_a.value,
            "trans_b": self.trans_b.value,
            "dtype_a": self.dtype_a.value,
            "dtype_b": self.dtype_b.value,
            "dtype_c": self.dtype_c.value,
            "dtype_d": self.dtype_d.value,
            "compute": self.compute.value,
            "bytes_a": self.dtype_a.nbytes,
            "bytes_b": self.dtype_b.nbytes,
            "bytes_c": self.dtype_c.nbytes,
            "bytes_d": self.dtype_d.nbytes,
            "bytes_compute": self.compute.nbytes,
            "bias": self.epilogue.bias is not None,
            "activation": self.epilogue.activation.value,
        }


@dataclass(frozen=True)
class GemmProblem:
    """One GEMM: op(A) is m x k, op(B) is k x n, C and D are m x n, all column-major.

    Leading dimensions and strides count elements. `stride_x` is the distance between the matrices of
    a batch. Build one with `GemmProblem.create`, which fills in the tight defaults.
    """

    type: ProblemType
    m: int
    n: int
    k: int
    batch_count: int
    lda: int
    ldb: int
    ldc: int
    ldd: int
    stride_a: int
    stride_b: int
    stride_c: int
    stride_d: int
    alpha: float = 1.0
    beta: float = 0.0

    @classmethod
    def create(
        cls,
        type: ProblemType,
        m: int,
        n: int,
        k: int,
        *,
        batch_count: int = 1,
        lda: int | None = None,
        ldb: int | None = None,
        ldc: int | None = None,
        ldd: int | None = None,
        stride_a: int | None = None,
        stride_b: int | None = None,
        stride_c: int | None = None,
        stride_d: int | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> GemmProblem:
        """Return the problem with tight leading dimensions and strides where none are given.

        Raises:
            ProblemError: a size is below 1, a leading dimension or stride is too small, alpha or beta is
                not finite, or the type breaks a rule of `ProblemType.violations`. It is a ValueError.
        """
        violations = list(type.violations())
        for name, scalar in (("alpha", alpha), ("beta", beta)):
            if not math.isfinite(scalar):
                violations.append(Violation(name, f"must be finite, but is {scalar}", "write a number"))
            elif type.compute.is_integer and scalar != int(scalar):
                rule = f"must be a whole number for i8 operands, but is {scalar:g}"
                violations.append(Violation(name, rule, "scale after the GEMM"))
        sizes = (("m", m), ("n", n), ("k", k), ("batch_count", batch_count))
        small = [
            Violation(x, f"must be at least 1, but is {size}", "raise it") for x, size in sizes if size < 1
        ]
        if small:
            raise ProblemError(violations + small)
        rows_a, cols_a = (m, k) if type.trans_a is Transpose.N else (k, m)
        rows_b, cols_b = (k, n) if type.trans_b is Transpose.N else (n, k)
        extents = {"a": (rows_a, cols_a), "b": (rows_b, cols_b), "c": (m, n), "d": (m, n)}
        given_ld = {"a": lda, "b": ldb, "c": ldc, "d": ldd}
        given_stride = {"a": stride_a, "b": stride_b, "c": stride_c, "d": stride_d}
        layout: dict[str, int] = {}
        for x, (rows, cols) in extents.items():
            ld = given_ld[x]
            ld = rows if ld is None else ld
            if ld < rows:
                rule = f"must be at least {rows}, the tight leading dimension, but is {ld}"
                violations.append(Violation(f"ld{x}", rule, f"raise it to {rows}, or leave it out"))
                continue
            stride = given_stride[x]
            stride = ld * cols if stride is None else stride
            least = ld * (cols - 1) + rows if batch_count > 1 else 0
            shared = stride == 0 and x in "abc"  # a batch may share an operand, never its result
            if stride < least and not shared:
                rule = f"must be at least {least}, the elements a matrix spans, but is {stride}"
                share = "" if x == "d" else ", set 0 to share one matrix"
                violations.append(Violation(f"stride_{x}", rule, f"raise it{share}, or leave it out"))
            layout[f"ld{x}"], layout[f"stride_{x}"] = ld, stride
        if violations:
            raise ProblemError(violations)
        return cls(type, m, n, k, batch_count, alpha=float(alpha), beta=float(beta), **layout)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> GemmProblem:
        """The inverse of `to_dict`."""
        kind = dict(data["type"])
        epilogue = dict(kind.pop("epilogue"))
        bias = epilogue.pop("bias")
        activation = Activation(epilogue.pop("activation"))
        type = ProblemType(
            trans_a=Transpose(kind.pop("trans_a")),
            trans_b=Transpose(kind.pop("trans_b")),
            epilogue=Epilogue(bias=None if bias is None else DType(bias), activation=activation, **epilogue),
            **{name: DType(value) for name, value in kind.items()},
        )
        return cls(**{**data, "type": type})

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, strings and numbers, for JSON and for other processes."""
        return asdict(self)

    @cached_property
    def id(self) -> str:
        return content_hash(asdict(self))

    @property
    def name(self) -> str:
        """Readable name: `f32_nn_1024x1024x512`, with what is not tight or default appended."""
        name = f"{self.type.name}_{self.m}x{self.n}x{self.k}"
        if self.batch_count > 1:
            name += f"_b{self.batch_count}"
        if self.alpha != 1.0:
            name += f"_alpha{self.alpha:g}"
        if self.beta != 0.0:
            name += f"_beta{self.beta:g}"
        tight = GemmProblem.create(self.type, self.m, self.n, self.k, batch_count=self.batch_count)
        for attribute in ("lda", "ldb", "ldc", "ldd"):
            if getattr(self, attribute) != getattr(tight, attribute):
                name += f"_{attribute}{getattr(self, attribute)}"
        return name

    @property
    def flops(self) -> int:
        """Floating-point (or integer) operations: a multiply and an add per k, element and batch."""
        return 2 * self.m * self.n * self.k * self.batch_count

    @property
    def min_bytes(self) -> int:
        """Bytes that must cross memory once: A and B read, C read where beta is not 0, D written."""
        kind = self.type
        per_matrix = (
            self.m * self.k * kind.dtype_a.nbytes
            + self.k * self.n * kind.dtype_b.nbytes
            + self.m * self.n * kind.dtype_d.nbytes
            + (self.m * self.n * kind.dtype_c.nbytes if self.beta != 0.0 else 0)
        )
        return per_matrix * self.batch_count

    def scope(self) -> dict[str, object]:
        """`ProblemType.scope` with the sizes, for template expressions that mention them."""
        return {
            **self.type.scope(),
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "batch_count": self.batch_count,
            "beta": self.beta,
        }
