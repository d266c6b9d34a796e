"""Posteriors that are found while a network trains: VOGGN, IVON and SWAG on one curve.

One learns: `VOGGN.step(x, y)`, `IVON.sampled_weights()`, `Swag.collect(network)`; all three give the same
kind of posterior, and they differ in how unsure they are in the gap between the data.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import net2gp as n2g
from net2gp import data, metrics, plots
from net2gp.training import IVON, VOGGN, Swag

NOISE = n2g.Gaussian(0.04)


def new_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1)).eval()


def by_voggn(x, y):
    optimizer = VOGGN(new_network(), NOISE, len(x), learning_rate=0.04, decays=(0.9, 0.96))
    for _ in range(300):
        optimizer.step(x, y)
    return optimizer.posterior((x, y))


def by_ivon(x, y):
    network = new_network()
    optimizer = IVON(network, len(x), learning_rate=0.02, decays=(0.9, 0.997), initial_var=1e-3)
    for _ in range(1000):
        with optimizer.sampled_weights():
            (-NOISE.log_prob(network(x), y).mean()).backward()
        optimizer.step()
    return optimizer.posterior((x, y), NOISE)


def by_swag(x, y):
    network, swag = new_network(), Swag(rank=20)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for step in range(1000):
        batch = torch.randint(len(x), (10,))
        optimizer.zero_grad()
        (network(x[batch]) - y[batch]).square().mean().backward()
        optimizer.step()
        if step >= 500 and step % 20 == 0:
            swag = swag.collect(network)
    return swag.posterior(network, (x, y), NOISE)


METHODS = {"VOGGN": by_voggn, "IVON": by_ivon, "SWAG": by_swag}


def main(out: Path) -> None:
    curve, grid = data.snelson_like(), torch.linspace(-3.5, 3.5, 141)[:, None]
    x, y, (left, right) = curve.x - 3, curve.y, curve.gap
    gap = (grid > left - 3) & (grid < right - 3)
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.5), layout="constrained", sharey=True)
    print(f"{'':8}{'RMSE':>8}{'NLL':>8}{'std with data':>16}{'std in the gap':>16}")
    for ax, (name, find) in zip(axes, METHODS.items(), strict=True):
        posterior = find(x, y)
        law, f = posterior.predict(x), posterior.marginal(grid)
        std = posterior.marginal(x).variance.sqrt().mean(), f.variance[gap].sqrt().mean()
        scores = f"{metrics.rmse(law.mean, y):8.3f}{metrics.nll(law, y):8.3f}"
        print(f"{name:8}{scores}{std[0]:16.3f}{std[1]:16.3f}")
        plots.plot_regression(ax, grid, f.mean, f.variance, data=(x, y), label="mean ± 2σ")
        ax.set_title(name)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "during_training.png", dpi=120)
    print("wrote", out / "during_training.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
