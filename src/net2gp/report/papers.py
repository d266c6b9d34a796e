"""Reproductions run again: the programs in the folder `papers` of a checkout, and what they found.

Each program computes numbers of a paper through the public interface of net2gp, holds them against expected
ones, and writes both as JSON (papers/findings.py says how). Here they run in processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import net2gp
from net2gp._version import __version__
from net2gp.errors import InputError
from net2gp.progress import progress

INDEX = "papers.toml"
"""The file that names the programs, in the folder where they lie."""


@dataclass(frozen=True)
class Paper:
    """A reproduction that can be run.

    Args:
        name: What `run_paper` calls it.
        title: The paper.
        source: Where the expected numbers come from.
        quick: What a quick run leaves out.
        program: The program.
    """

    name: str
    title: str
    source: str
    quick: str
    program: Path


@dataclass(frozen=True)
class PaperRow:
    """A number beside the expected one, or a claim.

    Args:
        name: What the number is, or the claim in words.
        paper: The expected number, or None for a claim.
        ours: What was found.
        allowed: The difference that is allowed, or None.
        bound: How they are compared: "within", "at most", "at least", "shown" (not judged), "claim" or
            "exception" (a claim that was expected to fail here).
        holds: Whether it came out as expected.
        note: What the program adds, such as a known exception.
        topic: What a group of rows is about.
    """

    name: str
    paper: float | str | None
    ours: float | str
    allowed: float | str | None
    bound: str
    holds: bool
    note: str = ""
    topic: str = ""

    @property
    def title(self) -> str:
        """The name, with the topic in front."""
        return f"{self.topic}: {self.name}" if self.topic else self.name

    @property
    def difference(self) -> float | None:
        """Ours less the paper's, or None without two numbers."""
        if isinstance(self.paper, float | int) and isinstance(self.ours, float | int):
            return self.ours - self.paper
        return None

    @property
    def verdict(self) -> str:
        """The word in the last column."""
        if self.bound == "shown":
            return "not judged"
        if not self.holds:
            return "NO"
        return "excepted" if self.bound == "exception" else "yes"

    def cells(self) -> tuple[str, str, str, str, str]:
        """Paper, ours, the difference, how much of it is allowed, and the verdict."""
        sign = {"at most": "≤ ", "at least": "≥ "}.get(self.bound, "")
        gap = self.difference
        return (
            "" if self.paper is None else sign + _number(self.paper),
            _number(self.ours),
            "" if gap is None else f"{gap:+.2g}",
            "" if self.allowed is None else _number(self.allowed, 2),
            self.verdict,
        )


def _number(value: float | str, digits: int = 5) -> str:
    return value if isinstance(value, str) else f"{value:.{digits}g}"


HEAD = ("paper", "ours", "difference", "allowed", "within?")


