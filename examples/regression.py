"""A trained regression network as a Gaussian process: error bars that open where data are missing.

One learns: `adapt`, `marginal` (the function) against `predict` (observations), coverage and NLL,
and why `zero_mean=True` is right for the very points that the network was trained on.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import net2gp as n2g
from net2gp import data, metrics, plots


def main(out: Path) -> None:
    torch.manual_seed(0)
    curve = data.snelson_like(num_points=40)
    network = nn.Sequential(
        nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(1000):
        optimizer.zero_grad()
        nn.functional.mse_loss(network(curve.x), curve.y).backward()
        optimizer.step()
    network.eval().requires_grad_(False)

    # The network has already explained these points, so that nothing would be left for a process around
    # it: here it gives the kernel only.
    posterior = n2g.adapt(network, curve.data, n2g.Gaussian(), zero_mean=True)
    print(f"noise variance: {posterior.likelihood.noise_var:.3f} (true: {curve.noise_var})")

    x = torch.linspace(0, 6, 1001)[:, None]
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    y = curve.truth(x) + curve.noise_var**0.5 * noise
    law = posterior.predict(x)
    residual_var = (network(curve.x) - curve.y).square().mean()
    laws = {"network": (network(x), residual_var.expand(y.shape)), "GP": (law.mean, law.variance)}
    gap = (x > curve.gap[0]) & (x < curve.gap[1])
    print(f"{'':8}{'RMSE':>8}{'NLL':>8}{'95 % with data':>17}{'95 % in the gap':>17}")
    for name, (mean, var) in laws.items():
        covered = [metrics.coverage(mean[part], var[part], y[part], 0.95) for part in (~gap, gap)]
        scores = f"{metrics.rmse(mean, y):8.3f}{metrics.gaussian_nll((mean, var), y):8.3f}"
        print(f"{name:8}{scores}{covered[0]:17.1%}{covered[1]:17.1%}")

    grid = torch.linspace(-0.5, 6.5, 281)[:, None]
    f = posterior.marginal(grid)
    figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
    plots.plot_regression(ax, grid, f.mean, f.variance, data=curve.data, label="GP mean ± 2σ")
    ax.plot(grid, network(grid), "--", color=plots.COLORS[1], label="network")
    ax.plot(grid, curve.truth(grid), ":", color=plots.INK, label="truth")
    ax.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "regression.png", dpi=120)
    print("wrote", out / "regression.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
