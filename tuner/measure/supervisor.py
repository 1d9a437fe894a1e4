"""The parent's side of a worker process: deadlines, crashes and second opinions."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from tuner.build import Binary
from tuner.errors import DeviceError
from tuner.measure.types import Measurement, Outcome, Protocol, Provenance
from tuner.problem import GemmProblem

_START_SECONDS = 120.0
_BASE_SECONDS = 5.0


class WorkerLost(Exception):
    """The worker ended or exceeded its deadline; `outcome` is the fate of what it was running."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class Supervisor:
    """Measures candidates in a worker process that it replaces when one of them takes it down.

    Use as a context manager. A candidate that gives a wrong result is tried once more in a new worker:
    another candidate may have damaged the memory of the first.
    """

    def __init__(self, device_kind: str, threads: int | None, protocol: Protocol) -> None:
        self._arguments = (device_kind, str(threads or 0))
        self._protocol = protocol
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._problem: GemmProblem | None = None
        self._prepared: GemmProblem | None = None
        self._prepare_seconds = 0.0
        self.restarts = 0

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def prepare(self, problem: GemmProblem) -> None:
        """Make `problem` the one that following measurements are about.

        Raises:
            DeviceError: the worker cannot be started or lacks the memory.
        """
        self._problem = problem
        self._ready()

    def measure(self, binary: Binary, incumbent_ns: float | None = None) -> Measurement:
        """Validate and time a candidate. Whatever it does ends as a `Measurement`."""
        measurement = self._measure(binary, incumbent_ns)
        if measurement.outcome is Outcome.WRONG_RESULT:
            self.stop()
            measurement = self._measure(binary, incumbent_ns)
            if measurement.outcome is Outcome.WRONG_RESULT:
                self.stop()
        return measurement

    def interleave(self, binaries: Sequence[Binary], rounds: int, slowest_ns: float) -> list[list[float]]:
        """Time validated candidates in turn; return `rounds` samples (ns) for each.

        Raises:
            WorkerLost: one of them crashed or hung after all.
        """
        self._ready()
        deadline = _BASE_SECONDS + 20e-9 * max(slowest_ns, 2e4) * (rounds + 2) * len(binaries)
        result: list[list[float]] = self._call(
            deadline, op="interleave", binaries=[_wire(b) for b in binaries], rounds=rounds
        )
        return result

    def compare(
        self, binary: Binary, rounds: int, slowest_ns: float
    ) -> tuple[str, list[float], list[float]] | None:
        """Time the device's baseline against a validated candidate, in turn.

        Returns the baseline's name and `rounds` times (ns) of it and of the candidate; None where the
        device has no baseline for the problem.

        Raises:
            WorkerLost: the candidate crashed or hung after all.
        """
        self._ready()
        deadline = _START_SECONDS + 1e-6 * slowest_ns * rounds
        result = self._call(deadline, op="compare", binary=_wire(binary), rounds=rounds)
        return None if result is None else (result[0], result[1], result[2])

    def stop(self) -> None:
        """End the worker, if there is one. The next request starts another."""
        if self._process is None:
            return
        assert self._connection is not None
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.2)
        self._process.kill()
        self._process.wait()
        self._process = self._connection = self._prepared = None

    def _measure(self, binary: Binary, incumbent_ns: float | None) -> Measurement:
        self._ready()
        start = time.perf_counter()
        # Without an incumbent all that is known is what the reference took on the host.
        launch = 30e-9 * incumbent_ns if incumbent_ns is not None else 100 * self._prepare_seconds
        deadline = _BASE_SECONDS + 5 * self._prepare_seconds + 6 * launch + 2 * self._protocol.max_seconds
        try:
            result = self._call(deadline, op="measure", binary=_wire(binary), incumbent_ns=incumbent_ns)
        except WorkerLost as lost:
            return Measurement(lost.outcome, message=str(lost), validate_seconds=time.perf_counter() - start)
        return Measurement(
            **{
                **result,
                "outcome": Outcome(result["outcome"]),
                "provenance": Provenance(result["provenance"]),
                "samples_ns": tuple(result["samples_ns"]),
            }
        )

    def _ready(self) -> None:
        """Start a worker if there is none, and have it prepare the problem if it has not yet."""
        assert self._problem is not None
        if self._process is None:
            self._start()
        if self._prepared != self._problem:
            seconds = _START_SECONDS + self._problem.flops / 1e8
            try:
                self._prepare_seconds = float(
                    self._call(
                        seconds,
                        op="prepare",
                        problem=self._problem.to_dict(),
                        protocol=asdict(self._protocol),
                    )
                )
            except WorkerLost as lost:
                raise DeviceError(f"the worker process failed while preparing a problem: {lost}") from None
            self._prepared = self._problem

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        environment = dict(os.environ)
        if self._arguments[1] != "0":
            for library in ("OPENBLAS", "MKL", "OMP"):
                environment[f"{library}_NUM_THREADS"] = self._arguments[1]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tuner.measure.worker", str(theirs.fileno()), *self._arguments],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        self.restarts += 1

    def _call(self, deadline: float, **request: Any) -> Any:
        """Send a request and return its result.

        Raises:
            WorkerLost: the worker ended, or did not answer within `deadline` seconds.
            DeviceError: the worker reports that its device cannot do it.
        """
        assert self._connection is not None
        try:
            self._connection.send_bytes(json.dumps(request).encode())
            if not self._connection.poll(deadline):
                self._kill()
                raise WorkerLost(Outcome.TIMEOUT, f"no result within {deadline:.1f} s")
            reply = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            # ValueError: the candidate wrote into our socket; what it says cannot be trusted.
            raise WorkerLost(Outcome.CRASHED, self._epitaph()) from None
        if "bug" in reply:
            raise RuntimeError(f"the worker process failed:\n{reply['bug']}")
        if "error" in reply:
            raise DeviceError(reply["error"])
        return reply["result"]

    def _epitaph(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._kill()
            return "closed the connection to the worker process"
        self._kill()
        if code < 0:
            return f"killed the worker process by {signal.Signals(-code).name}"
        return f"ended the worker process with exit code {code}"

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = self._prepared = None


def _wire(binary: Binary) -> dict[str, Any]:
    return {**asdict(binary), "path": str(binary.path)}
