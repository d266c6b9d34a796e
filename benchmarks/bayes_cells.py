"""What `fidelity.py` and `bayes_uci.py` share: jobs that leave a file for each method, and how they run.

A job is one split of a table and some methods that start from the same networks. Jobs are independent of each
other, so that they can run in any number of processes, the long ones first; a run that was stopped goes on
where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing import TimeoutError as Late
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from bayes_methods import (
    FROM_ENSEMBLE,
    FROM_OPTIMUM,
    QUICK,
    Problem,
    Sizes,
    bound,
    draws_of,
    found,
    noise_of,
)
from bayes_methods import problem_of as split_of
from bayes_peers import PEER_METHODS, STARTS, missing, peer_draws
from run import made_by, processor
from uci_networks import splits

POINTS = {
    "yacht": 308,
    "bostonHousing": 506,
    "energy": 768,
    "concrete": 1030,
    "wine-quality-red": 1599,
}
"""Rows of the tables, which say which jobs take long."""

PAIRS = {
    "TorchUncertainty ensemble of 5": "ensemble of 5",
    "TorchUncertainty ensemble of 10": "ensemble of 10",
    "bayesian-torch mean field": "mean field, drawn weights",
    "posteriors SGHMC": "SGHMC",
}
"""Counterparts elsewhere, and what they are counterparts of."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One split of a table and the methods that are asked for."""

    folder: Path
    data: str
    split: int
    methods: tuple[str, ...]
    sizes: Sizes = field(default_factory=Sizes)

    def stored_at(self, what: str) -> Path:
        """Where something of this split is kept."""
        return self.folder / f"{self.data}_{self.split}_{what}".replace(" ", "-")

    def missing(self) -> Job:
        """The same for the methods that are not stored yet, or failed."""
        found = {method: self.read(method) for method in self.methods}
        left = (m for m, row in found.items() if row is None or row["failed"])
        return replace(self, methods=tuple(left))

    def read(self, method: str) -> Row | None:
        """What was found by a method, or None."""
        path = self.stored_at(f"{method}.json")
        return json.loads(path.read_text()) if path.is_file() else None

    def keep(self, what: str, row: Row) -> None:
        """Write a row, all of it or nothing."""
        path = self.stored_at(f"{what}.json")
        part = path.with_suffix(".part")
        part.write_text(json.dumps(row))
        part.rename(path)

    def groups(self) -> Iterator[Job]:
        """A job for each kind of start, so that networks are trained once for all that start from them."""
        starts = dict.fromkeys(start_of(method) for method in self.methods)
        for start in starts:
            yield replace(self, methods=tuple(m for m in self.methods if start_of(m) == start))

    @property
    def work(self) -> float:
        """About how long it takes, in no unit."""
        return POINTS[self.data] * (3 if start_of(self.methods[0]) == "ensemble" else 1)

    def problem(self) -> Problem:
        """The regression; prior and noise are found once and kept, so that every method has the same."""
        known = self.read("model")
        if known is None:
            p = split_of(table(self.data, self.split + 1), self.split, self.sizes)
            self.keep("model", {"prior_var": p.prior_var, "noise_var": p.noise_var})
            return p
        return split_of(table(self.data, self.split + 1), self.split, self.sizes, **known)


def start_of(method: str) -> str:
    """What a method starts from: "optimum", "ensemble", or nothing but the data: its own name."""
    if method in FROM_OPTIMUM:
        return "optimum"
    return "ensemble" if method in FROM_ENSEMBLE else STARTS.get(method, method)


@cache
def table(name: str, count: int) -> Any:
    """The first splits of a table."""
    return splits(name, count)


def find_model(job: Job) -> None:
    """Find the prior and the noise of a split."""
    warnings.simplefilter("ignore")
    job.problem()


