"""Small problems, and the registry of ways from one of them to a posterior.

A new likelihood, solver or kernel joins the conformance and the saving tests by one line in WAYS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from contributing import example
from net2gp import (
    RBF,
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Linearized,
    condition,
    linearize,
    nngp,
    ntk,
)
from net2gp.likelihoods import NegativeBinomial, Ordinal, Poisson, StudentT
from net2gp.links import LogVariance, MonteCarlo, Probit
from net2gp.solvers import CG, Cholesky, Lanczos, Laplace, Nystrom, Variational, WeightCholesky
from net2gp.tuning import spectrum
from net2gp.types import Inputs, Kernel, Likelihood

NUM_POINTS = 14
Posterior = Any


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(
    outputs: int = 1,
    *,
    inputs: int = 2,
    hidden: int = 5,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> nn.Sequential:
    """A small tanh network: 2·5 + 5 + 5·C + C parameters unless told otherwise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = (nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))
        return nn.Sequential(*layers).to(dtype).eval()


def points(count: int = NUM_POINTS, seed: int = 1, inputs: int = 2) -> Tensor:
    return torch.randn(count, inputs, generator=seeded(seed), dtype=torch.float64)


def real_targets(x: Tensor, outputs: int) -> Tensor:
    columns = [(x[:, 0] * (1 + c)).sin() + 0.3 * x[:, 1] for c in range(outputs)]
    noise = torch.randn(len(x), outputs, generator=seeded(2), dtype=x.dtype)
    return torch.stack(columns, 1) + 0.3 * noise


def binary_targets(x: Tensor, outputs: int) -> Tensor:
    return (real_targets(x, outputs) > 0.2).to(x.dtype)


def count_targets(x: Tensor, outputs: int) -> Tensor:
    return (2 * real_targets(x, outputs)).exp().floor()


def positive_targets(x: Tensor, outputs: int) -> Tensor:
    return real_targets(x, outputs).exp()


def level_targets(x: Tensor, outputs: int) -> Tensor:
    return (real_targets(x, 1)[:, 0] > torch.tensor([[-0.4], [0.4]], dtype=x.dtype)).sum(0)


def class_targets(x: Tensor, outputs: int) -> Tensor:
    return real_targets(x, outputs).argmax(1)


@dataclass(frozen=True)
class Way:
    """A likelihood, and how its posterior is computed."""

    likelihood: Likelihood
    outputs: int = 2
    solver: Any = None
    inference: Any = None
    targets: Callable[[Tensor, int], Tensor] = real_targets
    kernel: Callable[[Linearized], Kernel] = lambda linearized: linearized.kernel(0.7)
    with_mean: bool = True
    by_spectrum: bool = False
    num_points: int = NUM_POINTS
    tol: float = 1e-8
    """How closely two computations of the same posterior agree."""

    def network(self) -> nn.Sequential:
        return network(self.outputs)

    def data(self) -> tuple[Tensor, Tensor]:
        x = points(self.num_points)
        return x, self.targets(x, self.num_targets)

    @property
    def num_targets(self) -> int:
        heteroscedastic = isinstance(self.likelihood, HeteroscedasticGaussian)
        return self.outputs // 2 if heteroscedastic else self.outputs

    def build(self, x: Inputs, y: Tensor, **changes: Any) -> Posterior:
        """The posterior given x and y; `changes` replace likelihood, kernel or mean."""
        linearized = linearize(self.network())
        kernel = changes.get("kernel", self.kernel(linearized))
        mean = changes.get("mean", linearized if self.with_mean else None)
        likelihood = changes.get("likelihood", self.likelihood)
        if self.by_spectrum:
            fixed = spectrum(kernel, (x, y), mean=mean)
            return fixed.condition(likelihood.noise_var)
        return condition(
            kernel, (x, y), likelihood, mean=mean, solver=self.solver, inference=self.inference
        )


ITERATIVE = CG(tol=1e-11, preconditioner=None, variance=Lanczos(200), num_probes=32)
SEARCH = Variational(max_iterations=1000, tol=1e-12)

GAUSSIAN = Way(Gaussian(0.1))
BERNOULLI = Way(Bernoulli(), targets=binary_targets)
CATEGORICAL = Way(Categorical(MonteCarlo(256)), outputs=3, targets=class_targets)
HETEROSCEDASTIC = Way(HeteroscedasticGaussian(LogVariance()))
POISSON = Way(Poisson(), targets=count_targets)
BY_LAW = {
    "poisson": POISSON,
    "negative binomial": replace(POISSON, likelihood=NegativeBinomial(0.5)),
    "student t": Way(StudentT(0.1, 4.0)),
    "ordinal": Way(Ordinal((-0.4, 0.4)), 1, targets=level_targets),
}
FEW = replace(  # L-BFGS over all sites takes hundreds of steps
    HETEROSCEDASTIC,
    kernel=lambda linearized: linearized.kernel(0.1),
    inference=Variational(max_iterations=1000, tol=1e-10),
    num_points=7,
    tol=1e-4,
)

