"""Regression tables of the Bayesian room: test likelihood and error of every method, over all splits.

    NET2GP_DATA=... python benchmarks/bayes_uci.py --cells FOLDER [--jobs 2] [--data yacht] [--splits 5]
    NET2GP_DATA=... python benchmarks/bayes_uci.py --quick

One hidden layer of 50 tanh units on the customary splits. Prior and noise of each split are found once and
are the same for all networks (see `bayes_methods.py`); both Gaussian processes find their own. Counterparts
in TorchUncertainty, posteriors and bayesian-torch get the same data, prior, noise and numbers of steps, in
their own environments (`peers.py`). What each method gave is kept in `--cells`; a run can be continued.
Writes `results/bayes_uci.json` and `results/bayes_uci.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from bayes_methods import QUICK, Problem, Sizes, draws_of, found, noise_of, problem_of
from bayes_peers import PEER_METHODS, peer_draws
from fidelity import alone, installed
from net2gp import metrics
from run import RESULTS, made_by, processor
from uci import cells as table_of
from uci_networks import splits

TABLES = ("yacht", "energy", "concrete", "wine-quality-red", "bostonHousing")
SPLITS, QUICK_SPLITS = 20, 2
OWN = ("MAP", "ensemble of 5", "ensemble of 10", "dropout", "mean field", "SGHMC", "microcanonical")
OWN += ("Laplace", "VOGN", "IVON", "mixture of Laplace", "RBF GP", "NNGP")
PAIRS = {
    "TorchUncertainty ensemble of 5": "ensemble of 5",
    "TorchUncertainty ensemble of 10": "ensemble of 10",
    "bayesian-torch mean field": "mean field",
    "posteriors SGHMC": "SGHMC",
}
"""Counterparts elsewhere, and what they are counterparts of."""

Row = dict[str, Any]


def main() -> int:
    options = parse(sys.argv[1:])
    made_by()
    console = Console(width=170)
    options.cells.mkdir(parents=True, exist_ok=True)
    options.methods = installed(options.methods, console)
    jobs = [job for job in (job.missing() for job in every(options)) if job.methods]
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), initializer=alone) as pool:
        bar = Console(stderr=True)
        list(track(pool.map(run, jobs), "splits", len(jobs), console=bar))
    return report(gathered(options), options, console)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [*OWN, *PEER_METHODS]
    parser.add_argument("--quick", action="store_true", help="one table, two splits: minutes")
    parser.add_argument("--data", nargs="+", choices=TABLES, help="tables (default: all)")
    parser.add_argument("--methods", nargs="+", choices=names, help="methods (default: all)")
    parser.add_argument("--splits", type=int, help=f"at most that many (default {SPLITS})")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default 2)")
    parser.add_argument("--cells", type=Path, help="folder of what each method gave, kept")
    parser.add_argument("--output", type=Path, help="folder of the result files")
    options = parser.parse_args(arguments)
    scratch = Path(tempfile.mkdtemp(prefix="net2gp-bayes-uci-"))
    options.data = options.data or (TABLES[:1] if options.quick else TABLES)
    options.methods = options.methods or (OWN if options.quick else names)
    options.splits = options.splits or (QUICK_SPLITS if options.quick else SPLITS)
    options.cells = options.cells or scratch
    options.output = options.output or (scratch if options.quick else RESULTS)
    options.sizes = QUICK if options.quick else Sizes()
    return options


@dataclass(frozen=True)
class Job:
    """One split of a table and the methods that are asked for."""

    folder: Path
    data: str
    split: int
    methods: tuple[str, ...]
    sizes: Sizes

    def stored_at(self, what: str) -> Path:
        """Where something of this split is kept."""
        return self.folder / f"{self.data}_{self.split}_{what}".replace(" ", "-")

    def missing(self) -> Job:
        """The same for the methods that are not stored yet."""
        left = (m for m in self.methods if not self.stored_at(f"{m}.json").is_file())
        return replace(self, methods=tuple(left))


def every(options: argparse.Namespace) -> Iterator[Job]:
    """All jobs: the first split of every table first, so that a run that is stopped has all tables."""
    for split in range(options.splits):
        for name in options.data:
            yield Job(options.cells, name, split, tuple(options.methods), options.sizes)


def run(job: Job) -> None:
    """Find prior and noise of a split once, and score every method on it."""
    warnings.simplefilter("ignore")
    tables, path = splits(job.data, job.split + 1), job.stored_at("model.json")
    known = json.loads(path.read_text()) if path.is_file() else {}
    p = problem_of(tables, job.split, job.sizes, **known)
    path.write_text(json.dumps({"prior_var": p.prior_var, "noise_var": p.noise_var}))
    for method in job.methods:
        try:
            if method in PEER_METHODS:
                (draws, seconds), noise_var = peer_draws(method, p), p.noise_var
            else:
                posterior, seconds = found(method, p)
                draws, noise_var = draws_of(posterior, p.x), noise_of(posterior)
            row = scored(draws, noise_var, p) | {"seconds": seconds, "failed": ""}
        except Exception as error:  # one method that fails leaves the others
            row = {"failed": f"{type(error).__name__}: {error}"[:300]}
        part = job.stored_at(f"{method}.part")
        part.write_text(json.dumps(row | {"num_points": tables.x.shape[1]}))
        part.rename(job.stored_at(f"{method}.json"))


def scored(draws: Tensor, noise_var: float, p: Problem) -> Row:
    """The likelihood of the average law and the error of the mean, in units of the table."""
    law = torch.distributions.Normal(draws, math.sqrt(noise_var))
    density = law.log_prob(p.y).logsumexp(0) - math.log(len(draws))
    error = float(metrics.rmse(draws.mean(0), p.y)) * p.scale
    return {"nll": float(-density.mean()) + math.log(p.scale), "rmse": error}


def gathered(options: argparse.Namespace) -> list[Row]:
    """A row for each table and method, with the scores of all splits that are there."""
    rows = []
    for name in options.data:
        for method in options.methods:
            mine = [j for j in every(options) if j.data == name]
            paths = [job.stored_at(f"{method}.json") for job in mine]
            cells = [json.loads(path.read_text()) for path in paths if path.is_file()]
            good = [cell for cell in cells if not cell["failed"]]
            row = {"data": name, "method": method, "num_points": cells[0]["num_points"]}
            for key in ("nll", "rmse", "seconds"):
                row[key] = [cell[key] for cell in good]
            row["failed"] = "" if good else cells[0]["failed"]
            row["failures"] = [cell["failed"] for cell in cells if cell["failed"]]
            rows.append(row)
    return rows


EXPLANATION = """\
One hidden layer of 50 tanh units. Mean ± standard error over the customary splits (Hernández-Lobato & Adams,
2015), in the units of the table; the best mean is bold. Prior variance and noise of each split maximize
Laplace's evidence at a network whose weight decay was chosen on held-out points, and are then the same for
all networks, those of other libraries as well. RBF GP and NNGP find their own by the evidence on 300 points.
Seconds: CPU seconds from data to posterior on one thread, with the training of what a method starts from,
without imports."""


def beside(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Counterparts beside ours: differences of NLL, split by split, and the ratio of CPU seconds."""
    body = []
    for row in rows:
        ours = [
            r for r in rows if r["data"] == row["data"] and r["method"] == PAIRS.get(row["method"])
        ]
        if not ours or row["failures"] or ours[0]["failures"]:
            continue
        gap = np.array(ours[0]["nll"]) - np.array(row["nll"])
        error = gap.std(ddof=1) / math.sqrt(len(gap)) if len(gap) > 1 else 0.0
        line = [row["data"], row["method"], f"{gap.mean():+.3f} ± {error:.3f}"]
        mine, theirs = np.mean(ours[0]["seconds"]), np.mean(row["seconds"])
        body.append([*line, f"{mine:.1f}", f"{theirs:.1f}", f"{theirs / mine:.1f}"])
    names = [
        "table",
        "counterpart",
        "NLL of ours minus its",
        "our CPU s",
        "its CPU s",
        "its / ours",
    ]
    return names, body


