"""Scores of predictions: accuracy, likelihood, calibration, detection.

Each takes tensors (or a distribution) and returns a 0-d tensor. Regressions take mean, variance and
y of one shape, (N,) or (N, C); classifications take probabilities (N, C) and labels (N,), where one
probability a point, (N,) or (N, 1), means that of label 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Distribution

from net2gp.errors import InputError


def rmse(mean: Tensor, y: Tensor) -> Tensor:
    """Root mean squared error, over points and outputs.

    >>> rmse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    tensor(1.4142)
    """
    y = _like(mean, y, "y")
    return (mean - y).square().mean().sqrt()


def gaussian_nll(prediction: Distribution | tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    """½ log 2πv + (y − m)²/2v, averaged over points and outputs.

    `prediction` is a pair (mean, variance), or a distribution of which only mean and variance are
    used: unlike `nll`, correlated outputs are scored one by one.

    >>> gaussian_nll((torch.zeros(2), torch.ones(2)), torch.zeros(2))
    tensor(0.9189)
    """
    mean, var = _mean_and_variance(prediction)
    y, var = _like(mean, y, "y"), _checked_variance(mean, var, zero=False)
    return 0.5 * ((y - mean).square() / var + var.log() + math.log(2 * math.pi)).mean()


def nll(distribution: Distribution, y: Tensor) -> Tensor:
    """−log p(y_n), averaged over the points; the outputs of a point are summed.

    >>> from torch.distributions import Categorical
    >>> nll(Categorical(logits=torch.zeros(3, 2)), torch.tensor([0, 1, 1]))
    tensor(0.6931)
    """
    shape = distribution.batch_shape + distribution.event_shape
    if y.dim() == len(shape) - 1 and shape[-1:] == (1,):
        y = y[..., None]
    if tuple(y.shape) != tuple(shape):
        raise InputError(
            f"y must have shape {tuple(shape)} for this {type(distribution).__name__}, "
            f"but has shape {tuple(y.shape)}."
        )
    if isinstance(distribution, Bernoulli):
        y = y.to(distribution.logits.dtype)
    log_prob = distribution.log_prob(y)
    return -log_prob.reshape(log_prob.shape[0], -1).sum(-1).mean()


def accuracy(probs: Tensor, y: Tensor) -> Tensor:
    """The share of points whose most probable class is y.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
    tensor(0.5000)
    """
    probs, y = _classes(probs, y)
    return (probs.argmax(-1) == y).to(probs.dtype).mean()


def brier(probs: Tensor, y: Tensor) -> Tensor:
    """Σ_c (p_c − [y = c])², averaged over points: 0 is best, 2 is worst.

    With two classes this is twice (p₁ − y)², which some call the Brier score.

    Reference: Brier (1950), Verification of forecasts expressed in terms of probability.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    tensor(0.5000)
    """
    probs, y = _classes(probs, y)
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
    probs, y = _classes(probs, y)
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


def coverage(mean: Tensor, var: Tensor, y: Tensor, level: float | Tensor) -> Tensor:
    """The share of y inside the central Gaussian interval of probability `level`.

    A calibrated prediction covers the share `level`. A tensor of levels gives a share for each.

    >>> coverage(torch.zeros(4), torch.ones(4), torch.tensor([0.0, 0.5, -1.0, 3.0]), 0.9)
    tensor(0.7500)
    """
    y, var = _like(mean, y, "y"), _checked_variance(mean, var, zero=True)
    levels = torch.as_tensor(level, dtype=mean.dtype, device=mean.device)
    if not bool(((levels >= 0) & (levels <= 1)).all()):
        raise InputError(f"level must be between 0 and 1, but is {level}. Try level=0.95.")
    width = torch.special.ndtri((1 + levels) / 2)[..., None]
    # 0·∞ at var = 0 and level = 1 would be NaN; there the interval still holds everything.
    reach = torch.where(width.isinf(), torch.inf, width * var.reshape(-1).sqrt())
    return ((y - mean).abs().reshape(-1) <= reach).to(mean.dtype).mean(-1)


def crps_gaussian(mean: Tensor, var: Tensor, y: Tensor) -> Tensor:
    """Continuous ranked probability score ∫ (F(t) − [t ≥ y])² dt of N(m, v), averaged.

    With z = (y − m)/√v it is √v [z (2Φ(z) − 1) + 2φ(z) − 1/√π], and |y − m| at v = 0.

    Reference: Gneiting & Raftery (2007), Strictly proper scoring rules, prediction, and estimation.

    >>> crps_gaussian(torch.zeros(1), torch.zeros(1), torch.tensor([2.0]))
    tensor(2.)
    """
    y, var = _like(mean, y, "y"), _checked_variance(mean, var, zero=True)
    std = var.clamp(min=torch.finfo(var.dtype).tiny).sqrt()
    z = (y - mean) / std
    # z (2Φ(z) − 1) std = (y − mean) erf(z/√2) stays finite where z overflows.
    density = torch.exp(-z.square() / 2) * math.sqrt(2 / math.pi)
    spread = std * (density - 1 / math.sqrt(math.pi))
    return ((y - mean) * torch.erf(z / math.sqrt(2)) + spread).mean()


def auroc(scores_in: Tensor, scores_out: Tensor) -> Tensor:
    """P(an outlier scores higher than an inlier), ties counting half.

    Scores are uncertainties, such as entropies or variances: 1 separates perfectly, ½ is chance.
    Cost O(n log n).

    Reference: Hanley & McNeil (1982), The meaning and use of the area under a ROC curve.

    >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.15, 0.9]))
    tensor(0.7500)
    """
    inside, outside = scores_in.reshape(-1).sort().values, scores_out.reshape(-1)
    if not inside.numel() or not outside.numel():
        raise InputError(
            f"auroc needs scores of both kinds, but got {inside.numel()} inside "
            f"and {outside.numel()} outside."
        )
    below = torch.searchsorted(inside, outside)
    not_above = torch.searchsorted(inside, outside, right=True)
    wins = (below + not_above).double().mean() / 2
    return (wins / inside.numel()).to(scores_in.dtype)


def _mean_and_variance(prediction: Distribution | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if isinstance(prediction, Distribution):
        return prediction.mean, prediction.variance
    mean, var = prediction
    return mean, var


def _like(mean: Tensor, value: Tensor, name: str) -> Tensor:
    """`value` in the shape of `mean`, with (N,) and (N, 1) taken for each other."""
    if mean.shape == value.shape:
        return value
    shapes = [t.shape[:1] if t.dim() == 2 and t.shape[1] == 1 else t.shape for t in (mean, value)]
    if shapes[0] != shapes[1]:
        raise InputError(
            f"mean and {name} must have the same shape, but have {tuple(mean.shape)} "
            f"and {tuple(value.shape)}."
        )
    return value.reshape(mean.shape)


def _checked_variance(mean: Tensor, var: Tensor, *, zero: bool) -> Tensor:
    if not bool(((var >= 0) if zero else (var > 0)).all()):
        raise InputError(
            f"variances must be {'zero or ' if zero else ''}positive, but the smallest is "
            f"{var.min().item():g}. Pass the variance of y, e.g. posterior.predict(x).variance."
        )
    return _like(mean, var, "variance")


def _classes(probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities as (N, C ≥ 2) and labels as (N,) integers."""
    if probs.dim() == 1:
        probs = probs[:, None]
    if probs.dim() == 2 and probs.shape[1] == 1:
        probs = torch.cat([1 - probs, probs], 1)
        y = y.reshape(-1) if y.dim() == 2 and y.shape[1] == 1 else y
    if probs.dim() != 2 or tuple(y.shape) != (probs.shape[0],):
        raise InputError(
            f"probs must be (N, C) and y (N,), but they are {tuple(probs.shape)} and "
            f"{tuple(y.shape)}. Score several labels one at a time: probs[:, c], y[:, c]."
        )
    y = y.long()
    if y.numel() == 0 or int(y.min()) < 0 or int(y.max()) >= probs.shape[1]:
        raise InputError(
            f"y must hold labels in 0..{probs.shape[1] - 1}, at least one, but holds "
            f"{sorted(set(y.tolist()))[:10]}."
        )
    return probs, y
