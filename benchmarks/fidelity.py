"""Fidelity on regression tables: predictions of every method beside those of long NUTS chains.

    NET2GP_DATA=... python benchmarks/fidelity.py --cells FOLDER [--jobs 2] [--data yacht]
    NET2GP_DATA=... python benchmarks/fidelity.py --quick

One hidden layer of 50 tanh units, the first customary split of each table, and a prior and a noise that are
found once for each table and are then the same for all methods (see `bayes_methods.py`). NUTS gives the
posterior of this model; the other methods are judged by how far their predictions are from it. What NUTS and
each method gave is kept in `--cells`, so that a run can be continued. Writes `results/fidelity.json` and
`results/fidelity.md`.
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

from bayes_methods import (
    METHODS,
    QUICK,
    Problem,
    Sizes,
    draws_of,
    found,
    noise_of,
    nuts,
    problem_of,
    timed,
)
from bayes_peers import PEER_METHODS, peer_draws
from net2gp import bayes, metrics
from peers import PEERS, NotInstalled, ensure
from run import RESULTS, made_by, processor
from uci_networks import splits

TABLES = ("yacht", "energy", "concrete", "wine-quality-red")
TRUTH, SAME = "NUTS", "NUTS, two chains beside two"
OWN = [name for name in METHODS if name not in ("RBF GP", "NNGP")]
"""Methods for this posterior: the two processes have another prior."""

NUM_BINS, NUM_QUANTILES, NUM_NOISES = 20, 500, 32
"""Bins of predictions, and for W₂ of y the quantiles of f at a point and of the noise around each."""

Row = dict[str, Any]


def main() -> int:
    options = parse(sys.argv[1:])
    made_by()
    console = Console(width=150)
    options.cells.mkdir(parents=True, exist_ok=True)
    options.methods = installed(options.methods, console)
    for method in (TRUTH, ""):
        jobs = [job for job in (j.missing() for j in every(options, method)) if job.methods]
        with ProcessPoolExecutor(options.jobs, get_context("spawn"), initializer=alone) as pool:
            bar = Console(stderr=True)
            list(track(pool.map(run, jobs), method or "methods", len(jobs), console=bar))
    named = (TRUTH, SAME, "")
    rows = [row for name in named for job in every(options, name) for row in job.rows()]
    return report(rows, options, console)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [*OWN, *PEER_METHODS]
    parser.add_argument("--quick", action="store_true", help="one table, short runs: minutes")
    parser.add_argument("--data", nargs="+", choices=TABLES, help="tables (default: all)")
    parser.add_argument("--methods", nargs="+", choices=names, help="methods (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default 2)")
    parser.add_argument("--cells", type=Path, help="folder of what each method gave, kept")
    parser.add_argument("--output", type=Path, help="folder of the result files")
    parser.add_argument("--draws", type=int, help="draws of each of NUTS's four chains")
    options = parser.parse_args(arguments)
    scratch = Path(tempfile.mkdtemp(prefix="net2gp-fidelity-"))
    options.data = options.data or (TABLES[-1:] if options.quick else TABLES)
    options.methods = options.methods or (OWN if options.quick else names)
    options.cells = options.cells or scratch
    options.output = options.output or (scratch if options.quick else RESULTS)
    sizes = QUICK if options.quick else Sizes()
    if options.draws:
        sizes = replace(sizes, nuts_draws=options.draws, nuts_warmup=options.draws)
    options.sizes = sizes
    return options


def installed(methods: Sequence[str], console: Console) -> list[str]:
    """The methods that can run here; environments of peers are made before all jobs."""
    missing = set()
    for name in {PEER_METHODS[m] for m in methods if m in PEER_METHODS}:
        try:
            ensure(PEERS[name])
        except NotInstalled as reason:
            console.print(f"missing: {reason}", highlight=False)
            missing.add(name)
    return [m for m in methods if PEER_METHODS.get(m) not in missing]


def alone() -> None:
    """One thread for each process."""
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Job:
    """One table and the methods that are asked for."""

    folder: Path
    data: str
    methods: tuple[str, ...]
    sizes: Sizes

    def stored_at(self, what: str) -> Path:
        """Where something of this table is kept."""
        return self.folder / f"{self.data}_{what}".replace(" ", "-")

    def missing(self) -> Job:
        """The same for the methods that are not stored yet."""
        left = (m for m in self.methods if not self.stored_at(f"{m}.json").is_file())
        return replace(self, methods=tuple(left))

    def rows(self) -> Iterator[Row]:
        """What was found."""
        for method in self.methods:
            path = self.stored_at(f"{method}.json")
            if path.is_file():
                yield json.loads(path.read_text())


def every(options: argparse.Namespace, method: str) -> Iterator[Job]:
    """A job for each table, the long ones first."""
    methods = (method,) if method else tuple(options.methods)
    for name in reversed(options.data):
        yield Job(options.cells, name, methods, options.sizes)


def run(job: Job) -> None:
    """Find what a method predicts and compare it with NUTS."""
    warnings.simplefilter("ignore")
    p = problem(job)
    if job.methods == (TRUTH,):
        keep(job, TRUTH, truth(job, p))
        return
    with np.load(job.stored_at("truth.npz")) as stored:
        reference = torch.from_numpy(stored["draws"])
    for method in job.methods:
        wall = time.perf_counter()
        try:
            if method in PEER_METHODS:
                (draws, seconds), noise = peer_draws(method, p), p.noise_var
            else:
                posterior, seconds = found(method, p)
                draws, noise = draws_of(posterior, p.x), noise_of(posterior)
            row = compared(draws, noise, reference, p) | {"seconds": seconds}
        except Exception as error:  # one method that fails leaves the others
            row = {"failed": f"{type(error).__name__}: {error}"[:300]}
        keep(job, method, row | {"wall": time.perf_counter() - wall})


def problem(job: Job) -> Problem:
    """The regression of a job; prior and noise are kept, so that every method has the same."""
    tables, path = splits(job.data, 1), job.stored_at("model.json")
    if not path.is_file():
        p = problem_of(tables, 0, job.sizes)
        path.write_text(json.dumps({"prior_var": p.prior_var, "noise_var": p.noise_var}))
    return problem_of(tables, 0, job.sizes, **json.loads(path.read_text()))


def keep(job: Job, method: str, row: Row) -> None:
    """Write a row, all of it or nothing."""
    path = job.stored_at(f"{method}.json")
    path.with_suffix(".part").write_text(json.dumps({"data": job.data, "method": method} | row))
    path.with_suffix(".part").rename(path)


def truth(job: Job, p: Problem) -> Row:
    """Run NUTS, keep its draws of f at the test points, and say how well its chains agree."""
    checkpoint = job.stored_at("chains.checkpoint")
    posterior, seconds = timed(lambda: nuts(p, checkpoint))
    draws = draws_of(posterior, p.x)
    np.savez(job.stored_at("truth.npz"), draws=draws.numpy())
    judged = bayes.diagnose(posterior, p.x)
    row = {"seconds": seconds, "prior_var": p.prior_var, "noise_var": p.noise_var}
    row |= {"r_hat": float(judged.r_hat.max()), "r_hat_median": float(judged.r_hat.median())}
    row |= {"bulk_ess": float(judged.bulk_ess.min()), "draws": len(draws)}
    row["divergences"] = int(judged.divergences.sum())
    halves = draws.reshape(4, -1, draws.shape[1])
    same = compared(halves[:2].flatten(0, 1), p.noise_var, halves[2:].flatten(0, 1), p)
    keep(job, SAME, same | {"seconds": seconds / 2})
    checkpoint.unlink(missing_ok=True)
    return compared(draws, p.noise_var, draws, p) | row


def compared(draws: Tensor, noise_var: float, reference: Tensor, p: Problem) -> Row:
    """How far draws of f (S, N) and a noise are from those of the reference, and how well they predict."""
    edges = torch.quantile(p.data[1][:, 0], torch.arange(1, NUM_BINS).double() / NUM_BINS)
    probs = binned(draws, noise_var, edges), binned(reference, p.noise_var, edges)
    values = noisy(draws, noise_var), noisy(reference, p.noise_var)
    law = torch.distributions.Normal(draws, math.sqrt(noise_var))
    density = law.log_prob(p.y).logsumexp(0) - math.log(len(draws))
    return {
        "agreement": float(metrics.agreement(*probs)),
        "total variation": float(metrics.total_variation(*probs)),
        "W2 of y": float(metrics.wasserstein_samples(*values)),
        "W2 of f": float(metrics.wasserstein_samples(draws, reference)),
        "NLL": float(-density.mean()) + math.log(p.scale),
        "RMSE": float(metrics.rmse(draws.mean(0), p.y)) * p.scale,
        "stddev of f": float(draws.std(0, correction=0).mean()),
        "failed": "",
    }


def binned(draws: Tensor, noise_var: float, edges: Tensor) -> Tensor:
    """Probabilities of bins between training targets' quantiles, (N, B), averaged over draws of f."""
    below = torch.zeros(draws.shape[1], len(edges), dtype=draws.dtype)
    for part in draws.split(200):
        gaps = (edges - part[..., None]) / math.sqrt(noise_var)
        below += torch.special.ndtr(gaps).sum(0)
    below = below / len(draws)
    ends = torch.zeros_like(below[:, :1])
    return torch.cat([ends, below, ends + 1], 1).diff(dim=1).clamp(min=0)


