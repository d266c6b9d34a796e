"""Scores of predicted numbers: errors, likelihood, coverage of intervals, CRPS."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Distribution

from net2gp.errors import InputError
from net2gp.metrics.checks import (
    check_numbers,
    check_tensors,
    checked_levels,
    checked_variance,
    shaped_like,
    shaped_like_a_sample,
)


def rmse(mean: Tensor, y: Tensor) -> Tensor:
    """Compute the root mean squared error over points and outputs.

    Args:
        mean: Predicted means, (N,) or (N, C).
        y: Targets, in the same shape.

    Returns:
        The error.

    >>> rmse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    tensor(1.4142)
    """
    y = shaped_like(mean, y, "y")
    return (mean - y).square().mean().sqrt()


def gaussian_nll(prediction: Distribution | tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    """Compute ½ log 2πv + (y − m)²/2v, averaged over points and outputs.

    Args:
        prediction: A pair (mean, variance) of tensors (N,) or (N, C), or a distribution. Only mean and
            variance of a distribution are used. Unlike `nll`, correlated outputs are scored one by one.
        y: Targets, in the shape of the mean.

    Returns:
        The negative log likelihood per number.

    >>> gaussian_nll((torch.zeros(2), torch.ones(2)), torch.zeros(2))
    tensor(0.9189)
    """
    mean, var = _mean_and_variance(prediction)
    y, var = shaped_like(mean, y, "y"), checked_variance(mean, var, zero=False)
    return 0.5 * ((y - mean).square() / var + var.log() + math.log(2 * math.pi)).mean()


def nll(distribution: Distribution, y: Tensor) -> Tensor:
    """Compute −log p(y_n), averaged over the points. The outputs of a point are summed.

    Args:
        distribution: The predicted law of y, such as `posterior.predict(x)`.
        y: Targets, in the shape of a draw. The last axis may be missing if it has size 1.

    Returns:
        The negative log likelihood per point.

    Raises:
        InputError: If `y` has another shape.

    >>> from torch.distributions import Categorical
    >>> nll(Categorical(logits=torch.zeros(3, 2)), torch.tensor([0, 1, 1]))
    tensor(0.6931)
    """
    if not isinstance(distribution, Distribution):
        raise InputError(
            f"nll takes the law of y, but got {type(distribution).__name__}. Pass posterior.predict(x)."
        )
    shape = distribution.batch_shape + distribution.event_shape
    check_tensors(y=y)
    if y.dim() == len(shape) - 1 and shape[-1:] == (1,):
        y = y[..., None]
    if tuple(y.shape) != tuple(shape):
        raise InputError(
            f"y must have shape {tuple(shape)} for this {type(distribution).__name__}, "
            f"but has shape {tuple(y.shape)}. Pass the targets of the points that were predicted."
        )
    if not y.is_floating_point() or _is_discrete(distribution):
        y = y.to(distribution.mean.dtype)
    log_prob = distribution.log_prob(y)
    return -log_prob.reshape(log_prob.shape[0], -1).sum(-1).mean()


def _is_discrete(distribution: Distribution) -> bool:
    try:
        return bool(distribution.support.is_discrete)  # type: ignore[union-attr]
    except (NotImplementedError, AttributeError):  # a law without a stated support
        return False


def coverage(mean: Tensor, var: Tensor, y: Tensor, level: float | Tensor) -> Tensor:
    """Compute the share of y inside the central Gaussian interval of probability `level`.

    Args:
        mean: Predicted means, (N,) or (N, C).
        var: Predicted variances of y, in the same shape. Zero is allowed.
        y: Targets, in the same shape.
        level: A probability, or a tensor of them.

    Returns:
        The share for each level. A calibrated prediction covers the share `level`.

    >>> coverage(torch.zeros(4), torch.ones(4), torch.tensor([0.0, 0.5, -1.0, 3.0]), 0.9)
    tensor(0.7500)
    """
    y, var = shaped_like(mean, y, "y"), checked_variance(mean, var, zero=True)
    check_numbers(mean=mean, y=y)
    levels = checked_levels(level, mean)
    width = torch.special.ndtri((1 + levels) / 2)[..., None]
    # At var = 0 and level = 1, 0·∞ would be NaN, but the interval of probability 1 holds everything.
    reach = torch.where(width.isinf(), torch.inf, width * var.reshape(-1).sqrt())
    return ((y - mean).abs().reshape(-1) <= reach).to(mean.dtype).mean(-1)


def coverage_samples(samples: Tensor, y: Tensor, level: float | Tensor) -> Tensor:
    """Compute the share of y between the sample quantiles (1 ∓ level)/2, as `coverage` does for a Gaussian.

    Quantiles interpolate between the samples. Few samples make the intervals too short: at level 1, S draws
    of the right law contain another draw with probability (S − 1)/(S + 1). The cost is O(S log S) per
    number.

    Args:
        samples: Draws of y (not of f), (S, N) or (S, N, C).
        y: Targets, in the shape of one sample.
        level: A probability, or a tensor of them.

    Returns:
        The share for each level.

    >>> samples = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])[:, None].expand(5, 2)
    >>> coverage_samples(samples, torch.tensor([2.5, 3.9]), torch.tensor([0.5, 1.0]))
    tensor([0.5000, 1.0000])
    """
    y = shaped_like_a_sample(samples, y)
    check_numbers(samples=samples, y=y)
    levels = checked_levels(level, samples)
    ordered, flat = samples.reshape(len(samples), -1).sort(0).values, y.reshape(-1)
    lower, upper = (_quantile(ordered, (1 + sign * levels) / 2) for sign in (-1, 1))
    return ((flat >= lower) & (flat <= upper)).to(samples.dtype).mean(-1)


def coverage_error(mean: Tensor, var: Tensor, y: Tensor, num_levels: int = 19) -> Tensor:
    """Compute |observed − nominal coverage|, averaged over equally spaced levels.

    This is for regression what `expected_calibration_error` is for classes. The levels are l/(L + 1), l =
    1…L.

    Args:
        mean: Predicted means, (N,) or (N, C).
        var: Predicted variances of y, in the same shape. Zero is allowed.
        y: Targets, in the same shape.
        num_levels: The number L of levels.

    Returns:
        The error: 0 is calibrated, ½ is the worst.

    Raises:
        InputError: If `num_levels` is below 1.

    >>> coverage_error(torch.zeros(2), torch.ones(2), torch.tensor([0.1, 9.0]), num_levels=3)
    tensor(0.1667)

    Reference: Kuleshov, Fenner & Ermon (2018), Accurate uncertainties for deep learning using calibrated
    regression, with absolute instead of squared differences.
    """
    if num_levels < 1:
        raise InputError(f"num_levels must be at least 1, but is {num_levels}. Try num_levels=19.")
    steps = torch.arange(1, num_levels + 1, dtype=mean.dtype, device=mean.device)
    levels = steps / (num_levels + 1)
    return (coverage(mean, var, y, levels) - levels).abs().mean()


def crps_gaussian(mean: Tensor, var: Tensor, y: Tensor) -> Tensor:
    """Compute the continuous ranked probability score ∫ (F(t) − [t ≥ y])² dt of N(m, v), averaged.

    With z = (y − m)/√v it is √v [z (2Φ(z) − 1) + 2φ(z) − 1/√π], and |y − m| at v = 0.

    Args:
        mean: Predicted means, (N,) or (N, C).
        var: Predicted variances of y, in the same shape. Zero is allowed.
        y: Targets, in the same shape.

    Returns:
        The score, in units of y. Less is better.

    >>> crps_gaussian(torch.zeros(1), torch.zeros(1), torch.tensor([2.0]))
    tensor(2.)

    Reference: Gneiting & Raftery (2007), Strictly proper scoring rules, prediction, and estimation.
    """
    y, var = shaped_like(mean, y, "y"), checked_variance(mean, var, zero=True)
    std = var.clamp(min=torch.finfo(var.dtype).tiny).sqrt()
    z = (y - mean) / std
    # z (2Φ(z) − 1) std = (y − mean) erf(z/√2) stays finite where z overflows.
    density = torch.exp(-z.square() / 2) * math.sqrt(2 / math.pi)
    spread = std * (density - 1 / math.sqrt(math.pi))
    return ((y - mean) * torch.erf(z / math.sqrt(2)) + spread).mean()


def crps_samples(samples: Tensor, y: Tensor, *, unbiased: bool = True) -> Tensor:
    """Compute the score E|X − y| − ½ E|X − X'| of the law that the samples are drawn from, averaged.

    The samples are sorted first, since the sum over pairs is then Σ_s (2s − S − 1) x₍ₛ₎. The cost is
    O(S log S) per number.

    Args:
        samples: Draws of y, (S, N) or (S, N, C).
        y: Targets, in the shape of one sample.
        unbiased: Whether the mean over pairs leaves out pairs of a sample with itself, which makes the score
            right on average for any S. With False it takes all pairs, which scores the S samples themselves
            as the prediction (and a single sample by its absolute error).

    Returns:
        The score, in units of y. Less is better.

    Raises:
        InputError: If there are too few samples, two with `unbiased`.

    >>> crps_samples(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]), unbiased=False)
    tensor(0.5000)

    References: Gneiting & Raftery (2007); Ferro (2014), Fair scores for ensemble forecasts.
    """
    y = shaped_like_a_sample(samples, y)
    S = len(samples)
    if 1 + unbiased > S:
        raise InputError(
            f"crps_samples needs at least {1 + unbiased} samples, but got {S}. Pass samples of shape "
            "(S, N) or (S, N, C), draws of y in front, or unbiased=False for a single draw."
        )
    ordered = (samples - y).sort(0).values
    weights = 2 * torch.arange(1, S + 1, dtype=samples.dtype, device=samples.device) - S - 1
    pairs = torch.tensordot(weights, ordered, 1) / (S * (S - 1 if unbiased else S))
    return (ordered.abs().mean(0) - pairs).mean()


def _mean_and_variance(prediction: Distribution | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if isinstance(prediction, Distribution):
        return prediction.mean, prediction.variance
    mean, var = prediction
    return mean, var


def _quantile(ordered: Tensor, q: Tensor) -> Tensor:
    """Interpolate linearly between sorted rows (S, M): (…, M) for q of shape (…)."""
    place = q * (len(ordered) - 1)
    low = place.floor().long()
    high = (low + 1).clamp(max=len(ordered) - 1)
    return torch.lerp(ordered[low], ordered[high], (place - low)[..., None])
