"""Whether it matters that a network was trained before it is linearized: ReLU networks of four widths.

    python papers/maddox2021/relu.py --out figures [--quick]

x is drawn around −5 and 5, y = 0.1 x² + |x| + 0.9 ε, and networks 1-h-1 of h = 5, 50, 500 and 5000 units are
linearized as torch initializes them and after training. Prints the mean squared residual of both beside the
published one, and what the Gaussian process of each makes of the data: its evidence, and its error
between and beyond the clusters. Draws the posteriors.

Maddox, Tang, Moreno, Wilson & Damianou (2021), "Fast adaptation with linearized neural networks", whose
program has these data and residuals.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from dataclasses import dataclass
from math import log10
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributions import Distribution

import net2gp as n2g
from net2gp import metrics
from net2gp.plots import plot_regression

sys.path.append(str(Path(__file__).parents[1]))
import findings
from studies import Row, print_table, save

WIDTHS = (5, 50, 500, 5000)
NOISE_VAR = 0.9**2
GRID = torch.linspace(-10, 10, 201, dtype=torch.float64)[:, None]
KINDS = ("untrained", "trained")


def truth(x: Tensor) -> Tensor:
    """The curve without noise."""
    return 0.1 * x.square() + x.abs()


def clusters(seed: int, num_points: int = 150) -> tuple[Tensor, Tensor]:
    """`num_points` around −5 and as many around 5, with standard deviation 0.8: (2N, 1) each."""
    kind: dict[str, Any] = {
        "generator": torch.Generator().manual_seed(seed),
        "dtype": torch.float64,
    }
    centers = torch.tensor([-5.0, 5.0], dtype=torch.float64).repeat_interleave(num_points)
    x = centers[:, None] + 0.8 * torch.randn(2 * num_points, 1, **kind)
    return x, truth(x) + NOISE_VAR**0.5 * torch.randn(2 * num_points, 1, **kind)


def untrained(width: int, seed: int) -> nn.Sequential:
    """1-width-1, as torch initializes it, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Linear(1, width), nn.ReLU(), nn.Linear(width, 1)
    return nn.Sequential(*layers).double().eval()


@dataclass(frozen=True, eq=False)
class Linearization:
    """A network of one width and seed, its mean squared residual, and the posterior with that as noise."""

    width: int
    kind: str
    residual: float
    posterior: Any
    data: tuple[Tensor, Tensor]

    @staticmethod
    def of(network: nn.Module, kind: str, data: tuple[Tensor, Tensor]) -> Linearization:
        """The published way: zero mean, unit prior, the residual as noise."""
        x, y = data
        with torch.no_grad():
            residual = float(metrics.rmse(network(x), y) ** 2)
        posterior = n2g.adapt(network, data, n2g.Gaussian(residual), prior_var=1.0, zero_mean=True)
        width = next(iter(network.parameters())).shape[0]
        return Linearization(width, kind, residual, posterior, data)

    def errors(self) -> dict[str, float]:
        """Of the posterior mean: residual at the data, and against the truth between and beyond them."""
        mean = lambda x: self.posterior.marginal(x).mean
        away = GRID.abs()[:, 0]
        found = {"at the data": float(metrics.rmse(mean(self.data[0]), self.data[1]) ** 2)}
        for name, place in (("between", away < 3), ("beyond", away > 7)):
            x = GRID[place]
            found[name] = float(metrics.rmse(mean(x), truth(x)) ** 2)
        return found

    def predict(self) -> Distribution:
        """Of y on the grid."""
        return self.posterior.predict(GRID)


def linearizations(widths: tuple[int, ...], seeds: int, num_steps: int) -> list[Linearization]:
    """Networks of every width and seed, before and after Adam on the squared error of all points."""
    found = []
    optimizer = n2g.training.AdamSettings(
        learning_rate=1e-2, num_steps=num_steps, factor=0.5, patience=100
    )
    for width in widths:
        pairs = [clusters(seed) for seed in range(seeds)]
        before = [untrained(width, seed) for seed in range(seeds)]
        # a prior so wide that it does not count: the published networks have none
        after = n2g.training.train_many(
            before, pairs, n2g.Gaussian(NOISE_VAR), prior_var=1e4, optimizer=optimizer, at_once=1
        )
        both: list[list[nn.Module]] = [[*before], [*after]]
        for kind, networks in zip(KINDS, both, strict=True):
            found += [
                Linearization.of(network, kind, pair)
                for network, pair in zip(networks, pairs, strict=True)
            ]
    return found


