"""The figures of the lecture on Bayesian networks as one page.

    python papers/lecture/page.py --out DIR [--quick] [--only TOPIC ...] [--list]

Runs every topic, writes its figure and one HTML page with all of them into the folder, prints the claims, and
exits with 0 if all of them hold. To add a figure, write a function from `quick` to a `Study` and put it into
`TOPICS`.
"""

from __future__ import annotations

import bayes_or_descent
import capacity
import conditions
import double_descent
import dropout
import ensembles
import evidence_ranks
import features
import finite_width
import gp_or_network
import gp_to_network
import harder_data
import inference
import maximum_likelihood
import minima
import ntk_depth
import priors
from common import Topic
from pages import Page

TOPICS: list[Topic] = [
    *maximum_likelihood.TOPICS,
    *minima.TOPICS,
    *capacity.TOPICS,
    *double_descent.TOPICS,
    *inference.TOPICS,
    *priors.TOPICS,
    *dropout.TOPICS,
    *ensembles.TOPICS,
    *conditions.TOPICS,
    *finite_width.TOPICS,
    *gp_to_network.TOPICS,
    *features.TOPICS,
    *ntk_depth.TOPICS,
    *bayes_or_descent.TOPICS,
    *gp_or_network.TOPICS,
    *evidence_ranks.TOPICS,
    *harder_data.TOPICS,
]

TITLE = "Bayesian networks, in figures"

LEAD = """From one minimum of the loss to many, from overfitting to priors, and from networks to Gaussian
processes. Each figure comes from a program that checks what it claims; the tables below the figures say
what was claimed and what was found."""

PAGE = Page(TITLE, LEAD, "python papers/lecture/page.py", "lecture")


def main(arguments: list[str] | None = None) -> int:
    """Run all topics, or those that are named, and write the page."""
    return PAGE.main(TOPICS, __doc__, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
