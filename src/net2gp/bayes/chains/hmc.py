"""Hamiltonian Monte Carlo with trajectories of a fixed length, for many chains at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Unpack

import numpy as np
import torch
from torch import nn

from net2gp.bayes.chains.adaptation import (
    Array,
    Density,
    Metric,
    State,
    leapfrog,
    normal,
    uniform,
)
from net2gp.bayes.chains.options import Options, settings_of
from net2gp.bayes.chains.runs import sample
from net2gp.bayes.model.prior import WeightPrior
from net2gp.linear.linearized import Linearized
from net2gp.posteriors.posterior import Posterior
from net2gp.types import Data, Likelihood

DIVERGENT = 1000.0
"""An increase of the energy above it counts as a divergence, as in Stan."""

MOST_STEPS = 1024
"""The largest number of leapfrog steps of a trajectory."""


@dataclass(frozen=True)
class Trajectories:
    """Trajectories of one number of steps for all chains, which advance together.

    Each chain has a step size of its own, so a chain in a narrow place makes shorter trajectories, and the
    others do not wait for it.

    Args:
        length: The mean time of a trajectory of the median chain, in units of the posterior's width. Each
            trajectory takes between half and one and a half of it, since a fixed time can lead back to the
            start.
    """

    length: float = math.pi / 2
    name: str = "hmc"
    block: int = 4

    def begin(self, state: State, density: Density, metric: Metric) -> None:
        """Evaluate the log density where the chains are."""
        z = metric.locate(state["theta"])
        value, grad = density(z)
        state |= {"draw.z": z.copy(), "at.value": value, "at.grad": grad}

    def restart(self, state: State, ended: Array, generator: torch.Generator) -> None:
        """Do nothing: each trajectory starts by itself."""

    def advance(self, state: State, density: Density, generator: torch.Generator) -> Array:
        """Run one trajectory of each chain, and accept its end or keep its start."""
        start, grad, value = state["draw.z"], state["at.grad"], state["at.value"]
        p, step = normal(start.shape, generator), state["step"]
        length = (0.5 + float(uniform(1, generator)[0])) * self.length
        steps = min(max(math.ceil(length / float(np.median(step))), 1), MOST_STEPS)
        before = value - 0.5 * np.vecdot(p, p)
        z, g, new = start.copy(), grad.copy(), value
        for _ in range(steps):
            new = leapfrog(z, g, p, step[:, None], density)
        gain = np.nan_to_num(new - 0.5 * np.vecdot(p, p) - before, nan=-np.inf)
        taken = np.log(uniform(len(z), generator)) < gain
        state["draw.z"] = np.where(taken[:, None], z, start)
        state["at.grad"] = np.where(taken[:, None], g, grad)
        state["at.value"] = np.where(taken, new, value)
        state["draw.acceptance"] = np.exp(gain.clip(max=0))
        state["draw.diverged"] = (gain < -DIVERGENT).astype(np.int64)
        state["draw.gradients"] = np.full_like(state["count"], steps)
        return np.arange(len(z))


def hmc(
    network: nn.Module | Linearized,
    data: Data,
    likelihood: Likelihood,
    *,
    prior: WeightPrior | float | None = 1.0,
    temperature: float = 1.0,
    num_draws: int = 1000,
    num_chains: int | None = None,
    **options: Unpack[Options],
) -> Posterior:
    """Draw the parameters of a network by Hamiltonian Monte Carlo with all data.

    A trajectory follows θ' = M⁻¹p, p' = ∇ log p(θ, y) from a random momentum p ~ N(0, M) by leapfrog steps,
    and its end is accepted with probability min(1, exp(−ΔH)), which leaves the posterior invariant. All
    chains advance together in float64 whatever the dtype of the network. In the warmup dual averaging adapts
    the step size and the draws of all chains give the mass matrix M. A draw costs about ten to a hundred
    gradients of the log joint. Judge the result with `diagnose`.

    Args:
        network: The network.
        data: The data, as in `laplace`.
        likelihood: How targets follow the outputs; Gaussian noise must be given.
        prior: The prior of the parameters. A number is the variance of independent Gaussians, and None is a
            flat prior.
        temperature: Divides the log joint; less than 1 gives a cold posterior.
        num_draws: The draws of each chain that are kept.
        num_chains: The number of chains. None takes one per network of an ensemble or of a dict as `start`,
            as many as earlier chains had that go on from `start`, and 4 otherwise.
        options: The entries of `net2gp.bayes.ChainOptions`: warmup, target_acceptance, mass, step_size,
            start, seed, checkpoint, checkpoint_seconds, only and output.

    Returns:
        A posterior of num_chains·num_draws networks; `recipe.statistics` has divergences, acceptance, step
        sizes and gradients of each chain.

    Raises:
        InputError: If an option, the prior or the start does not fit.
        ChainStuck: If a chain cannot move.

    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.ones(4, 1)
    >>> posterior = hmc(
    ...     nn.Linear(1, 1, bias=False), (x, x), Gaussian(noise_var=1.0), num_draws=50, warmup=50
    ... )
    >>> posterior.mean(x).shape
    torch.Size([4, 1])

    Reference: Neal, MCMC using Hamiltonian dynamics, Handbook of Markov Chain Monte Carlo, 2011.
    """
    settings = settings_of(num_draws, num_chains, options)
    return sample(network, data, likelihood, prior, temperature, Trajectories(), settings)
