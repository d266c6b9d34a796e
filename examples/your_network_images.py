"""Your network, your images: calibration, and images of another kind, beside the softmax.

One learns: `laplace` of a classifier, reliability, NLL and ECE, and AUROC of the predictive entropy. A
trained ResNet-20 with 500 images of CIFAR-10 in its last layer, if NET2GP_DATA names their folder; else
digits and a small network, with all of its layers. The prior is from the training images alone, and then
from held-out ones.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy, pad

import net2gp as n2g
from net2gp import data, metrics, plots


def main(out: Path) -> None:
    torch.manual_seed(0)
    if os.environ.get("NET2GP_DATA"):
        (x, y), (x_test, y_test) = map(data.cifar10, ("train", "test"))
        parts = [(data.IMAGENET(x[:500]), y[:500]), (data.IMAGENET(x_test[:750]), y_test[:750])]
        letters = pad(data.notmnist()[0][:200], (2, 2, 2, 2)).expand(-1, 3, -1, -1)
        others, structure = data.IMAGENET(letters), n2g.LastLayer()
        network = data.pretrained("resnet20_cifar10").requires_grad_(False)
    else:
        parts = [data.digits("train"), data.digits("test")]
        others, structure = parts[1][0].rot90(1, (-2, -1)), None
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 10))
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, weight_decay=1e-3)
        for _ in range(200):
            optimizer.zero_grad()
            cross_entropy(network(parts[0][0]), parts[0][1]).backward()
            optimizer.step()
        network.eval().requires_grad_(False)
    train, (x, y) = parts
    count = len(x) // 3
    held_out, (x, y) = (x[:count], y[:count]), (x[count:], y[count:])

    posterior = n2g.laplace(network, train, n2g.Categorical(), structure=structure)

    labels = n2g.tuning.Validation(held_out)
    validated = n2g.laplace(network, train, n2g.Categorical(), structure=structure, tuning=labels)
    predictors = {
        "softmax": lambda z: Categorical(logits=network(z)),
        "posterior": posterior.predict,
        "held-out prior": validated.predict,
    }
    print(f"{type(network).__name__}, {len(train[0])} images, {posterior.structure}")
    print(f"{'':16}{'accuracy':>10}{'NLL':>8}{'ECE':>8}{'AUROC':>8}")
    probs = {}
    for name, predict in predictors.items():
        law = predict(x)
        probs[name] = law.probs
        error = metrics.expected_calibration_error(law.probs, y)
        found = metrics.auroc(law.entropy(), predict(others).entropy())
        scores = f"{metrics.accuracy(law.probs, y):10.3f}{metrics.nll(law, y):8.3f}"
        print(f"{name:16}{scores}{error:8.3f}{found:8.3f}")
    ax = plots.plot_reliability(None, probs, y)
    out.mkdir(parents=True, exist_ok=True)
    ax.figure.savefig(out / "your_network_images.png", dpi=120)
    print("wrote", out / "your_network_images.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
