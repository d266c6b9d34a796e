"""The methods of `fidelity.py` and `bayes_uci.py` on one regression: a network, its data, prior and noise.

Prior and noise are found once, by Laplace's evidence at a network whose weight decay was chosen on held-out
points, and are then the same for all methods. What a method gives are draws of f at the test points.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp import bayes
from net2gp.bayes import Training
from net2gp.training import IVON, VOGN, Swag
from uci_networks import Splits, module_of, network, train

NUM_DRAWS = 2000
"""Draws of f for laws that are not a list of networks."""

DROPOUT = 0.05
"""The usual rate for these tables (Gal & Ghahramani, 2016)."""


@dataclass(frozen=True)
class Sizes:
    """How long methods run: steps of optimizers, and draws of each of some chains after a warm-up."""

    steps: int = 2000
    rate: float = 0.01
    chains: int = 4
    draws: int = 100
    thin: int = 10
    warmup: int = 1000
    nuts_draws: int = 1000
    nuts_warmup: int = 500
    nuts_depth: int = 10


QUICK = Sizes(steps=200, chains=2, draws=20, thin=2, warmup=100, nuts_draws=20, nuts_warmup=40)


@dataclass(frozen=True, eq=False)
class Problem:
    """One split of a table, standardized, with the prior and the noise of all methods."""

    data: tuple[Tensor, Tensor]
    x: Tensor
    y: Tensor
    scale: float
    prior_var: float
    noise_var: float
    seed: int = 0
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def likelihood(self) -> n2g.Gaussian:
        """The noise."""
        return n2g.Gaussian(self.noise_var)

    @property
    def common(self) -> dict[str, Any]:
        """What every method of the Bayesian room takes."""
        return {"prior": self.prior_var}

    @property
    def training(self) -> Training:
        """Full batches and Adam, whose rate falls to zero."""
        return Training(
            num_steps=self.sizes.steps,
            learning_rate=self.sizes.rate,
            batch_size=None,
            seed=self.seed,
        )

    def fresh(self) -> nn.Sequential:
        """An untrained network."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return network(self.x.shape[1])

    @cached_property
    def optimum(self) -> tuple[Any, float]:
        """The most probable parameters, and the CPU seconds that they took."""
        return timed(
            lambda: bayes.map_estimate(
                self.fresh(), self.data, self.likelihood, training=self.training, **self.common
            )
        )

    @cached_property
    def five(self) -> tuple[Any, float]:
        """An ensemble of five."""
        return timed(lambda: self.ensemble(5))

    def ensemble(self, count: int) -> Any:
        """Networks from independent starts."""
        return bayes.ensemble(
            self.fresh(),
            self.data,
            self.likelihood,
            num_members=count,
            training=self.training,
            **self.common,
        )

    @property
    def trained(self) -> nn.Module:
        """The network at its most probable parameters."""
        return bayes.module_of(self.optimum[0]).eval()


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """What a function gives, and its CPU seconds."""
    start = time.process_time()
    return run(), time.process_time() - start


def problem_of(tables: Splits, index: int, sizes: Sizes, **model: float) -> Problem:
    """The problem of one split, with the given `prior_var` and `noise_var` or by the evidence."""
    parts = (tables.x, tables.y, tables.test, tables.scale)
    one = Splits(*(part[index : index + 1] for part in parts))
    pair, (x, y) = one.train_pair(0), one.test_pair(0)
    if not model:
        params, _ = train(one, lambda _: None)
        tuned = n2g.laplace(
            module_of(params, 0),
            pair,
            n2g.Gaussian(),
            structure=n2g.Full(),
            tuning=n2g.tuning.Evidence(),
        )
        noise_var = float(tuned.likelihood.noise_var)  # type: ignore[arg-type]
        model = {"prior_var": float(tuned.prior_var), "noise_var": noise_var}
    return Problem(pair, x, y[:, 0], float(one.scale[0]), **model, seed=index, sizes=sizes)


def stochastic(p: Problem, **options: Any) -> dict[str, Any]:
    """Options of chains that start from an ensemble."""
    sizes = p.sizes
    chosen = {"num_chains": sizes.chains, "num_draws": sizes.draws, "thin": sizes.thin}
    return (
        p.common | chosen | {"warmup": sizes.warmup, "start": p.five[0], "seed": p.seed} | options
    )


def most_probable(p: Problem) -> Any:
    return p.optimum[0]


def ensemble_of_5(p: Problem) -> Any:
    return p.five[0]


def ensemble_of_10(p: Problem) -> Any:
    return p.ensemble(10)


