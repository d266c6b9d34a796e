"""Stochastic gradient Hamiltonian Monte Carlo."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Unpack

from torch import Tensor, nn

from net2gp.bayes.chains.langevin.stochastic import (
    STOCHASTIC,
    StochasticOptions,
    Tuned,
    chosen_step,
    tuned,
)
from net2gp.bayes.chains.langevin.walks import Setup, State, Walk, prepare, run
from net2gp.bayes.model.prior import WeightPrior
from net2gp.errors import InputError
from net2gp.inputs import ordinary_tensors
from net2gp.keywords import check_known, lists
from net2gp.linalg.langevin import sghmc_step
from net2gp.linear.linearized import Linearized
from net2gp.posteriors.posterior import Posterior
from net2gp.types import Data, Likelihood

STABLE = 0.3
"""The step size times the root of the largest curvature; above 2 the dynamics are not stable."""


class SGHMCOptions(StochasticOptions, total=False):
    """The options of `sghmc`."""

    momentum: float


DEFAULTS: dict[str, Any] = {**STOCHASTIC, "momentum": 0.9}


@dataclass(frozen=True, eq=False)
class SGHMC:
    """The steps of `sghmc`, with momenta w = G^{1/2} v of unit variance.

    Args:
        setup: The run.
        step_size: The step size h of each chain: (C, 1).
        tuned: What is learned of the gradients, such as G.
        momentum: The share a of the momentum that stays after a step.
    """

    setup: Setup
    step_size: Tensor = field(repr=False)
    tuned: Tuned
    momentum: float

    def begin(self, walk: Walk) -> None:
        """Draw the momenta."""
        self.tuned.begin(walk)
        walk.state["momentum"] = walk.noise()

    def step(self, walk: Walk, step: int) -> None:
        """Kick, drift for half a step, refresh the momentum, and drift for the other half."""
        state, plan, kept = walk.state, self.setup.plan, self.momentum
        slope = self.tuned.gradient(walk, step)
        size = self.step_size * plan.scale(step) ** 0.5
        if "scale" in state:
            size = size * state["scale"].sqrt()
        moving = state["position"], state["momentum"], slope, size, kept
        if plan.quiet(step):
            sghmc_step(*moving, None)
            return
        left = None
        if self.tuned.gradient_noise:
            left = self.tuned.remaining(walk, size.new_full((), 1 - kept**2), size.square())
        sghmc_step(*moving, walk.noise(), noise_var=left)

    def statistics(self, state: State) -> dict[str, Tensor]:
        """The step size of each chain."""
        return self.tuned.statistics(state, self.step_size)


@lists(**DEFAULTS)
@ordinary_tensors()
def sghmc(
    network: nn.Module | Linearized,
    data: Data,
    likelihood: Likelihood,
    *,
    prior: WeightPrior | float | None = 1.0,
    temperature: float = 1.0,
    **options: Unpack[SGHMCOptions],
) -> Posterior:
    """Draw networks from the posterior by stochastic gradient Hamiltonian Monte Carlo.

    Parameters have momenta v, and a step of size h on a minibatch is

        v ← v + h ∇ log p̂(θ),   θ ← θ + (h/2) v,   v ← a v + √(1 − a²) ξ,   θ ← θ + (h/2) v,

    with ξ ~ N(0, I). Friction and noise are the exact solution of dv = −γ v dt + √(2γ) dW over the step, with
    a = exp(−γh), so that v has unit variance for every a. The published form has (1 − α) v + √(2α) ξ, which
    leaves the variance 1/(1 − α/2). Friction in the middle of the drift makes the variance of θ exact on a
    quadratic for every stable h < 2/√k; otherwise the error is of second order in h. The noise of minibatches
    adds variance of first order in h. There is no accept step, and the network runs in eval mode. h² is the
    learning rate and a the momentum of SGD on the summed negative log joint.

    With `num_cycles`, h² falls to 0 in cosine cycles. The first `warmup` steps of a cycle have no noise and
    move to a new mode, and the others give draws. Cost of a step: one forward and one backward pass of a
    minibatch per chain; chains share vectorized passes.

    Args:
        network: The network; its parameters are where chains start, unless `start` says otherwise.
        data: The training data, (x, y), a Dataset or a loader.
        likelihood: How targets follow the outputs; Gaussian noise must be given.
        prior: The prior of the parameters. A number is the variance of independent Gaussians, and None is a
            flat prior.
        temperature: Divides the log joint; less than 1 gives a cold posterior.
        momentum: The share a of the momentum that stays after a step, from 0 to less than 1.
        step_size: The step size h. None takes 0.3/√λ at the start of each chain, where λ is the largest
            curvature there, so start at a trained network then.
        batch_size: The number of points of a minibatch; each chain shuffles by itself. None takes all.
        num_cycles: The number of cosine cycles, or None for a constant step size.
        precondition: Whether each parameter has a step size of its own, from the root mean square of its
            gradients during warmup. It stays fixed while draws are taken, so that it adds no bias.
        gradient_noise: Whether to estimate the variance V of minibatch gradients during warmup and to inject
            only the variance 1 − a² − h²V. Minibatches are then drawn independently.
        only: Chooses parameters by name pattern, as in `linearize`; the others stay fixed.
        output: Picks the tensor of outputs from what the network returns.
        start: A posterior whose networks start the chains, such as an ensemble; "network" or None for the
            network itself, "prior" for draws from the prior, or parameters by name with an axis of chains.
        num_draws: The number of draws of each chain.
        num_chains: The number of chains.
        warmup: The number of steps before the first draw, in each cycle.
        thin: The number of steps from one draw to the next.
        seed: The seed of all random numbers.
        vectorized: Whether chains share passes by vmap; False runs them one by one in less memory.
        checkpoint: A file to keep the chains in. A run that was killed goes on from it to the same draws.

    Returns:
        A posterior of the draws, those of the first chain first; `posterior.recipe.num_chains` says how many
        chains there are.

    Raises:
        InputError: If an option is out of range, or data, prior or start do not fit the network.
        NetworkError: If the network has dropout or batch statistics in training mode.
        ChainStuck: If a chain leaves the region where its step size is stable.

    >>> import torch
    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.ones(4, 1, dtype=torch.float64)
    >>> network = nn.Linear(1, 1, bias=False).double()
    >>> posterior = sghmc(network, (x, x), Gaussian(noise_var=1.0), step_size=0.2, num_draws=50, warmup=50)
    >>> posterior.recipe.num_chains
    4

    References: Chen, Fox and Guestrin, Stochastic gradient Hamiltonian Monte Carlo, ICML 2014; Leimkuhler and
    Matthews, Rational construction of stochastic numerical methods for molecular sampling, 2013; Zhang et
    al., Cyclical stochastic gradient MCMC for Bayesian deep learning, ICLR 2020.
    """
    check_known(options, SGHMCOptions)
    chosen = {**DEFAULTS, **options}
    kept = chosen["momentum"]
    if not isinstance(kept, int | float) or not 0 <= kept < 1:
        raise InputError(f"momentum must be at least 0 and less than 1, but is {kept!r}. Try 0.9.")
    setup = prepare("sghmc", (network, data, likelihood), prior, temperature, chosen)
    learned = tuned(setup, chosen)
    walk = setup.walk(chosen["batch_size"], independent=learned.gradient_noise)
    size = chosen_step(chosen["step_size"], setup, walk, lambda largest: STABLE * largest.rsqrt())
    return run(setup, SGHMC(setup, size, learned, float(kept)), walk)
