"""Two trained networks as Gaussian processes that are added, multiplied and composed.

One learns: what was learned apart can be put together afterwards, with its uncertainty. A sum is sure where
both networks are, a product of experts follows whoever knows, and a pipeline carries the uncertainty of its
first network through the second one.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import net2gp as n2g
from net2gp import plots
from net2gp.bayes import compose, draw_composition, product_of_experts, weighted_sum

NOISE = 0.05**2
GRID = torch.linspace(-3, 3, 200)[:, None]


def learned(function, low: float, high: float, count: int = 40) -> n2g.Posterior:
    """The posterior of a network that was trained on a function between `low` and `high`."""
    x = low + (high - low) * torch.rand(count, 1)
    y = function(x) + NOISE**0.5 * torch.randn(count, 1)
    network = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(1000):
        optimizer.zero_grad()
        mse_loss(network(x), y).backward()
        optimizer.step()
    return n2g.laplace(network.eval(), (x, y), n2g.Gaussian(NOISE))


def draw(ax, law, truth: Tensor, title: str) -> float:
    """Draw a law and the truth, and return the root mean squared error."""
    plots.plot_regression(ax, GRID, law.mean, law.variance, label=f"{title} ± 2σ")
    ax.plot(GRID, truth, color=plots.INK, linestyle=":")
    ax.set(title=title, xlim=(-3, 3), ylim=(-2.6, 2.6))
    return float((law.mean - truth).square().mean().sqrt())


def main(out: Path) -> None:
    torch.manual_seed(0)
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")

    trend, season = learned(lambda x: 0.4 * x, -3, 3), learned(lambda x: (2 * x).sin(), -3, 3)
    law = weighted_sum([trend, season]).marginal(GRID)
    error = draw(axes[0], law, 0.4 * GRID + (2 * GRID).sin(), "trend + season")
    print(f"sum: error {error:.3f}, standard deviation {float(law.stddev.mean()):.3f}")

    experts = [learned(torch.sin, *ends).marginal(GRID) for ends in ((-3, 0.5), (-0.5, 3))]
    error = draw(axes[1], product_of_experts(experts), GRID.sin(), "product of experts")
    for name, expert, color in zip(("west", "east"), experts, plots.COLORS[1:], strict=False):
        axes[1].plot(GRID, expert.mean, color=color, linewidth=1, label=f"{name} alone")
        alone = float((expert.mean - GRID.sin()).square().mean().sqrt())
        print(f"product: error {error:.3f}, of the expert of the {name} alone {alone:.3f}")
    axes[1].legend(frameon=False)

    inner, outer = learned(torch.sin, -2, 2, 12), learned(torch.square, -1.5, 1.5)
    pipeline = compose(outer, inner)
    draw(axes[2], pipeline.marginal(GRID), GRID.sin() ** 2, "composition")
    inside = GRID[(GRID.abs() < 2).flatten()]
    exact = draw_composition(outer, inner, inside, 500).std(0)
    ratio = float((pipeline.marginal(inside).stddev / exact).median())
    print(f"composition: standard deviation {ratio:.2f} times that of exact draws")

    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "two_networks.png", dpi=150)
    print(f"wrote {out / 'two_networks.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("figures"))
    main(parser.parse_args().out)
