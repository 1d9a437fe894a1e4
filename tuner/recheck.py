"""Winners once more: those that hold on this device, validated again or timed against its baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from tuner.build import Binary, BuildCache
from tuner.device import Device
from tuner.errors import StoreError, ToolchainError
from tuner.measure import Measurement, Supervisor, WorkerLost, median_interval, paired_ratio_interval
from tuner.problem import GemmProblem, Spec
from tuner.store import Store, Winner


@dataclass(frozen=True)
class Comparison:
    """A winner against the device's baseline, timed in turn.

    `ratio` is the baseline's time over the winner's, with its 95 % confidence interval.
    """

    winner: Winner
    baseline: str
    baseline_ns: float
    time_ns: float
    ratio: float
    ratio_low: float
    ratio_high: float


def winners_here(
    store: Store, device: Device, spec: Spec | None = None, *, cold: bool = True
) -> list[Winner]:
    """Return the winners that were measured on this very device, compiler and kind of timing.

    Raises:
        StoreError: there are none; the message says for which devices there are.
    """
    wanted = None if spec is None else {p.id for p in spec.problems}
    found = store.winners(device_id=device.fingerprint.id, problem_ids=wanted)
    found = [w for w in found if w.protocol.cold == cold]
    if found:
        return found
    here = device.fingerprint
    others = [f for f in store.devices() if f.id != here.id]
    listed = (
        "; ".join(f"{f.name}, {f.compute_units} units, {f.toolchain}" for f in others) or "no other device"
    )
    raise StoreError(
        f"there is no {'cold' if cold else 'warm'} winner{f' of {spec.name}' if spec else ''} for "
        f"{here.name}, {here.compute_units} units, {here.toolchain}, but for: {listed}; run `tuner tune`"
    )


def validate(
    problems: Iterable[GemmProblem],
    binary_for: Callable[[GemmProblem], Binary | None],
    supervisor: Supervisor,
) -> Iterator[tuple[GemmProblem, Measurement | None]]:
    """Put a kernel through the whole validation on each problem; None where there is no kernel."""
    for problem in problems:
        binary = binary_for(problem)
        if binary is None:
            yield problem, None
            continue
        supervisor.prepare(problem)
        yield problem, supervisor.measure(binary)


def compare(
    winners: Iterable[Winner], device: Device, supervisor: Supervisor, rounds: int
) -> Iterator[Comparison | tuple[Winner, str]]:
    """Time each winner against the device's baseline; where that is impossible, say why."""
    for winner in winners:
        supervisor.prepare(winner.problem)
        binary = rebuild(winner, device)
        measured = supervisor.measure(binary)
        if measured.time_ns is None:
            yield winner, f"{measured.outcome}: {measured.message}"
            continue
        try:
            result = supervisor.compare(binary, rounds, measured.time_ns)
        except WorkerLost as lost:
            yield winner, str(lost)
            continue
        if result is None:
            yield winner, "the device has no baseline for it"
            continue
        name, theirs, ours = result
        yield Comparison(
            winner, name, median_interval(theirs)[0], median_interval(ours)[0],
            *paired_ratio_interval(theirs, ours),
        )  # fmt: skip


def rebuild(winner: Winner, device: Device) -> Binary:
    """Return the binary of a winner's recorded source, from the build cache or built again.

    Raises:
        ToolchainError: it does not build any more.
    """
    binary = BuildCache().build(winner.source, device.target, device.toolchain)
    if not isinstance(binary, Binary):
        raise ToolchainError(f"{winner.candidate.name} does not build: {binary.message}")
    return replace(binary, symbol=winner.source.symbol)
