"""The worker process: owns the device and runs candidates, which may take it down.

Started by `tuner.measure.supervisor`, which sends one JSON request at a time over a socket.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tuner.build import Binary
from tuner.device import Device, Kernel, LaunchError, open_device
from tuner.errors import DeviceError, TunerError
from tuner.measure.benchmark import Benchmark
from tuner.measure.operands import needed_bytes
from tuner.measure.statistics import median_interval
from tuner.measure.types import Measurement, Outcome, Protocol
from tuner.measure.validate import Validator
from tuner.problem import GemmProblem

_HOPELESS = 20.0  # times the incumbent: not worth the remaining validation launches or any timing


class Worker:
    """Answers requests about one problem at a time on one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._validator: Validator | None = None
        self._benchmark: Benchmark | None = None

    def prepare(self, problem: dict[str, Any], protocol: dict[str, Any]) -> float:
        """Make operands and references for a problem; return the seconds it took."""
        start = time.perf_counter()
        for resident in (self._validator, self._benchmark):
            if resident is not None:
                resident.free()
        self._validator = self._benchmark = None
        gemm = GemmProblem.from_dict(problem)
        needed, there = needed_bytes(gemm), self.device.memory_bytes
        if needed > there:
            raise DeviceError(
                f"{gemm.name} needs about {needed / 2**30:.1f} GiB, but only {there / 2**30:.1f} GiB may be "
                "used; make it smaller"
            )
        self._validator = Validator(self.device, gemm)
        self._benchmark = Benchmark(self.device, gemm, Protocol(**protocol))
        return time.perf_counter() - start

    def measure(self, binary: dict[str, Any], incumbent_ns: float | None) -> dict[str, Any]:
        """Validate a candidate and, if it is right, time it."""
        assert self._validator is not None
        assert self._benchmark is not None
        try:
            kernel = self._load(binary)
        except LaunchError as error:
            return Measurement(Outcome.LAUNCH_FAILED, message=str(error)).to_dict()
        start = time.perf_counter()
        try:
            give_up = _HOPELESS * incumbent_ns if incumbent_ns is not None else float("inf")
            verdict = self._validator.check(kernel, give_up)
            validated = time.perf_counter()
            if verdict.message:
                return Measurement(
                    Outcome.WRONG_RESULT,
                    message=verdict.message,
                    max_error=verdict.max_error,
                    validate_seconds=validated - start,
                ).to_dict()
            if verdict.first_launch_ns > give_up:
                samples, raced = [verdict.first_launch_ns], True
            else:
                samples, raced = self._benchmark.time(kernel, incumbent_ns)
            median, low, high = median_interval(samples)
            return Measurement(
                Outcome.OK,
                time_ns=median,
                ci_low_ns=low,
                ci_high_ns=high,
                samples_ns=tuple(samples),
                raced=raced,
                max_error=verdict.max_error,
                validate_seconds=validated - start,
                benchmark_seconds=time.perf_counter() - validated,
            ).to_dict()
        except LaunchError as error:
            seconds = time.perf_counter() - start
            return Measurement(Outcome.LAUNCH_FAILED, message=str(error), validate_seconds=seconds).to_dict()
        finally:
            self.device.unload(kernel)

    def interleave(self, binaries: list[dict[str, Any]], rounds: int) -> list[list[float]]:
        """Time several validated candidates in turn; return the samples (ns) of each."""
        assert self._benchmark is not None
        kernels = [self._load(binary) for binary in binaries]
        try:
            return self._benchmark.interleave(kernels, rounds)
        finally:
            for kernel in kernels:
                self.device.unload(kernel)

    def compare(self, binary: dict[str, Any], rounds: int) -> tuple[str, list[float], list[float]] | None:
        """Time the device's baseline against a validated candidate; see `Benchmark.compare`."""
        assert self._benchmark is not None
        kernel = self._load(binary)
        try:
            return self._benchmark.compare(kernel, rounds)
        finally:
            self.device.unload(kernel)

    def _load(self, binary: dict[str, Any]) -> Kernel:
        return self.device.load(Binary(**{**binary, "path": Path(binary["path"])}))


def serve(connection: Connection, device_kind: str, threads: int | None) -> None:
    """Answer requests until the other side hangs up."""
    worker = Worker(open_device(device_kind, threads))
    operations: dict[str, Callable[..., Any]] = {
        "prepare": worker.prepare,
        "measure": worker.measure,
        "interleave": worker.interleave,
        "compare": worker.compare,
    }
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            reply = {"result": operations[request.pop("op")](**request)}
        except TunerError as error:
            reply = {"error": str(error)}
        except MemoryError:
            reply = {
                "error": "the machine has run out of memory; end other programs, or make problems smaller"
            }
        except Exception:
            reply = {"bug": traceback.format_exc()}
        connection.send_bytes(json.dumps(reply).encode())


def main() -> None:
    """`python -m tuner.measure.worker FD KIND THREADS`."""
    descriptor, kind, threads = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the sweep, which then ends its workers
    if sys.platform == "linux":
        # A kernel in an endless loop would outlive a sweep that was killed.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() == 1:
            return
    serve(Connection(int(descriptor)), kind, int(threads) or None)


if __name__ == "__main__":
    main()
