"""How the programs on maps run: train, compare, print, draw curves of errors, and maps."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from net2gp.data import Grid
from net2gp.plots import COLORS, FAINT, INK

sys.path.append(str(Path(__file__).parents[1]))
import findings
import maps
from maps import GP, Options, Scores, Transfer
from studies import panels, save

STYLES: dict[str, dict[str, Any]] = {
    GP: {"color": COLORS[0], "linewidth": 2.4, "zorder": 5},
    "GP, zero mean": {"color": COLORS[5]},
    "GP, as published": {"color": COLORS[5], "linestyle": ":"},
    "GP, untrained": {"color": FAINT},
    "GP, last layer": {"color": COLORS[0], "linestyle": ":"},
    "RBF GP": {"color": COLORS[2]},
    "network + RBF GP": {"color": COLORS[2], "linestyle": ":"},
    "source network": {"color": INK, "linestyle": "--"},
    "fine-tuned": {"color": COLORS[1]},
    "last layer tuned": {"color": COLORS[1], "linestyle": ":"},
}

QUICK = Options(repeats=3, steps=600, tuning_steps=50, sizes=(20, 50), tests=300, quick=True)
"""Minutes on two cores."""

Convert = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Mean and variance of what is mapped, from those of what the network predicts."""


@dataclass(frozen=True, eq=False)
class Canvas:
    """Places x (M, D) on a map: stations, or the cells of a grid that are not NaN, in the grid's order."""

    x: Tensor
    grid: Grid | None = None

    @staticmethod
    def of(grid: Grid, step: int = 1) -> Canvas:
        """The cells of a grid, every `step`-th of each row and column."""
        thin = Grid(grid.lon[::step], grid.lat[::step], grid.values[::step, ::step])
        return Canvas(thin.points()[0], thin)

    def draw(self, ax: Axes, values: Tensor, limits: tuple[float, float], colors: str) -> Any:
        """Values (M,) in color; what the color bar is of."""
        low, high = limits
        kind: dict[str, Any] = {"vmin": low, "vmax": high, "cmap": colors, "rasterized": True}
        if self.grid is None:
            size = 14 if len(values) < 1000 else 2.5
            return ax.scatter(self.x[:, 0], self.x[:, 1], c=values, s=size, linewidths=0, **kind)
        image = self.grid.values.clone()
        image[~image.isnan()] = values.to(image)
        return ax.pcolormesh(self.grid.lon, self.grid.lat, image, shading="nearest", **kind)


@dataclass(frozen=True, eq=False)
class Atlas:
    """What is mapped where: the source, the target's truth, and predictions from `size` points of it."""

    source: tuple[Canvas, Tensor]
    truth: tuple[Canvas, Tensor]
    places: Canvas
    size: int
    label: str
    titles: tuple[str, str]
    convert: Convert = lambda mean, variance: (mean, variance)


def draw_curves(transfer: Transfer, scores: Scores) -> Figure:
    """RMSE and negative log likelihood over the number of points, with standard errors."""
    figure, axes = panels(2, 3.8)
    figure.set_size_inches(10.5, 4.2)
    for measure, ax in enumerate(axes):
        for index, (name, values) in enumerate(scores.values.items()):
            apart = 1.02 ** (index - len(scores.values) / 2)  # so that bars do not hide each other
            one = values[..., measure]
            error = one.std(1) / one.shape[1] ** 0.5
            x = [apart * size for size in scores.sizes]
            ax.errorbar(x, one.mean(1), error, label=name, elinewidth=0.8, **STYLES[name])
        ax.set_xscale("log")
        ax.set_xticks(scores.sizes, [str(size) for size in scores.sizes])
        ax.minorticks_off()
        ax.set_xlabel("points of the target")
        own = torch.stack([v[..., measure].mean(1) for k, v in scores.values.items() if "GP" in k])
        low, high = float(own.min()), float(own.quantile(0.9))
        ax.set_ylim(low - 0.1 * (high - low), high + 0.5 * (high - low))
    axes[0].set_ylabel(f"RMSE in {transfer.unit}")
    axes[1].set_ylabel("negative log likelihood")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle(f"{transfer.name} (mean ± standard error; worse ones are off the scale)")
    return figure


