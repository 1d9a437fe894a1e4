"""The `cpu` device: native kernels on a team of host threads."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.build import Binary, HostToolchain, host_toolchain
from tuner.device.types import Array, Fingerprint, GemmCall, Kernel, LaunchError, Ring
from tuner.errors import DeviceError
from tuner.generate import Target
from tuner.identity import file_sha256
from tuner.problem import DType, GemmProblem

_SLACK = 0xA5  # fills the bytes between the lower guard page and a buffer


class GemmArgs(ctypes.Structure):
    """`tuner_gemm_args` of kernel_templates/common/gemm_abi.h."""

    _fields_ = (
        *[(name, ctypes.c_int64) for name in ("m", "n", "k", "batch_count")],
        *[(name, ctypes.c_int64) for name in ("lda", "ldb", "ldc", "ldd")],
        *[(name, ctypes.c_int64) for name in ("stride_a", "stride_b", "stride_c", "stride_d")],
        ("alpha", ctypes.c_double),
        ("beta", ctypes.c_double),
        *[(name, ctypes.c_void_p) for name in ("a", "b", "c", "d")],
        *[(name, ctypes.c_void_p) for name in ("bias", "scale_a", "scale_b", "scale_alpha_vec")],
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
    )


def gemm_args(call: GemmCall) -> GemmArgs:
    """Pack a call for C."""
    p = call.problem
    return GemmArgs(
        m=p.m, n=p.n, k=p.k, batch_count=p.batch_count,
        lda=p.lda, ldb=p.ldb, ldc=p.ldc, ldd=p.ldd,
        stride_a=p.stride_a, stride_b=p.stride_b, stride_c=p.stride_c, stride_d=p.stride_d,
        alpha=p.alpha, beta=p.beta,
        workspace=call.workspace, workspace_bytes=call.workspace_bytes,
        **call.addresses,
    )  # fmt: skip


@dataclass(frozen=True)
class CpuKernel:
    """A loaded shared library; `entry` is the address of the kernel function."""

    handle: int
    entry: int
    workspace: Any

    def workspace_bytes(self, problem: GemmProblem) -> int:
        args = gemm_args(GemmCall(problem, {}))
        return int(self.workspace(ctypes.byref(args), self.team_size))

    team_size: int = 1


class CpuBuffer:
    """Memory between two inaccessible pages; satisfies `tuner.device.Buffer`."""

    def __init__(self, launcher: ctypes.CDLL, nbytes: int) -> None:
        data = ctypes.c_void_p()
        body = launcher.launcher_guarded_alloc(nbytes, ctypes.byref(data))
        if not body or data.value is None:
            raise DeviceError(f"cannot allocate {nbytes:,} bytes of host memory")
        self._launcher, self._body, self._nbytes = launcher, int(body), nbytes
        self._address = int(data.value)
        self._slack = _view(self._body, self._address - self._body)
        self._slack[:] = _SLACK
        self._data = _view(self._address, nbytes)

    @property
    def address(self) -> int:
        return self._address

    def write(self, data: Array) -> None:
        self._data[:] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)

    def read(self, dtype: np.dtype[Any]) -> Array:
        return self._data.view(dtype).copy()

    def protect(self, writable: bool) -> None:
        if self._launcher.launcher_guarded_protect(self._body, self._nbytes, int(writable)):
            raise DeviceError("mprotect failed; the system allows too few memory mappings")

    def guards_intact(self) -> bool:
        return bool((self._slack == _SLACK).all())

    def free(self) -> None:
        self._launcher.launcher_guarded_free(self._body, self._nbytes)


class CpuArena:
    """Page-aligned memory for timing; satisfies `tuner.device.Buffer`, without guards."""

    def __init__(self, launcher: ctypes.CDLL, nbytes: int) -> None:
        address = launcher.launcher_arena_alloc(nbytes)
        if not address:
            raise DeviceError(f"cannot allocate {nbytes:,} bytes of host memory")
        self._launcher, self._address, self._nbytes = launcher, int(address), nbytes
        self._data = _view(self._address, nbytes)

    @property
    def address(self) -> int:
        return self._address

    def write(self, data: Array) -> None:
        self._data[:] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)

    def read(self, dtype: np.dtype[Any]) -> Array:
        return self._data.view(dtype).copy()

    def protect(self, writable: bool) -> None:
        pass

    def guards_intact(self) -> bool:
        return True

    def free(self) -> None:
        self._launcher.launcher_arena_free(self._address, self._nbytes)


@dataclass(frozen=True)
class CpuRing:
    """An array of `tuner_gemm_args`; satisfies `tuner.device.Ring`."""

    sets: ctypes.Array[GemmArgs]

    def __len__(self) -> int:
        return len(self.sets)


class NumpyBaseline:
    """`numpy.matmul` into a given array, as NumPy's users call it; satisfies `tuner.device.Baseline`.

    Its number of threads is that of the BLAS behind NumPy, which the worker process sets on starting.
    """

    def __init__(self, calls: Sequence[GemmCall]) -> None:
        config: Any = np.show_config(mode="dicts")
        blas = config["Build Dependencies"]["blas"]
        self.name = f"NumPy {np.__version__} ({blas['name']} {blas['version']})"
        self._calls = [self._operands(call) for call in calls]

    @staticmethod
    def _operands(call: GemmCall) -> tuple[Array, Array, Array]:
        """(op(B)^T, op(A)^T, D^T): row-major arrays whose product is the column-major one."""
        p = call.problem

        def matrix(x: str, rows: int, columns: int, ld: int, dtype: np.dtype[Any]) -> Array:
            bytes_ = _view(call.addresses[x], (ld * (columns - 1) + rows) * dtype.itemsize)
            shape, strides = (columns, rows), (ld * dtype.itemsize, dtype.itemsize)
            return np.lib.stride_tricks.as_strided(bytes_.view(dtype), shape, strides)

        a_shape = (p.m, p.k) if p.type.trans_a == "N" else (p.k, p.m)
        b_shape = (p.k, p.n) if p.type.trans_b == "N" else (p.n, p.k)
        a = matrix("a", *a_shape, p.lda, p.type.dtype_a.numpy)
        b = matrix("b", *b_shape, p.ldb, p.type.dtype_b.numpy)
        d = matrix("d", p.m, p.n, p.ldd, p.type.dtype_d.numpy)
        return (b if p.type.trans_b == "N" else b.T), (a if p.type.trans_a == "N" else a.T), d

    def time(self, first: int, samples: int, group: int) -> NDArray[np.float64]:
        times = np.empty(samples, np.float64)
        call = first
        for sample in range(samples):
            start = time.perf_counter_ns()
            for _ in range(group):
                left, right, out = self._calls[call % len(self._calls)]
                np.matmul(left, right, out=out)
                call += 1
            times[sample] = (time.perf_counter_ns() - start) / group
        return times


class CpuDevice:
    """The host's processor with a team of `threads`; satisfies `tuner.device.Device`."""

    emulated = False
    shares_host = True

    def __init__(self, threads: int | None = None) -> None:
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.threads = threads or available or 1
        if not 1 <= self.threads <= 1024:
            raise DeviceError(f"threads must be between 1 and 1024, but is {threads}")
        self._launcher_library: ctypes.CDLL | None = None
        self._team = 0

    @property
    def toolchain(self) -> HostToolchain:
        return host_toolchain()

    @property
    def target(self) -> Target:
        features = _features()
        return Target(
            kind="cpu",
            arch=_arch(features),
            facts=tuple({**_simd(features), **_caches(), "compute_units": self.threads}.items()),
        )

    @property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint(
            kind="cpu",
            name=_processor_name(),
            arch=self.target.arch,
            compute_units=self.threads,
            driver="none",
            runtime=f"{platform.system()} {platform.machine()}",
            toolchain=self.toolchain.id,
        )

    @property
    def cache_bytes(self) -> int:
        return _caches()["l3_bytes"]

    @property
    def memory_bytes(self) -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

    @property
    def _launcher(self) -> ctypes.CDLL:
        if self._launcher_library is None:
            self._launcher_library = _load_launcher(self.toolchain)
            self._team = self._launcher_library.launcher_team_create(self.threads)
            if not self._team:
                raise DeviceError(f"cannot start {self.threads} threads; use fewer with --threads")
        return self._launcher_library

    def load(self, binary: Binary) -> CpuKernel:
        try:
            if file_sha256(binary.path) != binary.sha256:
                raise LaunchError(f"{binary.path.name} has changed since it was built")
            library = ctypes.CDLL(str(binary.path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
            entry = ctypes.cast(library[binary.symbol], ctypes.c_void_p).value
            workspace = library[f"{binary.symbol}_workspace"]
        except (OSError, AttributeError) as error:
            raise LaunchError(str(error)) from None
        workspace.restype = ctypes.c_int64
        workspace.argtypes = [ctypes.c_void_p, ctypes.c_int]
        return CpuKernel(library._handle, entry or 0, workspace, self.threads)

    def unload(self, kernel: Kernel) -> None:
        assert isinstance(kernel, CpuKernel)
        _dlclose(kernel.handle)

    def guarded(self, nbytes: int, alignment: int) -> CpuBuffer:
        return CpuBuffer(self._launcher, nbytes)

    def arena(self, nbytes: int) -> CpuArena:
        return CpuArena(self._launcher, nbytes)

    def launch(self, kernel: Kernel, call: GemmCall, stagger: int = 0) -> None:
        assert isinstance(kernel, CpuKernel)
        args = ctypes.byref(gemm_args(call))
        if stagger:
            self._launcher.launcher_run_staggered(self._team, kernel.entry, args, stagger)
        else:
            self._launcher.launcher_run(self._team, kernel.entry, args)

    def ring(self, calls: Sequence[GemmCall]) -> CpuRing:
        return CpuRing((GemmArgs * len(calls))(*(gemm_args(call) for call in calls)))

    def time(
        self, kernel: Kernel, ring: Ring, workspace: tuple[int, int], first: int, samples: int, group: int
    ) -> NDArray[np.float64]:
        assert isinstance(kernel, CpuKernel)
        assert isinstance(ring, CpuRing)
        times = np.empty(samples, np.float64)
        for args in ring.sets:
            args.workspace, args.workspace_bytes = workspace
        self._launcher.launcher_time(
            self._team, kernel.entry, ring.sets, len(ring), first, samples, group, times.ctypes.data
        )
        return times

    def baseline(self, calls: Sequence[GemmCall]) -> NumpyBaseline | None:
        problem = calls[0].problem
        kind = problem.type
        types = {kind.dtype_a, kind.dtype_b, kind.dtype_d, kind.compute}
        # NumPy has no BLAS for the other types, and its loops for them would be no fair rival.
        if types not in ({DType.F32}, {DType.F64}) or problem.batch_count > 1:
            return None
        return NumpyBaseline(calls)

    def close(self) -> None:
        if self._launcher_library is not None:
            self._launcher_library.launcher_team_destroy(self._team)
            self._launcher_library = None


def _view(address: int, nbytes: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


@lru_cache(maxsize=1)
def _load_launcher(toolchain: HostToolchain) -> ctypes.CDLL:
    here = Path(__file__).parent
    library = ctypes.CDLL(str(toolchain.support_library(here / "cpu_launcher.c")))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "launcher_team_create": (pointer, [ctypes.c_int]),
        "launcher_team_destroy": (None, [pointer]),
        "launcher_guarded_alloc": (pointer, [size, pointer]),
        "launcher_guarded_protect": (ctypes.c_int, [pointer, size, ctypes.c_int]),
        "launcher_guarded_free": (None, [pointer, size]),
        "launcher_arena_alloc": (pointer, [size]),
        "launcher_arena_free": (None, [pointer, size]),
        "launcher_run": (None, [pointer, pointer, pointer]),
        "launcher_run_staggered": (None, [pointer, pointer, pointer, ctypes.c_int]),
        "launcher_time": (
            None,
            [pointer, pointer, pointer, ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int, pointer],
        ),
    }
    for name, (restype, argtypes) in signatures.items():
        function = getattr(library, name)  # unlike library[name], the same object each time
        function.restype, function.argtypes = restype, argtypes
    return library


@lru_cache(maxsize=1)
def _dlclose_function() -> Any:
    function = ctypes.CDLL(None).dlclose
    function.argtypes = [ctypes.c_void_p]
    return function


def _dlclose(handle: int) -> None:
    _dlclose_function()(handle)


@lru_cache(maxsize=1)
def _cpuinfo() -> dict[str, str]:
    """The first processor's entries of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _features() -> frozenset[str]:
    return frozenset(_cpuinfo().get("flags", _cpuinfo().get("Features", "")).split())


# The levels of the x86-64 psABI, https://gitlab.com/x86-psABIs/x86-64-ABI, by their deciding features.
_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])


def _arch(features: frozenset[str]) -> str:
    if platform.machine() not in ("x86_64", "AMD64"):
        return platform.machine()
    if features >= _V4:
        return "x86_64-v4+avx512vnni" if "avx512_vnni" in features else "x86_64-v4"
    return "x86_64-v3" if features >= _V3 else "x86_64-v2"


def _simd(features: frozenset[str]) -> dict[str, int]:
    """Bytes and number of the vector registers, and whether there is a fused multiply-add."""
    level = _arch(features).partition("+")[0]
    bytes_, registers, fma = {"x86_64-v4": (64, 32, 1), "x86_64-v3": (32, 16, 1)}.get(
        level, (16, 16, 0) if level == "x86_64-v2" else (16, 32, 1)
    )
    return {"simd_bytes": bytes_, "simd_registers": registers, "fma": fma}


@lru_cache(maxsize=1)
def _caches() -> dict[str, int]:
    """Bytes of the data caches that one core sees; typical sizes where the system does not say."""
    sizes = {"l1_bytes": 32 << 10, "l2_bytes": 512 << 10, "l3_bytes": 0}
    units = {"K": 10, "M": 20, "G": 30}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level, kind, size = ((index / f).read_text().strip() for f in ("level", "type", "size"))
        except OSError:
            continue
        match = re.fullmatch(r"(\d+)([KMG])", size)
        if match and kind != "Instruction" and f"l{level}_bytes" in sizes:
            sizes[f"l{level}_bytes"] = int(match[1]) << units[match[2]]
    sizes["l3_bytes"] = sizes["l3_bytes"] or max(8 << 20, sizes["l2_bytes"])
    return sizes


def _processor_name() -> str:
    info = _cpuinfo()
    name = info.get("model name") or platform.processor() or platform.machine()
    model = [info[key] for key in ("cpu family", "model", "stepping") if key in info]
    return f"{name} ({'.'.join(model)})" if model else name
