"""One command per file."""

from __future__ import annotations

import typer

from net2gp.cli.commands.compare import compare
from net2gp.cli.commands.demo import demo
from net2gp.cli.commands.explore import explore
from net2gp.cli.commands.fit import fit
from net2gp.cli.commands.info import info
from net2gp.cli.commands.kernel import kernel
from net2gp.cli.commands.paper import paper
from net2gp.cli.commands.predict import predict
from net2gp.cli.commands.report import report
from net2gp.cli.running import command


def register(app: typer.Typer) -> None:
    """Add all commands to an application."""
    for one in (fit, predict, report, compare, kernel, explore, paper, info, demo):
        command(app)(one)
