"""Every Bayesian method on a model whose posterior is known: five weights, Gaussian noise.

    python benchmarks/conjugate.py [--quick] [--only NAME ...]

prints for each method the distance of its mean from the closed form in Monte Carlo standard errors, and the
relative error of its covariance in the Frobenius norm, and fails unless they are less than 4 and 5 %. Mean
field is compared with what it converges to, the variances 1/diag(precision), to 2 %.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from net2gp import Posterior, bayes, laplace
from net2gp.likelihoods import Gaussian

NOISE = Gaussian(0.25)


@dataclass(frozen=True)
class Problem:
    """The data, the network at the posterior mean, and the closed form."""

    network: nn.Module
    x: Tensor
    y: Tensor
    mean: Tensor
    precision: Tensor

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        return self.x, self.y

    @property
    def covariance(self) -> Tensor:
        """The covariance of the posterior: (5, 5)."""
        return self.precision.inverse()


def problem() -> Problem:
    """Forty points of five inputs, with a prior of variance 1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    noise = 0.5 * torch.randn(40, 1, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(5, 1, generator=generator, dtype=torch.float64) + noise
    precision = x.T @ x / 0.25 + torch.eye(5, dtype=torch.float64)
    mean = torch.linalg.solve(precision, x.T @ y / 0.25)[:, 0]
    network = nn.Linear(5, 1, bias=False).double().eval()
    with torch.no_grad():
        network.weight.copy_(mean[None])
    return Problem(network, x, y, mean, precision)


def sampled(name: str, **options: float) -> Callable[[Problem, int], Posterior]:
    """A method that draws chains; `scale` multiplies their draws."""

    def run(given: Problem, scale: int) -> Posterior:
        method = getattr(bayes, name)
        draws = {**options, "num_draws": int(options["num_draws"]) * scale}
        return method(given.network, given.data, NOISE, **draws)

    return run


def anchored(given: Problem, scale: int) -> Posterior:
    """An ensemble of randomized priors, whose members are exact draws for a linear model."""
    training = bayes.Training(num_steps=1500, learning_rate=0.05, batch_size=None)
    return bayes.ensemble(
        given.network,
        given.data,
        NOISE,
        num_members=5000 * scale,
        training=training,
        randomized=True,
    )


def factorized(given: Problem, scale: int) -> Posterior:
    """Mean-field variational inference."""
    return bayes.mean_field(
        given.network, given.data, NOISE, num_steps=6000 * scale, num_draws=40000, num_samples=8
    )


def curved(given: Problem, scale: int) -> Posterior:
    """Laplace's approximation, which is exact here."""
    return laplace(given.network, given.data, NOISE, prior_var=1.0)


METHODS: dict[str, Callable[[Problem, int], Posterior]] = {
    "hmc": sampled("hmc", num_draws=500, num_chains=32, warmup=500),
    "nuts": sampled("nuts", num_draws=300, num_chains=32, warmup=300),
    "sgld": sampled("sgld", num_draws=40, num_chains=512, warmup=600, thin=60),
    "sghmc": sampled("sghmc", num_draws=40, num_chains=512, warmup=300, thin=20),
    "sghmc, minibatches": sampled(
        "sghmc", num_draws=40, num_chains=512, warmup=300, thin=40, batch_size=10, step_size=0.004
    ),
    "sghmc, preconditioned": sampled(
        "sghmc", num_draws=40, num_chains=512, warmup=300, thin=20, precondition=True
    ),
    "cyclical sgld": sampled(
        "sgld", num_draws=80, num_chains=512, warmup=50, thin=40, num_cycles=2, step_size=1e-3
    ),
    "cyclical sghmc": sampled(
        "sghmc", num_draws=80, num_chains=512, warmup=50, thin=20, num_cycles=2, step_size=0.03
    ),
    "microcanonical": sampled(
        "microcanonical", num_draws=100, num_chains=512, warmup=400, thin=5, energy_variance=5e-5
    ),
    "mean_field": factorized,
    "ensemble, randomized": anchored,
    "laplace": curved,
}


def draws_of(posterior: Posterior) -> Tensor:
    """All draws by chain, (C, S, 5); independent draws are chains of one draw."""
    members = getattr(posterior.process, "members", None)
    generator = torch.Generator().manual_seed(0)
    if members is None:
        drawn = posterior.sample_weights(40000, generator=generator)["weight"]
    else:
        drawn = members.values["weight"]
    chains = getattr(posterior.recipe, "num_chains", 1)
    return drawn.double().reshape(chains if chains > 1 else len(drawn), -1, 5)


def row(name: str, given: Problem, scale: int) -> bool:
    """Run a method, print its errors, and say whether they are small enough."""
    start = time.process_time()
    draws = draws_of(METHODS[name](given, scale))
    seconds = time.process_time() - start
    means = draws.mean(1)
    apart = (means.mean(0) - given.mean).abs() / (means.std(0) / len(means) ** 0.5)
    found = torch.cov(draws.flatten(0, 1).T)
    wanted, most = given.covariance, 0.05
    if name == "mean_field":
        wanted, most = torch.diag(1 / given.precision.diagonal()), 0.02
        found = torch.diag(found.diagonal())
    error = float((found - wanted).norm() / wanted.norm())
    good = float(apart.max()) < 4 and error < most
    numbers = f"{float(apart.max()):10.2f} {100 * error:13.2f} {draws.shape[0] * draws.shape[1]:9d}"
    print(f"{name:22} {numbers} {seconds:8.1f}  {'ok' if good else 'MISSED'}", flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the draws")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args()
    print(f"{'method':22} {'mean (SE)':>10} {'covariance %':>13} {'draws':>9} {'CPU s':>8}")
    given = problem()
    good = [row(name, given, 1 if options.quick else 4) for name in options.only]
    if not all(good):
        raise SystemExit("a method misses the closed form")


if __name__ == "__main__":
    main()
