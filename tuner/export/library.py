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

from tuner.device.cpu import CpuDevice
from tuner.errors import LibraryError
from tuner.export.arrays import Array, Plan, Planner, copied, overlap, turned
from tuner.export.manifest import Manifest, check_file, read_manifest
from tuner.export.table import Choice
from tuner.problem import GemmProblem

# wavetune_gemm_args: 9 enums, 12 sizes and strides, alpha and beta, 8 pointers.
_ARGS = struct.Struct("@9i12q2d8P")
_ARCH_MISMATCH = 3  # of wavetune_status
_MAX_PLANS = 4096


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
        self._planner = Planner(self._table.types)
        self._plans: dict[tuple[object, ...], Plan] = {}
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
        if beta == 0.0:
            c = None
        elif c is None:
            raise ValueError("beta is not 0, so that c is needed; pass c")
        plan = self._plan(a, b, c, bias, out, activation)
        options: dict[str, Any] = {"alpha": alpha, "beta": beta, "activation": activation}
        if out is not None:
            if not out.flags.writeable:
                raise ValueError("out must be writable, but is read-only; pass a copy")
            if plan.turned:
                self.gemm(
                    turned(b), turned(a), c=None if c is None else turned(c), out=turned(out), **options
                )
                return out
            if not plan.out_fits or overlap(out, a, b, c, bias):
                d = np.empty(out.shape, out.dtype)
                np.copyto(out, self.gemm(a, b, c=c, bias=bias, out=d, **options))
                return out
        d = np.empty(plan.shape, plan.dtype) if out is None else out
        if plan.copy_a is not None:
            a = copied(a, plan.copy_a)
        if plan.copy_b is not None:
            b = copied(b, plan.copy_b)
        if c is not None and plan.copy_c:
            c = c.copy("C")
        if bias is not None and plan.copy_bias:
            bias = bias.copy("C")
        pointers = [0 if x is None else x.ctypes.data for x in (b, a, c, d, bias)]
        args = _ARGS.pack(*plan.head, alpha, beta, *pointers, 0, 0, 0)
        if status := self._gemm(self._handle, args):
            raise LibraryError(f"gemm: {self._status_string(status).decode()}")
        return d

    def _plan(
        self, a: Array, b: Array, c: Array | None, bias: Array | None, out: Array | None, activation: str
    ) -> Plan:
        """The plan for such arrays, made once: programs call with the same shapes again and again."""
        key: list[object] = [activation]
        for x in (a, b, c, bias, out):
            if isinstance(x, np.ndarray):
                key += (x.dtype, x.shape, x.strides, x.flags.aligned)
            elif x is None and x is not a and x is not b:
                key.append(None)
            else:
                raise TypeError(
                    f"an operand must be a NumPy array, but is {type(x).__name__}; use numpy.asarray"
                )
        plan = self._plans.get(tuple(key))
        if plan is None:
            plan = self._planner.plan(a, b, c, bias, out, activation)
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[tuple(key)] = plan
        return plan

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