def report(rows: Sequence[Row], options: argparse.Namespace, console: Console) -> int:
    """Print the tables and write them."""
    machine = {"processor": processor(), "jobs": options.jobs, "made_by": made_by()}
    lines = ["# Regression tables of the Bayesian room", ""]
    lines += [f"{machine['processor']}, {options.jobs} processes. {machine['made_by']}", ""]
    lines += [EXPLANATION]
    shown = [("Test negative log likelihood", *table_of(rows, "nll"))]
    shown += [("Test root mean squared error", *table_of(rows, "rmse"))]
    shown += [("CPU seconds of a split", *table_of(rows, "seconds"))]
    shown += [("Beside other libraries", *beside(rows))]
    for heading, columns, body in shown:
        table = Table(title=heading, title_justify="left")
        # a row for each method, since there are more of them than tables
        turned = [list(line) for line in zip(columns, *body, strict=True)]
        if heading.startswith("Beside"):
            turned = [columns, *body]
        for i, column in enumerate(turned[0]):
            table.add_column(column, justify="right" if i else "left")
        for line in turned[1:]:
            table.add_row(*line)
        console.print(table)
        lines += ["", f"## {heading}", "", "| " + " | ".join(turned[0]) + " |"]
        lines += ["|---" + "|---:" * (len(turned[0]) - 1) + "|"]
        lines += ["| " + " | ".join(line) + " |" for line in turned[1:]]
    failed = sorted({f"{r['data']}, {r['method']}: {f}" for r in rows for f in r["failures"]})
    lines += ["", "## Failures", "", *(f"- {line}" for line in failed)] if failed else []
    options.output.mkdir(parents=True, exist_ok=True)
    stem = options.output / ("bayes_uci_quick" if options.quick else "bayes_uci")
    stem.with_suffix(".json").write_text(json.dumps({"machine": machine, "rows": rows}) + "\n")
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