def noisy(draws: Tensor, noise_var: float) -> Tensor:
    """Draws of y: quantiles of the noise around quantiles of f, equally many for every method."""
    places = ((torch.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES * len(draws)).long()
    levels = (torch.arange(NUM_NOISES, dtype=draws.dtype) + 0.5) / NUM_NOISES
    noise = math.sqrt(noise_var) * torch.special.ndtri(levels)
    return (draws.sort(0).values[places] + noise[:, None, None]).flatten(0, 1)


EXPLANATION = """\
One hidden layer of 50 tanh units, one split of each table, prior N(0, v) of all parameters and Gaussian noise
as in the first table. NUTS: four chains in float64; R̂ and effective sample sizes are of predictions f(x) at
the test points, the worst of them. Its first row compares two of its chains with the two others, which is
how close the same posterior comes to itself. Agreement: the share of test points whose most probable bin, of
20 between quantiles of the training targets, is the same as under NUTS. Total variation: half the L1
distance of the probabilities of these bins. W₂: distance of the laws of y and of f at a test point, in
standard deviations of the targets, averaged. NLL and RMSE: on test points, in units of the table. Seconds:
CPU seconds from data to posterior, training included."""
COLUMNS = ("agreement", "total variation", "W2 of y", "W2 of f", "stddev of f", "NLL", "RMSE")
COLUMNS += ("seconds",)


def report(rows: Sequence[Row], options: argparse.Namespace, console: Console) -> int:
    """Print the tables and write them."""
    machine = {"processor": processor(), "jobs": options.jobs, "made_by": made_by()}
    lines = ["# Fidelity to the posterior on regression tables", ""]
    lines += [f"{machine['processor']}, {options.jobs} processes. {machine['made_by']}", ""]
    lines += [EXPLANATION, "", "## The reference", ""]
    names = ["v", "noise", "draws", "largest R̂", "median R̂", "smallest ESS", "divergences", "CPU s"]
    keys = ["prior_var", "noise_var", "draws", "r_hat", "r_hat_median", "bulk_ess", "divergences"]
    lines += ["| table | " + " | ".join(names) + " |", "|---" + "|---:" * len(names) + "|"]
    for row in rows:
        if row["method"] == TRUTH:
            cells = [f"{row[key]:.4g}" for key in (*keys, "seconds")]
            lines.append(f"| {row['data']} | " + " | ".join(cells) + " |")
    for data in dict.fromkeys(row["data"] for row in rows):
        table = Table(title=data, title_justify="left")
        lines += ["", f"## {data}", "", "| method | " + " | ".join(COLUMNS) + " |"]
        lines += ["|---" + "|---:" * len(COLUMNS) + "|"]
        for name in ("method", *COLUMNS):
            table.add_column(name, justify="left" if name == "method" else "right")
        for row in rows:
            if row["data"] == data:
                cells = [row["failed"]] if row["failed"] else [shown(row[n]) for n in COLUMNS]
                cells += [""] * (len(COLUMNS) - len(cells))
                table.add_row(row["method"], *cells)
                lines.append(f"| {row['method']} | " + " | ".join(cells) + " |")
        console.print(table)
    options.output.mkdir(parents=True, exist_ok=True)
    stem = options.output / ("fidelity_quick" if options.quick else "fidelity")
    stem.with_suffix(".json").write_text(json.dumps({"machine": machine, "rows": rows}) + "\n")
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    return 0


def shown(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3f}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
