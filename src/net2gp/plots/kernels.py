"""Figures of kernels and of what a network finds similar: matrices, means sorted by class, neighbors.

Figures that are sorted by class have a symmetric color scale from blue over white (zero) to red.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.plots.style import FAINT, INK, axes_or_new

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_kernel(ax: Axes | None, K: Tensor, *, label: str | None = None) -> Axes:
    """Draw a heat map of a matrix with its color scale.

    A matrix with values of both signs gets a diverging scale around zero, any other matrix a sequential one.

    Args:
        ax: The Axes to draw into, or None for a new one.
        K: A matrix. The entry (0, 0) is at the top left.
        label: The name of the color scale.

    Returns:
        The Axes.

    Raises:
        InputError: If `K` is no matrix.
    """
    ax = axes_or_new(ax)
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


def plot_similarities(
    ax: Axes | None, values: Tensor, names: Sequence[str], *, label: str | None = None
) -> Axes:
    """Draw a heat map of a few similarities, with the number in each cell.

    Args:
        ax: The Axes to draw into, or None for a new one.
        values: Similarities, (K, K).
        names: K names for rows and columns.
        label: The name of the color scale.

    Returns:
        The Axes.

    Raises:
        InputError: If the number of names does not match.

    >>> ax = plot_similarities(None, torch.eye(2), ["one", "other"])
    >>> [text.get_text() for text in ax.texts]
    ['1.00', '0.00', '0.00', '1.00']
    """
    ax = axes_or_new(ax)
    if tuple(values.shape) != (len(names), len(names)):
        raise InputError(
            f"values must be ({len(names)}, {len(names)}) for {len(names)} names, but has shape "
            f"{tuple(values.shape)}. Pass similarity_matrix(embeddings), and a name for each of them."
        )
    numbers = values.detach().cpu()
    low = min(0.0, float(numbers.min()))
    image = ax.imshow(numbers.numpy(), cmap="cividis", vmin=low, vmax=1.0, interpolation="nearest")
    bar = ax.figure.colorbar(image, ax=ax, label=label)
    bar.outline.set_visible(False)
    for i, row in enumerate(numbers.tolist()):
        for j, value in enumerate(row):
            color = "white" if value < (low + 1) / 2 else "black"
            ax.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)
    ax.set_xticks(range(len(names)), names)
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return ax


def plot_class_kernel(
    ax: Axes | None,
    K: Tensor,
    labels: Tensor,
    *,
    label: str | None = None,
    limit: float | None = None,
) -> Axes:
    """Draw a heat map of a kernel matrix with its points sorted by class.

    Blocks on the diagonal show how similar the points of a class are. The other blocks show which classes
    the network finds similar.

    Args:
        ax: The Axes to draw into, or None for a new one.
        K: Kernel matrix, (N, N).
        labels: The classes of the points, (N,). Each class is named in the middle of its block.
        label: The name of the color scale.
        limit: The color scale ends at ±limit. None means the largest value. If a few points have large
            gradients, a smaller limit shows more.

    Returns:
        The Axes.

    Raises:
        InputError: If `K` does not fit the labels.

    >>> ax = plot_class_kernel(None, torch.eye(3), torch.tensor([7, 1, 7]))
    >>> [text.get_text() for text in ax.get_xticklabels()]
    ['1', '7']
    """
    ax = axes_or_new(ax)
    if K.dim() != 2 or K.shape[0] != K.shape[1] or len(K) != len(labels):
        raise InputError(
            f"K must be (N, N) for {len(labels)} labels, but has shape {tuple(K.shape)}. "
            "Pass aggregate(kernel, x), which gives one number per pair of points."
        )
    order = _by_class(labels)
    _heat_map(ax, K.detach().cpu()[order][:, order], label, limit)
    for axis in (ax.xaxis, ax.yaxis):
        _name_classes(axis, labels)
    for edge in _edges(labels)[1:-1]:
        ax.axhline(edge - 0.5, color=FAINT, linewidth=0.4)
        ax.axvline(edge - 0.5, color=FAINT, linewidth=0.4)
    return ax


def plot_class_means(
    ax: Axes | None, f: Tensor, labels: Tensor, *, label: str | None = None
) -> Axes:
    """Draw a heat map of outputs, with points in rows, sorted by class, and outputs in columns.

    A mean that classifies well shows a staircase of red blocks.

    Args:
        ax: The Axes to draw into, or None for a new one.
        f: Outputs, (N, C).
        labels: The classes of the points, (N,).
        label: The name of the color scale.

    Returns:
        The Axes.

    Raises:
        InputError: If `f` does not fit the labels.
    """
    ax = axes_or_new(ax)
    if f.dim() != 2 or len(f) != len(labels):
        raise InputError(
            f"f must be (N, C) for {len(labels)} labels, but has shape {tuple(f.shape)}."
        )
    _heat_map(ax, f.detach().cpu()[_by_class(labels)], label, aspect="auto", bar=0.1)
    _name_classes(ax.yaxis, labels)
    ax.set_xticks(range(f.shape[1]), [str(c) for c in range(f.shape[1])])
    ax.tick_params(axis="x", length=0)
    for edge in _edges(labels)[1:-1]:
        ax.axhline(edge - 0.5, color=FAINT, linewidth=0.4)
    return ax


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture of a gallery.

    Args:
        image: Gray values, (height, width).
        caption: The text below it.
        framed: Whether a frame marks it.
    """

    image: Tensor
    caption: str = ""
    framed: bool = False