def dropout(p: Problem) -> Any:
    """A network that is trained with dropout in front of its last layer."""
    module = p.fresh()
    module = nn.Sequential(module[0], module[1], nn.Dropout(DROPOUT), module[2]).double().train()
    found = bayes.map_estimate(module, p.data, p.likelihood, training=p.training, **p.common)
    return bayes.mc_dropout(bayes.module_of(found), p.data, p.likelihood, num_samples=500)


def mean_field(p: Problem, **options: Any) -> Any:
    """With a step size that falls from the rate of all optimizers, and the defaults of the rest."""
    sizes = {"num_steps": p.sizes.steps, "learning_rate": p.sizes.rate, "num_draws": 500}
    return bayes.mean_field(p.trained, p.data, p.likelihood, **p.common, **sizes, **options)


def drawn_mean_field(p: Problem) -> Any:
    """Weights are drawn once for all points of a step, as plain Bayes by backprop does."""
    return mean_field(p, estimator="weights")


def bound(p: Problem, weights: bayes.GaussianWeights) -> float:
    """The variational bound per point of an independent Gaussian law."""
    model = bayes.Model.of(p.fresh(), p.likelihood, p.prior_var, num_data=len(p.data[0]))
    found = bayes.elbo(weights, model, p.data, estimator="weights", num_samples=200)
    return float(found) / len(p.data[0])


def sgld(p: Problem) -> Any:
    return bayes.sgld(p.fresh(), p.data, p.likelihood, **stochastic(p))


def sghmc(p: Problem) -> Any:
    return bayes.sghmc(p.fresh(), p.data, p.likelihood, **stochastic(p))


