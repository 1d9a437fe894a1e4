"""`tuner device` and `doctor`: what this machine is, and whether everything works on it."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click

from tuner.cli.common import database_option, device_options, json_option, print_json, print_table


@click.command()
@device_options
@json_option
def device(device: str, threads: int | None, as_json: bool) -> None:
    """Show a device: its fingerprint, which measurements belong to, and what kernels are made for."""
    from tuner.device import open_device

    opened = open_device(device, threads)
    fingerprint, target = opened.fingerprint, opened.target
    if as_json:
        print_json({"id": fingerprint.id, **asdict(fingerprint), "facts": dict(target.facts)})
        return
    rows = [["id", fingerprint.id], *([k, str(v)] for k, v in asdict(fingerprint).items())]
    rows += [[name, f"{value:,}"] for name, value in target.facts if name != "compute_units"]
    print_table(["", ""], rows)


@click.command()
@database_option
@json_option
def doctor(db: str, as_json: bool) -> None:
    """Check that this machine can tune: compiler, cache, device, kernels, database. Exit code 1 if not."""
    from tuner.doctor import checkup

    checks = checkup(db)
    if as_json:
        print_json([asdict(c) for c in checks])
    else:
        print_table(["", "check", "found"], [[c.state, c.name, c.detail] for c in checks])
    if any(c.state == "fails" for c in checks):
        sys.exit(1)
