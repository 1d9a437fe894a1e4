"""The cpu device: the contract of all devices, and its team of threads."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from tuner.build import Binary, BuildCache
from tuner.device import GemmCall
from tuner.device.cpu import CpuDevice
from tuner.errors import DeviceError
from tuner.generate import Candidate, KernelSource
from tuner.problem import GemmProblem, ProblemType
from tuner.testing.device_contract import DeviceContract

ROOT = Path(__file__).resolve().parents[2]
ABI = (ROOT / "kernel_templates" / "common" / "gemm_abi.h").read_text()

PRODUCT = """
#include <stddef.h>
int64_t gemm_workspace(const tuner_gemm_args *args, int size) { return args->m * args->n * 4; }
void gemm(const tuner_gemm_args *args, tuner_team *team, int rank) {
    const float *a = args->a, *b = args->b;
    float *d = args->d, *sums = args->workspace;
    for (int64_t j = rank; j < args->n; j += team->size)
        for (int64_t i = 0; i < args->m; i++) {
            float sum = 0;
            for (int64_t l = 0; l < args->k; l++) sum += a[i + l * args->lda] * b[l + j * args->ldb];
            sums[i + j * args->m] = sum;
        }
    team->barrier(team, rank);
    if (rank == team->size - 1)
        for (int64_t j = 0; j < args->n; j++)
            for (int64_t i = 0; i < args->m; i++)
                d[i + j * args->ldd] = FACTOR * (float)args->alpha * sums[i + j * args->m];
}
"""
STRAY = """
int64_t gemm_workspace(const tuner_gemm_args *args, int size) { return 0; }
void gemm(const tuner_gemm_args *args, tuner_team *team, int rank) {
    if (rank == 0) *(volatile float *)(PLACE) = 1;
}
"""
BARRIER = """
int64_t gemm_workspace(const tuner_gemm_args *args, int size) { return size * 64; }
/* Ranks write a number each and read those of all others, `k` times over; D[rank] counts what was wrong. */
void gemm(const tuner_gemm_args *args, tuner_team *team, int rank) {
    volatile int *slots = args->workspace;
    float wrong = 0;
    for (int step = 0; step < args->k; step++) {
        slots[16 * rank] = step * 100 + rank;
        team->barrier(team, rank);
        for (int other = 0; other < team->size; other++) wrong += slots[16 * other] != step * 100 + other;
        team->barrier(team, rank);
    }
    ((float *)args->d)[rank] += wrong + 1;
}
"""


class TestCpu(DeviceContract):
    kind = "cpu"
    language = "c"
    sources: ClassVar = {
        "product": ABI + "#define FACTOR 1" + PRODUCT,
        "double": ABI + "#define FACTOR 2" + PRODUCT,
        "overrun": ABI + "#define PLACE ((float *)args->d + args->m * args->n)" + STRAY,
        "underrun": ABI + "#define PLACE ((float *)args->d - 1)" + STRAY,
        "scribble": ABI + "#define PLACE (args->a)" + STRAY,
    }

    @pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
    def test_what_is_unloaded_leaves_the_memory(self, device: CpuDevice, tmp_path: Path) -> None:
        path = tmp_path / "kernel.bin"
        built = self.binary(device, "product")
        shutil.copy(built.path, path)
        kernel = device.load(replace(built, path=path))
        assert str(path) in Path("/proc/self/maps").read_text()
        device.unload(kernel)
        assert str(path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("threads", range(1, 9))
def test_a_team_meets_at_every_barrier(threads: int) -> None:
    device = CpuDevice(threads)
    candidate = Candidate("barrier", "5eed", (), "barrier")
    source = KernelSource(candidate, ProblemType(), "c", "gemm", ABI + BARRIER)
    binary = BuildCache().build(source, device.target, device.toolchain)
    assert isinstance(binary, Binary)
    kernel = device.load(binary)
    problem = GemmProblem.create(ProblemType(), threads, 1, 20)
    d = device.guarded(4 * threads, 4)
    d.write(np.zeros(threads, np.float32))
    nbytes = kernel.workspace_bytes(problem)
    workspace = device.arena(nbytes)
    call = GemmCall(problem, {"a": 0, "b": 0, "c": 0, "d": d.address}, workspace.address, nbytes)
    launches = 200
    for launch in range(launches):
        device.launch(kernel, call, stagger=launch % 3 if launch < 6 else 0)
    device.time(kernel, device.ring([call]), (workspace.address, nbytes), 0, samples=10, group=10)
    # One for each launch, and nothing for a number that a barrier should have brought.
    assert d.read(np.dtype(np.float32)).tolist() == [launches + 100] * threads
    assert nbytes == threads * 64
    for buffer in (d, workspace):
        buffer.free()
    device.close()


@pytest.mark.parametrize("threads", [-1, 1025, 100_000])
def test_a_team_has_a_size_that_makes_sense(threads: int) -> None:
    with pytest.raises(DeviceError, match=f"^threads must be between 1 and 1024, but is {threads}$"):
        CpuDevice(threads)


def test_threads_that_cannot_be_had_are_told() -> None:
    code = """
import resource
from tuner.device.cpu import CpuDevice
from tuner.errors import DeviceError
device = CpuDevice(2)
device.guarded(4, 4)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
try:
    CpuDevice(1024).guarded(4, 4)
except DeviceError as error:
    print(error)
try:
    device.guarded(2**30, 4)
except DeviceError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines() == [
        "cannot start 1024 threads; use fewer with --threads",
        "cannot allocate 1,073,741,824 bytes of host memory",
    ], result.stderr


def test_a_team_starts_with_the_first_use_and_survives_many_devices() -> None:
    for _ in range(20):
        device = CpuDevice(4)
        device.guarded(4, 4).free()
        device.close()
