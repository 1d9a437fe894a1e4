"""Options and output that several commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

database_option = click.option(
    "--db", default="results.db", show_default=True, metavar="FILE|URL", help="The results database."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
spec_argument = click.argument("spec", type=click.Path(path_type=Path))


def device_options(function: F) -> F:
    """Which device, and for `cpu` with how many threads."""
    function = click.option(
        "--threads", type=click.IntRange(1, 1024), help="Threads of the cpu device [default: all processors]."
    )(function)
    return click.option(
        "--device", type=click.Choice(["cpu"]), default="cpu", show_default=True, help="Where kernels run."
    )(function)


warm_option = click.option(
    "--warm", is_flag=True, help="Time with operands in the cache, not in memory (the default)."
)


def print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2, default=str))


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print aligned columns; those named in `right` are numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        number = header in right
        table.add_column(header, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        table.add_row(*row)
    # Off a terminal nothing is wrapped: the lines are for grep and awk.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 400)
    with console.capture() as capture:
        console.print(table)
    lines = capture.get().splitlines()
    click.echo("\n".join(line.rstrip() for line in lines))


def duration(nanoseconds: float | None) -> str:
    """`12.3 us`: three significant digits in the unit that fits."""
    if nanoseconds is None:
        return "-"
    for unit, scale in (("ns", 1.0), ("us", 1e3), ("ms", 1e6)):
        if nanoseconds < 1000 * scale:
            return f"{nanoseconds / scale:.3g} {unit}" if nanoseconds < 999.5 * scale else f"1000 {unit}"
    return f"{nanoseconds / 1e9:.3g} s"


def gflops(flops: int, nanoseconds: float) -> str:
    return f"{flops / nanoseconds:.1f}"
