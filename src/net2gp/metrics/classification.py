"""Scores of predicted classes: accuracy, likelihood, Brier score, calibration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.metrics.checks import checked_classes


def accuracy(probs: Tensor, y: Tensor) -> Tensor:
    """Compute the share of points whose most probable class is y.

    Args:
        probs: Probabilities, (N, C), or (N,) or (N, 1) for label 1 of two. With two columns or more, logits
            or means work as well.
        y: Labels, (N,).

    Returns:
        The share, between 0 and 1.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
    tensor(0.5000)
    """
    probs, y = checked_classes(probs, y, any_scores=True)
    return (probs.argmax(-1) == y).to(probs.dtype).mean()


def brier(probs: Tensor, y: Tensor) -> Tensor:
    """Compute the Brier score Σ_c (p_c − [y = c])², averaged over points.

    With two classes this is twice (p₁ − y)², which is also called the Brier score.

    Args:
        probs: Probabilities, (N, C), or (N,) or (N, 1) for label 1 of two.
        y: Labels, (N,).

    Returns:
        The score, between 0 (best) and 2.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    tensor(0.5000)

    Reference: Brier (1950), Verification of forecasts expressed in terms of probability.
    """
    probs, y = checked_classes(probs, y)
    target = torch.nn.functional.one_hot(y, probs.shape[-1]).to(probs)
    return (probs - target).square().sum(-1).mean()


@dataclass(frozen=True, eq=False)
class Reliability:
    """Confidence and accuracy in B bins of equal width. Empty bins hold NaN.

    Args:
        edges: The edges of the bins, (B + 1,).
        confidence: The mean confidence of the points in each bin, (B,).
        accuracy: Their accuracy, (B,).
        count: Their number, (B,).
    """

    edges: Tensor
    confidence: Tensor
    accuracy: Tensor
    count: Tensor


def reliability(probs: Tensor, y: Tensor, num_bins: int = 15) -> Reliability:
    """Compute the mean confidence max_c p_c and the accuracy of the points in each bin (lower, upper].

    Args:
        probs: Probabilities, (N, C), or (N,) or (N, 1) for label 1 of two.
        y: Labels, (N,).
        num_bins: The number of bins.

    Returns:
        The bins.

    Raises:
        InputError: If `num_bins` is below 1.

    >>> reliability(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]), 2).accuracy
    tensor([   nan, 0.5000])

    Reference: Guo et al. (2017), On calibration of modern neural networks.
    """
    if num_bins < 1:
        raise InputError(f"num_bins must be at least 1, but is {num_bins}. Try num_bins=15.")
    probs, y = checked_classes(probs, y)
    confidence, label = probs.max(-1)
    correct = (label == y).to(probs.dtype)
    edges = torch.linspace(0, 1, num_bins + 1, dtype=probs.dtype, device=probs.device)
    # Only inner edges count, so that a confidence of 0 or above 1 by rounding falls into an outer bin.
    index = torch.bucketize(confidence, edges[1:-1])
    count = torch.bincount(index, minlength=num_bins)

    def average(values: Tensor) -> Tensor:
        return torch.zeros_like(edges[1:]).index_add(0, index, values) / count

    return Reliability(edges, average(confidence), average(correct), count)


def expected_calibration_error(probs: Tensor, y: Tensor, num_bins: int = 15) -> Tensor:
    """Compute Σ_b n_b/N |accuracy_b − confidence_b| over the bins of `reliability`.

    Args:
        probs: Probabilities, (N, C), or (N,) or (N, 1) for label 1 of two.
        y: Labels, (N,).
        num_bins: The number of bins.

    Returns:
        The error, between 0 (calibrated) and 1.

    >>> expected_calibration_error(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]), 1)
    tensor(0.3500)

    Reference: Naeini, Cooper & Hauskrecht (2015), Obtaining well calibrated probabilities.
    """
    bins = reliability(probs, y, num_bins)
    gap = (bins.accuracy - bins.confidence).abs().nan_to_num(0)
    return (gap * bins.count).sum() / bins.count.sum()
