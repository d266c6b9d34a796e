"""The figure of `dense.py`: where a U-Net is unsure, where it sees something new, what errs together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap, LogNorm
from torch import Tensor

import net2gp as n2g
from dense_problems import CLASSES, IGNORED, scenes

if TYPE_CHECKING:
    from dense import Problem

COLOURS = ListedColormap(["#e8e8e8", "#0072b2", "#d55e00", "#009e73"])
NUM_DRAWS = 100


def draw(problem: Problem, path: Path) -> None:
    """Draw one image with the unseen texture in its middle: maps above, what errs together below."""
    found = scenes(1, 777, strange=True)
    x, labels = found.x, found.y[0].float().masked_fill(found.y[0] == IGNORED, torch.nan)
    fitted = {
        name: n2g.laplace(problem.network, problem.data, n2g.Categorical(), structure=structure)
        for name, structure in (("Kron", n2g.Kron()), ("last", n2g.LastLayer()))
    }
    posterior = fitted["Kron"]
    parts = posterior.split(x)
    generator = torch.Generator().manual_seed(0)
    draws = posterior.sample(x, NUM_DRAWS, generator=generator)[:, 0]
    spread = draws.softmax(-1).var(0).sum(-1)
    classes = {
        "cmap": COLOURS,
        "vmin": -0.5,
        "vmax": len(CLASSES) - 0.5,
        "interpolation": "nearest",
    }
    logarithmic = {"cmap": "viridis", "norm": LogNorm(vmin=1e-6)}
    likely = draws.mean(0).argmax(-1)
    pixels = _two_pixels(spread, found.unseen[0])
    maps: list[tuple[str, Tensor, dict[str, Any]]] = [
        ("image, rings in the middle", x[0, 0], {"cmap": "gray"}),
        ("labels (white: ignored)", labels, classes),
        ("prediction", posterior.mean(x)[0].argmax(-1).float(), classes),
        ("entropy of the prediction", posterior.predict(x).entropy()[0], {"cmap": "viridis"}),
        (
            "novelty (last layer)",
            fitted["last"].novelty(x)[0],
            {"cmap": "magma", "norm": LogNorm()},
        ),
        ("variance from parameters (split)", parts.epistemic[0].sum(-1), logarithmic),
        ("variance of labels (split)", parts.aleatoric[0].sum(-1), {"cmap": "viridis"}),
        (f"share of {NUM_DRAWS} draws that disagree", _doubt(draws, likely), {"cmap": "viridis"}),
        *(
            (
                f"draws: correlation with ×, {n}",
                _beside(draws, at, likely),
                {"cmap": "RdBu_r", "vmin": -1, "vmax": 1},
            )
            for n, at in zip(("known", "rings"), pixels, strict=True)
        ),
    ]
    figure, axes = plt.subplots(2, 5, figsize=(15, 6.4), layout="constrained")
    for axis, (title, values, how) in zip(axes.flat, maps, strict=True):
        shown = axis.imshow(values, **how)
        axis.set_title(title, fontsize=9)
        axis.set(xticks=[], yticks=[])
        bar = figure.colorbar(shown, ax=axis, shrink=0.8)
        if how is classes:
            bar.set_ticks(range(len(CLASSES)), labels=CLASSES)
    for axis, (row, column) in zip(axes.flat[-2:], pixels, strict=True):
        axis.plot(column, row, "x", color="black", markersize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _doubt(draws: Tensor, likely: Tensor) -> Tensor:
    """The share of draws whose most probable class is another one."""
    return (draws.argmax(-1) != likely).double().mean(0)


def _two_pixels(spread: Tensor, unseen: Tensor) -> list[tuple[int, int]]:
    """Where draws differ most, outside of the unseen texture and inside."""
    width = spread.shape[1]
    best = [int(spread.masked_fill(mask, -1).argmax()) for mask in (unseen, ~unseen)]
    return [(i // width, i % width) for i in best]


def _beside(draws: Tensor, at: tuple[int, int], likely: Tensor) -> Tensor:
    """The correlation of each pixel's margin with that at `at`: logits of its two best classes there."""
    one, two = draws.mean(0)[at].topk(2).indices.tolist()
    margin = draws[..., one] - draws[..., two]
    z = (margin - margin.mean(0)) / margin.std(0, correction=0)
    return (z * z[:, at[0], at[1], None, None]).mean(0)