def cyclical(p: Problem) -> Any:
    """SGHMC in cosine cycles: four for each chain."""
    sizes = p.sizes
    own = {"num_cycles": 4, "warmup": sizes.warmup // 4, "num_draws": sizes.draws // 4 * 4}
    return bayes.sghmc(p.fresh(), p.data, p.likelihood, **stochastic(p, **own))


def microcanonical(p: Problem) -> Any:
    """A chain from each network of an ensemble of five."""
    options = stochastic(p, num_chains=None)
    return bayes.microcanonical(p.fresh(), p.data, p.likelihood, **options)


def laplace(structure: Any) -> Callable[[Problem], Any]:
    """A Gaussian around the network, and the network linearized there."""

    def found(p: Problem) -> Any:
        return n2g.laplace(
            p.trained, p.data, p.likelihood, prior_var=p.prior_var, structure=structure
        )

    return found


def linearized(p: Problem) -> Any:
    """The linear model around the network, conditioned on the data."""
    return n2g.adapt(p.trained, p.data, p.likelihood, prior_var=p.prior_var)


def first_var(p: Problem) -> float:
    """A variance as small as that of a parameter that the data determine, so that first steps are short."""
    return min(p.noise_var / len(p.data[0]), p.prior_var / 2)


def vogn(p: Problem) -> Any:
    """Natural gradients from the most probable parameters on, on all data."""
    module, (x, y) = p.trained, p.data
    optimizer = VOGN(
        module,
        p.likelihood,
        len(x),
        prior_var=p.prior_var,
        learning_rate=0.02,
        num_samples=1,
        initial_var=first_var(p),
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, p.sizes.steps)
    for _ in range(p.sizes.steps):
        optimizer.step(x, y)
        schedule.step()
    return optimizer.posterior(p.data)


def ivon(p: Problem) -> Any:
    """The same with ordinary gradients at drawn weights."""
    module, (x, y) = p.trained, p.data
    optimizer = IVON(
        module,
        len(x),
        prior_var=p.prior_var,
        learning_rate=0.02,
        decays=(0.9, 0.999),
        initial_var=first_var(p),
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, p.sizes.steps)
    half = 0.5 * math.log(2 * math.pi * p.noise_var)
    for _ in range(p.sizes.steps):
        with optimizer.sampled_weights():
            loss = (module(x) - y).square().mean() / (2 * p.noise_var) + half
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return optimizer.posterior(p.data, p.likelihood)


def swag(p: Problem) -> Any:
    """The path of Adam with a constant rate and batches of 32 from the most probable parameters on."""
    module, (x, y) = p.trained, p.data
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(p.seed)
    found = Swag(rank=20)
    for _ in range(max(3, p.sizes.steps // 60)):
        for rows in torch.randperm(len(x), generator=generator).split(32):
            optimizer.zero_grad()
            loss = (module(x[rows]) - y[rows]).square().mean() / (2 * p.noise_var)
            decay = sum(w.square().sum() for w in module.parameters()) / (2 * p.prior_var * len(x))
            (loss + decay).backward()
            optimizer.step()
        found = found.collect(module)
    return found.posterior(module.eval(), p.data, p.likelihood)


def multi_swag(p: Problem) -> Any:
    return bayes.multi_swag(
        p.fresh(), p.data, p.likelihood, num_members=5, training=p.training, **p.common
    )


def mixture_of_laplace(p: Problem) -> Any:
    """A Gaussian around each network of an ensemble of five."""
    members = [bayes.module_of(p.five[0], i).eval() for i in range(5)]
    return bayes.mixture(
        [n2g.laplace(m, p.data, p.likelihood, prior_var=p.prior_var) for m in members]
    )


def some(p: Problem, count: int) -> tuple[Tensor, Tensor]:
    """Random training points."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(p.data[0]), generator=generator)[:count]
    return p.data[0][chosen], p.data[1][chosen]


def rbf(p: Problem) -> Any:
    """A GP with one length scale for each input, tuned on 300 points at most; its noise is its own."""
    few = some(p, 300)
    build = lambda lengthscale, output_var, noise_var: n2g.condition(
        n2g.RBF(lengthscale, output_var), few, n2g.Gaussian(noise_var)
    )
    start = torch.full((p.x.shape[1],), math.sqrt(p.x.shape[1]), dtype=torch.float64)
    tuned = n2g.tune(build, lengthscale=start, output_var=1.0, noise_var=0.1, max_iterations=40)
    return n2g.condition(tuned.kernel, p.data, tuned.likelihood)


def nngp(p: Problem) -> Any:
    """The infinitely wide network; the variances of its layers and its noise are its own."""
    few = some(p, 200)
    build = lambda first_var, last_var, bias_var, noise_var: n2g.condition(
        n2g.nngp(p.fresh(), weight_var={"0": first_var, "2": last_var}, bias_var=bias_var),
        few,
        n2g.Gaussian(noise_var),
    )
    start = {"first_var": 1.0, "last_var": 1.0, "bias_var": 0.5, "noise_var": 0.1}
    tuned = n2g.tune(build, **start, max_iterations=20)
    return n2g.condition(tuned.kernel, p.data, tuned.likelihood)


METHODS: dict[str, Callable[[Problem], Any]] = {
    "MAP": most_probable,
    "ensemble of 5": ensemble_of_5,
    "ensemble of 10": ensemble_of_10,
    "dropout": dropout,
    "mean field": mean_field,
    "mean field, drawn weights": drawn_mean_field,
    "SGLD": sgld,
    "SGHMC": sghmc,
    "cyclical SGHMC": cyclical,
    "microcanonical": microcanonical,
    "Laplace": laplace(None),
    "Laplace Kron": laplace(n2g.Kron()),
    "linearized GP": linearized,
    "VOGN": vogn,
    "IVON": ivon,
    "SWAG": swag,
    "multi-SWAG": multi_swag,
    "mixture of Laplace": mixture_of_laplace,
    "RBF GP": rbf,
    "NNGP": nngp,
}
FROM_OPTIMUM = (
    "MAP",
    "mean field",
    "mean field, drawn weights",
    "Laplace",
    "Laplace Kron",
    "linearized GP",
    "VOGN",
    "IVON",
    "SWAG",
)
FROM_ENSEMBLE = ("ensemble of 5", "SGLD", "SGHMC", "cyclical SGHMC", "microcanonical")
FROM_ENSEMBLE += ("mixture of Laplace",)
"""Whose seconds include the training of what they start from."""


def found(name: str, p: Problem) -> tuple[Any, float]:
    """The posterior of a method, and the CPU seconds from data to posterior."""
    before = p.optimum[1] if name in FROM_OPTIMUM else 0.0
    before += p.five[1] if name in FROM_ENSEMBLE else 0.0
    posterior, seconds = timed(lambda: METHODS[name](p))
    return posterior, before + seconds


def draws_of(posterior: Any, x: Tensor) -> Tensor:
    """Draws of f at each point, (S, N): networks as they are, and quantiles of Gaussians."""
    if hasattr(posterior.process, "values"):
        return posterior.process.values(x)[..., 0].detach()
    if not hasattr(posterior.process, "predict"):
        law = posterior.marginal(x)
        mean, stddev = law.mean[:, 0].detach(), law.variance[:, 0].detach().sqrt()
        levels = (torch.arange(NUM_DRAWS, dtype=mean.dtype) + 0.5) / NUM_DRAWS
        return mean + torch.special.ndtri(levels)[:, None] * stddev
    generator = torch.Generator().manual_seed(0)
    return posterior.sample(x, NUM_DRAWS, generator=generator)[..., 0].detach()


def noise_of(posterior: Any) -> float:
    """The variance of the noise that a posterior predicts with."""
    return float(posterior.likelihood.noise_var)
