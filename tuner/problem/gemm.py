"""What to compute: `D = act(alpha * op(A) * op(B) + beta * C + bias)` in BLAS column-major terms."""

from __future__ import annotations

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
            ValueError: a size is below 1, or a leading dimension or stride is too small.
        """
        for name, size in (("m", m), ("n", n), ("k", k), ("batch_count", batch_count)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, but is {size}")
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
                raise ValueError(f"ld{x} must be at least {rows}, the rows of {x.upper()}, "
                                 f"but is {ld}")  # fmt: skip
            stride = given_stride[x]
            stride = ld * cols if stride is None else stride
            shared = stride == 0 and x in "abc"  # a batch may share an operand, never its result
            if batch_count > 1 and not shared and stride < ld * (cols - 1) + rows:
                raise ValueError(
                    f"stride_{x} must be at least {ld * (cols - 1) + rows} for batch_count > 1"
                    f"{'' if x == 'd' else ', or 0 to share it'}, but is {stride}"
                )
            layout[f"ld{x}"], layout[f"stride_{x}"] = ld, stride
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
