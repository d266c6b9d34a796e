"""When does depth help? The figures on deep Gaussian processes as one page.

    python papers/deep/page.py --out DIR [--quick]

Runs every topic, writes its figure and one HTML page with all of them into the folder, prints the claims, and
exits with 0 if all of them hold. To add a figure, write a function from `quick` to a `Study` and put it into
`TOPICS`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import bottleneck
import prior_draws

sys.path.append(str(Path(__file__).parents[1]))
from pages import Page, Topic

TOPICS: list[Topic] = [*prior_draws.TOPICS, *bottleneck.TOPICS]

LEAD = """Composing Gaussian processes gives functions that no single one has: flat stretches with jumps, and
features that data can shape. It is not true that more layers are always better. A few layers change the
law of functions a lot; many layers collapse all inputs into one, or forget them. What keeps a deep
process deep is a narrow layer, and a connection to the inputs. Each figure comes from a program that
checks what it claims."""

PAGE = Page("When does depth help?", LEAD, "python papers/deep/page.py", "deep", "deep.html")


def main(arguments: list[str] | None = None) -> int:
    """Run all topics, or those that are named, and write the page."""
    return PAGE.main(TOPICS, __doc__, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
