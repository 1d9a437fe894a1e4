"""What every device must do, whatever is behind it.

Subclass `DeviceContract` in a test module and give it `kind`, what `open_device` is told, `language`, and
the `sources` of a few kernels, each of which defines `gemm` for f32 operands without transposes:

- `product` computes D = alpha * A * B, by way of a workspace of as many bytes as D has.
- `double` computes twice that, with or without a workspace.
- `overrun` and `underrun` write one element behind the end of D, or before its start.
- `scribble` writes to the first element of A.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from tuner.build import Binary, BuildCache
from tuner.device import Buffer, Device, GemmCall, Kernel, LaunchError, open_device
from tuner.errors import DeviceError
from tuner.generate import Candidate, KernelSource
from tuner.identity import file_sha256
from tuner.problem import GemmProblem, ProblemType

F32 = np.dtype(np.float32)
PROBLEM = GemmProblem.create(ProblemType(), 5, 3, 4, alpha=2.0)
A = np.arange(20, dtype=F32)
B = np.arange(12, dtype=F32) - 5
D_BYTES = PROBLEM.m * PROBLEM.n * F32.itemsize
PRODUCT = 2 * (A.reshape(4, 5).T @ B.reshape(3, 4).T).T.reshape(-1)  # column-major, like A and B


def provoke(kind: str, binary: Mapping[str, str], read_only: bool) -> None:
    """Launch a kernel that may fault, in a process of its own; prints whether all guards are intact."""
    device = open_device(kind)
    run = Run(device, device.load(_binary(Path(binary["path"]), binary["sha256"])))
    run.buffers["a"].protect(writable=not read_only)
    run.launch()
    print(all(buffer.guards_intact() for buffer in run.buffers.values()))


def _binary(path: Path, sha256: str) -> Binary:
    return Binary(path, sha256, symbol="gemm", source_id="", toolchain="", seconds=0.0)


class Run:
    """`PROBLEM` in guarded memory, for one kernel."""

    def __init__(self, device: Device, kernel: Kernel) -> None:
        self.device, self.kernel = device, kernel
        self.workspace_bytes = kernel.workspace_bytes(PROBLEM)
        sizes = {"a": A.nbytes, "b": B.nbytes, "d": D_BYTES, "workspace": max(self.workspace_bytes, 64)}
        self.buffers = {name: device.guarded(size, alignment=4) for name, size in sizes.items()}
        self.buffers["a"].write(A)
        self.buffers["b"].write(B)

    def launch(self) -> NDArray[Any]:
        """Run the kernel on poisoned memory and return D."""
        self.buffers["d"].write(np.full(D_BYTES // 4, np.nan, F32))
        addresses = {name: self.buffers[name].address for name in "abd"} | {"c": self.buffers["d"].address}
        workspace = self.buffers["workspace"].address
        self.device.launch(self.kernel, GemmCall(PROBLEM, addresses, workspace, self.workspace_bytes))
        return self.buffers["d"].read(F32)

    def free(self) -> None:
        for buffer in self.buffers.values():
            buffer.free()


class DeviceContract:
    kind: ClassVar[str]
    language: ClassVar[str]
    sources: ClassVar[Mapping[str, str]]
    protects: ClassVar[bool] = True
    """Whether kernels' writes to memory that is protected fault."""

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        device = open_device(self.kind)
        yield device
        device.close()

    def binary(self, device: Device, name: str) -> Binary:
        candidate = Candidate(name, "5eed", (), name)
        source = KernelSource(candidate, PROBLEM.type, self.language, "gemm", self.sources[name])
        built = BuildCache().build(source, device.target, device.toolchain)
        assert isinstance(built, Binary), built
        return built

    @pytest.fixture
    def product(self, device: Device) -> Iterator[Run]:
        run = Run(device, device.load(self.binary(device, "product")))
        yield run
        run.free()

    def in_another_process(self, code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)

    # Identity

    def test_a_device_says_what_it_is(self, device: Device) -> None:
        assert device.fingerprint.kind == device.target.kind == self.kind
        assert device.fingerprint.arch == device.target.arch
        assert device.fingerprint.toolchain == device.toolchain.id
        assert dict(device.target.facts)["compute_units"] == device.fingerprint.compute_units > 0
        assert device.cache_bytes > 0
        assert device.memory_bytes > 0

    def test_the_fingerprint_is_that_of_every_process(self, device: Device) -> None:
        code = f"from tuner.device import open_device; print(open_device({self.kind!r}).fingerprint.id)"
        assert self.in_another_process(code).stdout.strip() == device.fingerprint.id
        assert open_device(self.kind).fingerprint == device.fingerprint

    # Memory

    @pytest.mark.parametrize("nbytes", [4, 64, 4096, 4100, 1 << 20])
    @pytest.mark.parametrize("place", ["guarded", "arena"])
    def test_memory_keeps_what_is_written(self, device: Device, nbytes: int, place: str) -> None:
        data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        buffer = device.guarded(nbytes, 4) if place == "guarded" else device.arena(nbytes)
        buffer.write(data)
        assert np.array_equal(buffer.read(np.dtype(np.uint8)), data)
        assert np.array_equal(buffer.read(np.dtype(np.uint32)), data.view(np.uint32))
        assert buffer.address % 4 == 0
        assert buffer.guards_intact()
        buffer.free()

    def test_what_is_read_is_a_copy(self, device: Device) -> None:
        buffer = device.guarded(8, 4)
        buffer.write(np.array([1, 2], np.int32))
        before = buffer.read(np.dtype(np.int32))
        buffer.write(np.array([3, 4], np.int32))
        assert before.tolist() == [1, 2]
        buffer.free()

    def test_protected_memory_can_be_read_and_unprotected(self, product: Run) -> None:
        a = product.buffers["a"]
        a.protect(writable=False)
        assert np.array_equal(product.launch(), PRODUCT)
        a.protect(writable=True)
        a.write(A + 1)
        assert np.array_equal(a.read(F32), A + 1)

    @pytest.mark.parametrize("name", ["overrun", "underrun", "scribble"])
    def test_what_a_kernel_writes_outside_is_found(self, device: Device, name: str) -> None:
        if name == "scribble" and not self.protects:
            pytest.skip("the device cannot protect memory from its kernels")
        binary = self.binary(device, name)
        data = json.dumps({"path": str(binary.path), "sha256": binary.sha256})
        code = f"from tuner.testing.device_contract import provoke; provoke({self.kind!r}, {data}, True)"
        result = self.in_another_process(code)
        assert result.returncode < 0 or result.stdout == "False\n", result.stderr

    # Kernels

    def test_a_launch_computes_the_product(self, product: Run) -> None:
        assert np.array_equal(product.launch(), PRODUCT)
        assert all(buffer.guards_intact() for buffer in product.buffers.values())

    @pytest.mark.parametrize("stagger", [1, 2])
    def test_the_order_of_threads_changes_no_result(self, product: Run, stagger: int) -> None:
        addresses = {name: product.buffers[name].address for name in "abd"}
        workspace = product.buffers["workspace"].address
        call = GemmCall(PROBLEM, addresses | {"c": 0}, workspace, product.workspace_bytes)
        product.device.launch(product.kernel, call, stagger)
        assert np.array_equal(product.buffers["d"].read(F32), PRODUCT)

    def test_a_kernel_says_what_workspace_it_needs(self, product: Run) -> None:
        assert product.kernel.workspace_bytes(PROBLEM) == D_BYTES
        assert product.kernel.workspace_bytes(GemmProblem.create(ProblemType(), 7, 9, 1)) == 7 * 9 * 4

    def test_kernels_of_one_name_are_kept_apart(self, device: Device, product: Run) -> None:
        double = Run(device, device.load(self.binary(device, "double")))
        assert np.array_equal(double.launch(), 2 * PRODUCT)
        assert np.array_equal(product.launch(), PRODUCT)
        double.free()
        device.unload(double.kernel)
        assert np.array_equal(product.launch(), PRODUCT)

    def test_a_kernel_may_be_loaded_again(self, device: Device) -> None:
        for _ in range(3):
            run = Run(device, device.load(self.binary(device, "product")))
            assert np.array_equal(run.launch(), PRODUCT)
            run.free()
            device.unload(run.kernel)

    def test_a_binary_that_is_not_the_one_that_was_built_is_refused(
        self, device: Device, tmp_path: Path
    ) -> None:
        path = tmp_path / "kernel.bin"
        built = self.binary(device, "product")
        shutil.copy(built.path, path)
        device.unload(device.load(_binary(path, built.sha256)))
        with path.open("ab") as stream:
            stream.write(b"\0")
        with pytest.raises(LaunchError, match=r"kernel\.bin has changed since it was built"):
            device.load(_binary(path, built.sha256))

    def test_what_cannot_be_loaded_is_a_launch_error(self, device: Device, tmp_path: Path) -> None:
        path = tmp_path / "kernel.bin"
        with pytest.raises(LaunchError):
            device.load(_binary(path, "0" * 64))
        path.write_text("no kernel")
        with pytest.raises(LaunchError):
            device.load(_binary(path, file_sha256(path)))
        with pytest.raises(LaunchError):
            device.load(replace(self.binary(device, "product"), symbol="absent"))

    # Time

    def test_timed_launches_go_through_the_ring(self, device: Device, product: Run) -> None:
        arena = device.arena(4 * D_BYTES)
        addresses = {name: product.buffers[name].address for name in "ab"} | {"c": 0}
        ring = device.ring(
            [GemmCall(PROBLEM, {**addresses, "d": arena.address + i * D_BYTES}) for i in range(4)]
        )
        workspace = (product.buffers["workspace"].address, product.workspace_bytes)
        assert len(ring) == 4
        if device.emulated:
            with pytest.raises(DeviceError):
                device.time(product.kernel, ring, workspace, first=0, samples=1, group=1)
            return
        for first, samples, group, written in (
            (0, 1, 1, {0}),
            (3, 1, 2, {3, 0}),
            (5, 2, 1, {1, 2}),
            (1, 2, 2, {0, 1, 2, 3}),
            (2, 3, 5, {0, 1, 2, 3}),
        ):
            _clear(arena)
            start = time.perf_counter_ns()
            times = device.time(product.kernel, ring, workspace, first, samples, group)
            assert times.sum() * group <= time.perf_counter_ns() - start  # of one launch, not of a group
            assert times.shape == (samples,)
            assert times.dtype == np.float64
            assert (np.isfinite(times) & (times > 0)).all()
            results = arena.read(F32).reshape(4, -1)
            assert {i for i in range(4) if np.array_equal(results[i], PRODUCT)} == written
            assert not results[[i for i in range(4) if i not in written]].any()
        arena.free()

    def test_a_baseline_goes_through_the_ring_too(self, device: Device, product: Run) -> None:
        arena = device.arena(2 * D_BYTES)
        addresses = {name: product.buffers[name].address for name in "ab"} | {"c": 0}
        calls = [GemmCall(PROBLEM, {**addresses, "d": arena.address + i * D_BYTES}) for i in range(2)]
        baseline = device.baseline(calls)
        if baseline is None:
            pytest.skip("the device has no library to compare with")
        _clear(arena)
        times = baseline.time(first=1, samples=3, group=1)
        assert times.shape == (3,)
        assert (times > 0).all()
        assert baseline.name
        # The bare product: alpha is the caller's affair.
        assert np.allclose(arena.read(F32).reshape(2, -1), PRODUCT / PROBLEM.alpha)
        arena.free()

    def test_a_device_that_is_closed_can_be_closed_again(self) -> None:
        device = open_device(self.kind)
        device.guarded(4, 4).free()
        device.close()
        device.close()

    def test_there_is_no_other_kind(self) -> None:
        with pytest.raises(DeviceError, match="device must be"):
            open_device("abacus")


def _clear(buffer: Buffer) -> None:
    buffer.write(np.zeros_like(buffer.read(np.dtype(np.uint8))))
