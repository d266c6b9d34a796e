"""Figures of predictions, calibration and kernels, in one plain style.

Each function draws into the Axes it is given (a new one for None) and returns that Axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.metrics import coverage, reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Blue, vermilion, green, purple, orange, sky: told apart by color-blind readers (Okabe & Ito, 2008)."""

INK = "#333333"
FAINT = "#999999"


def plot_regression(
    ax: Axes | None,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    data: tuple[Tensor, Tensor] | None = None,
    truth: Tensor | None = None,
    label: str | None = None,
) -> Axes:
    """The mean and a band of two standard deviations over one-dimensional inputs.

    `x`, `mean`, `var` and `truth` have N numbers each, in any order of x; `data` is a pair (x, y) of
    observations. Calling it again on the same Axes adds the next color, so that posteriors compare.

    >>> x = torch.linspace(0, 1, 5)
    >>> ax = plot_regression(None, x, x, torch.ones(5), label="posterior")
    >>> ax.get_legend_handles_labels()[1]
    ['posterior']
    """
    ax = _axes(ax)
    color = _next_color(ax)
    inputs, middle = _vector(x, "x"), _vector(mean, "mean")
    order = inputs.argsort()
    std = _vector(var, "var").clip(min=0) ** 0.5
    inputs, middle, std = (v[order] for v in _equally_long(x=inputs, mean=middle, var=std))
    ax.fill_between(inputs, middle - 2 * std, middle + 2 * std, color=color, alpha=0.2, linewidth=0)
    ax.plot(inputs, middle, color=color, linewidth=1.5, label=label)
    if truth is not None:
        values = _equally_long(x=inputs, truth=_vector(truth, "truth"))[1]
        ax.plot(inputs, values[order], color=INK, linewidth=1, linestyle="--", label="truth")
    if data is not None:
        points = (_vector(data[0], "data x"), _vector(data[1], "data y"))
        ax.plot(*points, ".", color=INK, markersize=4, alpha=0.7, label="data")
    _finish(ax, "x", "y")
    return ax


def plot_reliability(
    ax: Axes | None, probs: Mapping[str, Tensor], y: Tensor, *, num_bins: int = 15
) -> Axes:
    """Accuracy against confidence, a line for each entry of `probs`; the diagonal is calibrated.

    Entries are (N, C) class probabilities by label; marks grow with the share of points in the bin.
    """
    ax = _axes(ax)
    _diagonal(ax)
    for label, values in probs.items():
        bins = reliability(values.detach().cpu(), y.detach().cpu(), num_bins)
        filled = bins.count > 0
        share = (bins.count[filled] / bins.count.sum()).numpy()
        color = _next_color(ax)
        line = (bins.confidence[filled].numpy(), bins.accuracy[filled].numpy())
        ax.plot(*line, color=color, linewidth=1.5, label=label)
        ax.scatter(*line, s=10 + 90 * share, color=color, linewidth=0)
    _unit_square(ax)
    _finish(ax, "confidence", "accuracy")
    return ax


def plot_coverage(
    ax: Axes | None,
    predictions: Mapping[str, tuple[Tensor, Tensor]],
    y: Tensor,
    *,
    num_levels: int = 19,
) -> Axes:
    """Observed against nominal coverage of central intervals; the diagonal is calibrated.

    `predictions` holds pairs (mean, variance of y) by label. Below the diagonal a prediction is too
    sure of itself, above it too unsure.
    """
    ax = _axes(ax)
    _diagonal(ax)
    levels = torch.linspace(0, 1, num_levels + 2)
    for label, (mean, var) in predictions.items():
        observed = coverage(mean.detach().cpu(), var.detach().cpu(), y.detach().cpu(), levels)
        ax.plot(levels.numpy(), observed.numpy(), color=_next_color(ax), linewidth=1.5, label=label)
    _unit_square(ax)
    _finish(ax, "nominal coverage", "observed coverage")
    return ax


def plot_kernel(ax: Axes | None, K: Tensor, *, label: str | None = None) -> Axes:
    """A heat map of the matrix `K`, entry (0, 0) at the top left, with its color scale.

    A matrix with values of both signs gets a diverging scale around zero, any other a sequential one.
    """
    ax = _axes(ax)
    if K.dim() != 2:
        raise InputError(
            f"K must be a matrix, but has shape {tuple(K.shape)}. Pass kernel(x), or one class of it."
        )
    values = K.detach().cpu().numpy()
    if values.min() < 0 < values.max():
        limit = abs(values).max()
        style: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
    else:
        style = {"cmap": "cividis"}
    image = ax.imshow(values, interpolation="nearest", **style)
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.046, pad=0.04, label=label)
    bar.outline.set_visible(False)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    return ax


def _axes(ax: Axes | None) -> Axes:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib, which is not installed: pip install net2gp[plots]"
        ) from error
    return pyplot.subplots()[1] if ax is None else ax


def _next_color(ax: Axes) -> str:
    drawn = [line for line in ax.get_lines() if line.get_color() in COLORS]
    return COLORS[len(drawn) % len(COLORS)]


def _vector(values: Tensor, name: str) -> Any:
    flat = torch.as_tensor(values).detach().cpu()
    if flat.numel() != flat.shape[0]:
        raise InputError(
            f"{name} must hold one number a point, but has shape {tuple(flat.shape)}. "
            f"Pick a column, e.g. {name}[:, 0]."
        )
    return flat.reshape(-1).numpy()


def _equally_long(**values: Any) -> list[Any]:
    if len({len(value) for value in values.values()}) > 1:
        lengths = ", ".join(f"{name}: {len(value)}" for name, value in values.items())
        raise InputError(f"one number a point is needed for each of them, but there are {lengths}.")
    return list(values.values())


def _diagonal(ax: Axes) -> None:
    ax.plot([0, 1], [0, 1], color=FAINT, linewidth=1, linestyle=":", zorder=0)


def _unit_square(ax: Axes) -> None:
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
    ax.set_aspect("equal")


def _finish(ax: Axes, xlabel: str, ylabel: str) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    handles, labels = ax.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if unique:
        ax.legend(list(unique.values()), list(unique), frameon=False)
