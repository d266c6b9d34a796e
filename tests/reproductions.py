"""A folder of small reproductions, each of which ends in another way."""

from __future__ import annotations

from pathlib import Path

PAPERS = Path(__file__).resolve().parent.parent / "papers"

PROGRAM = """
import argparse, sys
sys.path.insert(0, {papers!r})
import findings
from findings import Entry
parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--count", type=int, default=100)
options = findings.parse(parser, quick={{"count": 3}})
{body}
"""

GOOD = """
findings.topic("sums")
findings.add([Entry("count", 3, options.count, 97, True)])
findings.leave_out("the rest, which takes days")
"""
WRONG = """
findings.add([
    Entry("a number", 2.0, 2.5, 0.1, False, note="half a unit too much"),
    Entry("a bound", 1.0, 0.5, 0.0, True, "at most"),
    Entry("beside it", 0.9, 0.8, None, True, "shown"),
    Entry("a claim", None, "+0.1 ± 0.2", None, True, "claim"),
    Entry("excused", None, "-1 ± 0.2", None, True, "exception", "no, an exception: known"),
    Entry("no number", 1.0, float("nan"), 0.1, False),
])
sys.exit(1)
"""
CRASH = 'findings.add([Entry("first", 1.0, 1.0, 0.0, True)])\nraise OSError("no such digits")'
SILENT = "import os; print('killed', flush=True); os._exit(9)"


def write(place: Path) -> Path:
    """A folder of reproductions: as expected, not as expected, stopped, and ended without a word."""
    place.mkdir(parents=True)
    index = ""
    for name, body in {"good": GOOD, "wrong": WRONG, "crash": CRASH, "silent": SILENT}.items():
        text = PROGRAM.format(papers=str(PAPERS), body=body)
        if name == "silent":
            text = body
        (place / f"{name}.py").write_text(text, encoding="utf-8")
        index += f'[{name}]\nprogram = "{name}.py"\ntitle = "On {name} & <b>"\n'
        index += 'source = "A book."\nquick = "Three of them."\nfull = "one second."\n'
    (place / "papers.toml").write_text(index, encoding="utf-8")
    return place
