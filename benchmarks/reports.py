"""The uncertainty report on real data: a page each for LeNet on MNIST and for a table of house prices.

    python benchmarks/reports.py [--quick] [--out FOLDER]

LeNet comes trained; its posterior is `laplace` with Kronecker factors of 10,000 training images, the
report is on all 10,000 test images, with notMNIST, Fashion-MNIST and KMNIST as other data. The table is
California housing, 8 columns: a network 8-50-50-1 is trained on 2000 rows, half of the others are held
out. Pages and numbers go to FOLDER.

How often do the stated intervals hold? For the table and for LeNet with a last layer, reports on random
parts of 200 held-out points each are compared with the scores of all held-out points. These intervals are
for the law that points come from, of which all held-out points are only a large sample; parts are 2 % or
less of them.

Written to `results/reports.md`, unless it is the quick run. The exit status is 1 if a claim (`CLAIMS`,
written down before the run) does not hold. Log loss of LeNet is measured without a claim: most parts of
200 have one wrong image or none, which says little about a mean that rare errors make up.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp import data
from net2gp.errors import Net2GPWarning
from net2gp.report import UncertaintyReport, uncertainty_report

RESULTS = Path(__file__).resolve().parent / "results" / "reports.md"
COLUMNS = (
    *("MedInc", "HouseAge", "AveRooms", "AveBedrms"),
    *("Population", "AveOccup", "Latitude", "Longitude"),
)
MEGABYTES, HITS, AREA = 3.0, 0.90, 0.95
PART = 200
CLAIMED = {"LeNet": ("accuracy", "ece", "smooth_ece"), "houses": ("coverage90", "rmse", "nll")}
CLAIMS = f"""\
1. Each page is smaller than {MEGABYTES:.0f} MB.
2. At least {HITS:.0%} of the intervals from {PART} points contain the score of all points: accuracy, ECE and
   smooth ECE of LeNet; coverage of 90 % intervals, RMSE and log loss of houses.
3. Uncertainty or novelty of LeNet tells notMNIST and Fashion-MNIST from MNIST with an AUROC of {AREA} or
   more."""

Pair = tuple[Tensor, Tensor]


@dataclass
class Found:
    """A report, its time, and how often intervals from parts hold."""

    report: UncertaintyReport
    seconds: float
    hits: dict[str, float] = field(default_factory=dict)


def lenet(count: int, structure: n2g.structures.Structure) -> n2g.Posterior[Any]:
    """The trained LeNet with a posterior of some training images."""
    x, y = data.mnist("train")
    network = data.pretrained("full_mnist_lenet_adaml2")
    return n2g.laplace(network, (x[:count], y[:count]), n2g.Categorical(), structure=structure)


class Standardized(nn.Module):
    """Columns in units of their standard deviations, so that the report has them as they are."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", x.mean(0))
        self.register_buffer("std", x.std(0))

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) / self.std).clamp(-6, 6)


def houses(count: int) -> tuple[n2g.Posterior[Any], Pair]:
    """A network of house prices, trained on some rows, and held-out rows."""
    x, y = data.california_housing()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    known, held_out = (x[:count], y[:count]), (x[count::2], y[count::2])
    torch.manual_seed(0)
    layers = (nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
    network = nn.Sequential(Standardized(x[:count]), *layers)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2, weight_decay=1e-4)
    for _ in range(400):
        optimizer.zero_grad()
        nn.functional.mse_loss(network(known[0]), known[1]).backward()
        optimizer.step()
    return n2g.laplace(network.eval(), known, n2g.Gaussian(), structure=n2g.Kron()), held_out


