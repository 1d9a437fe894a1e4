"""Whether this machine can tune, found out by doing each step once."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tuner import __version__
from tuner.build import Binary, BuildCache, host_toolchain
from tuner.device import open_device
from tuner.errors import DeviceError, TemplateError, TunerError
from tuner.generate import Space, find_templates, render
from tuner.measure import Outcome, Protocol, Supervisor
from tuner.problem import GemmProblem, ProblemType
from tuner.store import Store

_PACKAGES = ("numpy", "scikit-learn", "optuna", "sqlalchemy", "hip-python", "ziglang")


@dataclass(frozen=True)
class Check:
    """`state` is `ok`, `note` for what is missing but not needed, or `fails`."""

    name: str
    state: Literal["ok", "note", "fails"]
    detail: str


def checkup(db: str) -> list[Check]:
    """Do each step of tuning once. What a step cannot do is its check's detail, with the next action."""
    steps: list[tuple[str, Callable[[], str]]] = [
        ("wavetune", _versions),
        ("compiler", lambda: host_toolchain().id),
        ("build cache", lambda: str(BuildCache().root)),
        ("cpu device", _cpu),
        ("templates", lambda: ", ".join(t.name for t in find_templates())),
        ("a kernel, validated", _kernel),
        ("database", lambda: _database(db)),
    ]
    checks = [_try(name, step) for name, step in steps]
    try:
        checks.append(Check("AMD GPU", "ok", _hip()))
    except DeviceError as missing:
        checks.append(Check("AMD GPU", "note", str(missing)))
    return checks


def _try(name: str, step: Callable[[], str]) -> Check:
    try:
        return Check(name, "ok", step())
    except TunerError as error:
        return Check(name, "fails", str(error))


def _versions() -> str:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return f"{__version__} on Python {platform.python_version()}; {', '.join(found)}"


def _cpu() -> str:
    fingerprint = open_device("cpu").fingerprint
    return f"{fingerprint.name}, {fingerprint.arch}, {fingerprint.compute_units} threads"


def _kernel() -> str:
    """Build, validate and time the default candidate of a template on a small problem."""
    device = open_device("cpu")
    problem = GemmProblem.create(ProblemType(), 128, 128, 128)
    for template in find_templates("cpu"):
        space = Space.enumerate(template, problem, device.target)
        if not len(space):
            continue
        source = render(template, space.candidate(space.default_row), problem.type, device.target)
        binary = BuildCache().build(source, device.target, device.toolchain)
        if not isinstance(binary, Binary):
            raise TemplateError(f"{source.candidate.name} does not build: {binary.message}")
        with Supervisor("cpu", None, Protocol(max_samples=20)) as supervisor:
            supervisor.prepare(problem)
            measured = supervisor.measure(binary)
        if measured.outcome is not Outcome.OK or measured.time_ns is None:
            raise TemplateError(f"{source.candidate.name}: {measured.outcome}: {measured.message}")
        return f"{source.candidate.name}: {problem.flops / measured.time_ns:.1f} GFLOP/s on {problem.name}"
    raise TemplateError("no template serves the cpu device; unset TUNER_TEMPLATES")


def _database(db: str) -> str:
    if "://" not in db and not Path(db).exists():
        return f"{db} does not exist yet; `tuner tune` makes it"
    with Store.open(db, read_only=True) as store:
        return f"{db}: {len(store.runs())} runs, {len(store.winners())} winners"


def _hip() -> str:
    """The AMD GPU that the HIP runtime reports.

    Raises:
        DeviceError: there is none, or no ROCm; GPUs are not needed to tune the processor.
    """
    try:
        hip: Any = importlib.import_module("hip").hip
    except Exception as error:
        raise DeviceError(f"hip-python does not import: {error}") from None
    try:
        status, count = hip.hipGetDeviceCount()
    except Exception:
        raise DeviceError("no ROCm runtime here") from None
    if int(status) != 0 or not count:
        raise DeviceError("the ROCm runtime finds no GPU")
    return f"{count} found; wavetune {__version__} does not tune GPUs yet"
