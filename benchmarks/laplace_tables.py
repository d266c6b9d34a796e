"""The tables of `laplace_torch.py`, from what it stored.

python benchmarks/laplace_tables.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from laplace_problems import DIGITS, MANY_CLASSES, NUM_TEST, STRUCTURES, Structure

OURS, THEIRS = "net2gp", "laplace-torch"

EXPLANATION = f"""\
The networks are the same arrays for both libraries: {DIGITS.title} (P = {DIGITS.num_params:,}), trained by
Adam on {DIGITS.num_points} of scikit-learn's digits, and a {MANY_CLASSES.title} with
N = {MANY_CLASSES.num_points:,} points, of whose last layer a full covariance would have 513,000² entries.
All in float32, ExactFisher curvature, one thread pool of two threads.

Fit: the posterior at a prior variance of one. With prior: the posterior with the prior variance that the
library finds; for laplace-torch that is fit and `optimize_prior_precision(method="marglik")`, except for
functional posteriors, which are left at the prior variance of one, since it advises against tuning them;
for net2gp it is the default, a call of its own. Predict: class probabilities of {NUM_TEST} test points by
the probit link, from the prepared posterior. Of laplace-torch the back-end is shown that takes the least
CPU time in all; the others are in a table below. Its functional posterior keeps only the diagonal of each
likelihood curvature, multiplies the prior variance by the share of the training points that it uses, and
visits these points again for each prediction. net2gp's, `FunctionSpace(num_points)`, leaves rows of the data
out whose precision is at most .01 of what there is (its default `tol`); a column below has its variances
over those of all rows. ≈: measured on fewer points,
one at a time, and scaled up; all at once need more memory than there is.

