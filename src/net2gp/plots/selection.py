"""The figure of a sweep: evidence and losses over a hyper-parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from net2gp.errors import InputError
from net2gp.plots.style import COLORS, axes_or_new

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Table(Protocol):
    """What `plot_selection` draws: a `Selection`, or a value with the same members."""

    name: str
    values: tuple[Any, ...]

    @property
    def losses(self) -> Mapping[str, Tensor]:
        """Losses by name, (V, D) each."""

    def mean(self, score: str = ...) -> Tensor:
        """Average a score over the data sets.

        Args:
            score: The name of the score. By default it is the log marginal likelihood.

        Returns:
            The means, (V,).
        """

    def standard_error(self, score: str = ...) -> Tensor:
        """Compute the standard error of the mean over the data sets.

        Args:
            score: The name of the score.

        Returns:
            The standard errors, (V,).
        """

    def best_index(self, score: str = ...) -> int:
        """Find the value with the best mean score.

        Args:
            score: The name of the score.

        Returns:
            Its index.
        """


def plot_selection(
    ax: Axes | None,
    selection: Table,
    *,
    losses: Sequence[str] | None = None,
    label: str = "−log marginal likelihood",
) -> Axes:
    """Draw −log marginal likelihood on the left axis, losses on the right axis, and a star at every optimum.

    Bands show ± one standard error over the data sets. Positive values over two decades or more get a
    logarithmic axis. Values that are not numbers are spaced equally.

    Args:
        ax: The Axes to draw into, or None for a new one.
        selection: The result of `sweep`.
        losses: The names of the losses to draw. None draws all.
        label: The name of the left axis.

    Returns:
        The Axes. Its attribute `right_ax` is the right axis.

    Raises:
        InputError: If there is no loss of that name.

    >>> import torch
    >>> from net2gp.methods.selection import Selection
    >>> scores = {"log marginal likelihood": torch.randn(3, 4), "test loss": torch.rand(3, 4)}
    >>> ax = plot_selection(None, Selection("prior_var", (0.1, 1.0, 10.0), scores))
    >>> ax.get_xscale(), ax.right_ax.get_ylabel()
    ('log', 'loss')
    """
    ax = axes_or_new(ax)
    names = list(selection.losses if losses is None else losses)
    unknown = [name for name in names if name not in selection.losses]
    if unknown:
        known = ", ".join(selection.losses)
        raise InputError(f"there is no loss {unknown[0]!r} to draw. Known: {known}.")
    place = _places(ax, selection)
    drawn = [_curve(ax, place, selection, None, COLORS[0])]
    drawn[0].set_label(label)
    ax.set_ylabel(label, color=COLORS[0])
    ax.tick_params(axis="y", colors=COLORS[0])
    ax.spines[["top", "right"]].set_visible(False)
    if names:
        right: Any = ax.twinx()
        for color, name in zip(cycle(COLORS[1:]), names, strict=False):
            drawn.append(_curve(right, place, selection, name, color))
        right.set_ylabel("loss")
        right.spines["top"].set_visible(False)
        right.spines["right"].set_visible(True)
        ax.right_ax = right  # type: ignore[attr-defined]
    ax.legend(handles=drawn, frameon=False)
    return ax


def _curve(ax: Any, place: list[float], selection: Table, loss: str | None, color: str) -> Any:
    """Draw one mean with its band and star: the mean of a loss, or of −evidence if `loss` is None."""
    score = () if loss is None else (loss,)
    mean = selection.mean(*score) if loss else -selection.mean()
    middle = mean.detach().cpu().numpy()
    error = selection.standard_error(*score).nan_to_num(0.0).detach().cpu().numpy()
    ax.fill_between(place, middle - error, middle + error, color=color, alpha=0.2, linewidth=0)
    style = "-" if loss is None else "--"
    (line,) = ax.plot(place, middle, style, color=color, linewidth=1.5, label=loss)
    best = selection.best_index(*score)
    star = {"markersize": 12, "markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 5}
    ax.plot(place[best], middle[best], "*", color=color, **star)
    return line


def _places(ax: Axes, selection: Table) -> list[float]:
    """Return the positions of the values on the horizontal axis, and set its scale and label."""
    ax.set_xlabel(selection.name)
    values = selection.values
    if not all(isinstance(value, float | int) for value in values):
        ax.set_xticks(range(len(values)), [str(value) for value in values])
        return [float(index) for index in range(len(values))]
    if min(values) > 0 and max(values) >= 100 * min(values):
        ax.set_xscale("log")
    return [float(value) for value in values]
