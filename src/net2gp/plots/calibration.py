"""Figures of calibration: how often predictions come true, and what their uncertainty is good for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.metrics import (
    Reliability,
    auroc,
    coverage,
    coverage_samples,
    expected_calibration_error,
    reliability,
    risk_coverage,
)
from net2gp.plots.style import (
    COLORS,
    INK,
    axes_or_new,
    diagonal,
    finish,
    next_color,
    unit_square,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_reliability(
    ax: Axes | None, probs: Mapping[str, Tensor], y: Tensor, *, num_bins: int = 15
) -> Axes:
    """Draw accuracy against confidence. A calibrated prediction lies on the diagonal.

    Marks grow with the share of points in the bin. Bars at the bottom show this share. With a single
    prediction, the number of points is written above each bar.

    Args:
        ax: The Axes to draw into, or None for a new one.
        probs: Class probabilities (N, C) by label. The legend shows each label with its expected calibration
            error.
        y: Labels, (N,).
        num_bins: The number of bins of confidence.

    Returns:
        The Axes.

    >>> probs = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    >>> ax = plot_reliability(None, {"network": probs}, torch.tensor([0, 0]), num_bins=1)
    >>> ax.get_legend_handles_labels()[1], [text.get_text() for text in ax.texts]
    (['network (ECE 0.350)'], ['2'])
    """
    ax = axes_or_new(ax)
    diagonal(ax)
    for label, values in probs.items():
        given = values.detach().cpu(), y.detach().cpu(), num_bins
        bins, error = reliability(*given), expected_calibration_error(*given)
        filled = bins.count > 0
        share = (bins.count[filled] / bins.count.sum()).numpy()
        color = next_color(ax)
        line = (bins.confidence[filled].numpy(), bins.accuracy[filled].numpy())
        ax.plot(*line, color=color, linewidth=1.5, label=f"{label} (ECE {error:.3f})")
        ax.scatter(*line, s=10 + 90 * share, color=color, linewidth=0)
        _draw_counts(ax, bins, color, written=len(probs) == 1)
    unit_square(ax)
    finish(ax, "confidence", "accuracy, share of points (bars)")
    return ax


def _draw_counts(ax: Axes, bins: Reliability, color: str, *, written: bool) -> None:
    share = (bins.count / bins.count.sum()).numpy()
    left, width = bins.edges[:-1].numpy(), (bins.edges[1:] - bins.edges[:-1]).numpy()
    ax.bar(left, share, width, align="edge", color=color, alpha=0.15, linewidth=0, zorder=0.5)
    for place, height, count in zip(left + width / 2, share, bins.count.tolist(), strict=True):
        if written and count:
            ax.text(place, height + 0.01, str(count), ha="center", fontsize=6, color=INK)


def plot_coverage(
    ax: Axes | None,
    predictions: Mapping[str, tuple[Tensor, Tensor] | Tensor],
    y: Tensor,
    *,
    num_levels: int = 19,
) -> Axes:
    """Draw observed against nominal coverage of central intervals. A calibrated prediction lies on the
    diagonal.

    Below the diagonal a prediction is overconfident, above it underconfident.

    Args:
        ax: The Axes to draw into, or None for a new one.
        predictions: Pairs (mean, variance of y) by label, or samples of y, (S, N) or (S, N, C). The legend
            shows each label with its mean distance from the diagonal, which for a pair is `coverage_error`.
        y: Targets.
        num_levels: The number of levels between 0 and 1.

    Returns:
        The Axes.

    Raises:
        InputError: If `num_levels` is below 1.

    >>> y = torch.tensor([0.1, 9.0])
    >>> ax = plot_coverage(None, {"GP": (torch.zeros(2), torch.ones(2))}, y, num_levels=3)
    >>> ax.get_legend_handles_labels()[1]
    ['GP (off by 0.167)']
    """
    if num_levels < 1:
        raise InputError(f"num_levels must be at least 1, but is {num_levels}. Try num_levels=19.")
    ax = axes_or_new(ax)
    diagonal(ax)
    levels = torch.linspace(0, 1, num_levels + 2)
    for label, given in predictions.items():
        if isinstance(given, Tensor):
            observed = coverage_samples(given.detach().cpu(), y.detach().cpu(), levels)
        else:
            mean, var = given
            observed = coverage(mean.detach().cpu(), var.detach().cpu(), y.detach().cpu(), levels)
        error = float((observed - levels)[1:-1].abs().mean())
        words = f"{label} (off by {error:.3f})"
        ax.plot(levels.numpy(), observed.numpy(), color=next_color(ax), linewidth=1.5, label=words)
    unit_square(ax)
    finish(ax, "nominal coverage", "observed coverage")
    return ax


def plot_risk_coverage(
    ax: Axes | None, predictions: Mapping[str, tuple[Tensor, Tensor]], *, risk: str = "risk"
) -> Axes:
    """Draw the mean loss of the most certain points against their share. A lower curve is better.

    Args:
        ax: The Axes to draw into, or None for a new one.
        predictions: Pairs (uncertainty, loss) by label, as for `risk_coverage`. The legend shows each label
            with the area under its curve.
        risk: The name of the vertical axis, such as "error rate".

    Returns:
        The Axes.

    >>> entropy, wrong = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.0, 0.0, 0.0, 1.0])
    >>> ax = plot_risk_coverage(None, {"network": (entropy, wrong)}, risk="error rate")
    >>> ax.get_legend_handles_labels()[1]
    ['network (AURC 0.0625)']
    """
    ax = axes_or_new(ax)
    for label, (uncertainty, loss) in predictions.items():
        curve = risk_coverage(uncertainty.detach().cpu(), loss.detach().cpu())
        words = f"{label} (AURC {curve.risk.mean():.3g})"
        line = curve.coverage.numpy(), curve.risk.numpy()
        ax.plot(*line, color=next_color(ax), linewidth=1.5, label=words)
    ax.set_xlim(0, 1)
    ax.set_ylim(bottom=0)
    finish(ax, "coverage: share of points predicted", risk)
    return ax


def plot_detection(
    ax: Axes | None,
    scores_in: Tensor,
    scores_out: Tensor,
    *,
    label: str = "score",
    num_bins: int = 40,
) -> Axes:
    """Draw histograms of a score for in-distribution and for out-of-distribution data.

    Both histograms have area 1 and share their bins. The legend shows the AUROC.

    Args:
        ax: The Axes to draw into, or None for a new one.
        scores_in: Uncertainties of known data, such as entropies or variances.
        scores_out: Uncertainties of foreign data. Their number may differ.
        label: The name of the score.
        num_bins: The number of bins.

    Returns:
        The Axes.

    Raises:
        InputError: If `num_bins` is below 1.

    >>> ax = plot_detection(None, torch.tensor([0.1, 0.2]), torch.tensor([0.15, 0.9]))
    >>> ax.get_legend().get_title().get_text()
    'AUROC 0.750'
    """
    if num_bins < 1:
        raise InputError(f"num_bins must be at least 1, but is {num_bins}. Try num_bins=40.")
    ax = axes_or_new(ax)
    area = auroc(scores_in.detach().cpu(), scores_out.detach().cpu())
    known, foreign = (
        value.detach().cpu().reshape(-1).double() for value in (scores_in, scores_out)
    )
    low, high = (float(value) for value in torch.cat([known, foreign]).aminmax())
    if low == high:
        low, high = low - 0.5, high + 0.5
    edges = torch.linspace(low, high, num_bins + 1, dtype=torch.float64).tolist()
    kinds = {"in distribution": known, "out of distribution": foreign}
    for color, (words, values) in zip(COLORS, kinds.items(), strict=False):
        style = {"bins": edges, "density": True, "color": color}
        ax.hist(values.numpy(), alpha=0.3, **style)  # type: ignore[arg-type]
        ax.hist(values.numpy(), histtype="step", linewidth=1.5, label=words, **style)  # type: ignore[arg-type]
    finish(ax, label, "density")
    ax.get_legend().set_title(f"AUROC {area:.3f}")  # type: ignore[union-attr]
    return ax