Best of the runs (one where they take minutes), each library in a process of its own; OpenMP threads sleep
while they wait (`OMP_WAIT_POLICY=PASSIVE`). Memory is the peak above the process with its
imports and inputs. Outside: area under the ROC curve of the predictive entropy between {NUM_TEST} test
digits and the same turned by 90°, or uniform noise. Scores are by the probit link with the prior variance
of the evidence, for both libraries; "its own default" is `laplace(network, data, Categorical(),
structure=...)`, which also finds its link from the training data."""

Row = dict[str, Any]


class Results:
    """Measurements as they were stored, looked up by structure and library."""

    def __init__(self, stored: dict[str, Any]) -> None:
        self.machine, self.rows = stored["machine"], stored["measurements"]
        self.first = min((row["seed"] for row in self.rows), default=0)
        names = {row["structure"] for row in self.rows}
        self.structures = [s for s in STRUCTURES.values() if s.name in names]

    def of(self, structure: Structure, method: str) -> list[Row]:
        """All rows of a library on a structure that have figures, of the first seed."""
        key = (structure.name, method, self.first)
        return [
            row
            for row in self.rows
            if (row["structure"], row["method"], row["seed"]) == key and not row["failed"]
        ]

    def best(self, structure: Structure, method: str) -> Row | None:
        """The row of the back-end that takes the least CPU time in all stages."""
        rows = self.of(structure, method)
        return min(rows, key=lambda row: _total(row, structure), default=None)

    def scores(self, name: str, method: str, key: str, back_end: str | None = None) -> list[float]:
        """A score in all seeds, of one back-end."""
        return [
            row["scores"][key]
            for row in self.rows
            if (row["structure"], row["method"]) == (name, method)
            and key in row["scores"]
            and back_end in (None, row["back_end"])
        ]


def seconds(row: Row | None, stages: Sequence[str], structure: Structure, key: str) -> float | None:
    """CPU or wall seconds of the stages that were run, or None if none was."""
    found = [s for s in stages if row and s in row["found"]["stages"]]
    if row is None or not found:
        return None
    scale = _scale(row, structure)
    stages_of = row["found"]["stages"]
    return sum(stages_of[s][key] * (scale if s == "predict" else 1.0) for s in found)


def _scale(row: Row, structure: Structure) -> float:
    fewer = structure.peer_test if row["method"] == THEIRS else None
    return NUM_TEST / fewer if fewer else 1.0


def _total(row: Row, structure: Structure) -> float:
    return seconds(row, ("fit", "tune", "predict"), structure, "cpu_s") or 0.0


STAGES = (("fit", ("fit",), ("fit",)), ("with prior", ("tuned",), ("fit", "tune")))
STAGES = (*STAGES, ("predict", ("predict",), ("predict",)))
"""A heading, and the stages of each library that it means."""


def times(results: Results, key: str) -> Iterator[list[str]]:
    """Seconds of both libraries in each stage, and how many times faster net2gp is."""
    for structure in results.structures:
        ours, theirs = results.best(structure, OURS), results.best(structure, THEIRS)
        line = [structure.title]
        for heading, own, other in STAGES:
            a, b = (
                seconds(ours, own, structure, key),
                seconds(theirs, other, structure, key),
            )
            if heading == "with prior" and not structure.tuned:
                b = None  # it does not tune here
            scaled = "≈ " if heading == "predict" and structure.peer_test and b else ""
            line += [
                text(a, 3),
                text(b, 3, before=scaled),
                text(b / a if a and b else None, 1, "×"),
            ]
        fit, predict = structure.goals
        yield [*line, f"{fit:.0f}× / {predict:.0f}×"]


def memory(results: Results) -> Iterator[list[str]]:
    """Peak memory of fit (with the prior) and prediction."""
    for structure in results.structures:
        line = [structure.title]
        for stages in (("fit", "tune", "tuned"), ("predict",)):
            peaks = []
            for method in (OURS, THEIRS):
                row = results.best(structure, method)
                found = row["found"]["stages"] if row else {}
                peaks.append(max((found[s]["peak_mb"] for s in stages if s in found), default=None))
            a, b = peaks
            line += [text(a, 0), text(b, 0), text(b / a if a and b else None, 1, "×")]
        ours = results.best(structure, OURS)
        levels = ours["found"].get("exact", []) if ours else []
        exact = " / ".join(f"{level:.4f}" for level in levels)
        yield [*line, agreement(results, structure), exact]


def agreement(results: Results, structure: Structure) -> str:
    """Smallest, median and largest ratio of their variances to ours."""
    rows = [results.best(structure, method) for method in (OURS, THEIRS)]
    ours, theirs = (np.array(row["variances"] if row else []) for row in rows)
    if not len(ours) or len(ours) != len(theirs):
        return ""
    return " / ".join(f"{level:.3f}" for level in np.quantile(theirs / ours, [0.0, 0.5, 1.0]))


SCORES = ("accuracy", "nll", "ece", "rotated", "noise")


def quality(results: Results) -> Iterator[list[str]]:
    """Scores of the bare network and of every structure, as mean ± standard error over the seeds."""
    yield ["the bare network", "", *_scored(results, "network", "network", "")]
    for structure in results.structures:
        if structure.problem != DIGITS.name:
            continue
        prior = [row["found"]["prior_var"] for row in results.of(structure, OURS)]
        yield [
            f"{structure.title}: {OURS}",
            text(prior[0] if prior else None, 3),
            *_scored(results, structure.name, OURS, ""),
        ]
        yield [
            f"{structure.title}: {OURS}, its own default",
            "",
            *_scored(results, structure.name, OURS, "_default"),
        ]
        theirs = results.of(structure, THEIRS)
        if theirs:
            yield [
                f"{structure.title}: {THEIRS}",
                text(theirs[0]["found"]["prior_var"], 3),
                *_scored(results, structure.name, THEIRS, "", structure.back_ends[0]),
            ]


def _scored(
    results: Results, name: str, method: str, suffix: str, back_end: str | None = None
) -> list[str]:
    cells, seeds = [], 0
    for key in SCORES:
        values = np.array(results.scores(name, method, key + suffix, back_end))
        seeds = max(seeds, len(values))
        error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else None
        cells.append(text(values.mean() if len(values) else None, 3) + text(error, 3, before=" ± "))
    return [*cells, str(seeds or "")]


def back_ends(results: Results) -> Iterator[list[str]]:
    """Every back-end of laplace-torch on its own, and what failed."""
    for row in results.rows:
        if row["method"] != THEIRS or row["seed"] != results.first:
            continue
        structure = STRUCTURES[row["structure"]]
        line = [structure.title, row["back_end"]]
        if row["failed"]:
            yield [*line, row["failed"], "", "", ""]
            continue
        parts = [seconds(row, (s,), structure, "cpu_s") for s in ("fit", "tune", "predict")]
        yield [*line, *(text(part, 2) for part in parts), row["found"]["note"]]


def text(value: float | None, digits: int, after: str = "", before: str = "") -> str:
    """A number with its signs, or nothing."""
    return "" if value is None else f"{before}{value:.{digits}f}{after}"


def _columns(*more: str) -> tuple[str, ...]:
    pairs = [(f"{h}: {OURS}", THEIRS, "faster") for h, _, _ in STAGES]
    return ("structure", *(name for pair in pairs for name in pair), *more)


def tables(results: Results) -> Iterator[tuple[str, tuple[str, ...], list[list[str]]]]:
    goals = _columns("goal: fit / predict")
    yield "CPU seconds", goals, list(times(results, "cpu_s"))
    yield "Wall seconds", goals, list(times(results, "wall_s"))
    columns = ("structure", f"fit: {OURS}", THEIRS, "less", f"predict: {OURS}", THEIRS, "less")
    columns = (
        *columns,
        "variances of logits, theirs / ours: least / median / largest",
        "ours / of all rows",
    )
    yield (
        "Peak memory (MB), and agreement at a prior variance of one",
        columns,
        list(memory(results)),
    )
    columns = ("posterior", "prior variance", "accuracy", "NLL", "ECE")
    columns = (*columns, "outside: turned", "outside: noise", "seeds")
    yield "Scores on the digits", columns, list(quality(results))
    columns = ("structure", "back-end", "fit CPU s", "tune CPU s", "predict CPU s", "note")
    yield f"Back-ends of {THEIRS}", columns, list(back_ends(results))


def report(folder: Path, console: Console) -> int:
    """Print the tables, write them to laplace.md, and say which goals were missed."""
    results = Results(json.loads((folder / "laplace.json").read_text()))
    machine = results.machine
    cores, load = machine["cores"], machine["load"]
    where = f"{machine['processor']}, {cores} cores, at least {machine['repeats']} runs, load average {load}"
    where += ": others computed at the same time." if load > cores + 1 else "."
    where = " ".join(filter(None, (where, machine.get("made_by", ""), machine.get("note", ""))))
    lines = ["# Laplace posteriors, side by side", "", where, "", EXPLANATION]
    for heading, columns, body in tables(results):
        table = Table(title=heading, title_justify="left")
        for i, column in enumerate(columns):
            table.add_column(column, justify="right" if i else "left")
        for line in body:
            table.add_row(*line)
        console.print(table)
        lines += ["", f"## {heading}", "", "| " + " | ".join(columns) + " |"]
        lines += ["|---" + "|---:" * (len(columns) - 1) + "|"]
        lines += ["| " + " | ".join(line) + " |" for line in body]
    found = [row["found"] for row in results.rows if row["found"]]
    lines += ["", "## Versions", "", *dict.fromkeys(f"- {f['version']}" for f in found)]
    (folder / "laplace.md").write_text("\n".join(lines) + "\n")
    return verdict(results, console)


def verdict(results: Results, console: Console) -> int:
    """Our failures are errors; missed goals are only said."""
    wrong = 0
    for row in results.rows:
        if row["failed"]:
            console.print(f"{row['structure']}: {row['method']}: {row['failed']}", style="red")
            wrong += row["method"] == OURS
    for structure in results.structures:
        ours, theirs = results.best(structure, OURS), results.best(structure, THEIRS)
        for (heading, own, other), goal in zip(
            (STAGES[0], STAGES[2]), structure.goals, strict=True
        ):
            a = seconds(ours, own, structure, "cpu_s")
            b = seconds(theirs, other, structure, "cpu_s")
            if a and b and b / a < goal:
                console.print(f"{structure.title}, {heading}: {b / a:.1f}×, goal {goal:.0f}×")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(report(Path(__file__).resolve().parent / "results", Console(width=150)))
