"""Figures of predictions over one-dimensional inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from net2gp.plots.style import INK, axes_or_new, equally_long, finish, next_color, vector

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    """Draw the mean and a band of two standard deviations over one-dimensional inputs.

    A second call on the same Axes uses the next color, which lets you compare posteriors.

    Args:
        ax: The Axes to draw into, or None for a new one.
        x: N inputs, in any order.
        mean: N means.
        var: N variances.
        data: Observations as a pair (x, y), or None.
        truth: N values of the true curve, or None.
        label: The name in the legend.

    Returns:
        The Axes.

    >>> import torch
    >>> x = torch.linspace(0, 1, 5)
    >>> ax = plot_regression(None, x, x, torch.ones(5), label="posterior")
    >>> ax.get_legend_handles_labels()[1]
    ['posterior']
    """
    ax = axes_or_new(ax)
    color = next_color(ax)
    inputs, middle = vector(x, "x"), vector(mean, "mean")
    order = inputs.argsort()
    std = vector(var, "var").clip(min=0) ** 0.5
    inputs, middle, std = (v[order] for v in equally_long(x=inputs, mean=middle, var=std))
    ax.fill_between(inputs, middle - 2 * std, middle + 2 * std, color=color, alpha=0.2, linewidth=0)
    ax.plot(inputs, middle, color=color, linewidth=1.5, label=label)
    if truth is not None:
        values = equally_long(x=inputs, truth=vector(truth, "truth"))[1]
        ax.plot(inputs, values[order], color=INK, linewidth=1, linestyle="--", label="truth")
    if data is not None:
        points = (vector(data[0], "data x"), vector(data[1], "data y"))
        ax.plot(*points, ".", color=INK, markersize=4, alpha=0.7, label="data")
    finish(ax, "x", "y")
    return ax
