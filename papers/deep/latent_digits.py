"""Does the bound prefer several layers? Steps, and 150 images of the digits 0, 1 and 6.

    python papers/deep/latent_digits.py --out figures [--quick]

Stated before the run:

- steps (40 points on [−2, 2], noise 0.05): the collapsed bound of two layers is above the bound of one by at
  least 5 nats, for every seed;
- digits 0, 1 and 6 of scikit-learn and of USPS, 50 images each: the best bound with two or three layers is
  above the bound of one layer by at least 3 nats. Both are the best of three starts, and one layer has as
  many steps as all layers of the deepest model together;
- the map of the first level keeps the classes apart: the nearest neighbor of an image has its class for at
  least 90 % of the images;
- with the lower half of a new image missing, its latent variables fill it in with a smaller error than the
  mean image of all digits.

Bounds depend on the start, and even on how sums are rounded: one start of the deep model on USPS ended 50
nats apart with one and with two threads. Hence three starts for each, and one thread, which is faster too.
The starts of further levels were chosen on the images of USPS, and the limits of 5 and 3 nats after trials on
these data; so the run confirms these numbers, and is no test on data that nobody had seen. A quick run says
nothing about the depth for digits: with 60 images and 150 steps per level it is undecided, and its one layer
with more steps has the higher bound.

Titsias and Lawrence (2010), "Bayesian Gaussian process latent variable model"; Damianou and Lawrence (2013),
"Deep Gaussian processes", whose figure 6 has such a map.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from net2gp import data
from net2gp.deep import LatentSearch, LatentVariables, latent_variables
from net2gp.plots import COLORS, INK

sys.path.append(str(Path(__file__).parents[1]))
import findings
from claims import Claim, at_most, judge

DIGITS = (0, 1, 6)
WIDTHS = (2, 3, 5)
"""The variables of each level of the deepest model, from the top to the images."""


@dataclass(frozen=True, eq=False)
class Images:
    """Images of digits as rows, without the pixels that are always empty.

    Args:
        rows: (N, P).
        labels: (N,).
        used: Which of the pixels are there.
        new_rows: Further images of the same digits.
        name: The data set.
    """

    rows: Tensor
    labels: Tensor
    used: Tensor
    new_rows: Tensor
    name: str

    @staticmethod
    def read(name: str, count: int) -> Images:
        """The first images of each digit, and ten more of each from the test split."""
        source = {"scikit-learn": data.digits, "USPS": data.usps}[name]
        x, labels = source("train")
        some = torch.cat([(labels == digit).nonzero()[:count, 0] for digit in DIGITS])
        flat = x[some].flatten(1).double()
        used = flat.std(0) > 0
        new, kinds = source("test")
        few = torch.cat([(kinds == digit).nonzero()[:10, 0] for digit in DIGITS])
        new_rows = new[few].flatten(1).double()[:, used]
        return Images(flat[:, used], labels[some], used, new_rows, name)

    def picture(self, row: Tensor) -> Tensor:
        """A row as a square image."""
        full = torch.zeros(len(self.used), dtype=torch.float64)
        full[self.used] = row
        return full.reshape(self.side, self.side).clamp(0, 1)

    @property
    def side(self) -> int:
        """The number of pixels along an edge."""
        return math.isqrt(len(self.used))


def step_gains(seeds: int) -> list[tuple[float, float]]:
    """The bounds of one and of two layers on steps."""
    found = []
    for seed in range(seeds):
        noise = torch.randn(40, 1, generator=torch.Generator().manual_seed(seed))
        x = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]
        y = (x > 0).double() + 0.05 * noise.double()
        search = LatentSearch(num_steps=200, num_inducing=15)
        one, two = (latent_variables(y, w, inputs=x, search=search) for w in ((), (1,)))
        found.append((one.bound, two.bound))
    return found


def neighbors_agree(places: Tensor, labels: Tensor) -> float:
    """The share of rows whose nearest other row has the same label."""
    apart = torch.cdist(places, places).fill_diagonal_(float("inf"))
    return float((labels[apart.argmin(1)] == labels).double().mean())


def half_errors(found: LatentVariables, images: Images) -> tuple[float, float]:
    """Root mean squared errors of lower halves that were filled in, and of the mean image."""
    lower = images.used.nonzero()[:, 0] >= len(images.used) // 2
    holes = images.new_rows.clone()
    holes[:, lower] = float("nan")
    laws = found.infer(holes)
    filled = found.predict(laws[0].mean, laws[0].variance).mean
    mean = images.rows.mean(0)
    errors = [(guess - images.new_rows)[:, lower] for guess in (filled, mean)]
    return float(errors[0].square().mean().sqrt()), float(errors[1].square().mean().sqrt())


@dataclass(frozen=True, eq=False)
class Found:
    """What a run found on one set of images.

    Args:
        images: The images.
        one: The model of one layer with the best bound.
        deep: The deepest model with the best bound.
    """

    images: Images
    one: LatentVariables
    deep: LatentVariables


def measure(name: str, quick: bool) -> Found:
    """Fit all models of one set of images."""
    images = Images.read(name, 20 if quick else 50)
    steps, inducing = (150, 20) if quick else (400, 30)
    seeds = range(1 if quick else 3)

    def best(widths: tuple[int, ...] | int, num_steps: int) -> LatentVariables:
        searches = (LatentSearch(num_steps, inducing, seed=seed) for seed in seeds)
        tries = [latent_variables(images.rows, widths, search=search) for search in searches]
        return max(tries, key=lambda found: found.bound)

    return Found(images, best(WIDTHS[-1], len(WIDTHS) * steps), best(WIDTHS, steps))


def claims(found: Found, quick: bool) -> list[Claim]:
    """What was stated before the run about images."""
    name, gain = found.images.name, max(found.deep.depth_bounds[1:]) - found.one.bound
    agree = neighbors_agree(scaled(found.one), found.images.labels)
    filled, mean = half_errors(found.one, found.images)
    # a quick run is too short to say anything about depth
    made = [] if quick else [at_most(f"{name}: 3 less the gain by further layers", 3 - gain, 0)]
    return [
        *made,
        at_most(f"{name}: 0.9 less the share of neighbors of one class", 0.9 - agree, 0),
        at_most(f"{name}: error of lower halves, to the mean image", filled / mean, 1),
    ]


def scaled(found: LatentVariables) -> Tensor:
    """The latent means of the first level in units of its length scales."""
    return found.mean / found.layers[0].layer.lengthscale


def draw(found: Found) -> Figure:
    """Maps, bounds over depth, and images along the map."""
    figure = Figure(figsize=(15, 4), layout="constrained")
    figure.suptitle(f"{found.images.name}, digits 0, 1 and 6, {len(found.images.rows)} images")
    axes = figure.subplots(1, 4)
    title = "one layer: the two most relevant of 5"
    draw_map(axes[0], found.one, found.images.labels, title, 0)
    second = len(found.deep.levels) - 2  # a third layer may be idle, all at its prior
    draw_map(axes[1], found.deep, found.images.labels, "deep: the level above these", second)
    draw_bounds(axes[2], found)
    draw_grid(axes[3], found)
    return figure


def draw_map(ax: Axes, found: LatentVariables, labels: Tensor, title: str, index: int) -> None:
    """The latent means of a level by class, with bars of one standard deviation."""
    level = found.levels[index]
    assert level.variance is not None
    first, second = found.relevances[index].argsort(descending=True)[:2].tolist()
    for color, digit in zip(COLORS, DIGITS, strict=False):
        rows = labels == digit
        ax.errorbar(
            level.mean[rows, first],
            level.mean[rows, second],
            level.variance[rows, second].sqrt(),
            level.variance[rows, first].sqrt(),
            fmt="o",
            markersize=4,
            elinewidth=0.5,
            color=color,
            label=f"{digit}",
        )
    ax.legend(frameon=False, title="digit")
    ax.set(title=title, xlabel=f"variable {first + 1}", ylabel=f"variable {second + 1}")
    ax.spines[["top", "right"]].set_visible(False)


def draw_bounds(ax: Axes, found: Found) -> None:
    """The bound over the number of layers."""
    bounds = found.deep.depth_bounds
    depths = range(1, len(bounds) + 1)
    ax.plot(depths, bounds, "o-", color=COLORS[0], label="added one by one")
    ax.axhline(
        found.one.bound, color=INK, linewidth=0.8, linestyle="--", label="one, as many steps"
    )
    ax.legend(frameon=False, loc="lower right")
    ax.set_xticks(list(depths))
    ax.set(title="bound on log p(images)", xlabel="layers", ylabel="nats")
    ax.spines[["top", "right"]].set_visible(False)


def draw_grid(ax: Axes, found: Found) -> None:
    """Images that the model of one layer expects along its two most relevant variables."""
    first, second = found.one.relevances[0].argsort(descending=True)[:2].tolist()
    ends = [
        found.one.mean[:, k].quantile(torch.tensor([0.02, 0.98]).double()) for k in (first, second)
    ]
    across, up = (torch.linspace(float(a), float(b), 8, dtype=torch.float64) for a, b in ends)
    places = torch.zeros(64, found.one.mean.shape[1], dtype=torch.float64)
    places[:, first], places[:, second] = across.repeat(8), up.flip(0).repeat_interleave(8)
    rows = found.one.predict(places).mean
    pictures = torch.stack([found.images.picture(row) for row in rows])
    tiles = torch.nn.functional.pad(pictures, (1, 1, 1, 1))  # a white edge
    side = tiles.shape[1]
    page = tiles.reshape(8, 8, side, side).permute(0, 2, 1, 3).reshape(8 * side, 8 * side)
    ax.imshow(page.numpy(), cmap="gray_r")
    ax.set(title="images along the first map", xticks=[], yticks=[])


def main(arguments: list[str] | None = None) -> int:
    """Run, write the figure, and judge the claims."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder of the figure")
    parser.add_argument("--quick", action="store_true", help="fewer images and steps")
    options = findings.parse(parser, arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    pairs = step_gains(2 if options.quick else 10)
    print("steps, one and two layers:", *(f"{one:.1f}/{two:.1f}" for one, two in pairs))
    smallest = min(two - one for one, two in pairs)
    made = [at_most("steps: 5 less the smallest gain by a second layer", 5 - smallest, 0)]
    for name in ("scikit-learn",) if options.quick else ("scikit-learn", "USPS"):
        found = measure(name, options.quick)
        path = options.out / f"deep_latent_{name.lower().replace('-', '_')}.png"
        draw(found).savefig(path, dpi=130)
        print(path)
        print("bounds by depth:", *(f"{bound:.2f}" for bound in found.deep.depth_bounds))
        print(f"one layer with as many steps: {found.one.bound:.2f}")
        made += claims(found, options.quick)
    return 0 if judge(made) else 1


if __name__ == "__main__":
    raise SystemExit(main())
