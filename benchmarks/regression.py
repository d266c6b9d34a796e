"""Defaults for regression: likelihood, intervals and CRPS of posteriors around networks trained in four ways.

    NET2GP_DATA=... python benchmarks/regression.py --jobs 16
    python benchmarks/regression.py --quick

Every network has two hidden layers of 64 ReLU units (see `regression_networks.py`); 5 seeds, which are also
splits. Each network is a job of its own. The networks and what each method gave are kept in `--cells`, so
that a run can be continued, on another machine as well: laplace-torch has an environment of its own
(`peers.py`), and a second run adds it where there is one. The exit status asserts the claims of
`regression_tables.py`.
Writes `results/regression.json` and `results/regression.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

import net2gp as n2g
import regression_peer
from net2gp import metrics
from net2gp.errors import Net2GPWarning
from peers import PEERS, NotInstalled, ensure
from regression_module import network
from regression_networks import KINDS, TABLES, Rows, few, load, train
from regression_tables import BARE, DEFAULT, PEER_FULL, PROCESS, report
from run import RESULTS, made_by, processor

SEEDS, QUICK_SEEDS = 5, 3
QUICK_TABLES = ("diabetes", "Friedman")
COUNTS = (1, 2, 5, 10)
"""How few points are few."""

FEW_METHODS = (BARE, DEFAULT, "Kron", "Diagonal", "LastLayer", "adapt")
FEW_TABLES, FEW_KINDS = ("diabetes", "Friedman"), ("plain", "weight decay")
LEVELS = (0.5, 0.9, 0.95)
STRUCTURES: dict[str, Any] = {
    DEFAULT: None,
    "FunctionSpace": n2g.structures.FunctionSpace(),
    "Kron": n2g.Kron(),
    "Diagonal": n2g.Diagonal(),
    "LastLayer": n2g.LastLayer(),
    "LowRank": n2g.structures.LowRank(50),
    "Subnetwork": n2g.structures.Subnetwork(300),
}
FUNCTION_ROWS = 2000
"""Rows up to which `FunctionSpace()` is asked for by name."""

PEER_STRUCTURES = {"laplace-torch Kron": "Kron", "laplace-torch last layer": "last layer"}
PEER_STRUCTURES[PEER_FULL] = "full"
METHODS = (BARE, *STRUCTURES, "adapt", PROCESS, *PEER_STRUCTURES)
Row = dict[str, Any]
Prediction = tuple[Tensor, Tensor]


def main() -> int:
    options = parse(sys.argv[1:])
    made_by()
    console = Console(width=170)
    options.cells.mkdir(parents=True, exist_ok=True)
    options.methods = installed(options.methods, console)
    jobs = [job for job in (job.missing() for job in every(options)) if job.methods]
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), initializer=alone) as pool:
        done, bar = pool.map(run, jobs), Console(stderr=True)
        list(track(done, "networks", len(jobs), console=bar, transient=True))
    rows = [row for job in every(options) for row in job.rows()]
    options.output.mkdir(parents=True, exist_ok=True)
    machine = {"processor": processor(), "jobs": options.jobs, "made_by": made_by()}
    machine["runs"] = history(options.cells, machine, sum(len(job.methods) for job in jobs))
    found = sum(len(job.methods) for job in every(options))
    if left := found - sum(int(line.split()[0]) for line in machine["runs"]):
        machine["runs"] = [*machine["runs"], f"{left} results: a run that did not end."]
    name = "regression_quick" if options.quick else "regression"
    (options.output / f"{name}.json").write_text(as_columns(machine, rows))
    return report(rows, machine, options.output / f"{name}.md", console)


def history(cells: Path, machine: Row, count: int) -> list[str]:
    """A line for every run that left results in the folder of cells, this one included."""
    path = cells / "runs.txt"
    lines = path.read_text().splitlines() if path.is_file() else []
    if count:
        lines.append(
            f"{count} results: {machine['processor']}, {machine['jobs']} processes. {made_by()}"
        )
        path.write_text("".join(line + "\n" for line in lines))
    return lines


def as_columns(machine: Row, rows: Sequence[Row]) -> str:
    """JSON with the names once, six digits and a line for each row, which is a third of the size."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    short = lambda value: float(f"{value:.6g}") if isinstance(value, float) else value
    lines = (json.dumps([short(row.get(name)) for name in names]) for row in rows)
    head = f'{{"machine": {json.dumps(machine)},\n"columns": {json.dumps(names)},\n"rows": [\n'
    return head + ",\n".join(lines) + "\n]}\n"


