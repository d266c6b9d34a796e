"""Scores of predicted classes: accuracy, likelihood, Brier score, calibration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.metrics.checks import checked_classes


def accuracy(probs: Tensor, y: Tensor) -> Tensor:
    """The share of points whose most probable class is y; with two columns or more, logits and means do too.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
    tensor(0.5000)
    """
    probs, y = checked_classes(probs, y, any_scores=True)
    return (probs.argmax(-1) == y).to(probs.dtype).mean()


def brier(probs: Tensor, y: Tensor) -> Tensor:
    """Σ_c (p_c − [y = c])², averaged over points: 0 is best, 2 is worst.

    With two classes this is twice (p₁ − y)², which some call the Brier score.

    Reference: Brier (1950), Verification of forecasts expressed in terms of probability.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    tensor(0.5000)
    """
    probs, y = checked_classes(probs, y)
    target = torch.nn.functional.one_hot(y, probs.shape[-1]).to(probs)
    return (probs - target).square().sum(-1).mean()


@dataclass(frozen=True, eq=False)
class Reliability:
    """Confidence against accuracy in bins of equal width; empty bins hold NaN.

    `edges` is (B + 1,); `confidence`, `accuracy` and `count` are (B,).
    """

    edges: Tensor
    confidence: Tensor
    accuracy: Tensor
    count: Tensor


def reliability(probs: Tensor, y: Tensor, num_bins: int = 15) -> Reliability:
    """Mean confidence max_c p_c and accuracy of the points in each bin (lower, upper].

    Reference: Guo et al. (2017), On calibration of modern neural networks.

    >>> reliability(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]), 2).accuracy
    tensor([   nan, 0.5000])
    """
    if num_bins < 1:
        raise InputError(f"num_bins must be at least 1, but is {num_bins}. Try num_bins=15.")
    probs, y = checked_classes(probs, y)
    confidence, label = probs.max(-1)
    correct = (label == y).to(probs.dtype)
    edges = torch.linspace(0, 1, num_bins + 1, dtype=probs.dtype, device=probs.device)
    index = torch.bucketize(confidence, edges[1:-1])
    count = torch.bincount(index, minlength=num_bins)

    def average(values: Tensor) -> Tensor:
        return torch.zeros_like(edges[1:]).index_add(0, index, values) / count

    return Reliability(edges, average(confidence), average(correct), count)


def expected_calibration_error(probs: Tensor, y: Tensor, num_bins: int = 15) -> Tensor:
    """Σ_b n_b/N |accuracy_b − confidence_b| over the bins of `reliability`.

    Reference: Naeini, Cooper & Hauskrecht (2015), Obtaining well calibrated probabilities.

    >>> expected_calibration_error(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]), 1)
    tensor(0.3500)
    """
    bins = reliability(probs, y, num_bins)
    gap = (bins.accuracy - bins.confidence).abs().nan_to_num(0)
    return (gap * bins.count).sum() / bins.count.sum()
