"""`net2gp report`: what a posterior's uncertainty is worth on held-out data, on one page."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from net2gp.cli.files import check_output
from net2gp.cli.options import POSTERIOR_HELP, PredictionOptions
from net2gp.cli.problem import Reading, example
from net2gp.cli.reading.data import read_data
from net2gp.cli.running import FAILED, Result, UsageError, say
from net2gp.cli.saved import Note, open_posterior, read_held_out

TITLE = "How far to trust this posterior"
IN_UNITS = ("mae", "nll", "rmse", "width90")
"""Scores of a regression that depend on the units of the target."""


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

    Limits are in the units of the target, also where the page has standardized ones.
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
    _warn(note, reading)
    units = reading.scaling.y_std
    made = uncertainty_report(
        posterior,
        (reading.inputs(loaded, like), reading.values(loaded, like)),
        others=strangers,
        columns=list(reading.features) or None,
        classes=list(reading.classes or reading.targets) or None,
        title=_titled(options.title, units),
        command=shlex.join(["net2gp", *sys.argv[1:]]),
    )
    failures = made.failures(
        {name: _on_the_page(name, limit, units) for name, limit in limits.items()}
    )
    made.save(path)
    values = {"output": path, "failures": failures, **made.values}
    lines = [
        f"{path} and {path.with_suffix('.json').name}: {len(loaded)} held-out points.",
        *failures,
    ]
    return Result(values, "\n".join(lines), FAILED if failures else 0)


def _titled(title: str | None, units: Sequence[float] | None) -> str | None:
    """The title, with the units of the numbers if they are not those of the target."""
    if units is None:
        return title
    scales = ", ".join(f"{one:.4g}" for one in units)
    return f"{title or TITLE} (targets in units of {scales})"


def _on_the_page(name: str, limit: float, units: Sequence[float] | None) -> float:
    """A limit in the units of the target, in those of the page."""
    kind = name.partition("_")[0]
    if units is None or kind not in IN_UNITS:
        return limit
    if len(units) > 1:
        raise UsageError(
            f"--fail-under {name}: several targets were standardized, so that the page's numbers have no "
            "unit in common. Fit without --standardize, or limit a coverage."
        )
    scale = float(units[0])
    return limit - math.log(scale) if kind == "nll" else limit / scale


def _warn(note: Note, reading: Reading) -> None:
    """Say what a reader of the page would otherwise take for something else."""
    if note.settings.get("tuning") == "validation":
        say(
            "the held-out data of fit chose what was open (--tuning validation): pass others as --held-out."
        )
    if reading.scaling.y_std is not None:
        say(
            "numbers on the page are in standardized units: one is "
            f"{', '.join(f'{one:.4g}' for one in reading.scaling.y_std)} of the target."
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
