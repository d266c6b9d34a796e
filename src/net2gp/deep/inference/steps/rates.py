"""How long the steps of a fit are: those of Adam, and those of the last layer."""

from __future__ import annotations

import math

import torch

from net2gp.deep.inference.problem import DeepProblem, in_batches
from net2gp.deep.inference.settings import Ascent
from net2gp.likelihoods.traits import has_gaussian_noise
from net2gp.types import Likelihood

SHORT_RATE, LEAST_SHARE = 0.1, 0.1
"""The rate of the last layer where a single batch does not have its optimum, and the least share of it that
is left at the end: it then averages over a hundred batches."""

LATE, NOISY = 0.5, 0.3
"""The share of its first value at which the learning rate is small enough for a slow last layer to follow,
and the share of the variance of the targets from which noise hides how far it is behind."""

ENOUGH = 5
"""How many rows a batch needs for each inducing point, so that it has nearly the optimum of all rows."""


def falling(share: float) -> float:
    """The learning rate relative to the first, after a share of the steps: half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * share))


def natural_rate(problem: DeepProblem, ascent: Ascent, share: float, *, noisy: bool) -> float:
    """The share of the way to its optimum that the last layer goes in a step.

    Under Gaussian noise a last layer that is behind the others leaves residuals that they then move for. A
    batch of enough rows has nearly the optimum, so it is taken. It fits the batch more closely than all
    rows, which matters where there is much noise: there the last steps average over batches. Without
    Gaussian noise the average grows longer in the end.

    Args:
        problem: The data and the layers.
        ascent: Settings.
        share: The share of the steps that were taken before.
        noisy: Whether much of the variance of the targets is noise.

    Returns:
        A number from 0 to 1.
    """
    gaussian, size = has_gaussian_noise(problem.likelihood), ascent.batch_size
    if gaussian and share == 0:
        return 1.0
    if ascent.natural_rate is not None:
        return ascent.natural_rate
    if size is None or not in_batches(problem, ascent):
        return 1.0 if gaussian else SHORT_RATE
    if not gaussian:
        return SHORT_RATE * max(LEAST_SHARE, falling(share))
    wide = problem.layers[-1].num_inducing
    assert wide is not None
    whole = not noisy or falling(share) > LATE
    return 1.0 if whole and size >= ENOUGH * wide else SHORT_RATE


def is_noisy(problem: DeepProblem, likelihood: Likelihood) -> bool:
    """Whether noise is much of the variance of the targets.

    Args:
        problem: The data and the layers.
        likelihood: The likelihood with the present value of open noise.

    Returns:
        Whether it is; False without Gaussian noise.
    """
    if not has_gaussian_noise(likelihood):
        return False
    noise = torch.as_tensor(likelihood.noise_var, dtype=torch.float64).detach().mean()
    return float(noise) > NOISY * float(problem.scale.mean())
