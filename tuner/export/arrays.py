"""From NumPy arrays to the arguments of a kernel: the only place that knows of row-major matrices.

A row-major matrix is the transpose of the column-major matrix in the same memory, so D = A B is computed
as D^T = B^T A^T: A and B change places, and so do m and n, while each operand keeps its leading dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.errors import LibraryError
from tuner.export.table import ACTIVATION_CODES, DTYPE_CODES, TRANSPOSE_CODES
from tuner.problem import Activation, DType, ProblemType, Transpose

Array = NDArray[Any]

_DTYPES = {dtype.numpy: dtype for dtype in DType}
_ACTIVATIONS = {activation.value: activation for activation in Activation}
_Key = tuple[DType, DType, DType | None, Activation]


@dataclass(frozen=True)
class Plan:
    """How to call a kernel for arrays of certain types, shapes and strides.

    `head` is what `wavetune_gemm_args` begins with: enums, sizes, leading dimensions and strides. An
    operand is copied first where `copy_a` or `copy_b` names a layout, or `copy_c` or `copy_bias` is true.
    `turned` asks for the transposed product instead, `out_fits` says whether `out` can be written to.
    """

    head: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: np.dtype[Any] | None = None
    copy_a: Transpose | None = None
    copy_b: Transpose | None = None
    copy_c: bool = False
    copy_bias: bool = False
    out_fits: bool = True
    turned: bool = False


class Planner:
    """Finds the kernel type for NumPy arrays, among those of a library."""

    def __init__(self, types: Iterable[ProblemType]) -> None:
        self._types: dict[_Key, list[ProblemType]] = {}
        for type in types:
            fused = type.epilogue
            if not (fused.scale_a or fused.scale_b or fused.scale_alpha_vec):
                key = (type.dtype_b, type.dtype_a, fused.bias, fused.activation)
                self._types.setdefault(key, []).append(type)

    def plan(
        self, a: Array, b: Array, c: Array | None, bias: Array | None, out: Array | None, activation: str
    ) -> Plan:
        """Raises `TypeError`, `ValueError` and `LibraryError` as `Library.gemm` says."""
        shape = _shape(a, b)
        for name, x in (("c", c), ("out", out)):
            if x is not None and x.shape != shape:
                raise ValueError(f"{name} must have the shape {shape} of the result, but has {x.shape}")
        if bias is not None and bias.shape != shape[-1:]:
            raise ValueError(f"bias must have the shape {shape[-1:]}, but has {bias.shape}")
        out_layouts = None if out is None else layouts(out)
        if out_layouts and Transpose.N not in out_layouts and bias is None:
            return Plan(turned=True)
        layouts_a, layouts_b = layouts(a), layouts(b)
        type = self._choose(_key(a, b, bias, activation), (a, layouts_a), (b, layouts_b), c, out)
        m, k, n = a.shape[-2], a.shape[-1], shape[-1]
        copy_a = None if type.trans_b in layouts_a else type.trans_b
        copy_b = None if type.trans_a in layouts_b else type.trans_a
        copy_c = c is not None and Transpose.N not in layouts(c)
        batched = len(shape) == 3 and shape[0] > 1
        lda = layouts_a.get(type.trans_b) or max(k if type.trans_b is Transpose.N else m, 1)
        ldb = layouts_b.get(type.trans_a) or max(n if type.trans_a is Transpose.N else k, 1)
        ldc = max(n, 1) if c is None or copy_c else layouts(c)[Transpose.N]
        ldd = (out_layouts or {}).get(Transpose.N, max(n, 1))
        strides = (
            _stride(b, copy_b is not None),
            _stride(a, copy_a is not None),
            0 if c is None else _stride(c, copy_c),
            m * n if out is None else _stride(out, False),
        )
        return Plan(
            head=(
                *_codes(type),
                *(n, m, k, shape[0] if len(shape) == 3 else 1),
                *(ldb, lda, ldc, ldd),
                *(strides if batched else (0, 0, 0, 0)),
            ),
            shape=shape,
            dtype=type.dtype_d.numpy,
            copy_a=copy_a,
            copy_b=copy_b,
            copy_c=copy_c,
            copy_bias=bias is not None and not (bias.flags.c_contiguous and bias.flags.aligned),
            out_fits=out_layouts is None or Transpose.N in out_layouts,
        )

    def _choose(
        self,
        key: _Key,
        a: tuple[Array, dict[Transpose, int]],
        b: tuple[Array, dict[Transpose, int]],
        c: Array | None,
        out: Array | None,
    ) -> ProblemType:
        """The type of kernel that copies the least, and of those the one with the usual result."""
        fitting = [
            type
            for type in self._types.get(key, ())
            if (out is None or out.dtype == type.dtype_d.numpy)
            and (c is None or c.dtype == type.dtype_c.numpy)
        ]
        if not fitting:
            raise self._no_kernel(key, c, out)

        def rank(type: ProblemType) -> tuple[object, ...]:
            uses = ((*a, type.trans_b), (*b, type.trans_a))
            copies = sum(x.size for x, lies, trans in uses if trans not in lies)
            return (copies, type.dtype_d not in (type.dtype_a, DType.I32), type.name)

        return min(fitting, key=rank)

    def _no_kernel(self, key: _Key, c: Array | None, out: Array | None) -> LibraryError:
        wanted = f"{key[0]} x {key[1]}"
        wanted += "" if key[2] is None else f" with a bias of {key[2]}"
        wanted += "" if key[3] is Activation.NONE else f" and {key[3]}"
        wanted += "".join(
            f" and {name} of {x.dtype}" for name, x in (("c", c), ("out", out)) if x is not None
        )
        names = sorted({type.name for types in self._types.values() for type in types})
        has = ", ".join(names) or "none that arrays can use"
        return LibraryError(f"the library has no kernel for {wanted}, but for {has}; tune that type, too")


def layouts(x: Array) -> dict[Transpose, int]:
    """How a kernel can read x in place, N by rows or T by columns, with the leading dimension of each."""
    size = x.itemsize
    rows, columns = x.shape[-2:]
    by_row, by_column = x.strides[-2:]
    if x.size == 0:  # NumPy gives it strides of 0
        return {Transpose.N: max(columns, 1), Transpose.T: max(rows, 1)}
    if not x.flags.aligned:
        return {}
    if x.ndim == 3 and x.shape[0] > 1 and x.strides[0] != 0:
        span = (rows - 1) * abs(by_row) + (columns - 1) * abs(by_column) + size
        if x.strides[0] < span or x.strides[0] % size:
            return {}
    found: dict[Transpose, int] = {}
    if (by_column == size or columns == 1) and (
        rows == 1 or (by_row >= columns * size and by_row % size == 0)
    ):
        found[Transpose.N] = by_row // size if rows > 1 else columns
    if (by_row == size or rows == 1) and (
        columns == 1 or (by_column >= rows * size and by_column % size == 0)
    ):
        found[Transpose.T] = by_column // size if columns > 1 else rows
    return found


def turned(x: Array) -> Array:
    """Each matrix of x transposed, in the same memory."""
    return x.swapaxes(-1, -2)


def copied(x: Array, layout: Transpose) -> Array:
    """A copy that is contiguous by rows (N) or by columns (T)."""
    return x.copy("C") if layout is Transpose.N else turned(turned(x).copy("C"))


def overlap(out: Array, a: Array, b: Array, c: Array | None, bias: Array | None) -> bool:
    """Whether a kernel would write what it has yet to read. It may write D over C element by element."""
    if any(x is not None and np.may_share_memory(out, x) for x in (a, b, bias)):
        return True
    if c is None or (c.strides == out.strides and c.ctypes.data == out.ctypes.data and c.dtype == out.dtype):
        return False
    return np.may_share_memory(out, c)


def _key(a: Array, b: Array, bias: Array | None, activation: str) -> _Key:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, but is {activation!r}")
    for x in (a, b, bias):
        if x is not None and x.dtype not in _DTYPES:
            raise TypeError(f"an element type must be one of {', '.join(DType)}, but is {x.dtype}")
    bias_type = None if bias is None else _DTYPES[bias.dtype]
    return _DTYPES[a.dtype], _DTYPES[b.dtype], bias_type, _ACTIVATIONS[activation]


def _shape(a: Array, b: Array) -> tuple[int, ...]:
    """The shape of the product."""
    for name, x in (("a", a), ("b", b)):
        if x.ndim not in (2, 3):
            raise TypeError(f"{name} must have 2 axes, or 3 with a batch, but has {x.ndim}")
    if a.shape[-1] != b.shape[-2]:
        rule = "the columns of a must be as many as the rows of b"
        raise ValueError(f"{rule}, but there are {a.shape[-1]} and {b.shape[-2]}")
    batches = {x.shape[0] for x in (a, b) if x.ndim == 3}
    if len(batches) > 1:
        raise ValueError(f"a and b must have the same batch, but have {a.shape[0]} and {b.shape[0]}")
    return (*batches, a.shape[-2], b.shape[-1])


def _stride(x: Array, is_copied: bool) -> int:
    """Elements from one matrix of a batch to the next; 0 for a matrix that is shared."""
    if x.ndim == 2:
        return 0
    return x.shape[1] * x.shape[2] if is_copied else x.strides[0] // x.itemsize


def _codes(type: ProblemType) -> tuple[int, ...]:
    dtypes = (type.dtype_a, type.dtype_b, type.dtype_c, type.dtype_d, type.compute, type.epilogue.bias)
    return (
        TRANSPOSE_CODES[type.trans_a],
        TRANSPOSE_CODES[type.trans_b],
        *(DTYPE_CODES[dtype] for dtype in dtypes),
        ACTIVATION_CODES[type.epilogue.activation],
    )
