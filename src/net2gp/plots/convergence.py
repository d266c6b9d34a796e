"""The figure of a convergence diagnosis: predicted and measured losses over the steps of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.plots.style import COLORS, INK, axes_or_new, equally_long, finish

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Prediction(Protocol):
    """What `plot_convergence` draws: a `Convergence`, or a value with the same members."""

    @property
    def time_constants(self) -> Tensor:
        """Steps in which each direction shrinks by a factor e."""

    def loss(self, steps: Any) -> Tensor:
        """Predict the loss.

        Args:
            steps: Numbers of steps.

        Returns:
            The losses.
        """


def plot_convergence(
    ax: Axes | None,
    found: Prediction,
    *,
    measured: tuple[Sequence[int], Sequence[float]] | None = None,
    num_steps: int | None = None,
) -> Axes:
    """Draw the predicted loss over the steps of training, with a tick at each time constant.

    Both axes are logarithmic, and begin at the first step.

    Args:
        ax: The Axes to draw into, or None for a new one.
        found: What `convergence` returned.
        measured: Numbers of steps and the losses ‖f(X) − y‖² / (2NC) that were measured there.
        num_steps: Where the curve ends. None takes the last measured step, or else the slowest time constant.

    Returns:
        The Axes.

    Raises:
        InputError: If nothing was measured from the first step on.

    >>> from net2gp.methods import convergence
    >>> x = torch.linspace(-1, 1, 5)[:, None]
    >>> found = convergence(torch.nn.Linear(1, 1).eval(), (x, x))
    >>> plot_convergence(None, found, num_steps=100).get_xlabel()
    'steps'
    """
    ax = axes_or_new(ax)
    times = found.time_constants.detach().cpu()
    times = times[times.isfinite()]
    if measured is not None:
        steps, losses = (torch.as_tensor(values).detach().double().tolist() for values in measured)
        places, losses = equally_long(steps=steps, losses=losses)
        kept = [(k, value) for k, value in zip(places, losses, strict=True) if k >= 1]
        if not kept:
            raise InputError(
                "measured needs a loss at the first step or later: ([1, 10], [0.5, 0.1])."
            )
        num_steps = num_steps or max(k for k, _ in kept)
        ax.plot(*zip(*kept, strict=True), "o", color=COLORS[1], markersize=4, label="measured")
    last = num_steps or int(min(max(10.0, float(times.max()) if len(times) else 10.0), 1e9))
    grid = torch.logspace(0, torch.tensor(float(last)).log10().item(), 200, dtype=torch.float64)
    grid = grid.round().unique()
    curve = found.loss(grid).detach().cpu()
    ax.plot(grid, curve, color=COLORS[0], linewidth=1.5, label="predicted")
    seen = times[(times >= 1) & (times <= last)]
    ax.plot(
        seen,
        [0.02] * len(seen),
        "|",
        color=INK,
        alpha=0.4,
        transform=ax.get_xaxis_transform(),
        label="time constants",
    )
    ax.set_xscale("log")
    ax.set_yscale("log")
    finish(ax, "steps", "training loss")
    return ax
