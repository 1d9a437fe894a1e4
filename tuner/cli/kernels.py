"""`tuner export`, `validate` and `bench`: what is done with winners."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

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


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--spec", type=click.Path(path_type=Path), help="Only the problems of this spec.")
@database_option
@device_options
@warm_option
@click.option("--name", default="wavetune", show_default=True, help="Name of the library.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier export.")
@json_option
def export(
    folder: Path,
    spec: Path | None,
    db: str,
    device: str,
    threads: int | None,
    warm: bool,
    name: str,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the winners as a library into FOLDER, for C, CMake and `tuner.load`."""
    from tuner.build import BuildCache, host_toolchain
    from tuner.device import open_device
    from tuner.export import export_library
    from tuner.problem import load_spec
    from tuner.recheck import winners_here
    from tuner.store import Store

    loaded = load_spec(spec) if spec else None
    opened = open_device(device, threads)
    with Store.open(db, read_only=True) as store:
        winners = winners_here(store, opened, loaded, cold=not warm)
    done = export_library(
        winners, folder, host_toolchain(), opened.target, name=name, cache=BuildCache(), overwrite=overwrite
    )
    if as_json:
        print_json(
            {"path": str(done.path), "kernels": done.kernels, "problems": done.problems, "bytes": done.bytes}
        )
    else:
        size = f"{done.bytes / 2**20:.1f} MiB"
        click.echo(f"wrote {done.kernels} kernels for {done.problems} problems to {folder} ({size})")


@click.command()
@spec_argument
@click.option("--template", help="Validate a candidate of this template, not the winners.")
@click.option("--set", "values", multiple=True, metavar="NAME=VALUE", help="A parameter of that candidate.")
@database_option
@device_options
@json_option
def validate(
    spec: Path,
    template: str | None,
    values: tuple[str, ...],
    db: str,
    device: str,
    threads: int | None,
    as_json: bool,
) -> None:
    """Validate the winners, or one candidate, on every problem of SPEC. Exit code 1 if one is wrong."""
    from tuner.build import Binary, BuildCache
    from tuner.cli.templates import candidate_for
    from tuner.device import open_device
    from tuner.errors import ToolchainError
    from tuner.generate import render
    from tuner.measure import Protocol, Supervisor
    from tuner.problem import GemmProblem, load_spec
    from tuner.recheck import rebuild, winners_here
    from tuner.recheck import validate as validate_all
    from tuner.store import Store

    loaded = load_spec(spec)
    opened = open_device(device, threads)
    if template is None:
        if values:
            raise click.UsageError("--set needs --template")
        with Store.open(db, read_only=True) as store:
            winners = {w.problem.id: w for w in winners_here(store, opened, loaded)}

    def binary_for(problem: GemmProblem) -> Binary | None:
        if template is None:
            return rebuild(winners[problem.id], opened) if problem.id in winners else None
        family, candidate = candidate_for(template, values, problem, opened.target)
        source = render(family, candidate, problem.type, opened.target)
        binary = BuildCache().build(source, opened.target, opened.toolchain)
        if not isinstance(binary, Binary):
            raise ToolchainError(f"{candidate.name} does not build: {binary.message}")
        return binary

    protocol = Protocol(min_samples=1, max_samples=1)
    with Supervisor(device, threads, protocol) as supervisor:
        results = list(validate_all(loaded.problems, binary_for, supervisor))
    verdicts = [(p, str(m.outcome) if m else "no winner", m) for p, m in results]
    if as_json:
        print_json([
            {
                "problem": p.name,
                "outcome": outcome,
                "message": m.message if m else "",
                "max_error": m.max_error if m else None,
            }
            for p, outcome, m in verdicts
        ])  # fmt: skip
    else:
        rows = [
            [
                p.name,
                outcome,
                f"{m.max_error:.2g} of the bound" if m and m.max_error is not None and not m.message else "",
                m.message if m else "",
            ]
            for p, outcome, m in verdicts
        ]
        print_table(["problem", "outcome", "largest error", ""], rows)
    if any(m is not None and m.outcome != "ok" for _, _, m in verdicts):
        sys.exit(1)


@click.command()
@spec_argument
@database_option
@device_options
@warm_option
@click.option("--rounds", type=click.IntRange(1, 1000), default=9, show_default=True,
              help="How often each pair is timed in turn.")  # fmt: skip
@json_option
def bench(
    spec: Path, db: str, device: str, threads: int | None, warm: bool, rounds: int, as_json: bool
) -> None:
    """Time the winners of SPEC against the device's usual library, side by side.

    On the cpu device that is NumPy's BLAS with as many threads. It computes the bare product: what a
    fused epilogue saves is not held against it.
    """
    from tuner.device import open_device
    from tuner.measure import Protocol, Supervisor
    from tuner.problem import load_spec
    from tuner.recheck import Comparison, compare, winners_here
    from tuner.store import Store

    loaded = load_spec(spec)
    opened = open_device(device, threads)
    with Store.open(db, read_only=True) as store:
        winners = winners_here(store, opened, loaded, cold=not warm)
    with Supervisor(
        device, threads or opened.fingerprint.compute_units, Protocol(cold=not warm)
    ) as supervisor:
        results = list(compare(winners, opened, supervisor, rounds))
    done = [r for r in results if isinstance(r, Comparison)]
    failed = [r for r in results if not isinstance(r, Comparison)]
    if as_json:
        data: list[dict[str, Any]] = [
            {
                "problem": r.winner.problem.name,
                "kernel": r.winner.candidate.name,
                "time_ns": r.time_ns,
                "baseline": r.baseline,
                "baseline_ns": r.baseline_ns,
                "ratio": r.ratio,
                "ratio_low": r.ratio_low,
                "ratio_high": r.ratio_high,
            }
            for r in done
        ]
        print_json(data + [{"problem": w.problem.name, "error": reason} for w, reason in failed])
        return
    if done:
        here = opened.fingerprint
        click.echo(f"{here.name}, {here.compute_units} threads, {'warm' if warm else 'cold'} cache; "
                   f"baseline: {done[0].baseline}")  # fmt: skip
        rows = [
            [
                r.winner.problem.name,
                duration(r.time_ns),
                gflops(r.winner.problem.flops, r.time_ns),
                gflops(r.winner.problem.flops, r.baseline_ns),
                f"{r.ratio:.2f}",
                f"{r.ratio_low:.2f}..{r.ratio_high:.2f}",
            ]
            for r in done
        ]
        headers = ["problem", "time", "GFLOP/s", "baseline", "ratio", "95 %"]
        print_table(headers, rows, right=headers[1:])
        mean = math.exp(sum(math.log(r.ratio) for r in done) / len(done))
        click.echo(f"geometric mean of the ratios: {mean:.2f} over {len(done)} problems")
    for winner, reason in failed:
        click.echo(f"{winner.problem.name}: {reason}")
