"""How close predictions come to those of a reference, such as a long Markov chain."""

from __future__ import annotations

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.metrics.checks import check_numbers, checked_classes, shaped_like, shaped_like_a_sample


def agreement(probs: Tensor, reference: Tensor) -> Tensor:
    """Compute the share of points whose most probable class is the same under both predictions.

    Args:
        probs: Probabilities, (N, C), or (N,) or (N, 1) for label 1 of two.
        reference: The probabilities to compare with, in the same shape.

    Returns:
        The share, between 0 and 1 (best).

    >>> agreement(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([[0.6, 0.4], [0.8, 0.2]]))
    tensor(0.5000)

    Reference: Izmailov et al. (2021), What are Bayesian neural network posteriors really like?
    """
    first, second = _both_classes(probs, reference)
    return (first.argmax(-1) == second.argmax(-1)).to(first.dtype).mean()


def total_variation(probs: Tensor, reference: Tensor) -> Tensor:
    """Compute ½ Σ_c |p_c − q_c|, averaged over points.

    It is the largest difference between the probabilities that both predictions give to a set of classes.

    Args:
        probs: Probabilities, (N, C), or (N,) or (N, 1) for label 1 of two.
        reference: The probabilities q to compare with, in the same shape.

    Returns:
        The distance, between 0 (best) and 1.

    >>> total_variation(torch.tensor([[0.9, 0.1]]), torch.tensor([[0.6, 0.4]]))
    tensor(0.3000)

    Reference: Izmailov et al. (2021), What are Bayesian neural network posteriors really like?
    """
    first, second = _both_classes(probs, reference)
    return 0.5 * (first - second).abs().sum(-1).mean()


def total_variation_samples(samples: Tensor, reference: Tensor, num_bins: int = 20) -> Tensor:
    """Compute the total variation between two laws of y in bins, averaged over points.

    The bins of each number lie between the quantiles of its reference samples, so that the reference gives
    each of B bins the share 1/B (samples that are equal stay together). Few samples look too far apart: S
    and R draws of the same law have a distance of about √(B/2π · (1/S + 1/R)). The cost is O((S + R) log R)
    per number.

    Args:
        samples: Draws of y, (S, N) or (S, N, C).
        reference: Draws of y to compare with, (R, N) or (R, N, C).
        num_bins: The number B of bins.

    Returns:
        The distance, between 0 (best) and 1.

    Raises:
        InputError: If the points differ, a draw is NaN, or `num_bins` is below 2.

    >>> reference = torch.arange(8.0)[:, None]
    >>> total_variation_samples(reference.clamp(max=6.5), reference, num_bins=4)
    tensor(0.)
    >>> total_variation_samples(reference + 4, reference, num_bins=4)
    tensor(0.5000)
    """
    if num_bins < 2:
        raise InputError(f"num_bins must be at least 2, but is {num_bins}. Try num_bins=20.")
    one, other = _both_samples(samples, reference)
    ordered = other.sort(0).values
    cuts = torch.arange(1, num_bins, device=one.device) * len(ordered) // num_bins
    edges = ordered[cuts.clamp(max=len(ordered) - 1)].mT.contiguous()
    shares = [_shares(draws.mT.contiguous(), edges, num_bins) for draws in (one, other)]
    return 0.5 * (shares[0] - shares[1]).abs().sum(-1).mean()


def wasserstein_samples(samples: Tensor, reference: Tensor) -> Tensor:
    """Compute the distance W₂ = √∫ (F⁻¹(u) − G⁻¹(u))² du between two laws of y, averaged over points.

    It is exact for the samples as they are: both quantile functions are steps, and the integral runs over
    the steps of both. Few samples look too far apart. The cost is O((S + R) log(S + R)) per number.

    Args:
        samples: Draws of y, (S, N) or (S, N, C).
        reference: Draws of y to compare with, (R, N) or (R, N, C).

    Returns:
        The distance, in units of y.

    Raises:
        InputError: If the points differ, or a draw is NaN.

    >>> wasserstein_samples(torch.tensor([[0.0], [1.0]]), torch.tensor([[3.0], [2.0], [2.0], [3.0]]))
    tensor(2.)

    Reference: Villani (2009), Optimal transport: old and new.
    """
    one, other = _both_samples(samples, reference)
    S, R = len(one), len(other)
    # In units of 1/(S·R) the steps end at whole numbers.
    own = torch.arange(1, S + 1, device=one.device) * R
    theirs = torch.arange(1, R + 1, device=one.device) * S
    ends = torch.cat([own, theirs]).unique()
    weights = torch.diff(ends, prepend=ends.new_zeros(1)).to(one.dtype) / (S * R)
    first = one.sort(0).values[torch.bucketize(ends, own)]
    second = other.sort(0).values[torch.bucketize(ends, theirs)]
    return torch.tensordot(weights, (first - second).square(), 1).sqrt().mean()


def _both_classes(probs: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    check_numbers(probs=probs, reference=reference)
    reference = shaped_like(probs, reference, "reference", "probs")
    anything = torch.zeros(len(probs), dtype=torch.long, device=probs.device)
    return checked_classes(probs, anything)[0], checked_classes(reference, anything)[0]


def _both_samples(samples: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Both as (draws, numbers)."""
    check_numbers(samples=samples, reference=reference)
    if reference.dim() < 2 or not len(reference):
        raise InputError(
            "reference must be (R, N) or (R, N, C), draws of y with at least one in front, but has shape "
            f"{tuple(reference.shape)}. Pass e.g. posterior.predict(x).sample(torch.Size([100]))."
        )
    shaped_like_a_sample(samples, reference[0])
    return samples.flatten(1), reference.to(samples).flatten(1)


def _shares(draws: Tensor, edges: Tensor, num_bins: int) -> Tensor:
    """The share of the draws (M, S) in each bin between the edges (M, B − 1): (M, B)."""
    index = torch.searchsorted(edges, draws, right=True)
    counts = draws.new_zeros(len(draws), num_bins)
    return counts.scatter_add(1, index, torch.ones_like(draws)) / draws.shape[1]
