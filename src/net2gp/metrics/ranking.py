"""Scores of uncertainties by the order in which they put points: detection and selection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.metrics.checks import check_numbers


def auroc(scores_in: Tensor, scores_out: Tensor) -> Tensor:
    """Compute the probability that an outlier scores higher than an inlier, where ties count half.

    Scores are uncertainties, such as entropies or variances. The cost is O(n log n).

    Args:
        scores_in: Scores of inliers, of any shape.
        scores_out: Scores of outliers, of any shape.

    Returns:
        The area under the ROC curve: 1 separates perfectly, ½ is chance.

    Raises:
        InputError: If one of the two holds no scores.

    >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.15, 0.9]))
    tensor(0.7500)

    Reference: Hanley & McNeil (1982), The meaning and use of the area under a ROC curve.
    """
    inside, outside = _both_kinds("auroc", scores_in, scores_out)
    below = torch.searchsorted(inside, outside)
    not_above = torch.searchsorted(inside, outside, right=True)
    wins = (below + not_above).double().mean() / 2
    return (wins / inside.numel()).to(scores_in.dtype)


def fpr95(scores_in: Tensor, scores_out: Tensor) -> Tensor:
    """Compute the share of outliers that pass where 95 % of the inliers do: FPR at a TPR of 95 %.

    Scores are uncertainties. The threshold is the smallest score that at least 95 % of the inliers do not
    exceed, and an outlier passes if it does not exceed it either. The cost is O(n log n).

    Args:
        scores_in: Scores of inliers, of any shape.
        scores_out: Scores of outliers, of any shape.

    Returns:
        The share: 0 separates perfectly, 0.95 is chance.

    Raises:
        InputError: If one of the two holds no scores.

    >>> fpr95(torch.arange(100.0), torch.tensor([93.0, 94.0, 95.0, 200.0]))
    tensor(0.5000)

    Reference: Liang, Li & Srikant (2018), Enhancing the reliability of out-of-distribution image detection
    in neural networks.
    """
    inside, outside = _both_kinds("fpr95", scores_in, scores_out)
    threshold = inside[-(-95 * len(inside) // 100) - 1]
    return (outside <= threshold).to(scores_in.dtype).mean()


def _both_kinds(name: str, scores_in: Tensor, scores_out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sorted scores of inliers, and those of outliers, as vectors."""
    check_numbers(scores_in=scores_in, scores_out=scores_out)
    inside, outside = scores_in.reshape(-1).sort().values, scores_out.reshape(-1)
    if not inside.numel() or not outside.numel():
        raise InputError(
            f"{name} needs scores of both kinds, but got {inside.numel()} inside "
            f"and {outside.numel()} outside. For labels y of two classes: scores[y == 0], scores[y == 1]."
        )
    return inside, outside


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """The mean loss of the most certain points, for each number of them.

    Args:
        coverage: The shares 1/N, 2/N, …, 1 of points, (N,).
        risk: The mean loss of that share of points, (N,).
    """

    coverage: Tensor
    risk: Tensor


def risk_coverage(uncertainty: Tensor, loss: Tensor) -> RiskCoverage:
    """Compute the risk of predicting only the most certain points, for each number of them.

    Points with the same uncertainty each count with their mean loss, which is the average risk over all
    their orders. The cost is O(N log N).

    Args:
        uncertainty: One number per point, such as an entropy or a variance.
        loss: One number per point, such as `probs.argmax(-1) != y` or a squared error.

    Returns:
        Shares of points and their mean losses.

    >>> risk_coverage(torch.tensor([0.3, 0.1, 0.2]), torch.tensor([1.0, 0.0, 0.5])).risk
    tensor([0.0000, 0.2500, 0.5000])

    Reference: El-Yaniv & Wiener (2010), On the foundations of noise-free selective classification.
    """
    uncertainty, loss = _sorted_together(uncertainty, loss)
    _, group, size = torch.unique_consecutive(uncertainty, return_inverse=True, return_counts=True)
    means = torch.zeros_like(size, dtype=torch.float64).index_add(0, group, loss.double()) / size
    number = torch.arange(1, len(loss) + 1, dtype=torch.float64, device=loss.device)
    risk = means[group].cumsum(0) / number
    return RiskCoverage((number / len(loss)).to(loss.dtype), risk.to(loss.dtype))


def aurc(uncertainty: Tensor, loss: Tensor) -> Tensor:
    """Compute the area under `risk_coverage`, which is the mean of the risk over 1, …, N points.

    An uninformative uncertainty has the mean loss as its area. An uncertainty that sorts the losses has the
    smallest possible area.

    Args:
        uncertainty: One number per point, such as an entropy or a variance.
        loss: One number per point, such as `probs.argmax(-1) != y` or a squared error.

    Returns:
        The area. Less is better.

    >>> aurc(torch.tensor([0.3, 0.1, 0.2]), torch.tensor([1.0, 0.0, 0.5]))
    tensor(0.2500)

    Reference: Geifman, Uziel & El-Yaniv (2019), Bias-reduced uncertainty estimation.
    """
    return risk_coverage(uncertainty, loss).risk.mean()


def _sorted_together(uncertainty: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as (N,) with the least uncertain first.

    Losses that are counts or booleans become floats.
    """
    check_numbers(uncertainty=uncertainty, loss=loss)
    sizes = [value.shape[:1] if value.dim() else () for value in (uncertainty, loss)]
    one_each = uncertainty.numel() == loss.numel() == (sizes[0][0] if sizes[0] else 0)
    if sizes[0] != sizes[1] or not one_each or not loss.numel():
        raise InputError(
            "uncertainty and loss must hold one number for each of the same points, but have shapes "
            f"{tuple(uncertainty.shape)} and {tuple(loss.shape)}. Average the outputs of a point first, "
            "e.g. loss.mean(-1)."
        )
    dtype = torch.promote_types(uncertainty.dtype, loss.dtype)
    if not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    ordered, order = uncertainty.reshape(-1).sort()
    return ordered, loss.reshape(-1)[order].to(dtype)
