"""Links that predict labels best that were held out: a temperature, and what novelty takes away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from net2gp.likelihoods.traits import Linked
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.around_network import AroundNetwork
from net2gp.types import Inputs

LOG_SCALES = (-6.0, 40.0)
"""The logarithms of the scales of a link that are looked through."""

WEIGHTS = (1.0, 0.25, 0.0625, 0.0)
"""Shares of the variance of novel points that are tried, the most cautious one first."""


def with_scale(posterior: Posterior, x: Inputs, y: Tensor) -> Posterior:
    """The posterior with the matched kind of link, of the scale at which log p(y | x) is largest."""
    likelihood = posterior.likelihood
    assert isinstance(likelihood, Linked)
    mean, variances = _law(posterior, x)
    link = likelihood.matched_link

    def loss(scale: float) -> Tensor:
        return -likelihood.log_prob(link(scale).shrink(mean, variances), y)

    return replace(posterior, likelihood=likelihood.with_link(link(_best(loss))))


def with_weight(posterior: Posterior, x: Inputs, y: Tensor) -> Posterior:
    """The posterior that takes as much certainty from novel points as the labels at x allow.

    For each share of `novelty_var` the scale has the largest log p(y | x). The largest share is taken whose
    log p(y | x) is not smaller than the best one by more than a standard error of the difference: few of the
    points are novel, so that the labels of ordinary ones say little, and caution costs nothing there.
    """
    likelihood, process = posterior.likelihood, posterior.process
    assert isinstance(likelihood, Linked)
    assert isinstance(process, AroundNetwork)
    (mean, variances), link = _law(posterior, x), likelihood.link
    twice = 2.0 if likelihood.matched_link.needs == "contrasts" else 1.0
    excess = twice * process.excess(x)[:, None].double()
    relative = link.novelty_var / link.scale**2

    def loss(scale: float, weight: float) -> Tensor:
        gained = weight * relative * scale**2 * excess
        return -likelihood.log_prob(link.__class__(scale).shrink(mean, variances + gained), y)

    scales = [_best(partial(loss, weight=weight)) for weight in WEIGHTS]
    losses = torch.stack([loss(*pair) for pair in zip(scales, WEIGHTS, strict=True)])
    more = losses - losses[losses.mean(1).argmin()]
    allowed = more.mean(1) <= more.std(1, correction=0) / len(y) ** 0.5
    number = int(allowed.int().argmax())
    scale, weight = scales[number], WEIGHTS[number]
    chosen = link.__class__(scale, novelty_var=weight * relative * scale**2)
    return replace(posterior, likelihood=likelihood.with_link(chosen))


def _law(posterior: Posterior, x: Inputs) -> tuple[Tensor, Tensor]:
    """The means of f and the variances that the matched kind of link reads, (N, C) each."""
    likelihood = posterior.likelihood
    assert isinstance(likelihood, Linked)
    if likelihood.matched_link.needs == "contrasts":
        return posterior.mean(x).double(), posterior.contrast(x).double()
    mean, variances = posterior.process.diagonal(x)
    return mean.double(), variances.double()


def _best(loss: Callable[[float], Tensor]) -> float:
    """The scale of the smallest mean loss, which is convex in the scale."""
    found = minimize_scalar(
        lambda log: float(loss(float(np.exp(log))).mean()),
        bounds=LOG_SCALES,
        method="bounded",
        options={"xatol": 1e-4},
    )
    return float(np.exp(found.x))