def installed(methods: Sequence[str], console: Console) -> list[str]:
    """The methods that can run here: the environment of laplace-torch is made once, before all jobs."""
    if set(methods) & set(PEER_STRUCTURES):
        try:
            ensure(PEERS["laplace"])
        except NotInstalled as reason:
            console.print(f"missing: {reason}", highlight=False)
            return [method for method in methods if method not in PEER_STRUCTURES]
    return list(methods)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two tables, three seeds: minutes")
    parser.add_argument("--data", nargs="+", choices=TABLES, help="tables (default: all)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="methods (default: all)")
    parser.add_argument("--seeds", type=int, help=f"how many (default {SEEDS})")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default 2)")
    parser.add_argument("--cells", type=Path, help="folder of what each network gave, kept")
    parser.add_argument("--output", type=Path, help="folder of the result files")
    options = parser.parse_args(arguments)
    scratch = Path(tempfile.mkdtemp(prefix="net2gp-regression-"))
    options.data = options.data or (QUICK_TABLES if options.quick else TABLES)
    options.seeds = options.seeds or (QUICK_SEEDS if options.quick else SEEDS)
    own = [name for name in METHODS if name not in PEER_STRUCTURES]
    options.methods = options.methods or (own if options.quick else METHODS)
    options.cells = options.cells or scratch
    options.output = options.output or (scratch if options.quick else RESULTS)
    return options


@dataclass(frozen=True)
class Job:
    """One network and what is asked of it; `count` are the training rows, if they are to be few."""

    folder: Path
    data: str
    kind: str
    seed: int
    methods: tuple[str, ...]
    count: int = 0

    def stored_at(self, what: str) -> Path:
        """Where a result of this network is kept, or the network itself."""
        parts = (
            self.data,
            self.kind or "any",
            self.seed,
            *([self.count] if self.count else []),
            what,
        )
        return self.folder / "_".join(str(part) for part in parts).replace(" ", "-")

    def missing(self) -> Job:
        """The same for the methods that are not stored yet."""
        left = (m for m in self.methods if not self.stored_at(f"{m}.json").is_file())
        return replace(self, methods=tuple(left))

    def rows(self) -> Iterator[Row]:
        """What was found."""
        for method in self.methods:
            yield from json.loads(self.stored_at(f"{method}.json").read_text())


def every(options: argparse.Namespace) -> Iterator[Job]:
    """All jobs, the long ones first."""
    chosen = [m for m in options.methods if m != PROCESS]
    for name in sorted(options.data, key=TABLES.index, reverse=True):
        for seed in range(options.seeds):
            for kind in KINDS:
                methods = tuple(m for m in chosen if wanted(m, name, seed))
                yield Job(options.cells, name, kind, seed, methods)
            if PROCESS in options.methods:
                yield Job(options.cells, name, "", seed, (PROCESS,))
    if DEFAULT not in options.methods:
        return
    for name in sorted(set(FEW_TABLES) & set(options.data)):
        for count in COUNTS:
            for seed in range(options.seeds):
                for kind in FEW_KINDS:
                    yield Job(options.cells, name, kind, seed, FEW_METHODS, count)


def wanted(method: str, name: str, seed: int) -> bool:
    """The whole precision of laplace-torch takes minutes for each of these networks: one table, one seed."""
    return method != PEER_FULL or (name == "diabetes" and seed == 0)


def alone() -> None:
    """One thread for each process."""
    torch.set_num_threads(1)


def run(job: Job) -> None:
    """Train the network of a job, or read it, and score every method on it."""
    warnings.simplefilter("ignore")
    rows = few(job.data, job.count, job.seed) if job.count else load(job.data, job.seed)
    module = None if not job.kind else trained(job, rows)
    for method in job.methods:
        head = {"data": job.data, "kind": job.kind, "seed": job.seed, "method": method}
        head |= {"count": job.count, "num_rows": len(rows.x), "scale": scale(rows)}
        start = time.perf_counter()
        found = one(module, rows, method, job.kind)
        row = {**head, **found, "seconds": time.perf_counter() - start}
        path = job.stored_at(f"{method}.json")
        path.with_suffix(".part").write_text(json.dumps([row] if found else []))
        path.with_suffix(".part").rename(path)


def scale(rows: Rows) -> float:
    """The standard deviation of the training targets; of one, its size."""
    y = rows.y.double()
    return float(y.std(correction=0)) if len(y) > 1 else float(y.abs().mean())