def draw_maps(transfer: Transfer, network: nn.Sequential, atlas: Atlas, options: Options) -> Figure:
    """Source, truth and predictions in one color scale, and the standard deviation of the GP."""
    (few_x, few_y), _ = transfer.choose(0, options)
    few = few_x[: atlas.size], few_y[: atlas.size]
    makers = {
        "the source network": maps.of_network(network),
        f"GP of the network, {atlas.size} points": maps.of_posterior(maps.adapted(network, few)),
        f"RBF GP, {atlas.size} points": maps.of_rbf(few),
    }
    found = {
        name: atlas.convert(*transfer.in_units(make)(atlas.places.x))
        for name, make in makers.items()
    }
    means = [(name, atlas.places, mean) for name, (mean, _) in found.items()]
    first = [(t, *c) for t, c in zip(atlas.titles, (atlas.source, atlas.truth), strict=True)]
    deviation = list(found.values())[1][1].sqrt()
    limits = quantiles(atlas.truth[1])
    plt.rcParams.update({"font.size": 8})
    figure, axes = plt.subplots(2, 3, figsize=(12, 1.6 + 6 * shape(atlas)), layout="constrained")
    for ax, (title, canvas, values) in zip(axes.flat, first + means, strict=False):
        image = canvas.draw(ax, values.flatten(), limits, "viridis")
        finish(ax, title, atlas)
        figure.colorbar(image, ax=ax, label=atlas.label, extend="both", shrink=0.75)
    image = atlas.places.draw(axes.flat[5], deviation.flatten(), quantiles(deviation), "magma")
    finish(axes.flat[5], "standard deviation, GP of the network", atlas)
    figure.colorbar(image, ax=axes.flat[5], label=atlas.label, extend="both", shrink=0.75)
    dots = few[0] * transfer.source[0].std(0) + transfer.source[0].mean(0)
    look = {"ms": 3, "mfc": "white"} if atlas.places.grid else {"ms": 5.5, "mfc": "none"}
    for ax in axes.flat[3:]:
        ax.plot(dots[:, 0], dots[:, 1], "o", mec="black", mew=0.7, **look)
    figure.suptitle(f"{transfer.name}; circles are the points of the target that are known")
    return figure


def quantiles(values: Tensor) -> tuple[float, float]:
    """Between which 96 % of the values are."""
    low, high = (float(values.double().flatten().quantile(q)) for q in (0.02, 0.98))
    return low, high


def corners(atlas: Atlas) -> tuple[Tensor, Tensor]:
    """The least and the largest longitude and latitude that are mapped."""
    places = torch.cat([atlas.places.x[:, :2], atlas.source[0].x[:, :2]])
    return places.min(0).values - 0.5, places.max(0).values + 0.5


def stretch(atlas: Atlas) -> float:
    """How much longer a degree of latitude is than one of longitude, at the middle latitude."""
    return 1 / float(torch.stack(corners(atlas))[:, 1].mean().deg2rad().cos())


def shape(atlas: Atlas) -> float:
    """The height of the map over its width."""
    width, height = (corners(atlas)[1] - corners(atlas)[0]).tolist()
    return float(height * stretch(atlas) / width)


def finish(ax: Axes, title: str, atlas: Atlas) -> None:
    """Titles and axes, a kilometer as long in both directions."""
    low, high = corners(atlas)
    ax.set_xlim(float(low[0]), float(high[0]))
    ax.set_ylim(float(low[1]), float(high[1]))
    ax.set_aspect(stretch(atlas))
    ax.set_title(title)
    ax.set_xlabel("longitude")
    ax.set_ylabel("latitude")


@dataclass(frozen=True, eq=False)
class Study:
    """A transfer and what is mapped of it."""

    transfer: Transfer
    atlas: Atlas


def run_study(program: str, study: Study, options: Options, out: Path) -> bool:
    """Train, compare, print and draw; whether the claims of the .toml beside the program hold."""
    transfer = study.transfer
    source = transfer.standardized(transfer.source)
    start = maps.untrained(source[0].shape[1], seed=0)
    network = maps.train(start, source, options.steps)
    error = maps.squared_error(network, source) ** 0.5 * transfer.spread
    spread = f"whose standard deviation is {transfer.spread:.3g}"
    print(f"\n{transfer.name}: {len(source[0])} points of the source, {spread};")
    print(f"the network's RMSE there is {error:.3g} {transfer.unit}")
    scores = maps.score(transfer, maps.methods(network, source, options), options)
    maps.print_scores(transfer.name, transfer.unit, scores)
    name = f"maddox2021_{transfer.name.lower().replace(' ', '_')}"
    save(draw_curves(transfer, scores), out, f"{name}_curves.png")
    save(draw_maps(transfer, network, study.atlas, options), out, f"{name}_maps.png")
    return maps.compare(program, transfer.name, scores, options.quick)


def run_studies(
    program: str, studies: dict[str, Callable[[], Study]], arguments: list[str] | None = None
) -> int:
    """The command line of a program; its exit status says whether all claims came out as stated."""
    parser = argparse.ArgumentParser(prog=Path(program).name)
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the figures")
    parser.add_argument("--only", choices=list(studies), help="one of the transfers")
    parser.add_argument("--repeats", type=int, default=Options.repeats, help="choices of points")
    parser.add_argument("--steps", type=int, default=Options.steps, help="steps at the source")
    parser.add_argument("--quick", action="store_true", help="three choices of few points")
    chosen = findings.parse(parser, arguments)
    if chosen.repeats < 3:
        parser.error("--repeats must be at least 3: standard errors are over them")
    options = QUICK if chosen.quick else Options(chosen.repeats, chosen.steps)
    names = [chosen.only] if chosen.only else list(studies)
    agree = [run_study(program, studies[name](), options, chosen.out) for name in names]
    return 0 if all(agree) else 1