def predicted(method: str, p: Problem) -> tuple[torch.Tensor, Row]:
    """Draws of f at the test points (S, N), and the variance of the noise, CPU seconds and the like."""
    if method in PEER_METHODS:
        draws, seconds, more = peer_draws(method, p)
        return draws, {"noise_var": p.noise_var, "seconds": seconds, "failed": ""} | more
    posterior, seconds = found(method, p)
    row = {"noise_var": noise_of(posterior), "seconds": seconds, "failed": ""}
    if hasattr(posterior.recipe, "weights"):
        row["bound"] = bound(p, posterior.recipe.weights)
    return draws_of(posterior, p.x), row


def arguments(description: str, names: Sequence[str]) -> argparse.ArgumentParser:
    """The options of both programs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="one table, short runs: minutes")
    parser.add_argument("--data", nargs="+", choices=POINTS, help="tables (default: all)")
    parser.add_argument("--methods", nargs="+", choices=names, help="methods (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default 2)")
    parser.add_argument("--minutes", type=float, help="end after that time, with what is there")
    parser.add_argument("--cells", type=Path, help="folder of what each method gave, kept")
    parser.add_argument("--output", type=Path, help="folder of the result files")
    parser.add_argument("--report", action="store_true", help="only write what is in the cells")
    return parser


def without_missing_peers(methods: Sequence[str], console: Console) -> list[str]:
    """The methods that can run here; environments of peers are made before all jobs."""
    reasons = {
        name: missing(name) for name in {PEER_METHODS[m] for m in methods if m in PEER_METHODS}
    }
    for reason in filter(None, reasons.values()):
        console.print(f"missing: {reason}", highlight=False)
    return [m for m in methods if not reasons.get(PEER_METHODS.get(m, ""))]


def work(
    run: Callable[[Any], None], jobs: Iterable[Any], options: argparse.Namespace, title: str
) -> bool:
    """Run jobs in that many processes of one thread each; whether all ended in time."""
    jobs = [] if options.report else list(jobs)
    if not jobs:
        return True
    # Pages of large arrays are kept by the process; faults of new ones would be most of the time.
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"):
        os.environ.setdefault(name, str(2**26))
    with (
        get_context("spawn").Pool(min(options.jobs, len(jobs)), alone) as pool,
        Progress(console=Console(stderr=True)) as bar,
    ):
        task = bar.add_task(title, total=len(jobs))
        done = pool.imap_unordered(run, jobs)
        for _ in jobs:
            left = None if options.ends is None else max(0.0, options.ends - time.monotonic())
            try:
                done.next(left)
            except Late:
                return False
            bar.advance(task)
    return True


def alone() -> None:
    """One thread for each process, and what the first fit imports: imports are not counted."""
    torch.set_num_threads(1)
    data = torch.zeros(4, 1).double(), torch.zeros(4, 1).double()
    p = Problem(data, data[0], data[1][:, 0], 1.0, 1.0, 1.0, sizes=replace(QUICK, steps=2))
    for method in ("MAP", "ensemble of 5"):
        found(method, p)


def machine(options: argparse.Namespace) -> Row:
    """What the cells were made on and by, kept beside them: a report may be written on another machine."""
    path = options.cells / "machine.json"
    if not path.is_file():
        made = {"processor": processor(), "jobs": options.jobs, "made_by": made_by()}
        made |= {"torch": torch.__version__, "revision": os.environ.get("NET2GP_REVISION", "")}
        path.write_text(json.dumps(made))
    made = json.loads(path.read_text())
    if not options.report and processor() not in made["processor"]:
        made["processor"] += f" and {processor()}"
        path.write_text(json.dumps(made))
    return made


def head(made: Row) -> str:
    """The machine and the program that made the cells."""
    code = f" The code is revision {made['revision']}." if made["revision"] else ""
    return f"{made['processor']}, {made['jobs']} processes, torch {made['torch']}. {made['made_by']}{code}"


def markdown(names: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """A table."""
    lines = ["| " + " | ".join(names) + " |", "|---" + "|---:" * (len(names) - 1) + "|"]
    return lines + ["| " + " | ".join(line) + " |" for line in body]