def hits(
    posterior: n2g.Posterior[Any], held_out: Pair, whole: dict[str, Any], repeats: int
) -> dict[str, float]:
    """The share of reports on parts of the held-out points whose intervals contain the whole's scores."""
    x, y = held_out
    counts = dict.fromkeys(whole, 0)
    for seed in range(repeats):
        part = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:PART]
        scores = uncertainty_report(posterior, (x[part], y[part])).values["scores"]
        for name in counts:
            one = scores[name]
            counts[name] += one["low"] <= whole[name]["value"] <= one["high"]
    return {name: count / repeats for name, count in counts.items()}


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Found]:
    """Both reports, saved, and the intervals of parts."""
    known, tested, rows, repeats = (
        (1000, 1000, 500, 4) if options.quick else (10_000, 10_000, 2000, 40)
    )
    x, y = (values[:tested] for values in data.mnist("test"))
    others = {
        "notMNIST": data.notmnist()[0][: tested // 10],
        "Fashion": data.fashion_mnist("test")[0][: tested // 10],
        "KMNIST": data.kmnist_test()[0][: tested // 10],
    }
    command = "python benchmarks/reports.py" + " --quick" * options.quick
    found = {}
    start = time.perf_counter()
    report = uncertainty_report(
        *(lenet(known, n2g.Kron()), (x, y)),
        others=others,
        title="LeNet on MNIST",
        command=command,
    )
    report.save(folder / "lenet")
    found["LeNet"] = Found(report, time.perf_counter() - start)
    start = time.perf_counter()
    posterior, held_out = houses(rows)
    far = 3 * held_out[0][:1000]
    report = uncertainty_report(
        *(posterior, held_out),
        others={"three times as far out": far},
        columns=COLUMNS,
        classes=["price"],
        title="House prices in California",
        command=command,
    )
    report.save(folder / "houses")
    found["houses"] = Found(report, time.perf_counter() - start)
    names = ("accuracy", "ece", "smooth_ece", "brier", "nll")
    last = lenet(known, n2g.LastLayer())
    whole = uncertainty_report(last, (x, y)).values["scores"]
    found["LeNet"].hits = hits(last, (x, y), {n: whole[n] for n in names}, repeats)
    names = ("coverage50", "coverage90", "coverage95", "rmse", "mae", "nll", "width90")
    whole = report.values["scores"]
    found["houses"].hits = hits(posterior, held_out, {n: whole[n] for n in names}, repeats)
    return found


def failures(found: dict[str, Found], *, quick: bool) -> list[str]:
    """The claims that do not hold. A quick run has too few parts for the second."""
    wrong = []
    for name, one in found.items():
        size = len(one.report.html.encode()) / 1e6
        if size >= MEGABYTES:
            wrong.append(f"{name}: the page has {size:.1f} MB")
        for score in CLAIMED[name]:
            if not quick and one.hits[score] < HITS:
                wrong.append(f"{name}: {one.hits[score]:.0%} of the intervals of {score} hold")
    scores = found["LeNet"].report.values["scores"]
    for other in ("notMNIST", "Fashion"):
        best = max(scores[f"{kind}_{other}"]["value"] for kind in ("auroc", "novelty_auroc"))
        if best < AREA:
            wrong.append(f"LeNet: AUROC {best:.3f} on {other}")
    return wrong


def table(found: dict[str, Found]) -> list[str]:
    """Sizes, times, verdicts, and how often intervals hold."""
    lines = ["| page | kB | seconds with the posterior | held-out points |", "|---|---:|---:|---:|"]
    for name, one in found.items():
        size = len(one.report.html.encode()) / 1e3
        lines.append(f"| {name} | {size:.0f} | {one.seconds:.0f} | {one.report.values['n']:,} |")
    for name, one in found.items():
        lines += ["", f"Verdict on {name}:", ""]
        lines += [f"- {line['says']}" for line in one.report.values["verdict"]]
    lines += ["", f"| intervals from {PART} points | hold | claimed |", "|---|---:|---|"]
    for name, one in found.items():
        for score, share in one.hits.items():
            lines.append(f"| {name}, {score} | {share:.0%} | {'yes' * (score in CLAIMED[name])} |")
    return lines


def main() -> int:
    """Measure, write, and check the claims."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer points; nothing is written")
    parser.add_argument("--out", type=Path, help="where pages go; by default they are not kept")
    options = parser.parse_args()
    warnings.simplefilter("ignore", Net2GPWarning)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as nowhere:
        folder = options.out or Path(nowhere)
        folder.mkdir(parents=True, exist_ok=True)
        found = measured(options, folder)
    wrong = failures(found, quick=options.quick)
    lines = table(found)
    told = [f"Does not hold: {line}." for line in wrong] or ["All hold."]
    if not options.quick:
        lead = [
            *("# Uncertainty reports on real data", ""),
            "Made by `python benchmarks/reports.py`, one CPU thread on a shared machine, torch",
            f"{torch.__version__}. Scores of {PART} points come from 40 random parts of the held-out points.",
            "",
        ]
        claims = ["", "Claims, written down before the run:", "", *CLAIMS.splitlines(), "", *told]
        RESULTS.write_text("\n".join([*lead, *lines, *claims]) + "\n", encoding="utf-8")
    print("\n".join([*lines, "", *told]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
