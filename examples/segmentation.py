"""Pixels: a network that labels each pixel of an image, where it is unsure, and what it has never seen.

One learns: `laplace` of a network with outputs (N, C, H, W) and labels (N, H, W), of which some are ignored;
maps of entropy, of `novelty`, and of how much draws of the weights differ.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp import metrics


def textures(count: int, seed: int, unseen: bool = False) -> tuple[Tensor, Tensor]:
    """Boxes with upright (class 1) and level stripes (class 2) on a plain ground; or with checks, too."""
    generator = torch.Generator().manual_seed(seed)
    down, right = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    patterns = right.sin(), down.sin(), 1.4 * right.sin() * down.sin()
    x, y = torch.zeros(count, 64, 64), torch.zeros(count, 64, 64, dtype=torch.long)
    for n in range(count):
        for number in [0, 1, 0, 1] + [2] * unseen:
            i, j, strength = (64 * torch.rand(3, generator=generator)).tolist()
            far = torch.maximum((down - i).abs(), (right - j).abs())
            x[n] = torch.where(far < 12, (0.3 + strength / 64) * patterns[number], x[n])
            y[n, far < 13] = -100  # nobody is sure of the border, nor of checks
            y[n, (far < 11) & (number < 2)] = 1 + number
    return (x + 0.5 * torch.randn(x.shape, generator=generator))[:, None], y


def main(out: Path) -> None:
    torch.manual_seed(0)
    (x, y), (x_test, y_test) = textures(8, 0), textures(10, 1)
    layers = nn.Conv2d(1, 8, 7, padding=3), nn.ReLU(), nn.Conv2d(8, 8, 5, padding=2), nn.ReLU()
    network = nn.Sequential(*layers, nn.Conv2d(8, 3, 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 250)
    for _ in range(250):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
        schedule.step()

    posterior = n2g.laplace(network.eval(), (x, y), n2g.Categorical())
    kept = y_test != -100
    found = posterior.mean(x_test).softmax(-1), posterior.predict(x_test).probs
    for name, probs in zip(("network", "laplace"), (p[kept] for p in found), strict=True):
        nll = metrics.nll(torch.distributions.Categorical(probs), y_test[kept])
        error = metrics.expected_calibration_error(probs, y_test[kept])
        print(f"{name}: NLL {nll:.3f}, ECE {error:.3f}")

    image, _ = textures(1, 5, unseen=True)
    draws = posterior.sample(image, 200)[:, 0]
    maps = {
        "image, checks are new": image[0, 0],
        "prediction": posterior.mean(image)[0].argmax(-1),
        "entropy": posterior.predict(image).entropy()[0],
        "deviation of probabilities": draws.softmax(-1).var(0).sum(-1).sqrt(),
        "log of novelty": posterior.novelty(image)[0].log(),
    }
    figure, axes = plt.subplots(1, 5, figsize=(14, 3), layout="constrained")
    for axis, (title, values) in zip(axes, maps.items(), strict=True):
        figure.colorbar(axis.imshow(values), ax=axis, shrink=0.7)
        axis.set(title=title, xticks=[], yticks=[])
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "segmentation.png", dpi=120)
    print("wrote", out / "segmentation.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