def trained(job: Job, rows: Rows) -> nn.Module:
    """The network, kept beside its results: every method, on any machine, gets the same one."""
    path = job.stored_at("network.pt")
    if path.is_file():
        module = network(job.kind, rows.x.shape[1])
        module.load_state_dict(torch.load(path, weights_only=True))
        return module.eval()
    module = train(job.kind, rows, job.seed)
    torch.save(module.state_dict(), path)
    return module


def one(module: nn.Module | None, rows: Rows, method: str, kind: str) -> Row:
    """The scores of one method; nothing where it is not asked for."""
    if module is None:
        return scored(plain_process(rows), rows)
    if method == BARE:
        return bare(module, rows)
    if method in PEER_STRUCTURES:
        return peer(module, kind, rows, PEER_STRUCTURES[method])
    if method == "FunctionSpace" and len(rows.x) > FUNCTION_ROWS:
        return {}
    return ours(module, rows, method)


def bare(module: nn.Module, rows: Rows) -> Row:
    """The network itself, with the mean squared residual of its training rows as noise."""
    with torch.no_grad():
        noise = (module(rows.x) - rows.y).square().mean().clamp(min=1e-12)
        mean = module(rows.x_test)[:, 0]
    return {**scored((mean, noise.expand_as(mean)), rows), "noise_var": float(noise)}


def ours(module: nn.Module, rows: Rows, method: str) -> Row:
    """`laplace` with its own prior and noise, or `adapt` on the network's own rows."""
    pair = (rows.x, rows.y)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", Net2GPWarning)
        posterior = (
            n2g.adapt(module, pair, n2g.Gaussian())
            if method == "adapt"
            else n2g.laplace(module, pair, n2g.Gaussian(), structure=STRUCTURES[method])
        )
    law = posterior.predict(rows.x_test)
    assert isinstance(posterior.likelihood, n2g.Gaussian)
    return {
        **scored((law.mean[:, 0].detach(), law.variance[:, 0].detach()), rows),
        "noise_var": float(posterior.likelihood.noise_var),  # type: ignore[arg-type]
        "structure": type(getattr(posterior, "structure", posterior)).__name__,
        "warned": sorted(
            {w.category.__name__ for w in caught if issubclass(w.category, Net2GPWarning)}
        ),
    }


def plain_process(rows: Rows) -> Prediction:
    """A GP with a squared-exponential kernel, one length scale for each input, tuned on 300 rows at most."""
    x, y, x_test = rows.x.double(), rows.y.double(), rows.x_test.double()

    def build(lengthscale: Tensor, output_var: float, noise_var: float) -> Any:
        kernel = n2g.RBF(lengthscale, output_var)
        return n2g.condition(kernel, (x[:300], y[:300]), n2g.Gaussian(noise_var))

    start = torch.full((x.shape[1],), x.shape[1] ** 0.5, dtype=torch.float64)
    tuned = n2g.tune(build, lengthscale=start, output_var=1.0, noise_var=0.1, max_iterations=40)
    law = n2g.condition(tuned.kernel, (x, y), tuned.likelihood).predict(x_test)
    return law.mean[:, 0].detach().float(), law.variance[:, 0].detach().float()


def peer(module: nn.Module, kind: str, rows: Rows, structure: str) -> Row:
    """laplace-torch, in its own environment; a prediction that is no number counts as a failure."""
    try:
        pair, noise = regression_peer.predict(module, kind, rows, structure)
    except regression_peer.Failed as reason:
        return {"failed": str(reason)}
    if not all(part.isfinite().all() for part in pair):
        return {"failed": "predictions are not finite"}
    return {**scored(pair, rows), "noise_var": noise}


def scored(prediction: Prediction, rows: Rows) -> Row:
    """In units of the standardized targets."""
    mean, variance = (part.double() for part in prediction)
    y = rows.y_test[:, 0].double()
    inside: Callable[[float], float] = lambda level: float(
        metrics.coverage(mean, variance, y, level)
    )
    return {
        "nll": float(metrics.gaussian_nll((mean, variance), y)),
        "crps": float(metrics.crps_gaussian(mean, variance, y)),
        "rmse": float(metrics.rmse(mean, y)),
        "stddev": float(variance.sqrt().mean()),
        **{f"inside{100 * level:.0f}": inside(level) for level in LEVELS},
        "failed": "",
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
