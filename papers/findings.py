"""What a program found, as data: the options that all programs share, and the file that --json writes.

    python papers/neal1996/run.py --quick --json neal.json

The file has a row for each number or claim, in the order of the printed tables:

    {"rows": [{"topic": "", "name": "...", "paper": 1.0, "ours": 1.02, "allowed": 0.1, "bound": "within",
               "holds": true, "note": ""}, ...],
     "left_out": [], "error": ""}

`bound` says how `ours` is held against `paper`:

- "within", "at most", "at least": `ours` may be off by `allowed`, in either direction, above or below;
- "shown": beside it for comparison, without a verdict;
- "claim": what the row says in words was judged in the program; `ours` is text and `paper` null;
- "exception": a claim that is known not to hold here, for the reason in `note`, and was not expected to.

`left_out` says what was not computed, and why; `error` what stopped the program, if anything did. Infinite
numbers and NaN are text.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

BOUNDS = ("within", "at most", "at least", "shown", "claim", "exception")


@dataclass(frozen=True)
class Entry:
    """One row of the file."""

    name: str
    paper: float | str | None
    ours: float | str
    allowed: float | str | None
    holds: bool
    bound: str = "within"
    note: str = ""
    topic: str = ""


@dataclass
class Recorder:
    """Where rows go, if anywhere, and the rows so far."""

    path: Path | None = None
    topic: str = ""
    rows: tuple[Entry, ...] = ()
    left_out: tuple[str, ...] = ()

    def write(self, error: str = "") -> None:
        """Write the file, or nothing without --json. It is complete at any time."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + ".part")
        rows = [asdict(row) for row in self.rows]
        content = {"rows": rows, "left_out": self.left_out, "error": error}
        part.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")
        part.replace(self.path)


RECORDER = Recorder()


def parse(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None = None,
    *,
    quick: dict[str, Any] | None = None,
) -> argparse.Namespace:
    """The options of a program, with --json; rows that are added from here on go into its file.

    `quick` has other defaults for --quick, which is added then. Options that are given win over both.
    """
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found as JSON")
    if quick is not None:
        words = ", ".join(f"--{key.replace('_', '-')} {_words(v)}" for key, v in quick.items())
        short = f"short for {words}" if words else "nothing is left out: it is quick already"
        parser.add_argument("--quick", action="store_true", help=short)
    options = parser.parse_args(arguments)
    if quick is not None and options.quick:
        parser.set_defaults(**quick)
        options = parser.parse_args(arguments)
    RECORDER.path, RECORDER.topic, RECORDER.rows = options.json, "", ()
    RECORDER.write()
    if options.json is not None:
        sys.excepthook = _stopped
    return options


def topic(name: str) -> None:
    """Say what the rows that follow are about."""
    RECORDER.topic = name


def add(entries: Iterable[Entry]) -> None:
    """Add rows, and write the file."""
    topic = RECORDER.topic
    RECORDER.rows += tuple(
        replace(
            entry,
            paper=_plain(entry.paper),
            ours=_plain(entry.ours),
            allowed=_plain(entry.allowed),
            holds=bool(entry.holds),
            topic=topic,
        )
        for entry in entries
    )
    RECORDER.write()


def show(numbers: Mapping[str, float], published: Mapping[str, float] | None = None) -> None:
    """Add numbers that are not judged, beside published ones where there are some."""
    beside = published or {}
    add(
        Entry(name, beside.get(name), value, None, True, "shown") for name, value in numbers.items()
    )


def leave_out(what: str) -> None:
    """Print what is not computed, and why, and write it to the file."""
    print(what)
    RECORDER.left_out += (what,)
    RECORDER.write()


def _plain(value: Any) -> Any:
    """A number as JSON can have it."""
    if value is None or isinstance(value, str):
        return value
    return float(value) if math.isfinite(value) else str(float(value))


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _stopped(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    RECORDER.write(f"{kind.__name__}: {error}")
    sys.__excepthook__(kind, error, trace)