def widths_of(found: list[Linearization]) -> list[int]:
    """The widths that there are, in order."""
    return sorted({one.width for one in found})


def mean_residual(found: list[Linearization], width: int, kind: str) -> float:
    """Over the seeds."""
    values = [one.residual for one in found if (one.width, one.kind) == (width, kind)]
    return sum(values) / len(values)


def residual_rows(found: list[Linearization], numbers: dict[str, Any]) -> list[Row]:
    """The residuals; those of untrained networks, which are the luck of a draw, by orders of magnitude."""
    rows = []
    for kind in KINDS:
        for width, published in zip(WIDTHS, numbers[kind]["residuals"], strict=True):
            if width not in widths_of(found):
                continue
            value, tolerance = mean_residual(found, width, kind), numbers[kind]["tolerance"]
            if kind == "untrained":
                name = f"log10 of the squared residual, untrained, {width} units"
                note = f"{published:.3g} published, {value:.3g} found"
                rows.append(Row(name, log10(published), log10(value), tolerance, note))
            else:
                name = f"squared residual, trained, {width} units"
                rows.append(Row(name, published, value, tolerance))
    return rows


def print_processes(found: list[Linearization]) -> None:
    """Means over the seeds of what the posteriors make of the data."""
    print(f"\n{'':<24}{'evidence':>12}{'MSE at data':>14}{'between':>10}{'beyond':>10}")
    for width in widths_of(found):
        for kind in KINDS:
            some = [one for one in found if (one.width, one.kind) == (width, kind)]
            evidence = [float(one.posterior.log_marginal_likelihood()) for one in some]
            columns = [evidence, *zip(*(one.errors().values() for one in some), strict=True)]
            means = [sum(column) / len(some) for column in columns]
            cells = f"{means[0]:>12.1f}{means[1]:>14.3f}{means[2]:>10.3f}{means[3]:>10.3f}"
            print(f"{f'{width} units, {kind}':<24}{cells}")


def draw(found: list[Linearization]) -> Figure:
    """The posteriors of the first seed: untrained above, trained below, by width."""
    plt.rcParams.update({"font.size": 8})
    figure, axes = plt.subplots(
        2, len(widths_of(found)), figsize=(12, 5.4), sharex=True, sharey=True, layout="constrained"
    )
    for row, kind in zip(axes, KINDS, strict=True):
        for ax, width in zip(row, widths_of(found), strict=True):
            one = next(each for each in found if (each.width, each.kind) == (width, kind))
            law = one.predict()
            plot_regression(
                ax,
                GRID,
                law.mean,
                law.variance,
                data=one.data,
                truth=truth(GRID),
                label="mean ± 2 sd",
            )
            handles, labels = ax.get_legend_handles_labels()
            ax.get_legend().remove()
            ax.set_title(f"{width} units, {kind}, residual {one.residual:.3g}", fontsize=8)
            ax.set_ylim(-12, 32)
            ax.label_outer()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def expected() -> dict[str, Any]:
    """What relu.toml says."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, write the figure; the exit status says whether residuals are as expected."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the figure")
    parser.add_argument("--seeds", type=int, default=3, help="networks of each width")
    parser.add_argument("--steps", type=int, default=800, help="steps of Adam on all points")
    parser.add_argument("--quick", action="store_true", help="2 networks of each width but 5000")
    options = findings.parse(parser, arguments)
    widths = WIDTHS[:-1] if options.quick else WIDTHS
    seeds = 2 if options.quick else options.seeds
    found = linearizations(widths, seeds, options.steps)
    agree = print_table(residual_rows(found, expected()))
    print_processes(found)
    save(draw(found), options.out, "maddox2021_relu.png")
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
