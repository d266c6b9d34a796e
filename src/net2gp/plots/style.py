"""What all figures share: colors, axes, legends, and checks of the values that are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from net2gp.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Blue, vermilion, green, purple, orange, sky: clear to color-blind readers too (Okabe & Ito, 2008)."""

INK = "#333333"
"""The color of text and data."""

FAINT = "#999999"
"""The color of lines for comparison."""


def axes_or_new(ax: Axes | None) -> Axes:
    """Return the given Axes, or a new one for None."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib, which is not installed: pip install net2gp[plots]"
        ) from error
    return pyplot.subplots()[1] if ax is None else ax


def next_color(ax: Axes) -> str:
    """Return the color of the next line, after as many as are drawn in a color of `COLORS`."""
    drawn = [line for line in ax.get_lines() if line.get_color() in COLORS]
    return COLORS[len(drawn) % len(COLORS)]


def vector(values: Tensor, name: str) -> Any:
    """Return one number per point as a numpy array."""
    flat = torch.as_tensor(values).detach().cpu()
    if flat.numel() != flat.shape[0]:
        raise InputError(
            f"{name} must hold one number per point, but has shape {tuple(flat.shape)}. "
            f"Pick a column, e.g. {name}[:, 0]."
        )
    return flat.reshape(-1).numpy()


def equally_long(**values: Any) -> list[Any]:
    """Return the values if they have the same length."""
    if len({len(value) for value in values.values()}) > 1:
        lengths = ", ".join(f"{name}: {len(value)}" for name, value in values.items())
        raise InputError(f"each of them needs one number per point, but there are {lengths}.")
    return list(values.values())


def diagonal(ax: Axes) -> None:
    """Draw a dotted line where both axes are equal."""
    ax.plot([0, 1], [0, 1], color=FAINT, linewidth=1, linestyle=":", zorder=0)


def unit_square(ax: Axes) -> None:
    """Let both axes run from 0 to 1 with equal length."""
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
    ax.set_aspect("equal")


def finish(ax: Axes, xlabel: str, ylabel: str) -> None:
    """Name the axes and, if anything is labeled, draw a legend without repetitions."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    handles, labels = ax.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if unique:
        ax.legend(list(unique.values()), list(unique), frameon=False)
