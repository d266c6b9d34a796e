"""Digits: how sure is a trained classifier, and of what?

One learns: `laplace` with several structures, what its default tuning does to NLL, calibration (ECE) and
the detection of images unlike the data (AUROC).
"""

import argparse
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.distributions import Categorical

import net2gp as n2g
from net2gp import data, metrics


def main(out: Path) -> None:
    torch.manual_seed(0)
    (x, y), (x_test, y_test) = data.digits("train"), data.digits("test")
    layers = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    network = nn.Sequential(nn.Flatten(), *layers)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3, weight_decay=1e-4)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    network.eval().requires_grad_(False)

    laplace = partial(n2g.laplace, network, (x, y), n2g.Categorical())
    posterior = laplace(structure=n2g.Kron())
    predictors = {
        "network": lambda z: Categorical(logits=network(z)),
        "Kron": posterior.predict,
        "Kron, evidence": laplace(structure=n2g.Kron(), tuning=n2g.tuning.Evidence()).predict,
        "last layer": laplace(structure=n2g.LastLayer()).predict,
    }
    turned = x_test.rot90(1, (-2, -1))
    entropies = {}
    print(f"{'':16}{'accuracy':>10}{'NLL':>8}{'ECE':>8}{'AUROC of turned digits':>25}")
    for name, predict in predictors.items():
        law = predict(x_test)
        known, other = law.entropy(), predict(turned).entropy()
        entropies[name] = known, other
        right = (law.probs.argmax(-1) == y_test).double().mean()
        nll = metrics.nll(law, y_test)
        ece = metrics.expected_calibration_error(law.probs, y_test)
        print(f"{name:16}{right:10.3f}{nll:8.3f}{ece:8.3f}{metrics.auroc(known, other):25.3f}")

    spreads = [posterior.contrast(images).mean() for images in (x_test, turned)]
    print(
        "variance between logits, of digits and of turned ones: "
        + ", ".join(f"{v:.0f}" for v in spreads)
    )

    figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
    for axis, name in zip(axes, ("network", "Kron"), strict=True):
        bins = torch.linspace(0, 2.4, 40).tolist()
        for values, label in zip(entropies[name], ("digits", "turned digits"), strict=True):
            axis.hist(values.tolist(), bins=bins, alpha=0.6, label=label)
        axis.set(title=name, xlabel="entropy of the prediction", yscale="log")
    axes[0].set_ylabel("images")
    axes[1].legend()
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "laplace.png", dpi=150)
    print("wrote", out / "laplace.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
