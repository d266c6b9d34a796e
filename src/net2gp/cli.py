"""The command line: `net2gp demo` and `net2gp --version`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from net2gp._version import __version__
from net2gp.errors import Net2GPError

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
    """Hand over the PyTorch network you already have and get the Gaussian process it is."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder to write into.")] = Path("demo_output"),
) -> None:
    """Train small networks, turn them into GPs, and write figures and a page. It takes under a minute."""
    from net2gp.report import demo as run

    try:
        path = run(out.expanduser())
    except (Net2GPError, ImportError) as error:
        typer.echo(f"net2gp: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"The page is at {path.resolve()}. Open it in a browser; its figures lie beside it.")


def main() -> None:
    """Run the command line."""
    app(prog_name="net2gp")
