"""How long the steps of a fit are: those of Adam, and those of the last layer."""

from __future__ import annotations

import math

from net2gp.deep.inference.problem import DeepProblem, in_batches
from net2gp.deep.inference.settings import Ascent
from net2gp.likelihoods.traits import has_gaussian_noise

SHORT_RATE, LEAST_SHARE = 0.1, 0.1
"""The rate of the last layer where a single batch does not have its optimum, and the least share of it that
is left at the end: it then averages over a hundred batches."""

LATE = 0.5
"""The share of its first value at which the learning rate is small enough for a slow last layer to follow."""

ENOUGH = 5
"""How many rows a batch needs for each inducing point, so that it has nearly the optimum of all rows."""


def falling(step: int, ascent: Ascent) -> float:
    """The learning rate of a step relative to the first: half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * step / ascent.num_steps))


def natural_rate(problem: DeepProblem, ascent: Ascent, step: int) -> float:
    """The share of the way to its optimum that the last layer goes in a step.

    Under Gaussian noise a last layer that is behind the others leaves residuals that they then move for. A
    batch of enough rows has nearly the optimum, so it is taken while the others move fast. It fits the batch
    more closely than all rows, which makes the noise too small, so that the last steps average over batches.
    Without Gaussian noise the average grows longer in the end; with it, targets of little noise need a last
    layer that follows.
    """
    gaussian, size = has_gaussian_noise(problem.likelihood), ascent.batch_size
    if gaussian and step == 0:
        return 1.0
    if ascent.natural_rate is not None:
        return ascent.natural_rate
    if size is None or not in_batches(problem, ascent):
        return 1.0 if gaussian else SHORT_RATE
    if not gaussian:
        return SHORT_RATE * max(LEAST_SHARE, falling(step, ascent))
    wide = problem.layers[-1].num_inducing
    assert wide is not None
    early = size >= ENOUGH * wide and falling(step, ascent) > LATE
    return 1.0 if early else SHORT_RATE