def plot_gallery(
    figure: Figure,
    gallery: Sequence[Sequence[Picture | None]],
    headings: Sequence[tuple[int, str]] = (),
) -> Figure:
    """Draw rows of small pictures, such as a digit with its nearest training digits.

    Args:
        figure: The figure to draw into.
        gallery: Rows of pictures. None leaves a gap.
        headings: Pairs of a column and the words that begin above it.

    Returns:
        The figure.

    Raises:
        InputError: If the gallery is empty.
    """
    columns = max((len(row) for row in gallery), default=0)
    if not columns:
        raise InputError("the gallery is empty: pass a list of rows of Picture(image, caption).")
    axes = figure.subplots(len(gallery), columns, squeeze=False)
    for ax in axes.reshape(-1):
        ax.axis("off")
    for row, pictures in zip(axes, gallery, strict=True):
        for ax, picture in zip(row, pictures, strict=False):
            if picture is not None:
                _show(ax, picture)
    for column, words in headings:
        ax = axes[0, column]
        # An empty title reserves room for the words, which may be wider than the picture.
        ax.set_title(" ", fontsize=9, pad=8)
        heading = ax.text(0.0, 1.12, words, fontsize=9, color=INK, transform=ax.transAxes)
        heading.set_in_layout(False)
    return figure


def _show(ax: Axes, picture: Picture) -> None:
    image = picture.image.detach().cpu().squeeze()
    if image.dim() != 2:
        raise InputError(
            f"an image must be (height, width), but has shape {tuple(picture.image.shape)}."
        )
    ax.axis("on")
    ax.imshow(image.numpy(), cmap="gray_r", vmin=0.0, interpolation="nearest")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set(visible=True, color=INK if picture.framed else "#DDDDDD")
    ax.spines[:].set_linewidth(1.4 if picture.framed else 0.6)
    ax.set_xlabel(picture.caption, fontsize=7, color=INK, labelpad=3)


def _heat_map(
    ax: Axes,
    values: Tensor,
    label: str | None,
    limit: float | None = None,
    *,
    aspect: Literal["equal", "auto"] = "equal",
    bar: float = 0.046,
) -> None:
    largest = float(values.abs().max()) or 1.0
    limit = largest if limit is None else limit
    image = ax.imshow(
        values.numpy(),
        cmap="RdBu_r",
        vmin=-limit,
        vmax=limit,
        interpolation="nearest",
        aspect=aspect,
    )
    scale = ax.figure.colorbar(
        image,
        ax=ax,
        fraction=bar,
        pad=0.04,
        aspect=25,
        label=label,
        extend="both" if limit < largest else "neither",
    )
    scale.outline.set_visible(False)
    scale.ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _by_class(labels: Tensor) -> Tensor:
    return labels.detach().cpu().argsort(stable=True)


def _edges(labels: Tensor) -> list[int]:
    """Return where classes begin and end in sorted order."""
    counts = torch.unique(labels.detach().cpu(), return_counts=True)[1]
    return [0, *counts.cumsum(0).tolist()]


def _name_classes(axis: Any, labels: Tensor) -> None:
    edges = _edges(labels)
    middles = [(a + b - 1) / 2 for a, b in pairwise(edges)]
    names = [str(int(c)) for c in torch.unique(labels.detach().cpu())]
    axis.set_ticks(middles, names)
    axis.set_tick_params(length=0)
