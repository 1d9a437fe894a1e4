"""`tuner status`, `best` and `show`: what is in the database."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tuner.cli.common import database_option, duration, gflops, json_option, print_json, print_table
from tuner.errors import StoreError

if TYPE_CHECKING:
    from tuner.store import Trial, Winner


@click.command()
@database_option
@json_option
def status(db: str, as_json: bool) -> None:
    """List the runs, with what became of their trials."""
    from tuner.store import Store

    with Store.open(db, read_only=True) as store:
        runs = [(run, _drift(store.canaries(run.id))) for run in store.runs()]
    if as_json:
        data = [
            {**asdict(r), "outcomes": {str(k): v for k, v in r.outcomes.items()}, "canary_drift": d}
            for r, d in runs
        ]
        print_json(data)
        return
    rows = [
        [
            str(run.id),
            run.spec_name,
            run.status,
            f"{run.started_at:%Y-%m-%d %H:%M}",
            f"{(run.ended_at - run.started_at).total_seconds():.0f} s" if run.ended_at else "-",
            run.strategy,
            ", ".join(f"{n} {o}" for o, n in sorted(run.outcomes.items())) or "none",
            str(run.unfinished),
            f"{drift:.0%}" if drift is not None else "-",
            f"{run.fingerprint.name}, {run.fingerprint.compute_units} units",
        ]
        for run, drift in runs
    ]
    headers = [
        "run",
        "spec",
        "status",
        "started (UTC)",
        "took",
        "strategy",
        "trials",
        "cut off",
        "drift",
        "device",
    ]
    print_table(headers, rows, right=["run", "took", "cut off", "drift"])


def _drift(canaries: list[Any]) -> float | None:
    """The largest spread of a canary's times over its shortest, over the problems of a run."""
    spreads = []
    for _, group in groupby(sorted(canaries, key=lambda c: c.problem_id), key=lambda c: c.problem_id):
        times = [c.time_ns for c in group]
        spreads.append(max(times) / min(times) - 1)
    return max(spreads, default=None)


@click.command()
@click.argument("spec", type=click.Path(path_type=Path), required=False)
@database_option
@json_option
def best(spec: Path | None, db: str, as_json: bool) -> None:
    """List the winners, of SPEC alone where one is given."""
    from tuner.problem import load_spec
    from tuner.store import Store

    weights = {w.problem.id: w.weight for w in load_spec(spec).workload} if spec else None
    with Store.open(db, read_only=True) as store:
        winners = store.winners(problem_ids=weights)
    if as_json:
        print_json([winner_json(w) for w in winners])
        return
    if not winners:
        click.echo(f"there is no winner in {db}{f' for {spec}' if spec else ''}; run `tuner tune`")
        return

    def group(w: Winner) -> tuple[str, str]:
        return w.fingerprint.id, w.protocol.id

    for index, (_, members) in enumerate(groupby(sorted(winners, key=group), key=group)):
        mine = list(members)
        fingerprint, protocol = mine[0].fingerprint, mine[0].protocol
        click.echo(
            ("\n" if index else "")
            + f"{fingerprint.name}, {fingerprint.compute_units} units, {fingerprint.toolchain}, "
            + ("cold cache" if protocol.cold else "warm cache")
        )
        rows = [
            [
                w.problem.name,
                duration(w.time_ns),
                f"{(w.ci_high_ns - w.ci_low_ns) / 2 / w.time_ns:.1%}",
                gflops(w.problem.flops, w.time_ns),
                f"{w.default_ns / w.time_ns:.2f}" if w.default_ns else "-",
                str(len(w.ties)),
                w.candidate.name,
            ]
            for w in mine
        ]
        headers = ["problem", "time", "+-", "GFLOP/s", "x default", "ties", "winner"]
        print_table(headers, rows, right=headers[1:6])
        if weights is not None:
            total = sum(weights[w.problem.id] * w.time_ns for w in mine)
            missing = len(weights) - len({w.problem.id for w in mine})
            note = f"; {missing} of its problems have no winner here" if missing else ""
            click.echo(f"all calls of {spec}, weighted: {duration(total)}{note}")


def winner_json(winner: Winner) -> dict[str, Any]:
    """A winner as plain data, without its source."""
    data = asdict(winner)
    del data["source"]
    data["problem"]["name"] = winner.problem.name
    data["candidate"] = winner.candidate.to_dict()
    data["gflops"] = winner.problem.flops / winner.time_ns
    return data


@click.command()
@click.argument("problem")
@click.option("--source", is_flag=True, help="Print the winning kernel's source.")
@database_option
@json_option
def show(problem: str, source: bool, db: str, as_json: bool) -> None:
    """Show what was found for PROBLEM: a name that `tuner best` lists, or a part of one."""
    from tuner.store import Store

    with Store.open(db, read_only=True) as store:
        named = [p for p in store.problems() if problem in (p.name, p.id)]
        named = named or [p for p in store.problems() if problem in p.name]
        if len(named) != 1:
            listed = ", ".join(sorted(p.name for p in named)[:8]) or "none"
            raise StoreError(f"PROBLEM must match one problem of {db}, but `{problem}` matches: {listed}")
        trials = list(store.all_trials(problem_id=named[0].id))
        winners = store.winners(problem_ids={named[0].id})
        finals = {w.trial_id: store.finalists(w) for w in winners}
    if source:
        if not winners:
            raise StoreError(f"{named[0].name} has no winner yet; run `tuner tune`")
        click.echo(winners[-1].source.text, nl=False)
        return
    if as_json:
        data = {
            "problem": {"name": named[0].name, **named[0].to_dict()},
            "outcomes": Counter(str(t.measurement.outcome) for t in trials if t.measurement),
            "winners": [
                {**winner_json(w), "finalists": [asdict(f) for f in finals[w.trial_id]]} for w in winners
            ],
            "failures": [
                {"candidate": t.candidate.name, "outcome": str(outcome), "message": message}
                for t, outcome, message in _failures(trials)
            ],
        }
        print_json(data)
        return
    counts = Counter(str(t.measurement.outcome) if t.measurement else "cut off" for t in trials)
    click.echo(f"{named[0].name}: " + ", ".join(f"{n} {o}" for o, n in sorted(counts.items())))
    for winner in winners:
        click.echo(f"\n{winner.fingerprint.name}, {winner.fingerprint.compute_units} units, the final round:")
        rows = [
            [
                "*" if f.trial_id == winner.trial_id else "=" if f.candidate.name in winner.ties else "",
                duration(f.median_ns),
                gflops(winner.problem.flops, f.median_ns),
                f.candidate.name,
            ]
            for f in sorted(finals[winner.trial_id], key=lambda f: f.median_ns)
        ]
        print_table(["", "time", "GFLOP/s", "candidate (* winner, = tie)"], rows, right=["time", "GFLOP/s"])
    failures = _failures(trials)
    if failures:
        click.echo("\nwhat failed:")
        for trial, outcome, message in failures[:20]:
            click.echo(f"  {trial.candidate.name}: {outcome}: {message}")
        if len(failures) > 20:
            click.echo(f"  and {len(failures) - 20} more; see --json")


def _failures(trials: list[Trial]) -> list[tuple[Trial, str, str]]:
    return [
        (t, str(t.measurement.outcome), t.measurement.message)
        for t in trials
        if t.measurement and t.measurement.outcome != "ok"
    ]
