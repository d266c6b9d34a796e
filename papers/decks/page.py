"""What Gaussian processes say about real networks, as one page: convergence, new sources, stability.

    NET2GP_DATA=... python papers/decks/page.py --out DIR [--quick]

Runs every topic, writes its figure and one HTML page with all of them into the folder, prints the claims, and
exits with 0 if all of them hold. To add a figure, write a function from `quick` to a `Study` and put it into
`TOPICS`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import convergence
import domain
import stability

sys.path.append(str(Path(__file__).parents[1]))
from pages import Page, Topic

TOPICS: list[Topic] = [*convergence.TOPICS, *domain.TOPICS, *stability.TOPICS]

LEAD = """A network that was turned into a Gaussian process can be asked more than for predictions: whether
its training will converge, how it takes to the same labels from another source, and how far its outputs and
its certainty move when inputs do. Each figure comes from a program that checks what it claims."""

PAGE = Page("Asking networks", LEAD, "python papers/decks/page.py", "decks", "decks.html")


def main(arguments: list[str] | None = None) -> int:
    """Run all topics, or those that are named, and write the page."""
    return PAGE.main(TOPICS, __doc__, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
