"""Fidelity on regression tables: predictions of every method beside those of long NUTS chains.

    NET2GP_DATA=... python benchmarks/fidelity.py --cells FOLDER [--jobs 2] [--data yacht]
    NET2GP_DATA=... python benchmarks/fidelity.py --quick

One hidden layer of 50 tanh units, the first customary split of each table, and a prior and a noise that are
found once for each table and are then the same for all methods (see `bayes_methods.py`). NUTS gives the
posterior of this model; the other methods are judged by how far their predictions are from it. What each
chain and each method gave is kept in `--cells`, so that a run can be continued. Writes
`results/fidelity.json`, `results/fidelity.md` and `results/fidelity.png`.

The exit status asserts that R̂ of NUTS's predictions is below 1.01 at every test point, that every method gave
a result for every table, that no method here is behind its counterpart in another library (its total
variation is nowhere larger by more than 0.01 and two standard errors, which count the test points and, by the
jackknife, the members of ensembles; and it takes fewer CPU seconds), and that the microcanonical ensemble is
nearer to NUTS than the ensemble of 10, dropout, mean field and Laplace on every table. A quick run asserts
the second of these, and R̂ below 2.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from bayes_cells import PAIRS, Job, Row, arguments, find_model, machine, predicted, work
from bayes_cells import without_missing_peers as without_missing
from bayes_methods import METHODS, QUICK, Problem, Sizes
from fidelity_tables import SAME, TRUTH, report
from net2gp import bayes, metrics
from run import RESULTS, made_by, processor

TABLES = ("yacht", "energy", "concrete", "wine-quality-red")
CHAINS = {"yacht": 4, "energy": 5, "concrete": 5, "wine-quality-red": 4}
TREES = {
    "yacht": {"nuts_draws": 1500},
    "energy": {"nuts_draws": 1200, "nuts_warmup": 300, "nuts_depth": 12},
    "concrete": {"nuts_draws": 2000, "nuts_warmup": 250, "nuts_depth": 11},
    "wine-quality-red": {"nuts_draws": 500, "nuts_warmup": 300},
}
"""How long each chain is. On energy and concrete, trees of 1023 steps are too short."""

OWN = [name for name in METHODS if name not in ("RBF GP", "NNGP")]
"""Methods for this posterior: the two processes have another prior."""

NUM_BINS, NUM_QUANTILES, NUM_NOISES = 20, 500, 32
"""Bins of predictions, and for W₂ of y the quantiles of f at a point and of the noise around each."""

MEMBERS = 10
"""Members of the largest ensemble: methods with more draws are chains."""

KEPT = 1000
"""Draws of a method that are kept at most."""


def main() -> int:
    options = parse(sys.argv[1:])
    made_by()
    console = Console(width=150)
    options.cells.mkdir(parents=True, exist_ok=True)
    machine(options)
    if not options.report:
        options.methods = without_missing(options.methods, console)
    models = [job for job in every(options) if job.read("model") is None]
    if work(find_model, models, options, "priors and noises"):
        work(run, parts(options), options, "chains and methods")
    torch.set_num_threads(1)
    return report([row for job in every(options) for row in rows(job)], options, console)


def parse(given: Sequence[str]) -> argparse.Namespace:
    names = [*OWN, *PAIRS]
    parser = arguments((__doc__ or "").splitlines()[0], names)
    parser.add_argument("--draws", type=int, help="draws of each chain of NUTS")
    options = parser.parse_args(given)
    scratch = Path(tempfile.mkdtemp(prefix="net2gp-fidelity-"))
    options.ends = time.monotonic() + 60 * options.minutes if options.minutes else None
    options.data = options.data or (TABLES[:1] if options.quick else TABLES)
    options.methods = options.methods or (OWN if options.quick else names)
    options.cells = options.cells or scratch
    options.output = options.output or (scratch if options.quick else RESULTS)
    options.claims = (__doc__ or "").split("\n\n")[-1].strip()
    options.sizes = QUICK if options.quick else Sizes(steps=3000, warmup=5000, draws=250, thin=20)
    return options


def every(options: argparse.Namespace) -> Iterator[Job]:
    """A job for each table, with all that is asked for."""
    for name in options.data:
        chains = tuple(f"{TRUTH} {i}" for i in range(CHAINS[name]))
        sizes = options.sizes if options.quick else replace(options.sizes, **TREES[name])
        sizes = replace(sizes, nuts_draws=options.draws or sizes.nuts_draws)
        yield Job(options.cells, name, 0, (*chains, *options.methods), sizes)


def parts(options: argparse.Namespace) -> list[Job]:
    """What is left to do: chains first, since they take the longest."""
    left = [part for job in every(options) for part in job.missing().groups() if part.methods]
    order = ("energy", "yacht", "concrete", "wine-quality-red")
    chains = [job for job in left if job.methods[0].startswith(TRUTH)]
    methods = [job for job in left if job not in chains]
    return sorted(chains, key=lambda job: order.index(job.data)) + sorted(
        methods, key=lambda job: -job.work
    )


def run(job: Job) -> None:
    """Keep what methods predict at the test points."""
    warnings.simplefilter("ignore")
    p = job.problem()
    for method in job.methods:
        wall = time.perf_counter()
        try:
            if method.startswith(TRUTH):
                draws, row = truth(job, method, p)
            else:
                draws, row = predicted(method, p)
                draws = draws[:: max(1, len(draws) // KEPT)]
            np.savez(job.stored_at(f"{method}.npz"), draws=draws.float().numpy())
            row |= {"failed": ""}
        except Exception as error:  # one method that fails leaves the others
            row = {"failed": f"{type(error).__name__}: {error}"[:300]}
        row |= {"wall": time.perf_counter() - wall, "processor": processor()}
        job.keep(method, row)


def truth(job: Job, name: str, p: Problem) -> tuple[Tensor, Row]:
    """Draws of f at the test points by a chain of NUTS that starts from the prior."""
    number = int(name.removeprefix(TRUTH))
    posterior, seconds = chain(p, number, job.stored_at(f"{name}.checkpoint"))
    found = posterior.recipe.statistics
    row = {key: float(found[key].sum()) for key in ("divergences", "gradients", "acceptance")}
    draws = posterior.process.values(p.x)[..., 0].detach()
    return draws, row | {"noise_var": p.noise_var, "seconds": seconds}


def chain(p: Problem, number: int, checkpoint: Path) -> tuple[Any, float]:
    """A chain of NUTS, which goes on from a checkpoint if there is one, and its CPU seconds in all."""
    sizes, clock = p.sizes, checkpoint.with_suffix(".seconds")
    with counted(clock) as spent:
        posterior = bayes.nuts(
            p.fresh(),
            p.data,
            p.likelihood,
            num_draws=sizes.nuts_draws,
            num_chains=1,
            warmup=sizes.nuts_warmup,
            max_depth=sizes.nuts_depth,
            # trees end at their largest size here, and larger steps take them farther
            target_acceptance=0.65,
            seed=number,
            checkpoint=checkpoint,
            checkpoint_seconds=20.0,
            **p.common,
        )
    seconds = spent()
    for path in (checkpoint, clock):
        path.unlink(missing_ok=True)
    return posterior, seconds


@contextmanager
def counted(clock: Path) -> Iterator[Callable[[], float]]:
    """Count CPU seconds on from those in a file, which is written often, as the work may be killed."""
    before = float(clock.read_text()) if clock.is_file() else 0.0
    start, ended = time.process_time(), Event()
    spent = lambda: before + time.process_time() - start

    def note() -> None:
        while not ended.wait(5.0):
            clock.write_text(f"{spent()}")

    watch = Thread(target=note, daemon=True)
    watch.start()
    try:
        yield spent
    finally:
        ended.set()
        watch.join()


def rows(job: Job) -> Iterator[Row]:
    """The figures of a table: the reference, how close it comes to itself, and all methods."""
    p = job.problem()
    found = {method: job.read(method) for method in job.methods}
    names = [name for name in found if name.startswith(TRUTH)]
    if any(found[name] is None or found[name]["failed"] for name in names):
        for name in names:
            if found[name] and found[name]["failed"]:
                yield {"data": job.data, "method": name, "failed": found[name]["failed"]}
        yield {"data": job.data, "method": TRUTH, "failed": "not run"}
        return
    drawn = [kept(job, name) for name in names]
    chains = torch.stack([one[: min(map(len, drawn))] for one in drawn])
    reference = chains.flatten(0, 1)
    total = {key: sum(found[name][key] for name in names) for key in ("seconds", "gradients")}
    row = total | {"prior_var": p.prior_var, "noise_var": p.noise_var, "draws": len(reference)}
    r_hat = bayes.r_hat(chains)
    row |= {"r_hat": float(r_hat.max()), "r_hat_most": float(r_hat.quantile(0.95))}
    row |= {"bulk_ess": float(bayes.bulk_ess(chains).min())}
    row |= {"tail_ess": float(bayes.tail_ess(chains).min())}
    row["processors"] = sorted({found[name].get("processor", "not recorded") for name in names})
    row["divergences"] = int(sum(found[name]["divergences"] for name in names))
    named = {"data": job.data, "method": TRUTH}
    yield named | compared(reference, p.noise_var, reference, p) | row
    halves = chains[::2].flatten(0, 1), chains[1::2].flatten(0, 1)
    same = compared(halves[0], p.noise_var, halves[1], p)
    yield named | same | {"method": SAME, "seconds": total["seconds"] / 2}
    for method, cell in found.items():
        if method in names:
            continue
        named = {"data": job.data, "method": method}
        if cell is None or cell["failed"]:
            yield named | {"failed": "not run" if cell is None else cell["failed"]}
            continue
        draws = kept(job, method)
        figures = compared(draws, cell["noise_var"], reference, p)
        figures["member error"] = member_error(draws, cell["noise_var"], reference, p)
        yield named | figures | {"seconds": cell["seconds"]}


def kept(job: Job, method: str) -> Tensor:
    """The draws of a method at the test points, (S, N)."""
    with np.load(job.stored_at(f"{method}.npz")) as stored:
        return torch.from_numpy(stored["draws"]).double()


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
        "of points": (0.5 * (probs[0] - probs[1]).abs().sum(1)).tolist(),
        "W2 of y": float(metrics.wasserstein_samples(*values)),
        "W2 of f": float(metrics.wasserstein_samples(draws, reference)),
        "NLL": float(-density.mean()) + math.log(p.scale),
        "RMSE": float(metrics.rmse(draws.mean(0), p.y)) * p.scale,
        "stddev of f": float(draws.std(0, correction=0).mean()),
        "failed": "",
    }


def member_error(draws: Tensor, noise_var: float, reference: Tensor, p: Problem) -> float:
    """Standard error of an ensemble's total variation, by the jackknife over its members; 0 for chains."""
    count = len(draws)
    if not 1 < count <= MEMBERS:
        return 0.0
    rest = [torch.cat([draws[:i], draws[i + 1 :]]) for i in range(count)]
    left = [compared(some, noise_var, reference, p)["total variation"] for some in rest]
    return math.sqrt((count - 1) * float(np.var(left)))


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


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