@dataclass(frozen=True)
class PaperResult:
    """What a reproduction found.

    Args:
        paper: The reproduction.
        rows: Its numbers and claims, in the program's order.
        left_out: What the program did not compute, and why.
        error: What stopped the program, or "".
        status: The program's exit status.
        quick: Whether it was a quick run.
        command: What was run, from the folder above `papers`.
        revision: The commit of the checkout, and whether files differed from it.
        date: When it started, in UTC.
        seconds: How long it took.
    """

    paper: Paper
    rows: tuple[PaperRow, ...]
    left_out: tuple[str, ...]
    error: str
    status: int
    quick: bool
    command: str
    revision: str
    date: str
    seconds: float

    @property
    def agrees(self) -> bool:
        """Whether the program ended well and everything came out as expected."""
        return self.status == 0 and not self.error and bool(self.rows)

    @property
    def outcome(self) -> str:
        """In words: what agrees, or what went wrong."""
        judged = [row for row in self.rows if row.bound != "shown"]
        good, counted = sum(row.holds for row in judged), tally(self.rows)
        if self.error:
            return f"stopped, after {counted}: {self.error}" if judged else f"failed: {self.error}"
        if not self.agrees and good == len(judged):
            return f"exit status {self.status}, after {counted}"
        return counted

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it."""
        rows = [vars(row) | {"difference": row.difference} for row in self.rows]
        paper = vars(self.paper) | {"program": self.paper.program.name}
        found = vars(self) | {"paper": paper, "rows": rows, "left_out": list(self.left_out)}
        return found | {"agrees": self.agrees, "outcome": self.outcome}

    def __str__(self) -> str:
        """A table: paper, ours, difference and whether it is within what is allowed."""
        lines = [(row.title, *row.cells()) for row in self.rows]
        table = [("", *HEAD), *lines]
        widths = [max(len(line[k]) for line in table) for k in range(len(HEAD) + 1)]
        text = [
            "  ".join(
                cell.ljust(width) if k == 0 else cell.rjust(width)
                for k, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in table
        ]
        notes = [
            f"{row.title}: {row.note}"
            for row in self.rows
            if row.note and (not row.holds or row.bound == "exception")
        ]
        return "\n".join(
            [
                self.paper.title,
                f"Expected: {self.paper.source}",
                *text,
                *notes,
                *(f"Not computed: {what}" for what in self.left_out),
                f"{self.outcome} ({self.command}, revision {self.revision}, {self.seconds:.0f} s)",
            ]
        )


def tally(rows: Iterable[PaperRow]) -> str:
    """Count what came out as expected, and the exceptions among it, which were expected to fail.

    Args:
        rows: Numbers and claims.

    Returns:
        The counts in words.
    """
    judged = [row for row in rows if row.bound != "shown"]
    good = [row for row in judged if row.holds]
    excepted = sum(row.bound == "exception" for row in good)
    words = f", of which {excepted} excepted" if excepted else ""
    return f"{len(good)} of {len(judged)} as expected{words}"


def papers_folder(folder: str | os.PathLike | None = None) -> Path:
    """Find the folder of the reproductions, which is part of a checkout and not of the installed package.

    Args:
        folder: Where it is. None looks beside the sources of this package, then in the current folder and
            in those above it.

    Returns:
        The folder, which has a file papers.toml.

    Raises:
        InputError: If there is none.
    """
    if folder is not None:
        found = Path(folder).expanduser().resolve()
        if not (found / INDEX).is_file():
            raise InputError(
                f"{found} has no reproductions: there is no {INDEX} in it. Pass the folder `papers` of a "
                "clone of net2gp."
            )
        return found
    package = Path(str(net2gp.__file__)).resolve().parent
    here = Path.cwd()
    for place in (package.parents[1], here, *here.parents):
        if (place / "papers" / INDEX).is_file():
            return place / "papers"
    raise InputError(
        "the reproductions are programs of the repository, not of the installed package, and no clone was "
        f"found here ({here}). Clone net2gp and say where: run_paper(name, folder='net2gp/papers'), or "
        "net2gp paper NAME --papers net2gp/papers."
    )


def list_papers(folder: str | os.PathLike | None = None) -> tuple[Paper, ...]:
    """Return the reproductions that can be run.

    Args:
        folder: The folder `papers` of a checkout. None looks for it.

    Returns:
        The reproductions, in the order of papers.toml.

    Raises:
        InputError: If the folder is not found.
    """
    place = papers_folder(folder)
    index = tomllib.loads((place / INDEX).read_text(encoding="utf-8"))
    return tuple(
        Paper(name, entry["title"], entry["source"], entry["quick"], place / entry["program"])
        for name, entry in index.items()
    )


def find_papers(names: list[str], folder: str | os.PathLike | None = None) -> tuple[Paper, ...]:
    """Return the reproductions with these names.

    Raises:
        InputError: If there is no such reproduction.
    """
    known = {paper.name: paper for paper in list_papers(folder)}
    for name in names:
        if name not in known:
            raise InputError(f"there is no reproduction {name!r}. There are: {', '.join(known)}.")
    return tuple(known[name] for name in names)


def run_paper(
    name: str,
    *,
    quick: bool = True,
    out: str | os.PathLike | None = None,
    folder: str | os.PathLike | None = None,
) -> PaperResult:
    """Run a reproduction and return its numbers beside the expected ones.

    The program runs in a process of its own with the sources of its checkout. A full run takes minutes to
    days; what it needs beyond the repository is read from the folder that NET2GP_DATA names.

    Args:
        name: One of the names of `list_papers()`.
        quick: Whether to run the small version, which takes seconds to some minutes.
        out: The folder for figures and for the program's own output, `NAME.log`. None keeps neither.
        folder: The folder `papers` of a checkout. None looks for it.

    Returns:
        What was found. A program that fails is a result too, with the reason as its `error`.

    Raises:
        InputError: If the folder or the name is unknown.
    """
    (paper,) = find_papers([name], folder)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(out).expanduser().resolve() if out is not None else Path(scratch) / "figures"
        place.mkdir(parents=True, exist_ok=True)
        with progress(name, None):
            return _run(paper, quick, place, Path(scratch) / "found.json")


def _run(paper: Paper, quick: bool, out: Path, found: Path) -> PaperResult:
    checkout = _checkout(paper)
    program = str(paper.program.relative_to(checkout))
    options = ["--quick"] if quick else []
    date, revision, start = datetime.now(UTC), _revision(checkout), perf_counter()
    sources = [str(checkout / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with (out / f"{paper.name}.log").open("w", encoding="utf-8") as log:
        done = subprocess.run(
            [sys.executable, program, *options, "--out", str(out), "--json", str(found)],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sources)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    written: dict[str, Any] = {"rows": [], "left_out": [], "error": ""}
    if found.is_file():
        written = json.loads(found.read_text(encoding="utf-8"))
    else:
        last = (out / f"{paper.name}.log").read_text(encoding="utf-8").strip().splitlines()[-1:]
        written["error"] = f"exit status {done.returncode}: {' '.join(last)}"
    return PaperResult(
        paper=paper,
        rows=tuple(PaperRow(**row) for row in written["rows"]),
        left_out=tuple(written["left_out"]),
        error=written["error"],
        status=done.returncode,
        quick=quick,
        command=" ".join(["python", program, *options]),
        revision=revision,
        date=date.strftime("%Y-%m-%d %H:%M"),
        seconds=perf_counter() - start,
    )


def _checkout(paper: Paper) -> Path:
    """The folder above the one with the index."""
    return next(p.parent for p in paper.program.parents if (p / INDEX).is_file())


def _revision(checkout: Path) -> str:
    """The commit of a checkout, and whether files differ from it."""
    git = ["git", "-C", str(checkout)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        status = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True
        )
    except OSError:
        return f"unknown, net2gp {__version__}"
    if commit.returncode:
        return f"unknown, net2gp {__version__}"
    return commit.stdout.strip() + (" with changes" if status.stdout.strip() else "")
