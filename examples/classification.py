"""Digits: an overconfident classifier, and the more careful process around it.

One learns: `adapt` with `Categorical`, `predict(x).probs`, calibration (NLL, ECE), detection of images
that are no digits (AUROC), and how to choose the prior variance where the evidence cannot.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.distributions import Categorical

import net2gp as n2g
from net2gp import data, metrics, plots


def main(out: Path) -> None:
    torch.manual_seed(0)
    (x, y), (x_test, y_test) = data.digits("train"), data.digits("test")
    order = torch.randperm(len(x))
    trained, held_out = order[:100], order[100:300]
    layers = nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
    network = nn.Sequential(nn.Flatten(), *layers)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x[trained]), y[trained]).backward()
        optimizer.step()
    network.eval().requires_grad_(False)

    # The network has fitted these very digits, so that their evidence would favor no variance at all:
    # digits that it has not seen choose. On new digits, leave prior_var out and the evidence chooses.
    known = x[trained], y[trained]
    candidates = [
        n2g.adapt(network, known, n2g.Categorical(), prior_var=variance)
        for variance in (0.003, 0.01, 0.03)
    ]
    losses = [metrics.nll(gp.predict(x[held_out]), y[held_out]) for gp in candidates]
    posterior = candidates[int(torch.stack(losses).argmin())]
    print("NLL of held-out digits by prior variance:", [f"{loss:.3f}" for loss in losses])

    predictors = {
        "network": lambda z: Categorical(logits=network(z)),
        "GP": posterior.predict,
    }
    negatives = 1 - x_test
    probs = {}
    print(f"{'':10}{'accuracy':>10}{'NLL':>8}{'ECE':>8}{'AUROC of negatives':>21}")
    for name, predict in predictors.items():
        law = predict(x_test)
        probs[name] = law.probs
        strangers = metrics.auroc(law.entropy(), predict(negatives).entropy())
        error = metrics.expected_calibration_error(law.probs, y_test, num_bins=10)
        scores = f"{metrics.accuracy(law.probs, y_test):10.1%}{metrics.nll(law, y_test):8.3f}"
        print(f"{name:10}{scores}{error:8.3f}{strangers:21.3f}")

    figure, ax = plt.subplots(figsize=(4.5, 4.5), layout="constrained")
    plots.plot_reliability(ax, probs, y_test, num_bins=10)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "classification.png", dpi=120)
    print("wrote", out / "classification.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
