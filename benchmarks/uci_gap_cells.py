"""The methods of `uci_gaps.py`, and what each gave on a split, kept in a folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal

import net2gp as n2g
from net2gp import bayes
from net2gp.errors import Net2GPError
from uci import PEERS_STRUCTURES, bare, peer, plain_process
from uci_networks import DENSITIES, SQUARES, Loss, Splits, gaps, module_of, splits, train

TABLES = {
    "bostonHousing": 10,
    "concrete": 10,
    "energy": 10,
    "naval-propulsion-plant": 3,
    "power-plant": 3,
    "protein-tertiary-structure": 1,
    "wine-quality-red": 10,
    "yacht": 10,
}
"""Tables and how many of their customary splits are used."""

AIMS = {
    "bostonHousing": 2.40,
    "concrete": 2.93,
    "energy": 0.61,
    "naval-propulsion-plant": -6.8,
    "power-plant": 2.73,
    "protein-tertiary-structure": 2.71,
    "wine-quality-red": 0.92,
    "yacht": 0.37,
}
"""Test NLL on customary splits, partly from memory: aims, not to be quoted."""

MOST_ROWS = 3000
"""Rows that are used of a table with gaps."""

TUNING, CONDITIONED = 300, 4000
"""The RBF process is tuned on so many points at most, and conditioned on so many."""

MEMBERS = 5
FEW_VALUES = 10
TOLERANCE, ENERGY = 0.01, 5.0
LIMIT_S = 1200.0

Pair = tuple[Tensor, Tensor]
Predict = Callable[[Sequence[nn.Module], Pair, Tensor], Distribution]
Row = dict[str, Any]


def posterior_of(network: nn.Module, data: Pair, likelihood: Any, structure: Any) -> n2g.Posterior:
    return n2g.laplace(network, data, likelihood, structure=structure)


def default(likelihood: Any, structure: Any = None) -> Predict:
    """What `laplace` predicts."""
    return lambda networks, data, x: posterior_of(networks[0], data, likelihood, structure).predict(
        x
    )


def narrow(structure: Any = None) -> Predict:
    """The same posterior, its Gaussian as it is."""

    def predict(networks: Sequence[nn.Module], data: Pair, x: Tensor) -> Distribution:
        posterior = posterior_of(networks[0], data, n2g.Gaussian(), structure)
        return posterior.likelihood.predict(posterior.marginal(x))

    return predict


def mixed(likelihood: Any) -> Predict:
    """Five networks, each with its posterior."""

    def predict(networks: Sequence[nn.Module], data: Pair, x: Tensor) -> Distribution:
        members = [posterior_of(network, data, likelihood, None) for network in networks]
        return bayes.mixture(members).predict(x)

    return predict


def limit_of(kernel: Callable[[nn.Module], Any]) -> Predict:
    """A network of infinite width, two layers of ReLUs."""

    def predict(_: Sequence[nn.Module], data: Pair, x: Tensor) -> Distribution:
        layers = (
            *(nn.Linear(x.shape[1], 1), nn.ReLU(), nn.Linear(1, 1)),
            *(nn.ReLU(), nn.Linear(1, 1)),
        )
        return n2g.tuning.fit_kernel(kernel(nn.Sequential(*layers).double()), data).predict(x)

    return predict


def beside_limits(networks: Sequence[nn.Module], data: Pair, x: Tensor) -> Distribution:
    """What `laplace` predicts, mixed with two networks of infinite width."""
    posterior = posterior_of(networks[0], data, n2g.Gaussian(), None)
    return bayes.with_limits(posterior).predict(x)


def gaussian(method: Callable[..., Pair]) -> Predict:
    """A method of `uci.py`, which gives means and variances."""

    def predict(networks: Sequence[nn.Module], data: Pair, x: Tensor) -> Distribution:
        mean, variance = method(networks[0], data, x)
        return Normal(mean, variance.sqrt())

    return predict


def own_density(networks: Sequence[nn.Module], data: Pair, x: Tensor) -> Distribution:
    """A network that predicts its own noise."""
    out = networks[0](x).detach()
    return Normal(out[:, 0], n2g.likelihoods.SoftplusScale().log_std(out[:, 1]).exp())


STRUCTURES: dict[str, Any] = {
    "": None,
    " Kron": n2g.Kron(),
    " last layer": n2g.LastLayer(n2g.Full()),
    " diagonal": n2g.Diagonal(),
}
NARROW = ", not widened"
PROCESS, MIXTURE, DEFAULT = "RBF GP", "mixture of five", "net2gp"
WITH_LIMITS = "net2gp with limits"
RIVALS = ("network", PROCESS, *PEERS_STRUCTURES)
EXCEPTIONS = dict.fromkeys(
    [("concrete", PROCESS), ("protein-tertiary-structure", PROCESS)],
    "its mean has a smaller error, and the default keeps that of the network",
)
"""Where the default is known to be behind with gaps, by table and rival, and why."""
METHODS: dict[str, dict[str, Predict | None]] = {
    "gaussian": {
        "network": gaussian(bare),
        **{f"net2gp{name}": default(n2g.Gaussian(), one) for name, one in STRUCTURES.items()},
        **{f"net2gp{name}{NARROW}": narrow(one) for name, one in STRUCTURES.items()},
        WITH_LIMITS: beside_limits,
        "wide network, NNGP": limit_of(n2g.nngp),
        "wide network, NTK": limit_of(n2g.ntk),
        PROCESS: gaussian(partial(plain_process, tuning=TUNING, most=CONDITIONED)),
        MIXTURE: mixed(n2g.Gaussian()),
        **dict.fromkeys(name for name in PEERS_STRUCTURES),
    },
    "heteroscedastic": {
        "network": own_density,
        "net2gp": default(n2g.HeteroscedasticGaussian()),
        "net2gp Kron": default(n2g.HeteroscedasticGaussian(), n2g.Kron()),
        MIXTURE: mixed(n2g.HeteroscedasticGaussian()),
    },
}
"""Methods; None stands for laplace-torch in its own environment."""

LATE = {PROCESS: 1, MIXTURE: 2} | dict.fromkeys(PEERS_STRUCTURES, 3)
"""What takes long comes after all else."""

LOSSES: dict[str, Loss] = {"gaussian": SQUARES, "heteroscedastic": DENSITIES}
KINDS = ("gaps", "customary")
QUICK_METHODS = ["network", "net2gp", "net2gp Kron", f"net2gp{NARROW}"]


@dataclass(frozen=True)
class Job:
    """One method on all splits of a table that it has not been run on."""

    folder: Path
    kind: str
    likelihood: str
    data: str
    method: str

    def path(self, split: int) -> Path:
        """Where the result on a split is kept."""
        name = "_".join([self.kind, self.likelihood, self.data, f"{split:02}", self.method])
        return self.folder / f"{name}.json".replace(" ", "-").replace(",", "")

    def read(self, split: int) -> Row | None:
        """The result on a split, or None."""
        path = self.path(split)
        return json.loads(path.read_text()) if path.is_file() else None

    def keep(self, split: int, row: Row) -> None:
        """Write a result, all of it or nothing."""
        part = self.path(split).with_suffix(".part")
        part.write_text(json.dumps(row))
        part.rename(self.path(split))

    @property
    def left(self) -> list[int]:
        """The splits without a result."""
        tables, _ = tables_of(self.kind, self.data)
        rows = {split: self.read(split) for split in range(len(tables))}
        return [split for split, row in rows.items() if row is None or row["failed"]]


@cache
def tables_of(kind: str, name: str) -> tuple[Splits, list[int]]:
    """The splits of a table, and of gaps how many values the input has."""
    if kind == "gaps":
        return gaps(name, MOST_ROWS)
    return splits(name, TABLES[name]), []


def trained(job: Job, seed: int) -> dict[str, Tensor]:
    """The networks of all splits, kept beside the results."""
    path = job.folder / f"networks_{job.kind}_{job.likelihood}_{job.data}_{seed}.pt"
    if not path.is_file():
        start = time.perf_counter()
        tables, _ = tables_of(job.kind, job.data)
        params, _ = train(tables, lambda _: None, loss=LOSSES[job.likelihood], seed=seed)
        torch.save(params, path)
        print(f"{path.stem}: {time.perf_counter() - start:.0f} s", flush=True)
    return torch.load(path)


def run(job: Job, ends: float) -> None:
    """One method on the splits that are left, until the time is over."""
    tables, _ = tables_of(job.kind, job.data)
    predict = METHODS[job.likelihood][job.method]
    if predict is None:
        row = peer(job.method, PEERS_STRUCTURES[job.method], tables, trained(job, 0), LIMIT_S)
        for split in range(len(tables)):
            found = {} if row["failed"] else {key: row[key][split] for key in ("nll", "rmse")}
            job.keep(split, {**found, "failed": row["failed"]})
        return
    for split in job.left:
        if time.monotonic() > ends:
            return
        seeds = range(MEMBERS if job.method == MIXTURE else 1)
        networks = [module_of(trained(job, seed), split) for seed in seeds]
        start = time.process_time()
        try:
            row = scored(
                predict(networks, tables.train_pair(split), tables.test_pair(split)[0]),
                tables,
                split,
            )
        except Net2GPError as error:  # one fit that fails leaves the others
            row = {"failed": f"{type(error).__name__}: {error}"[:300]}
        job.keep(split, row | {"cpu_s": time.process_time() - start})


def scored(law: Distribution, tables: Splits, split: int) -> Row:
    """Negative log likelihood and root mean squared error in the table's units."""
    y, scale = tables.test_pair(split)[1], tables.scale[split]
    density = law.log_prob(y.reshape(law.batch_shape + law.event_shape))
    error = law.mean.reshape(y.shape) - y
    nll = float(scale.log() - density.mean())
    return {"nll": nll, "rmse": float(error.square().mean().sqrt() * scale), "failed": ""}
