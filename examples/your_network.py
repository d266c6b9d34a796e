"""Your network, your data: a network trained on a table, and how far its predictions may be off.

One learns: the one line that `laplace` takes, and RMSE, NLL, CRPS and the coverage of 90 % intervals
beside the bare network with one noise for all. California housing, if NET2GP_DATA names its folder, else
scikit-learn's diabetes. Continued by your_network_images.py and your_network_few_labels.py.
"""

import argparse
import os
from pathlib import Path

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.distributions import Normal
from torch.nn.functional import mse_loss

import net2gp as n2g
from net2gp import data, metrics, plots


def main(out: Path) -> None:
    torch.manual_seed(0)
    if os.environ.get("NET2GP_DATA"):
        name, (x, y) = "California housing", data.california_housing()
    else:
        name, table = "diabetes", load_diabetes(return_X_y=True)
        x, y = (torch.tensor(values, dtype=torch.float32) for values in table)
        y = y[:, None] / 100
    order, count = torch.randperm(len(x))[:3000], min(1000, len(x) * 2 // 3)
    (x, x_test), (y, y_test) = (v[order].tensor_split([count]) for v in (x, y))
    middle, spread = x.mean(0), x.std(0)
    x, x_test = (x - middle) / spread, (x_test - middle) / spread

    network = nn.Sequential(
        nn.Linear(x.shape[1], 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    for _ in range(200):
        optimizer.zero_grad()
        mse_loss(network(x), y).backward()
        optimizer.step()
        schedule.step()
    network.eval().requires_grad_(False)

    posterior = n2g.laplace(network, (x, y), n2g.Gaussian())

    print(f"{name}: {count} rows, {posterior.structure}")
    alone = Normal(network(x_test), mse_loss(network(x), y).sqrt())
    pairs = {}
    print(f"{'':12}{'RMSE':>8}{'NLL':>8}{'CRPS':>8}{'inside 90 %':>14}")
    for label, law in {"network": alone, "posterior": posterior.predict(x_test)}.items():
        mean, var = pairs[label] = law.mean, law.variance
        scores = f"{metrics.rmse(mean, y_test):8.3f}{metrics.gaussian_nll(law, y_test):8.3f}"
        crps, inside = (
            metrics.crps_gaussian(mean, var, y_test),
            metrics.coverage(mean, var, y_test, 0.9),
        )
        print(f"{label:12}{scores}{crps:8.3f}{inside:14.1%}")
    ax = plots.plot_coverage(None, pairs, y_test)
    out.mkdir(parents=True, exist_ok=True)
    ax.figure.savefig(out / "your_network.png", dpi=120)
    print("wrote", out / "your_network.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
