"""The cost of a step of `bayes.mean_field` beside a plain training step of the same network.

    python benchmarks/mean_field_step.py [--quick]

One thread, Adam, cross-entropy. Plain steps and steps of each estimator take turns for many rounds. A figure
is the least CPU time of a round, since other programs on the machine only add to it. The time of a call with
two steps (checks, draws in the end) is subtracted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

import net2gp as n2g

ESTIMATORS = ("local", "flipout", "weights")


def mlp(*widths: int) -> nn.Sequential:
    layers = [part for i, o in pairwise(widths) for part in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def images() -> nn.Sequential:
    front = (nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    back = (nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*front, *back, *mlp(64 * 49, 128, 10))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "8-50-10, batch 100": (lambda: mlp(8, 50, 10), (100, 8), 100),
    "64-256-256-10, batch 128": (lambda: mlp(64, 256, 256, 10), (128, 64), 40),
    "784-1024-1024-10, batch 128": (lambda: mlp(784, 1024, 1024, 10), (128, 784), 6),
    "two convolutions, 28 × 28, batch 32": (images, (32, 1, 28, 28), 6),
}


def plain(network: nn.Module, x: Tensor, y: Tensor, steps: int) -> float:
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    start = time.process_time()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    return time.process_time() - start


def variational(network: nn.Module, x: Tensor, y: Tensor, steps: int, estimator: str) -> float:
    start = time.process_time()
    n2g.bayes.mean_field(
        network, (x, y), n2g.Categorical(), estimator=estimator, num_steps=steps, num_draws=1
    )
    return time.process_time() - start


def measured(name: str, rounds: int) -> dict[str, float]:
    """Milliseconds per step, by estimator."""
    make, shape, steps = CASES[name]
    torch.manual_seed(0)
    x, y = torch.randn(shape), torch.randint(0, 10, shape[:1])
    best: dict[tuple[str, int], float] = {}
    for _ in range(rounds):
        for count in (2, 2 + steps):
            found = {"plain": plain(make(), x, y, count)} | {
                one: variational(make().eval(), x, y, count, one) for one in ESTIMATORS
            }
            for kind, seconds in found.items():
                best[kind, count] = min(best.get((kind, count), float("inf")), seconds)
    return {
        kind: 1e3 * (best[kind, 2 + steps] - best[kind, 2]) / steps
        for kind in ("plain", *ESTIMATORS)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three rounds in place of fifteen")
    rounds = 3 if parser.parse_args().quick else 15
    torch.set_num_threads(1)
    print(f"{'network':<38}{'plain':>10}" + "".join(f"{one:>10}" for one in ESTIMATORS))
    for name in CASES:
        found = measured(name, rounds)
        ratios = "".join(f"{found[one] / found['plain']:>9.2f}×" for one in ESTIMATORS)
        print(f"{name:<38}{found['plain']:>7.2f} ms{ratios}", flush=True)


if __name__ == "__main__":
    main()
