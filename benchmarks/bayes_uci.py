"""Regression tables of the Bayesian room: test likelihood and error of every method, over all splits.

    NET2GP_DATA=... python benchmarks/bayes_uci.py --cells FOLDER [--jobs 2] [--data yacht] [--splits 5]
    NET2GP_DATA=... python benchmarks/bayes_uci.py --quick

One hidden layer of 50 tanh units on the customary splits. Prior and noise of each split are found once and
are the same for all networks (see `bayes_methods.py`); both Gaussian processes find their own. Counterparts
in TorchUncertainty, posteriors and bayesian-torch get the same data, prior, noise and numbers of steps
(`bayes_peers.py`), on the first five splits of each table. What each method gave is kept in `--cells`; a run
can be continued. Writes `results/bayes_uci.json` and `results/bayes_uci.md`.

The exit status asserts that every method gave a result for every split, and every counterpart for its five,
and that no method here is behind its counterpart: its test NLL is on no table larger by more than two
standard errors over the splits and 0.01, and it takes fewer CPU seconds on every table. The counterpart of
bayesian-torch is mean field with drawn weights, as it has; local reparameterization, the default here, is
claimed to end at a larger bound on every table. A quick run asserts that every method gave a result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bayes_cells import (
    PAIRS,
    POINTS,
    Job,
    Row,
    arguments,
    find_model,
    head,
    machine,
    markdown,
    predicted,
    without_missing_peers,
    work,
)
from bayes_methods import QUICK, Problem, Sizes
from net2gp import metrics
from run import RESULTS, made_by
from uci import cells as table_of

SPLITS, QUICK_SPLITS = 20, 2
PEER_SPLITS = 5
"""Counterparts run on the first splits of each table: they take as long as all methods here together."""

OWN = ("MAP", "ensemble of 5", "ensemble of 10", "dropout", "mean field")
OWN += ("mean field, drawn weights", "SGHMC", "microcanonical", "Laplace", "VOGN", "IVON")
OWN += ("mixture of Laplace", "RBF GP", "NNGP")
OTHERS = [name for name in PAIRS if name != "TorchUncertainty ensemble of 10"]
"""Counterparts that run unless others are asked for."""

BOUNDS = ("mean field", "bayesian-torch mean field")
"""Whose variational bound is claimed to be larger, and than which."""

TOLERANCE = 0.01
"""A difference of NLL that does not count."""


def main() -> int:
    options = parse(sys.argv[1:])
    made_by()
    console = Console(width=170)
    options.cells.mkdir(parents=True, exist_ok=True)
    machine(options)
    if not options.report:
        options.methods = without_missing_peers(options.methods, console)
    models = [job for job in every(options) if job.read("model") is None]
    if work(find_model, models, options, "priors and noises"):
        left = (job.missing() for job in every(options))
        parts = [part for job in left if job.methods for part in job.groups()]
        # A run that is stopped has the same splits of all tables.
        parts = sorted(parts, key=lambda job: (job.split, -job.work))
        work(run, parts, options, "methods")
    return report(gathered(options), options, console)


def parse(given: Sequence[str]) -> argparse.Namespace:
    names = [*OWN, *PAIRS]
    parser = arguments((__doc__ or "").splitlines()[0], names)
    parser.add_argument("--splits", type=int, help=f"at most that many (default {SPLITS})")
    options = parser.parse_args(given)
    scratch = Path(tempfile.mkdtemp(prefix="net2gp-bayes-uci-"))
    options.ends = time.monotonic() + 60 * options.minutes if options.minutes else None
    options.data = options.data or (list(POINTS)[:1] if options.quick else list(POINTS))
    options.methods = options.methods or (list(OWN) if options.quick else [*OWN, *OTHERS])
    options.splits = options.splits or (QUICK_SPLITS if options.quick else SPLITS)
    options.cells = options.cells or scratch
    options.output = options.output or (scratch if options.quick else RESULTS)
    options.sizes = QUICK if options.quick else Sizes()
    return options


def every(options: argparse.Namespace) -> Iterator[Job]:
    """All splits of all tables, each with its methods."""
    for split in range(options.splits):
        for name in options.data:
            methods = [m for m in options.methods if m not in PAIRS or split < PEER_SPLITS]
            yield Job(options.cells, name, split, tuple(methods), options.sizes)


def run(job: Job) -> None:
    """Score some methods on one split."""
    warnings.simplefilter("ignore")
    p = job.problem()
    for method in job.methods:
        try:
            draws, row = predicted(method, p)
            row |= scored(draws, row["noise_var"], p)
        except Exception as error:  # one method that fails leaves the others
            row = {"failed": f"{type(error).__name__}: {error}"[:300]}
        job.keep(method, row)


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
            jobs = [job for job in every(options) if job.data == name and method in job.methods]
            found = {job.split: job.read(method) for job in jobs}
            cells = {split: cell for split, cell in found.items() if cell is not None}
            good = {split: cell for split, cell in cells.items() if not cell["failed"]}
            row: Row = {"data": name, "method": method, "num_points": POINTS[name]}
            row["splits"], row["asked"] = list(good), len(jobs)
            for key in ("nll", "rmse", "seconds"):
                row[key] = [cell[key] for cell in good.values()]
            row["bound"] = [-cell["bound"] for cell in good.values() if "bound" in cell]
            row["failures"] = [cell["failed"] for cell in cells.values() if cell["failed"]]
            row["failed"] = "" if good else "failed" if cells else "not run"
            rows.append(row)
    return rows


EXPLANATION = """\
One hidden layer of 50 tanh units. Mean ± standard error over the customary splits (Hernández-Lobato & Adams,
2015), in the units of the table; the best mean is bold. Prior variance and noise of each split maximize
Laplace's evidence at a network whose weight decay was chosen on held-out points, and are then the same for
all networks, those of other libraries as well. RBF GP finds its own by the evidence on 300 points and NNGP,
with a variance for each layer, on 200, so that they are not held to the noise of the networks. Dropout has
the rate .05 before the last layer.
Optimizers take {steps} steps on all data at rates that fall from {rate} to zero, counterparts as many. Chains
are {chains} (the microcanonical ones 5) of {draws} draws, every {thin} steps, after {warmup} steps from an
ensemble of 5. Bound: minus the variational bound per training point, which mean field minimizes. Seconds:
CPU seconds from data to posterior on one thread, with the training of what a method starts from, without
imports."""


def beside(rows: Sequence[Row]) -> tuple[list[str], list[list[str]], list[str], list[str]]:
    """Counterparts beside ours: differences by split, CPU seconds, bounds, and what is not as claimed."""
    body, said, broken = [], [], []
    known = {(row["data"], row["method"]): row for row in rows}
    for row in rows:
        ours = known.get((row["data"], PAIRS.get(row["method"], "")))
        shared = sorted(set(row["splits"]) & set(ours["splits"])) if ours else []
        if ours is None or not shared:
            continue
        mine, theirs = picked(ours, shared), picked(row, shared)
        gap = mine["nll"] - theirs["nll"]
        error = gap.std(ddof=1) / math.sqrt(len(gap)) if len(gap) > 1 else 0.0
        lead = (mine["rmse"] - theirs["rmse"]).mean()
        line = [row["data"], row["method"], f"{gap.mean():+.3f} ± {error:.3f}", f"{lead:+.3f}"]
        spent = mine["seconds"].mean(), theirs["seconds"].mean()
        body.append([*line, *(f"{s:.1f}" for s in spent), f"{spent[1] / spent[0]:.1f}"])
        if gap.mean() > max(2 * error, TOLERANCE):
            broken.append(f"{row['data']}: {ours['method']} has a larger NLL than {row['method']}.")
        if spent[0] > spent[1]:
            broken.append(f"{row['data']}: {ours['method']} takes longer than {row['method']}.")
    names = ["table", "counterpart", "NLL of ours minus its", "RMSE of ours minus its"]
    for name in dict.fromkeys(row["data"] for row in rows):
        mine, theirs = (known.get((name, method), {"splits": []}) for method in BOUNDS)
        shared = sorted(set(mine["splits"]) & set(theirs["splits"]))
        if shared:
            ours, other = (picked(row, shared)["bound"].mean() for row in (mine, theirs))
            said.append(
                f"- {name}: minus the bound per point is {ours:.3f} for {BOUNDS[0]} and {other:.3f} for "
                f"{BOUNDS[1]}."
            )
            if ours > other:
                broken.append(f"{name}: the bound of {BOUNDS[0]} is smaller than of {BOUNDS[1]}.")
    return [*names, "our CPU s", "its CPU s", "its / ours"], body, said, broken


def picked(row: Row, splits: Sequence[int]) -> dict[str, np.ndarray]:
    """The figures of some splits."""
    places = [row["splits"].index(split) for split in splits]
    known = [key for key in ("nll", "rmse", "seconds", "bound") if row[key]]
    return {key: np.array([row[key][i] for i in places]) for key in known}


def winners(rows: Sequence[Row]) -> list[str]:
    """Who is best on each table, and the best network where a Gaussian process is."""
    lines = []
    for data in dict.fromkeys(row["data"] for row in rows):
        own = [r for r in rows if r["data"] == data and r["nll"] and r["method"] not in PAIRS]
        mean = {r["method"]: np.mean(r["nll"]) for r in own}
        if not mean:
            continue
        order = sorted(mean, key=lambda method: mean[method])
        networks = [method for method in order if method not in ("RBF GP", "NNGP")]
        said = f"- {data}: {order[0]} has the smallest NLL ({mean[order[0]]:.3f})"
        if networks and order[0] != networks[0]:
            said += (
                f", a Gaussian process; {networks[0]} is the best network ({mean[networks[0]]:.3f})"
            )
        lines.append(said + ".")
    return lines


def incomplete(rows: Sequence[Row]) -> list[str]:
    """Methods without a result for some split."""
    wrong = []
    for row in rows:
        if len(row["splits"]) < row["asked"]:
            said = f"{len(row['splits'])} of {row['asked']} splits"
            wrong.append(f"{row['data']}: {row['method']} has {said}. {row['failures'][:1] or ''}")
    return wrong


def report(rows: Sequence[Row], options: argparse.Namespace, console: Console) -> int:
    """Print the tables and write them; the status says whether what is claimed holds."""
    made = machine(options)
    names, body, bounds, behind = beside(rows)
    broken = incomplete(rows) + ([] if options.quick else behind)
    sizes = {key: getattr(options.sizes, key) for key in Sizes.__dataclass_fields__}
    lines = [
        "# Regression tables of the Bayesian room",
        "",
        head(made),
        "",
        EXPLANATION.format(**sizes),
    ]
    titles = {"nll": "Test negative log likelihood", "rmse": "Test root mean squared error"}
    titles |= {
        "bound": "Minus the variational bound per point",
        "seconds": "CPU seconds of a split",
    }
    for key, title in titles.items():
        some = [row for row in rows if row[key] and row["method"] not in PAIRS]
        if not some:
            continue
        columns, cells = table_of(some, key)
        # a row for each method, since there are more of them than tables
        turned = [list(line) for line in zip(columns, *cells, strict=True)]
        show(console, title, turned[0], turned[1:])
        lines += ["", f"## {title}", "", *markdown(turned[0], turned[1:])]
        lines += ["", *winners(rows)] if key == "nll" else []
    if body:
        show(console, "Beside other libraries", names, body)
        lines += ["", "## Beside other libraries", "", *markdown(names, body), "", *bounds]
    said = [f"- {line}" for line in broken] or ["Everything that is claimed holds."]
    lines += ["", "## Claims", "", (__doc__ or "").split("\n\n")[-1].strip(), "", *said]
    console.print("\n".join(said), highlight=False)
    options.output.mkdir(parents=True, exist_ok=True)
    stem = options.output / ("bayes_uci_quick" if options.quick else "bayes_uci")
    stem.with_suffix(".json").write_text(json.dumps({"machine": made, "rows": rows}) + "\n")
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    return 1 if broken else 0


def show(console: Console, title: str, names: Sequence[str], body: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    shown = Table(title=title, title_justify="left")
    for i, name in enumerate(names):
        shown.add_column(name, justify="right" if i else "left")
    for line in body:
        shown.add_row(*line)
    console.print(shown)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
