"""The command line: each command parses, calls the package and prints; no logic lives here.

Exit codes: 0 done; 1 the answer is no (a kernel failed validation, a check of `doctor` failed); 2 the
user's mistake, told in one line; 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback

import click

from tuner import __version__
from tuner.errors import TunerError

_COMMANDS = {
    "tune": "tune",
    "status": "results",
    "best": "results",
    "show": "results",
    "export": "kernels",
    "validate": "kernels",
    "bench": "kernels",
    "render": "templates",
    "templates": "templates",
    "schema": "templates",
    "device": "machine",
    "doctor": "machine",
}


class _Commands(click.Group):
    """Imports the module of a command when it is asked for, so that `tuner --version` is quick."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module = importlib.import_module(f"tuner.cli.{_COMMANDS[name]}")
        command = getattr(module, name)
        assert isinstance(command, click.Command)
        return command


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="wavetune")
def cli() -> None:
    """Tune GEMM kernels: problem specs in YAML, measured winners in SQLite, libraries to link.

    Start with `tuner doctor`, then `tuner tune problem_specs/quickstart.yaml`.
    """


def main() -> None:
    """The `tuner` command."""
    try:
        code = cli.main(prog_name="tuner", standalone_mode=False)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f"; see `{context.command_path} --help`" if context else ""
        click.echo(f"tuner: {error.format_message().rstrip('.')}{hint}", err=True)
        code = 2
    except TunerError as error:
        click.echo("\n".join(f"tuner: {line}" for line in str(error).splitlines()), err=True)
        code = 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("tuner: interrupted; what was measured is kept", err=True)
        code = 130
    except BrokenPipeError:
        # The reader of our output, such as `head`, has gone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except Exception as error:
        if os.environ.get("TUNER_DEBUG"):
            traceback.print_exc()
        detail = " ".join(f"{type(error).__name__}: {error}".split())
        click.echo(f"tuner: a bug in wavetune: {detail}; TUNER_DEBUG=1 prints where", err=True)
        code = 70
    sys.exit(code if isinstance(code, int) else 0)
