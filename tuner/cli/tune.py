"""`tuner tune`: the sweep, with its progress."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from tuner.cli.common import (
    database_option,
    device_options,
    duration,
    gflops,
    json_option,
    print_json,
    print_table,
    spec_argument,
    warm_option,
)

if TYPE_CHECKING:
    from tuner.sweep import Event, Sweep, SweepResult

_LINE_SECONDS = 10.0  # between lines of progress where there is no terminal


@click.command()
@spec_argument
@database_option
@device_options
@click.option(
    "--strategy",
    type=click.Choice(["model", "random", "tpe", "exhaustive"]),
    default="model",
    show_default=True,
    help="How candidates are chosen.",
)
@click.option(
    "--trials", type=click.IntRange(1), help="Candidates per problem, all runs together [default: 100]."
)
@click.option(
    "--minutes", type=click.FloatRange(0.01), help="Stop after this long, divided among the problems."
)
@click.option("--template", "templates", multiple=True, help="Use this template only; may be repeated.")
@click.option("--finalists", type=click.IntRange(1, 64), default=8, show_default=True,
              help="Candidates in the interleaved final round.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="For the order of random choices.")
@click.option("--jobs", type=click.IntRange(1, 256), help="Parallel builds [default: all processors].")
@warm_option
@json_option
def tune(
    spec: Path,
    db: str,
    device: str,
    threads: int | None,
    strategy: str,
    trials: int | None,
    minutes: float | None,
    templates: tuple[str, ...],
    finalists: int,
    seed: int,
    jobs: int | None,
    warm: bool,
    as_json: bool,
) -> None:
    """Tune every problem of SPEC and keep the winners in the database.

    Each trial is on the disk before the next begins: after Ctrl-C, a crash or a power cut the same
    command goes on where it was.
    """
    from tuner.measure import Protocol
    from tuner.problem import load_spec
    from tuner.store import Store
    from tuner.sweep import Settings, Sweep

    loaded = load_spec(spec)
    settings = Settings(
        device=device,
        threads=threads,
        protocol=Protocol(cold=not warm),
        strategy=strategy,
        trials=trials,
        minutes=minutes,
        finalists=finalists,
        seed=seed,
        jobs=jobs,
        templates=templates,
    )
    with Store.open(db, create=True) as store:
        progress = _Terminal() if sys.stderr.isatty() else _Lines()
        sweep = Sweep(loaded, spec.read_text("utf-8"), settings, store, progress)
        with _stop_on_signal(sweep), progress:
            result = sweep.run()
    if as_json:
        print_json(_summary(result))
    else:
        _print_result(result, db)
    if result.status == "interrupted":
        sys.exit(130)


@contextmanager
def _stop_on_signal(sweep: Sweep) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the sweep after the running trial, the second at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        if sweep.stopping:
            raise KeyboardInterrupt
        click.echo("\nending after this trial; once more to end at once", err=True)
        sweep.stop()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Lines:
    """Progress as plain lines on standard error."""

    def __init__(self) -> None:
        self._last = 0.0

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, event: Event) -> None:
        from tuner.sweep import CanaryTimed, ProblemEnded, ProblemSkipped, ProblemStarted, TrialEnded

        match event:
            case ProblemStarted():
                self._last = time.monotonic()
                self.say(_started(event))
            case TrialEnded() if time.monotonic() - self._last >= _LINE_SECONDS:
                self._last = time.monotonic()
                best = gflops(event.problem.flops, event.best_ns) if event.best_ns else "none yet"
                self.say(f"  {event.done} candidates, best {best} GFLOP/s")
            case ProblemEnded():
                for line in _ended(event):
                    self.say(line)
            case ProblemSkipped():
                self.say(f"{event.problem.name}: skipped: {event.reason}")
            case CanaryTimed() if not 0.9 <= event.drift <= 1.1:
                self.say(
                    f"  the machine drifts: the default kernel now takes {event.drift:.2f} x its first time"
                )

    def say(self, line: str) -> None:
        click.echo(line, err=True)


class _Terminal(_Lines):
    """Progress as a live bar, with the time left and the best so far."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[best]}"),
            console=Console(stderr=True, highlight=False),
            transient=True,
        )
        self._task = self._progress.add_task("", total=None, best="", visible=False)

    def __enter__(self) -> _Terminal:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        from tuner.sweep import ProblemStarted, TrialEnded

        match event:
            case ProblemStarted():
                self.say(_started(event))
                self._progress.reset(
                    self._task,
                    description=event.problem.name,
                    total=event.budget,
                    completed=event.known,
                    best="",
                    visible=True,
                )
            case TrialEnded():
                best = f"best {gflops(event.problem.flops, event.best_ns)} GFLOP/s" if event.best_ns else ""
                self._progress.update(self._task, completed=event.done, best=best)
            case _:
                super().__call__(event)

    def say(self, line: str) -> None:
        self._progress.console.print(line, markup=False)


def _started(event: Any) -> str:
    known = f", {event.known:,} of them measured before" if event.known else ""
    return (
        f"{event.problem.name}: {event.candidates:,} candidates are valid "
        f"of {event.raw_size:,} combinations{known}"
    )


def _ended(event: Any) -> list[str]:
    winner, quality = event.winner, event.quality
    if winner is None:
        return ["  no candidate was valid; `tuner show` tells why"]
    lines = []
    if quality is not None:
        line = f"  measured {quality.measured:,}, skipped {quality.skipped:,} by the model's judgement"
        if quality.rank_correlation is not None:
            line += (
                f"; on {quality.controls} drawn at random its ranking has a correlation of "
                f"{quality.rank_correlation:.2f}, and the winner beats {quality.control_beaten:.0%} of them"
            )
        lines.append(line)
    speed = gflops(winner.problem.flops, winner.time_ns)
    gain = f", {winner.default_ns / winner.time_ns:.2f} x the default" if winner.default_ns else ""
    lines.append(f"  winner: {duration(winner.time_ns)}, {speed} GFLOP/s{gain}: {winner.candidate.name}")
    return lines


def _print_result(result: SweepResult, db: str) -> None:
    rows = [
        [
            w.problem.name,
            duration(w.time_ns),
            gflops(w.problem.flops, w.time_ns),
            f"{w.default_ns / w.time_ns:.2f}" if w.default_ns else "-",
            w.candidate.name,
        ]
        for w in result.winners
    ]
    if rows:
        headers = ["problem", "time", "GFLOP/s", "x default", "winner"]
        print_table(headers, rows, right=headers[1:4])
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.outcomes.items()))
    click.echo(
        f"{result.status} in {result.seconds:.0f} s: {counts or 'nothing was left to do'}; kept in {db}"
    )


def _summary(result: SweepResult) -> dict[str, Any]:
    from tuner.cli.results import winner_json

    return {
        "run_id": result.run_id,
        "status": result.status,
        "seconds": result.seconds,
        "outcomes": {str(k): v for k, v in result.outcomes.items()},
        "winners": [winner_json(w) for w in result.winners],
        "skipped": [{"problem": s.problem.name, "reason": s.reason} for s in result.skipped],
    }
