"""The command line: `net2gp fit`, `predict`, `report` and more. Each command is a file of `commands`."""

from __future__ import annotations

import signal
from typing import Annotated, Any

import typer

from net2gp._version import __version__

app = typer.Typer(
    name="net2gp",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"net2gp {__version__}")
        raise typer.Exit


@app.callback()
def net2gp(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Hand over the PyTorch network you already have and get the Gaussian process it is.

    Exit codes: 0 done, 1 an error that the message names, 2 wrong usage, 3 a report whose --fail-under was
    not met, 130 interrupted.
    """


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, _stop)
    app(prog_name="net2gp")


def _stop(number: int, frame: Any) -> None:
    """End as by Ctrl-C, so that files in the making are taken away."""
    raise KeyboardInterrupt


def _register() -> None:
    from net2gp.cli import commands

    commands.register(app)


_register()
