"""The toy regression over width: from which training are the authors' stored networks?

    python papers/khan2019/widths.py --device cuda
    python papers/khan2019/widths.py --quick

Their stored widths are of an earlier program than the one that they published, whose schedule (rate .5,
10,000 steps) brings networks of 1000 units almost to a mode, where the stored ones are far from it. Nor did
they start at the published seed: from it narrow networks end in the stored mode no more often than from
any other. So schedules are compared by how probable they make what is stored of the widest networks, which
tell them apart, over random starts; optima and test losses take no part in it.

For networks of at least 303 units, `log_density` sums log p(stored) over the evidence and the training loss
of each network, p being Student's t of a new draw given those of the starts. On a GPU this takes minutes. The
claim is that rate 1 and 5000 steps, `SCHEDULE`, are the most probable of the schedules that are compared.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy import stats
from torch import Tensor, nn

from net2gp.training import AdamSettings, train_many
from net2gp.tuning import EVIDENCE, Selection

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parent))
import claims
import findings
from toy import NOISE, TRAINING, Problem, network, prior_offset, problems, stored, tabulate

STORED = "dnn2gp_toy_width_original"
DELTA = 0.63
"""The prior precision δ at which widths are compared."""

SCHEDULE = replace(TRAINING, learning_rate=1.0, num_steps=5000)
RATES, STEPS = (0.2, 0.5, 1.0, 2.0), (2000, 5000, 10_000)
WIDE = 303
STARTS = tuple(range(10))
"""The seeds of the starts over which a sweep is averaged."""

NARROW = (
    100  # units: on a GPU networks up to here train together, padded, and then all that are wider
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of schedules; the exit status says whether `SCHEDULE` is the most probable one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="learning rates")
    parser.add_argument("--steps", nargs="+", type=int, default=STEPS, help="steps of Adam")
    parser.add_argument("--starts", type=int, default=len(STARTS), help="random starts, at least 3")
    parser.add_argument("--sets", type=int, default=5, help="data sets, at most 5")
    parser.add_argument("--largest", type=int, default=1000, help="units of the widest networks")
    parser.add_argument("--device", default="cpu", help="where networks train")
    parser.add_argument("--out", type=Path, help="not used: this program draws nothing")
    small = {"rates": [0.5, 1.0], "steps": [5000], "starts": 3, "sets": 2, "largest": WIDE}
    options = findings.parse(parser, arguments, quick=small)
    archive = stored(STORED)
    rows = [i for i, v in enumerate(archive["params"]) if WIDE <= v <= options.largest]
    widths, sets = [int(archive["params"][i]) for i in rows], problems(options.sets, STORED)
    truth = {
        score: archive[key][rows, : options.sets]
        for score, key in ((EVIDENCE, "mlh"), ("train loss", "train_loss_map"))
    }
    table = Table("rate", "steps", "log density", *(f"{w} units" for w in widths))
    found: dict[tuple[float, int], float] = {}
    for rate, steps in itertools.product(options.rates, options.steps):
        training = replace(SCHEDULE, learning_rate=rate, num_steps=steps)
        here = selection(widths, sets, training, range(options.starts), options.device)
        found[rate, steps] = sum(
            log_density(by_start(here, options.starts, key), value) for key, value in truth.items()
        )
        means = (f"{float(v):.2f}" for v in here.mean(EVIDENCE))
        table.add_row(f"{rate:g}", str(steps), f"{found[rate, steps]:.1f}", *means)
        findings.show({f"{words(rate, steps)}: log density of what is stored": found[rate, steps]})
    table.add_row("stored", "", "", *(f"{v:.2f}" for v in truth[EVIDENCE].mean(1)))
    Console(width=120).print(table)
    return 0 if claims.judge([most_probable(found)]) else 1


def words(rate: float, steps: int) -> str:
    """A schedule in words."""
    return f"rate {rate:g}, {steps} steps"


def most_probable(found: dict[tuple[float, int], float]) -> claims.Claim:
    """That the schedule of the stored networks is `SCHEDULE`, by log densities."""
    best, stated = (
        max(found, key=lambda key: found[key]),
        (SCHEDULE.learning_rate, SCHEDULE.num_steps),
    )
    return claims.Claim(f"most probable: {words(*stated)}", words(*best), best == stated)


def log_density(found: Tensor, expected: np.ndarray) -> float:
    """Σ log p(expected | found), found (S, W, D) over S starts: Student's t of one more draw."""
    count = len(found)
    spread = found.std(0) * (1 + 1 / count) ** 0.5
    law = stats.t(count - 1, loc=found.mean(0).numpy(), scale=spread.numpy())
    return float(law.logpdf(expected).sum())


