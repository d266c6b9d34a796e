"""A classifier as a file that a server loads: its probabilities, with and without net2gp, and a correction.

    python examples/serving.py [--out FOLDER] [--serve]

With `--serve` the program is served at 127.0.0.1:8000 until Ctrl-C.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import net2gp as n2g
from net2gp import data, serving


def trained() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A small network for handwritten digits, and what it was trained on."""
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
    parser.add_argument("--serve", action="store_true", help="serve the program at 127.0.0.1:8000")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "digits.pt2"

    network, x, y = trained()
    posterior = n2g.laplace(network, (x, y), n2g.Categorical(), structure=n2g.LastLayer())
    facts = serving.export(posterior, path, x, classes=[str(digit) for digit in range(10)])
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} kB, {facts['structure']}")
    print(f"holds of the training data: {facts['carries']}")

    program = serving.load(path)
    x_test, _ = data.digits("test")
    strange = torch.rand(200, 8, 8)
    for name, points in (("digits", x_test[:200]), ("noise", strange)):
        answers = program(points)
        gap = (answers["probabilities"] - posterior.predict(points).probs).abs().max()
        print(
            f"{name:7} largest probability {answers['probabilities'].amax(1).mean():.2f}, "
            f"novelty {answers['novelty'].mean():.2f}, differs from the posterior by {gap:.0e}"
        )
    if options.serve:
        import uvicorn

        from net2gp.serving.server import create_app

        uvicorn.run(create_app(program), host="127.0.0.1", port=8000)


if __name__ == "__main__":
    main()
