"""`net2gp report`: what a posterior's uncertainty is worth on held-out data, on one page."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from net2gp.cli.files import check_output
from net2gp.cli.options import POSTERIOR_HELP, PredictionOptions
from net2gp.cli.problem import example
from net2gp.cli.reading.data import read_data
from net2gp.cli.running import FAILED, Result, UsageError, say
from net2gp.cli.saved import Note, open_posterior, read_held_out


@dataclass(kw_only=True)
class ReportOptions(PredictionOptions):
    """A posterior, held-out data, and what must hold."""

    posterior: Annotated[Path, typer.Argument(help=POSTERIOR_HELP)]
    held_out: Annotated[
        str | None,
        typer.Option(help="Data with targets that fit did not see; what fit held out if left out."),
    ] = None
    target: Annotated[
        list[str], typer.Option(help="The .npy file of targets, if --held-out is a .npy.")
    ] = field(default_factory=list)
    other: Annotated[
        list[str],
        typer.Option(help="NAME=FILE of data of another kind, to see whether they are noticed."),
    ] = field(default_factory=list)
    fail_under: Annotated[
        list[str],
        typer.Option(
            help="SCORE=LIMIT, such as coverage90=0.88: exit with 3 if a score is worse (may be repeated)."
        ),
    ] = field(default_factory=list)
    title: Annotated[str | None, typer.Option(help="The title of the page.")] = None
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The page; its numbers go beside it, as .json.")
    ] = Path("report.html")


def report(options: ReportOptions) -> Result:
    """Write a page on what a posterior's uncertainty is worth, and the same numbers as JSON.

    \b
    Examples:
      net2gp report posterior.safetensors
      net2gp report posterior.safetensors --held-out test.csv -o report.html
      net2gp report posterior.safetensors --held-out test.npz --other noise=noise.npz
      net2gp report posterior.safetensors --fail-under coverage90=0.88 --json

    The page and limits are in the units of the files, also where fit has standardized them.
    Without --held-out the data are those that `net2gp fit --held-out` kept back. Scores that should be large
    must be at least their limit, such as accuracy and coverage90, and others at most.
    """
    from net2gp.report import uncertainty_report

    path = check_output(options.output, [".html"])
    limits = {
        name: _number(name, value) for name, value in _pairs(options.fail_under, "--fail-under")
    }
    named = dict(_pairs(options.other, "--other"))
    posterior, note, network = open_posterior(options.posterior, options)
    reading, like = note.reading, example(network).to(options.device)
    loaded = read_held_out(note, options.held_out, options.target)
    strangers = {
        name: reading.inputs(read_data(Path(file), reading.wanted(needs_target=False)), like)
        for name, file in named.items()
    }
    _warn(note)
    made = uncertainty_report(
        posterior,
        (reading.inputs(loaded, like), reading.values(loaded, like)),
        others=strangers,
        columns=list(reading.features) or None,
        classes=list(reading.classes or reading.targets) or None,
        scaling=reading.scaling,
        title=options.title,
        command=shlex.join(["net2gp", *sys.argv[1:]]),
    )
    failures = made.failures(limits)
    made.save(path)
    values = {"output": path, "failures": failures, **made.values}
    lines = [
        f"{path} and {path.with_suffix('.json').name}: {len(loaded)} held-out points.",
        *failures,
    ]
    return Result(values, "\n".join(lines), FAILED if failures else 0)


def _warn(note: Note) -> None:
    """Say what a reader of the page would otherwise take for something else."""
    if note.settings.get("tuning") == "validation":
        say(
            "the held-out data of fit chose what was open (--tuning validation): pass others as --held-out."
        )


def _pairs(given: list[str], name: str) -> list[tuple[str, str]]:
    found: Mapping[str, str] = {}
    for text in given:
        key, equal, value = text.partition("=")
        if not (equal and key and value):
            raise UsageError(f"{name} takes NAME=VALUE, but got '{text}'.")
        found = {**found, key: value}
    return list(found.items())


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--fail-under {name} must be a number, but is '{text}'.") from None
