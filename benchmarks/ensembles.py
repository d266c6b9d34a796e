"""Ensembles on UCI tables: are they better than their members, and how much faster than a loop?

    NET2GP_DATA=... python benchmarks/ensembles.py [--tables yacht energy] [--splits 20] [--quick]

Ten networks with one hidden layer of 50 on each split of a table, trained by `bayes.ensemble` with a tenth of
the training rows held out for early stopping and noise. The first table has the test NLL and RMSE of single
members, of five and of ten together. The second has CPU and wall seconds (best of three) for ten members
by vectorized passes, one after the other, and by a plain training loop of torch, with the same number of
steps and rows. Writes `results/ensembles.md`; a quick run has two tables with three splits and writes none.

The exit status says whether these claims hold: five members have a better NLL than one on nine tenths of the
splits of each table, and vectorized passes take less than a third of the CPU seconds of either loop.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

import net2gp as n2g
from net2gp import bayes, data
from run import RESULTS, made_by, processor

TABLES = ("yacht", "energy", "concrete", "wine-quality-red")
NUM_MEMBERS = 10
Pair = tuple[Tensor, Tensor]


def scaled(name: str, split: int) -> tuple[Pair, Pair, float]:
    """Training and test rows with mean 0 and variance 1 over the training rows; the scale of the targets."""
    (x, y), (x_test, y_test) = data.uci(name).split(split)
    scale, spread = x.std(0).clamp(min=1e-8), y.std()
    center, mean = x.mean(0), y.mean()
    train = ((x - center) / scale, (y - mean) / spread)
    return train, ((x_test - center) / scale, (y_test - mean) / spread), float(spread)


def network(num_inputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(num_inputs, 50), nn.ReLU(), nn.Linear(50, 1))


def scores(name: str, split: int) -> dict[str, tuple[float, float]]:
    """NLL and RMSE in the units of the targets: of one member on average, of five, and of ten."""
    train, (x, y), spread = scaled(name, split)
    settings = bayes.Training(num_steps=2000, held_out=0.1, patience=20, seed=split)
    posterior = bayes.ensemble(
        network(x.shape[1]), train, n2g.Gaussian(), num_members=NUM_MEMBERS, training=settings
    )
    f, noise = posterior.process.values(x), posterior.recipe.statistics["noise_var"]
    log_probs = torch.stack(
        [n2g.Gaussian(float(v)).log_prob(one, y) for one, v in zip(f, noise, strict=True)]
    )
    errors = (f - y)[:, :, 0]
    found = {
        "1": (
            float(-log_probs.mean()),
            float(errors.square().mean(1).sqrt().mean()),
        )
    }
    for count in (5, NUM_MEMBERS):
        together = log_probs[:count].logsumexp(0) - math.log(count)
        found[str(count)] = (
            float(-together.mean()),
            float(errors[:count].mean(0).square().mean().sqrt()),
        )
    return {k: (nll + math.log(spread), rmse * spread) for k, (nll, rmse) in found.items()}


def plain_loop(train: Pair, num_steps: int, batch_size: int) -> None:
    """What one would write by hand: members one after the other, Adam, weight decay in the loss."""
    x, y = train
    for _ in range(NUM_MEMBERS):
        module = network(x.shape[1])
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
        step = 0
        while step < num_steps:
            order = torch.randperm(len(x))
            for part in order.split(batch_size):
                if len(part) < batch_size or step == num_steps:
                    break
                optimizer.zero_grad()
                loss = (module(x[part]) - y[part]).square().mean() / 0.2
                decay = torch.stack([p.square().sum() for p in module.parameters()]).sum()
                (loss + decay / (2 * len(x))).backward()
                optimizer.step()
                schedule.step()
                step += 1


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """The least CPU and wall seconds of three runs."""
    found = []
    for _ in range(3):
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        found.append((time.process_time() - cpu, time.perf_counter() - wall))
    return min(c for c, _ in found), min(w for _, w in found)


def speeds(num_steps: int) -> dict[str, tuple[float, float]]:
    """Seconds of ten members on the table energy, by each way."""
    train, _, _ = scaled("energy", 0)
    settings = bayes.Training(num_steps=num_steps, batch_size=100)

    def ours(vectorize: bool) -> None:
        bayes.ensemble(
            network(8),
            train,
            n2g.Gaussian(0.1),
            num_members=NUM_MEMBERS,
            training=settings,
            vectorize=vectorize,
        )

    return {
        "vectorized": seconds(lambda: ours(True)),
        "one after the other": seconds(lambda: ours(False)),
        "plain loop of torch": seconds(lambda: plain_loop(train, num_steps, 100)),
    }


def quality(names: list[str], num_splits: int) -> tuple[list[str], bool]:
    lines = ["| table | NLL of 1 | of 5 | of 10 | RMSE of 1 | of 5 | of 10 | gain of 5 in NLL |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    holds = True
    for name in names:
        found = [scores(name, s) for s in track(range(num_splits), name, transient=True)]
        cells = [
            f"{torch.tensor([one[count][which] for one in found]).mean():.3f}"
            for which in (0, 1)
            for count in ("1", "5", str(NUM_MEMBERS))
        ]
        gains = torch.tensor([one["1"][0] - one["5"][0] for one in found])
        error = float(gains.std() / len(gains) ** 0.5)
        holds &= float((gains > 0).double().mean()) >= 0.9
        lines.append(f"| {name} | {' | '.join(cells)} | {gains.mean():.3f} ± {error:.3f} |")
    return lines, holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tables", nargs="+", default=list(TABLES))
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="two tables, three splits")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names, splits = (["yacht", "energy"], 3) if options.quick else (options.tables, options.splits)
    times = speeds(200 if options.quick else 1000)
    best = times["vectorized"][0]
    fast = all(3 * best < cpu for way, (cpu, _) in times.items() if way != "vectorized")
    table, better = quality(names, splits)
    lines = ["# Ensembles on UCI tables", "", f"{made_by()} One thread of {processor()}.", ""]
    lines += [f"Test scores over {splits} splits, in the units of the targets.", "", *table, ""]
    lines += [
        "Seconds for ten members on the table energy.",
        "",
        "| way | CPU | wall |",
        "|---|---|---|",
    ]
    lines += [f"| {way} | {cpu:.2f} | {wall:.2f} |" for way, (cpu, wall) in times.items()]
    Console().print("\n".join(lines), markup=False)
    if not options.quick:
        (RESULTS / "ensembles.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if fast and better else 1


if __name__ == "__main__":
    sys.exit(main())
