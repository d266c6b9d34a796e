"""What reproductions found: numbers beside the expected ones, as values, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Paper:
    """A reproduction that can be run.

    Args:
        name: What `run_paper` calls it.
        title: The paper.
        source: Where the expected numbers come from.
        quick: What a quick run leaves out.
        full: What a full run takes, or why it was not recorded.
        program: The program.
    """

    name: str
    title: str
    source: str
    quick: str
    full: str
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
        options: The program's own options that were given, beyond --quick.
        machine: What it ran on.
        printed: What the program printed.
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
    options: tuple[str, ...] = ()
    machine: str = ""
    printed: str = ""

    @property
    def kind(self) -> str:
        """Quick or full, and with which other options."""
        more = f", {' '.join(self.options)}" if self.options else ""
        return ("quick" if self.quick else "full") + more

    @property
    def is_part(self) -> bool:
        """Whether the program was told to run some of its parts only."""
        return "--only" in self.options

    @property
    def ended(self) -> bool:
        """Whether the program came to its end, with whatever verdict."""
        return self.status in (0, 1) and not self.error and bool(self.rows)

    @property
    def agrees(self) -> bool:
        """Whether the program ended well and everything came out as expected."""
        return self.ended and self.status == 0

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
        found = vars(self) | {
            "paper": paper,
            "rows": rows,
            "left_out": list(self.left_out),
            "options": list(self.options),
            "printed": self.printed.splitlines(),
        }
        return found | {"agrees": self.agrees, "outcome": self.outcome}

    @classmethod
    def from_dict(cls, paper: Paper, found: Mapping[str, Any]) -> PaperResult:
        """The result that `as_dict` wrote.

        Args:
            paper: The reproduction.
            found: What `as_dict` returned.

        Returns:
            The result.
        """
        rows = tuple(
            PaperRow(**{key: value for key, value in row.items() if key != "difference"})
            for row in found["rows"]
        )
        plain = ("error", "status", "quick", "command", "revision", "date", "seconds", "machine")
        return cls(
            paper,
            rows=rows,
            left_out=tuple(found["left_out"]),
            options=tuple(found["options"]),
            printed="\n".join(found["printed"]),
            **{key: found[key] for key in plain},
        )

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
