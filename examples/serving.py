"""A classifier of digits as one file that a server loads, and what it answers for digits and noise.

One learns: `serving.export` and `serving.load`, that a program answers what the posterior answers, and how
novelty tells noise from digits. With `--serve` the program is served at 127.0.0.1:8000 until Ctrl-C.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import net2gp as n2g
from net2gp import data, serving


def trained() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x, y = (value[:400] for value in data.digits("train"))
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, weight_decay=1e-4)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    return network.eval(), x, y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("figures"))
    parser.add_argument("--serve", action="store_true", help="serve the program")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    network, x, y = trained()
    posterior = n2g.laplace(network, (x, y), n2g.Categorical(), structure=n2g.LastLayer())
    path = options.out / "digits.pt2"
    facts = serving.export(posterior, path, x, classes=[str(digit) for digit in range(10)])
    print(f"{path.name}, {path.stat().st_size >> 10} kB, holds: {facts['carries']}")

    import matplotlib.pyplot as plt

    program = serving.load(path)
    images = {"digits": data.digits("test")[0][:200], "noise": torch.rand(200, *x.shape[1:])}
    for name, points in images.items():
        answers = program(points)
        top = answers["probabilities"].amax(1)
        gap = (answers["probabilities"] - posterior.predict(points).probs).abs().max()
        print(f"{name}: certainty {top.mean():.2f}, differs from the posterior by {gap:.0e}")
        plt.scatter(answers["novelty"], top, s=8, label=name)
    plt.xlabel("novelty")
    plt.ylabel("largest probability")
    plt.legend()
    plt.savefig(options.out / "serving.png", dpi=120)
    print(f"wrote {options.out / 'serving.png'}")
    if options.serve:
        import uvicorn

        from net2gp.serving.server import create_app

        uvicorn.run(create_app(program), host="127.0.0.1", port=8000)


if __name__ == "__main__":
    main()
