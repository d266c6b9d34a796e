"""Uncertainty for a trained network, for regression and classes alike: the picture of README.

One learns: `laplace` keeps the outputs of the network and says where it knows little, for a regression by
wider bands, and for a classifier by probabilities that fall away from the data.
"""

import argparse
import math
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import net2gp as n2g
from net2gp import data, plots


def trained(network: nn.Sequential, x: Tensor, y: Tensor, loss, steps: int) -> nn.Sequential:
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(network(x), y).backward()
        optimizer.step()
    return network.eval()


def regression(ax) -> None:
    curve = data.snelson_like(num_points=60)
    network = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    trained(network, *curve.data, mse_loss, 1500)
    posterior = n2g.laplace(network, curve.data, n2g.Gaussian())
    grid = torch.linspace(-1, 7, 300)[:, None]
    law = posterior.predict(grid)
    plots.plot_regression(ax, grid, law.mean, law.variance, data=curve.data, label="network ± 2σ")
    ax.set(title="a regression, with laplace", xlim=(-1, 7), ylim=(-3.2, 3.2))
    known, gap = posterior.predict(torch.tensor([[1.0], [2.75]])).stddev.flatten().tolist()
    print(f"regression: standard deviation {known:.2f} at the data, {gap:.2f} in the gap")


def classification(axes) -> None:
    labels, angle = torch.arange(100) % 2, math.pi * torch.rand(100, 1)
    first, second = labels[:, None] == 0, torch.cat([1 - angle.cos(), 0.5 - angle.sin()], 1)
    points = torch.where(first, torch.cat([angle.cos(), angle.sin()], 1), second)
    points += 0.12 * torch.randn(100, 2)  # two moons
    network = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 2))
    trained(network, points, labels, cross_entropy, 300)
    posterior = n2g.laplace(network, (points, labels), n2g.Categorical())
    side = torch.linspace(-3, 4, 100), torch.linspace(-3, 3.5, 100)
    grid = torch.cartesian_prod(*side)
    found = {"network alone": network(grid).softmax(1), "laplace": posterior.predict(grid).probs}
    for ax, (name, probs) in zip(axes, found.items(), strict=True):
        unsure = float((probs.amax(1) < 0.9).float().mean())
        print(f"classes, {name}: less than 90 % sure in {unsure:.0%} of the square")
        image = probs[:, 1].detach().reshape(100, 100).T
        ax.contourf(*side, image, levels=torch.linspace(0, 1, 11), cmap="RdBu", alpha=0.75)
        ax.scatter(*points.T, s=9, c=labels, cmap="bwr_r", linewidths=0)
        ax.set(title=f"a classifier, {name}", xticks=[], yticks=[])


def main(out: Path) -> None:
    torch.manual_seed(0)
    figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
    regression(axes[0])
    classification(axes[1:])
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "uncertainty.png", dpi=120)
    print("wrote", out / "uncertainty.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