def by_start(table: Selection, starts: int, score: str) -> Tensor:
    """A score (S, W, D) of a table whose columns are the data sets D of one start after the other."""
    columns = table.scores[score]
    return columns.reshape(len(columns), starts, -1).transpose(0, 1)


def averaged(table: Selection, starts: int) -> Selection:
    """The means over starts, a column for each data set."""
    scores = {key: by_start(table, starts, key).mean(0) for key in table.scores}
    return Selection(table.name, table.values, scores)


def apart(table: Selection, starts: int, expected: Tensor) -> Tensor:
    """How far the mean evidence of each width (W,) is from that of single networks (W, D).

    In standard deviations of the difference, where each of the single networks has a start of its own.
    """
    found = by_start(table, starts, EVIDENCE)
    gap = (found.mean(0) - expected).mean(1)
    deviation = found.var(0).sum(1).sqrt() / expected.shape[1]
    return gap / (deviation * (1 + 1 / starts) ** 0.5)


def padded(one: nn.Sequential, width: int) -> nn.Sequential:
    """The same function as a wider network, by hidden units whose parameters are all zero.

    Their gradients are zero too: tanh(0) = 0 goes into the output, an output weight 0 comes back, and the
    prior pulls to zero. So networks of many widths train in one batch, none of them changed.
    """
    wide = network(width).to(one[0].weight)
    with torch.no_grad():
        for new, old in zip(wide.parameters(), one.parameters(), strict=True):
            new.zero_()[tuple(slice(size) for size in old.shape)] = old
    return wide


def narrowed(one: nn.Module, width: int) -> nn.Sequential:
    """The first hidden units of a network: `padded` the other way round."""
    narrow = network(width)
    with torch.no_grad():
        for new, old in zip(narrow.parameters(), one.parameters(), strict=True):
            new.copy_(old[tuple(slice(size) for size in new.shape)])
    return narrow


def selection(
    widths: Sequence[int],
    problems: Sequence[Problem],
    training: AdamSettings = SCHEDULE,
    seeds: Sequence[int] = STARTS,
    device: str = "cpu",
) -> Selection:
    """A network of each width from each start on each data set: width by width, or at once on a GPU.

    There a step takes as long for all of them, `padded`, as for one. Columns are the data sets of the
    first start, of the second, and so on.
    """
    networks: list[nn.Module] = []
    groups = [[width] for width in widths]
    if device != "cpu":
        parts = ([w for w in widths if w <= NARROW], [w for w in widths if w > NARROW])
        groups = [part for part in parts if part]
    data = [(problem.x.to(device), problem.y.to(device)) for problem in problems]
    for group in groups:
        each = [(width, seed) for width in group for seed in seeds]
        starts = [padded(network(*one), max(group)).to(device) for one in each]
        trained = train_many(
            [start for start in starts for _ in problems],
            data * len(each),
            NOISE,
            prior_var=1 / DELTA,
            offset=[prior_offset(network(*one), DELTA) for one in each for _ in problems],
            optimizer=training,
        )
        sizes = [width for width, _ in each for _ in problems]
        networks += [narrowed(one, size) for one, size in zip(trained, sizes, strict=True)]
    columns = [problem for _ in seeds for problem in problems]
    return tabulate("width", widths, columns, [DELTA] * len(widths), networks)


if __name__ == "__main__":
    raise SystemExit(main())
