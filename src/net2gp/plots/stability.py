"""The figure of stability: how a quantity moves with the distance by which inputs were moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from net2gp.plots.style import axes_or_new, equally_long, finish, next_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_stability(
    ax: Axes | None,
    distances: Sequence[float] | Tensor,
    values: Mapping[str, Tensor],
    *,
    label: str = "change of the mean",
) -> Axes:
    """Draw the median over points, with a band from the first to the third quartile, against the distance.

    Args:
        ax: The Axes to draw into, or None for a new one.
        distances: The distances: (S,).
        values: By name, a number for each distance and point, (S, N), such as `change`, `variance` or
            `novelty` of what `stability` returned.
        label: The name of the vertical axis.

    Returns:
        The Axes.

    Raises:
        InputError: If there are more distances than values, or fewer.

    >>> import torch
    >>> plot_stability(None, torch.tensor([0.0, 1.0]), {"noise": torch.rand(2, 9)}).get_ylabel()
    'change of the mean'
    """
    ax = axes_or_new(ax)
    places = torch.as_tensor(distances).detach().cpu().numpy()
    for name, value in values.items():
        equally_long(distances=places, values=value)
        parts = (
            value.detach()
            .cpu()
            .double()
            .quantile(value.new_tensor([0.25, 0.5, 0.75]).double().cpu(), 1)
        )
        color = next_color(ax)
        ax.fill_between(places, parts[0], parts[2], color=color, alpha=0.2, linewidth=0)
        ax.plot(places, parts[1], color=color, linewidth=1.5, label=name)
    finish(ax, "distance", label)
    return ax
