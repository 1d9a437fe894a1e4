"""Loading an exported library: tuned GEMMs on NumPy arrays."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import platform
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.device.cpu import CpuDevice
from tuner.errors import LibraryError
from tuner.export.manifest import Manifest, check_file, read_manifest
from tuner.export.table import ACTIVATION_CODES, DTYPE_CODES, TRANSPOSE_CODES, Choice
from tuner.problem import Activation, DType, GemmProblem, ProblemType, Transpose

Array = NDArray[Any]

# wavetune_gemm_args: 9 enums, 12 sizes and strides, alpha and beta, 8 pointers.
_ARGS = struct.Struct("@9i12q2d8P")
_ARCH_MISMATCH = 3
_DTYPES = {dtype.numpy: dtype for dtype in DType}
_ACTIVATIONS = {activation.value: activation for activation in Activation}
_Key = tuple[DType, DType, DType | None, Activation]


def load(folder: str | os.PathLike[str], *, threads: int = 0) -> Library:
    """Open an exported library; `threads` is as for `Library`.

    The shared library runs in this process: open only what you would also run as a program.

    Raises:
        LibraryError: the folder is no export, is damaged, or is for another processor.
    """
    return Library(Path(folder), threads)


class Library:
    """The kernels of an exported library, with a team of threads to run them.

    `threads` is the size of the team; 0 means as many as the kernels were tuned with, or as there are
    processors if those are fewer. Any number of threads may call `gemm` at once: one has the team, and the
    others run their kernel alone meanwhile. Close it, or use it as a context manager, to end the team.
    """

    def __init__(self, folder: Path, threads: int = 0) -> None:
        self.path = folder
        self.manifest: Manifest = read_manifest(folder)
        self._table = self.manifest.lookup()
        self._types: dict[_Key, list[ProblemType]] = {}
        for type in self._table.types:
            fused = type.epilogue
            if not (fused.scale_a or fused.scale_b or fused.scale_alpha_vec):
                # Operands change places: NumPy's are row-major.
                key = (type.dtype_b, type.dtype_a, fused.bias, fused.activation)
                self._types.setdefault(key, []).append(type)
        self._codes = {type: _codes(type) for types in self._types.values() for type in types}
        library = _open(folder, self.manifest)
        handle = ctypes.c_void_p()
        status = library.wavetune_create(ctypes.byref(handle), threads)
        if status:
            _ctypes.dlclose(library._handle)
            self._refuse(status, threads)
        self._gemm = library.wavetune_gemm
        self._status_string = library.wavetune_status_string
        self._handle: ctypes.c_void_p | None = handle
        self.threads: int = library.wavetune_threads(handle)
        self._finalizer = weakref.finalize(self, _close, library, handle)

    def _refuse(self, status: int, threads: int) -> None:
        if status == _ARCH_MISMATCH:
            built, here = self.manifest.fingerprint.arch, CpuDevice().target.arch
            rule = f"{self.path} is for {built} processors, but this one is {here}"
            raise LibraryError(f"{rule}; tune and export on this machine")
        rule = f"{self.path}: a team of {threads} threads cannot be started"
        raise LibraryError(f"{rule}; ask for 1 to 1024, or fewer")

    @property
    def problems(self) -> tuple[GemmProblem, ...]:
        """The problems that were tuned."""
        return tuple(row.problem for row in self.manifest.table)

    def kernel_for(self, problem: GemmProblem) -> Choice | None:
        """Which kernel `problem` gets, or None where none of its type was tuned."""
        return self._table.find(problem)

    def gemm(
        self,
        a: Array,
        b: Array,
        *,
        c: Array | None = None,
        bias: Array | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        activation: str = "none",
        out: Array | None = None,
    ) -> Array:
        """Return `act(alpha * a @ b + beta * c + bias)`.

        `a` is (m, k) or (batch, m, k), `b` is (k, n) or (batch, k, n), `c` and `out` are (m, n), or
        (batch, m, n) if one of `a` and `b` has a batch; `bias` has n elements, one per column. `activation`
        is none, relu, gelu or silu. `out` may be `c`. Rows or columns may be any distance apart: a matrix
        that is contiguous along one of its axes is used in place if the library has a kernel for that,
        and any other is copied. The result has the element type of `out`, of `c`, or the usual one.

        Raises:
            LibraryError: the library has no kernel for these element types and epilogue.
            TypeError: an operand is not an array, or has an element type or number of axes that cannot be.
            ValueError: shapes do not match, `activation` is unknown, or `out` is read-only.
        """
        if self._handle is None:
            raise LibraryError(f"{self.path} is closed; load it again")
        if out is not None and bias is None and not _is_row_major(out) and _is_row_major(_turned(out)):
            c = None if c is None else _turned(c)
            scalars: dict[str, Any] = {"alpha": alpha, "beta": beta, "activation": activation}
            self.gemm(_turned(b), _turned(a), c=c, out=_turned(out), **scalars)
            return out
        shape = _shape(a, b)
        if beta == 0.0:
            c = None
        elif c is None:
            raise ValueError("beta is not 0, so that c is needed; pass c")
        for name, x in (("c", c), ("out", out)):
            if x is not None and x.shape != shape:
                raise ValueError(f"{name} must have the shape {shape} of the result, but has {x.shape}")
        if bias is not None and bias.shape != shape[-1:]:
            raise ValueError(f"bias must have the shape {shape[-1:]}, but has {bias.shape}")
        if out is not None and not out.flags.writeable:
            raise ValueError("out must be writable, but is read-only; pass a copy")
        type, b, ldb, a, lda = self._choose(a, b, c, bias, activation, out)
        d = out
        if out is None or not _is_row_major(out) or _overlaps(out, a, b, c, bias):
            d = np.empty(shape, type.dtype_d.numpy)
        assert d is not None
        if c is not None and not _is_row_major(c):
            c = c.copy("C")
        if bias is not None and not (bias.flags.c_contiguous and bias.flags.aligned):
            bias = bias.copy()
        m, k, n = a.shape[-2], a.shape[-1], shape[-1]
        args = _ARGS.pack(
            *self._codes[type],
            n, m, k, shape[0] if len(shape) == 3 else 1,
            ldb, lda, 0 if c is None else _ld(c), _ld(d),
            _stride(b), _stride(a), 0 if c is None else _stride(c), _stride(d),
            alpha, beta,
            _address(b), _address(a), 0 if c is None else _address(c), _address(d),
            0 if bias is None else _address(bias), 0, 0, 0,
        )  # fmt: skip
        if status := self._gemm(self._handle, args):
            raise LibraryError(f"gemm: {self._status_string(status).decode()}")
        if out is None or out is d:
            return d
        np.copyto(out, d)
        return out

    def _choose(
        self, a: Array, b: Array, c: Array | None, bias: Array | None, activation: str, out: Array | None
    ) -> tuple[ProblemType, Array, int, Array, int]:
        """The type of kernel, and its operands with their leading dimensions: b, ldb, a and lda."""
        try:
            key = (
                _DTYPES[a.dtype],
                _DTYPES[b.dtype],
                None if bias is None else _DTYPES[bias.dtype],
                _ACTIVATIONS[activation],
            )
        except KeyError:
            if activation not in _ACTIVATIONS:
                rule = f"activation must be one of {', '.join(_ACTIVATIONS)}, but is {activation!r}"
                raise ValueError(rule) from None
            found = next(x.dtype for x in (a, b, bias) if x is not None and x.dtype not in _DTYPES)
            raise TypeError(f"an element type must be one of {', '.join(DType)}, but is {found}") from None
        layouts_a, layouts_b = _layouts(a), _layouts(b)
        best: tuple[tuple[Any, ...], ProblemType] | None = None
        for type in self._types.get(key, ()):
            if (out is not None and out.dtype != type.dtype_d.numpy) or (
                c is not None and c.dtype != type.dtype_c.numpy
            ):
                continue
            copied = (type.trans_a not in layouts_b) * b.size + (type.trans_b not in layouts_a) * a.size
            usual = type.dtype_d in (type.dtype_a, DType.I32)
            rank = (copied, not usual, type.dtype_d, type.dtype_c, type.compute, type.trans_a, type.trans_b)
            if best is None or rank < best[0]:
                best = (rank, type)
        if best is None:
            raise self._no_kernel(key, c, out)
        type = best[1]
        if type.trans_a not in layouts_b:
            b, layouts_b = _copied(b, type.trans_a)
        if type.trans_b not in layouts_a:
            a, layouts_a = _copied(a, type.trans_b)
        return type, b, layouts_b[type.trans_a], a, layouts_a[type.trans_b]

    def _no_kernel(self, key: _Key, c: Array | None, out: Array | None) -> LibraryError:
        wanted = f"{key[0]} x {key[1]}"
        wanted += "" if key[2] is None else f" with a bias of {key[2]}"
        wanted += "" if key[3] is Activation.NONE else f" and {key[3]}"
        wanted += "".join(
            f" and {name} of {x.dtype}" for name, x in (("c", c), ("out", out)) if x is not None
        )
        names = sorted({type.name for types in self._types.values() for type in types})
        return LibraryError(
            f"{self.path} has no kernel for {wanted}; it has {', '.join(names) or 'none for arrays'}"
        )

    def close(self) -> None:
        """End the team and unload the library. No call may be in progress. May be called twice."""
        self._handle = None
        self._finalizer()

    def __enter__(self) -> Library:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Library {self.path}: {len(self._table)} sizes, {len(self.manifest.kernels)} kernels>"


def _open(folder: Path, manifest: Manifest) -> ctypes.CDLL:
    """Load the shared library once its bytes are known to be those of the manifest."""
    arch = manifest.fingerprint.arch
    if arch.partition("-")[0] != platform.machine():
        rule = f"{folder} is for {arch} processors, but this one is {platform.machine()}"
        raise LibraryError(f"{rule}; tune and export on this machine")
    path = check_file(folder, manifest.library, manifest.files[manifest.library]).resolve()
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        functions: dict[str, tuple[Any, list[Any]]] = {
            "wavetune_create": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int]),
            "wavetune_destroy": (None, [ctypes.c_void_p]),
            "wavetune_gemm": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]),
            "wavetune_threads": (ctypes.c_int, [ctypes.c_void_p]),
            "wavetune_status_string": (ctypes.c_char_p, [ctypes.c_int]),
            "wavetune_library_id": (ctypes.c_char_p, []),
        }
        for name, (restype, argtypes) in functions.items():
            function = getattr(library, name)
            function.restype, function.argtypes = restype, argtypes
    except (OSError, AttributeError) as error:
        raise LibraryError(
            f"{path} cannot be loaded ({error}); export it again with `tuner export`"
        ) from None
    if library.wavetune_library_id() != manifest.id.encode():
        # The loader gives back what it has open under the same path, even if the file is another by now.
        _ctypes.dlclose(library._handle)
        raise LibraryError(f"{path} is still open from before it was exported anew; close that library first")
    return library


def _close(library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
    library.wavetune_destroy(handle)
    _ctypes.dlclose(library._handle)


def _codes(type: ProblemType) -> tuple[int, ...]:
    """The enums that `wavetune_gemm_args` begins with."""
    dtypes = (type.dtype_a, type.dtype_b, type.dtype_c, type.dtype_d, type.compute, type.epilogue.bias)
    return (
        TRANSPOSE_CODES[type.trans_a],
        TRANSPOSE_CODES[type.trans_b],
        *(DTYPE_CODES[dtype] for dtype in dtypes),
        ACTIVATION_CODES[type.epilogue.activation],
    )


def _shape(a: Array, b: Array) -> tuple[int, ...]:
    """The shape of the product."""
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, np.ndarray):
            raise TypeError(f"{name} must be a NumPy array, but is {type(x).__name__}; use numpy.asarray")
        if x.ndim not in (2, 3):
            raise TypeError(f"{name} must have 2 axes, or 3 with a batch, but has {x.ndim}")
    if a.shape[-1] != b.shape[-2]:
        rule = "the columns of a must be as many as the rows of b"
        raise ValueError(f"{rule}, but there are {a.shape[-1]} and {b.shape[-2]}")
    batches = {x.shape[0] for x in (a, b) if x.ndim == 3}
    if len(batches) > 1:
        raise ValueError(f"a and b must have the same batch, but have {a.shape[0]} and {b.shape[0]}")
    return (*batches, a.shape[-2], b.shape[-1])


def _layouts(x: Array) -> dict[Transpose, int]:
    """How a kernel can read x in place, N by rows or T by columns, with the leading dimension of each."""
    size = x.itemsize
    rows, columns = x.shape[-2:]
    by_row, by_column = x.strides[-2:]
    found: dict[Transpose, int] = {}
    if x.size == 0:  # NumPy gives it strides of 0
        return {Transpose.N: max(columns, 1), Transpose.T: max(rows, 1)}
    if not x.flags.aligned:
        return found
    if (by_column == size or columns <= 1) and (
        rows <= 1 or (by_row >= columns * size and by_row % size == 0)
    ):
        found[Transpose.N] = max(by_row // size if rows > 1 else columns, 1)
    if (by_row == size or rows <= 1) and (
        columns <= 1 or (by_column >= rows * size and by_column % size == 0)
    ):
        found[Transpose.T] = max(by_column // size if columns > 1 else rows, 1)
    if x.ndim == 3 and x.shape[0] > 1 and x.strides[0] != 0:
        span = max(rows - 1, 0) * abs(by_row) + max(columns - 1, 0) * abs(by_column) + size
        if x.strides[0] < span or x.strides[0] % size:
            found.clear()
    return found


def _copied(x: Array, layout: Transpose) -> tuple[Array, dict[Transpose, int]]:
    x = x.copy("C") if layout is Transpose.N else _turned(_turned(x).copy("C"))
    return x, _layouts(x)


def _turned(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def _is_row_major(x: Array) -> bool:
    return Transpose.N in _layouts(x)


def _ld(x: Array) -> int:
    return _layouts(x)[Transpose.N]


def _stride(x: Array) -> int:
    return x.strides[0] // x.itemsize if x.ndim == 3 and x.shape[0] > 1 else 0


def _address(x: Array) -> int:
    address: int = x.__array_interface__["data"][0]
    return address


def _overlaps(out: Array, a: Array, b: Array, c: Array | None, bias: Array | None) -> bool:
    """Whether a kernel would write what it has yet to read. It may write D over C element by element."""
    if any(x is not None and np.may_share_memory(out, x) for x in (a, b, bias)):
        return True
    if c is None or (c.strides == out.strides and _address(c) == _address(out) and c.dtype == out.dtype):
        return False
    return np.may_share_memory(out, c)
