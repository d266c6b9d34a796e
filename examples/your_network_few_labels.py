"""Your network, new classes: five labeled images of each, in closed form.

One learns: `adapt_classes`, which trains nothing, beside fine-tuning with a new last layer. A LeNet of
MNIST learns printed letters, if NET2GP_DATA names their folder; else a network of the digits 0 to 4 learns
5 to 9.
"""

import argparse
import os
import time
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy

import net2gp as n2g
from net2gp import data, metrics, plots


def fit(network, x, y):
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, weight_decay=1e-3)
    for _ in range(200):
        optimizer.zero_grad()
        cross_entropy(network(x), y).backward()
        optimizer.step()
    return network.eval().requires_grad_(False)


def main(out: Path) -> None:
    torch.manual_seed(0)
    if os.environ.get("NET2GP_DATA"):
        network, (x, y) = data.pretrained("full_mnist_lenet_adaml2"), data.notmnist()
    else:
        x, y = data.digits()
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 5))
        fit(network, x[y < 5], y[y < 5])
        x, y = x[y >= 5], y[y >= 5] - 5
    order = torch.randperm(len(x))[:1200]
    x, y = x[order], y[order]
    few = torch.cat([(y == label).nonzero()[:5, 0] for label in y.unique()])
    rest = torch.ones(len(x), dtype=torch.bool).index_fill(0, few, False)

    started = time.perf_counter()
    posterior = n2g.adapt_classes(network, (x[few], y[few]))
    adapted = time.perf_counter()

    tuned = deepcopy(network).requires_grad_()
    list(tuned.modules())[-1].reset_parameters()  # a new last layer
    fit(tuned, x[few], y[few])
    seconds = time.perf_counter() - adapted, adapted - started
    laws = {
        "fine-tuned": Categorical(logits=tuned(x[rest])),
        "posterior": posterior.predict(x[rest]),
    }
    print(f"{type(network).__name__}, {len(few)} labeled images of {len(y.unique())} classes")
    print(f"{'':12}{'accuracy':>10}{'NLL':>8}{'ECE':>8}{'seconds':>10}")
    for (name, law), taken in zip(laws.items(), seconds, strict=True):
        error = metrics.expected_calibration_error(law.probs, y[rest])
        scores = f"{metrics.accuracy(law.probs, y[rest]):10.3f}{metrics.nll(law, y[rest]):8.3f}"
        print(f"{name:12}{scores}{error:8.3f}{taken:10.2f}")
    ax = plots.plot_reliability(None, {n: law.probs for n, law in laws.items()}, y[rest])
    out.mkdir(parents=True, exist_ok=True)
    ax.figure.savefig(out / "your_network_few_labels.png", dpi=120)
    print("wrote", out / "your_network_few_labels.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
