"""One command per file."""

from __future__ import annotations

import typer

from net2gp.cli.commands.compare import compare
from net2gp.cli.commands.demo import demo
from net2gp.cli.commands.explore import explore
from net2gp.cli.commands.fit import fit
from net2gp.cli.commands.info import info
from net2gp.cli.commands.kernel import kernel
from net2gp.cli.commands.predict import predict
from net2gp.cli.commands.report import report
from net2gp.cli.running import command
from net2gp.report.papers_command import paper


def register(app: typer.Typer) -> None:
    """Add all commands to an application."""
    for one in (fit, predict, report, compare, kernel, explore):
        command(app)(one)
    app.command("paper")(paper)
    for other in (info, demo):
        command(app)(other)
