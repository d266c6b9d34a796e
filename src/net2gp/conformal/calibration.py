"""Calibration data: checked, predicted, and reduced to one threshold per group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from net2gp.conformal.ranks import Groups, kth_smallest, rank
from net2gp.errors import InputError
from net2gp.inputs import describe, gather, same_inputs, tensors
from net2gp.likelihoods.traits import rows_per_point
from net2gp.posteriors import Posterior
from net2gp.posteriors.conditioning.process import linearizations_of
from net2gp.types import Data, Inputs, Likelihood


def check_posterior(posterior: Any) -> None:
    """Raise unless `posterior` is a posterior.

    Args:
        posterior: What was passed.

    Raises:
        InputError: If it is anything else.
    """
    if not isinstance(posterior, Posterior):
        raise InputError(
            f"expected a posterior, but got {describe(posterior)}. Pass what condition, adapt, laplace or "
            "another method returns."
        )


@torch.no_grad()
def predicted(
    posterior: Posterior, data: Data, likelihood: Likelihood | None
) -> tuple[Distribution, Tensor]:
    """Predict the calibration data.

    Args:
        posterior: The posterior.
        data: The calibration data.
        likelihood: Replaces the posterior's own likelihood.

    Returns:
        The predicted law of the targets, and the targets.

    Raises:
        InputError: If the data are the posterior's own, or do not have the form of these.
    """
    if rows_per_point(posterior.likelihood if likelihood is None else likelihood) is not None:
        raise InputError(
            "coverage is promised for points that are exchangeable, and the pixels, tokens or times of one "
            "point are not. Promise it for one place of each point: laplace(linearize(network, "
            "output=lambda out: out[:, :, 0, 0]), (x, y[:, 0, 0]), likelihood)."
        )
    known = [] if posterior.x is None else tensors(posterior.x)
    networks = (one.example for one in linearizations_of(posterior))
    like = next((v for v in (*known, *networks) if v.is_floating_point()), None)
    x, y = gather(data, like)
    if posterior.x is not None and same_inputs(x, posterior.x):
        raise InputError(
            "the calibration data are the data of the posterior, whose residuals are too small to calibrate "
            "with. Pass data that it has not seen, or use conformal.jackknife_plus(posterior)."
        )
    f = posterior.mean(x)
    (posterior.likelihood if likelihood is None else likelihood).check(f, y)
    return posterior.predict(x, likelihood=likelihood), y


@torch.no_grad()
def predict(posterior: Posterior, x: Inputs, likelihood: Likelihood | None) -> Distribution:
    """Predict new points.

    Args:
        posterior: The posterior.
        x: N points.
        likelihood: Replaces the posterior's own likelihood.

    Returns:
        The law of their targets.
    """
    return posterior.predict(x, likelihood=likelihood)


def thresholds(scores: Tensor, groups: Groups, place: Tensor, alpha: float) -> Tensor:
    """Take the threshold of each group: the k-th smallest of its n scores, k = ⌈(1 − alpha)(n + 1)⌉.

    Args:
        scores: The scores of the calibration points, (n, D).
        groups: The groups.
        place: The place of each point's group, (n,).
        alpha: The share of misses that is allowed.

    Returns:
        The thresholds, (G, D); infinite for groups with too few points.
    """
    place = place.to(scores.device)
    parts = [
        kth_smallest(scores[place == g], rank(alpha, count), 0)
        for g, count in enumerate(groups.counts)
    ]
    return torch.stack(parts)