WAYS: dict[str, Way] = {
    "gaussian by cholesky": replace(GAUSSIAN, solver=Cholesky()),
    "gaussian by cholesky, full-rank cache": replace(GAUSSIAN, solver=Cholesky(Lanczos(200))),
    "gaussian in weight space": replace(GAUSSIAN, solver=WeightCholesky()),
    "gaussian by conjugate gradients": replace(GAUSSIAN, solver=ITERATIVE, tol=1e-7),
    "gaussian by spectrum": replace(GAUSSIAN, by_spectrum=True),
    "gaussian without mean": replace(GAUSSIAN, solver=Cholesky(), with_mean=False),
    "gaussian, noise per output": replace(
        GAUSSIAN, likelihood=Gaussian(torch.tensor([0.1, 0.4])), solver=Cholesky()
    ),
    "gaussian, rbf": replace(GAUSSIAN, kernel=lambda _: RBF(0.8, 1.5), with_mean=False),
    "gaussian, rbf, noise per output": replace(
        GAUSSIAN,
        likelihood=Gaussian(torch.tensor([0.1, 0.4])),
        kernel=lambda _: RBF(torch.tensor([0.8, 1.1]), 1.5),
        with_mean=False,
    ),
    "gaussian, rbf by spectrum": replace(
        GAUSSIAN, kernel=lambda _: RBF(0.8, 1.5), with_mean=False, by_spectrum=True
    ),
    "gaussian, rbf by conjugate gradients": replace(
        GAUSSIAN,
        kernel=lambda _: RBF(0.8, 1.5),
        with_mean=False,
        solver=replace(ITERATIVE, preconditioner=Nystrom(8)),
        tol=1e-7,
    ),
    "gaussian, trace kernel": replace(GAUSSIAN, kernel=lambda lin: lin.trace_kernel(0.7)),
    "gaussian, infinite width": replace(
        GAUSSIAN,
        kernel=lambda lin: nngp(lin.network, weight_var=1.5, bias_var=0.1),
        with_mean=False,
    ),
    "categorical, tangent kernel at infinite width": replace(
        CATEGORICAL,
        kernel=lambda lin: ntk(lin.network, weight_var={"0": 1.5, "2": 0.7}),
        with_mean=False,
    ),
    "bernoulli by laplace": replace(BERNOULLI, solver=Cholesky(), inference=Laplace()),
    "bernoulli by laplace in weight space": replace(BERNOULLI, solver=WeightCholesky()),
    "bernoulli by laplace and conjugate gradients": replace(BERNOULLI, solver=ITERATIVE, tol=1e-6),
    "bernoulli by laplace, full-rank cache": replace(BERNOULLI, solver=Cholesky(Lanczos(200))),
    "bernoulli, variational": replace(BERNOULLI, solver=Cholesky(), inference=SEARCH, tol=1e-6),
    "bernoulli, variational in weight space": replace(
        BERNOULLI, solver=WeightCholesky(), inference=SEARCH, tol=1e-6
    ),
    "bernoulli with probit, rbf": replace(
        BERNOULLI, likelihood=Bernoulli(Probit()), kernel=lambda _: RBF(), with_mean=False
    ),
    "categorical by laplace": replace(CATEGORICAL, solver=Cholesky()),
    "categorical by laplace in weight space": replace(CATEGORICAL, solver=WeightCholesky()),
    "categorical by laplace and conjugate gradients": replace(
        CATEGORICAL, solver=ITERATIVE, tol=1e-6
    ),
    "categorical, variational": replace(CATEGORICAL, solver=Cholesky(), inference=SEARCH, tol=1e-6),
    "categorical, variational in weight space": replace(
        CATEGORICAL, solver=WeightCholesky(), inference=SEARCH, tol=1e-6
    ),
    "categorical, trace kernel": replace(CATEGORICAL, kernel=lambda lin: lin.trace_kernel(0.7)),
    "heteroscedastic by laplace": replace(HETEROSCEDASTIC, solver=Cholesky()),
    "heteroscedastic by laplace in weight space": replace(HETEROSCEDASTIC, solver=WeightCholesky()),
    "heteroscedastic by laplace and conjugate gradients": replace(
        HETEROSCEDASTIC, solver=ITERATIVE, tol=1e-6
    ),
    "heteroscedastic, variational": replace(FEW, solver=Cholesky()),
    "heteroscedastic, variational in weight space": replace(FEW, solver=WeightCholesky()),
    "heteroscedastic, rbf": replace(HETEROSCEDASTIC, kernel=lambda _: RBF(), with_mean=False),
    **{
        f"{name} by laplace{how}": replace(way, solver=solver, tol=tol)
        for name, way in BY_LAW.items()
        for how, solver, tol in (
            ("", Cholesky(), 1e-8),
            (" in weight space", WeightCholesky(), 1e-8),
            (" and conjugate gradients", ITERATIVE, 1e-6),
        )
    },
    "poisson, variational": replace(POISSON, solver=Cholesky(), inference=SEARCH, tol=1e-6),
    "poisson, variational in weight space": replace(
        POISSON, solver=WeightCholesky(), inference=SEARCH, tol=1e-6
    ),
    "ordinal by laplace, rbf": Way(
        Ordinal((-0.4, 0.4)), 1, targets=level_targets, kernel=lambda _: RBF(), with_mean=False
    ),
    "likelihood of contributing, by laplace": Way(
        example("likelihood").Waiting(), solver=Cholesky(), targets=positive_targets
    ),
}


@cache
def built(name: str) -> Posterior:
    """The posterior of one way, built once a session: posteriors are values."""
    return WAYS[name].build(*WAYS[name].data())


def unseen_points() -> Tensor:
    return points(6, seed=5)
