"""Stochastic gradient Langevin dynamics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Unpack

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
from net2gp.inputs import ordinary_tensors
from net2gp.keywords import check_known, lists
from net2gp.linalg.langevin import sgld_step
from net2gp.linear.linearized import Linearized
from net2gp.posteriors.posterior import Posterior
from net2gp.types import Data, Likelihood

STABLE = 0.1
"""The step size times the largest curvature; the variance along it is too large by a fortieth of that."""


@dataclass(frozen=True, eq=False)
class SGLD:
    """The steps θ ← θ + (ε/2) G ∇ log p̂(θ) + √(εG) ξ.

    Args:
        setup: The run.
        step_size: The step size ε of each chain: (C, 1).
        tuned: What is learned of the gradients, such as G.
    """

    setup: Setup
    step_size: Tensor = field(repr=False)
    tuned: Tuned

    def begin(self, walk: Walk) -> None:
        """Prepare the averages of gradients."""
        self.tuned.begin(walk)

    def step(self, walk: Walk, step: int) -> None:
        """Move all chains."""
        state, plan = walk.state, self.setup.plan
        slope = self.tuned.gradient(walk, step)
        size = self.step_size * plan.scale(step)
        if "scale" in state:
            size = size * state["scale"]
        if plan.quiet(step):
            sgld_step(state["position"], slope, size, None)
            return
        left = self.tuned.remaining(walk, size, size.square() / 4)
        sgld_step(state["position"], slope, size, walk.noise(), noise_var=left)

    def statistics(self, state: State) -> dict[str, Tensor]:
        """The step size of each chain."""
        return self.tuned.statistics(state, self.step_size)


@lists(**STOCHASTIC)
@ordinary_tensors()
def sgld(
    network: nn.Module | Linearized,
    data: Data,
    likelihood: Likelihood,
    *,
    prior: WeightPrior | float | None = 1.0,
    temperature: float = 1.0,
    **options: Unpack[StochasticOptions],
) -> Posterior:
    """Draw networks from the posterior by stochastic gradient Langevin dynamics.

    A step is θ ← θ + (ε/2) ∇ log p̂(θ) + √ε ξ with ξ ~ N(0, I), where p̂ is the joint density of parameters
    and targets, estimated from a minibatch: its likelihood counts N/B times. There is no accept step. On a
    quadratic with curvature k the variance is 1/(k(1 − εk/4)), so the error is of first order in ε, and the
    noise of minibatches adds variance of the same order. The network runs in eval mode.

    With `num_cycles`, the step size falls from ε to 0 in cosine cycles. The first `warmup` steps of a cycle
    have no noise and move to a new mode, and the others give draws. Cost of a step: one forward and one
    backward pass of a minibatch per chain; chains share vectorized passes.

    Args:
        network: The network; its parameters are where chains start, unless `start` says otherwise.
        data: The training data, (x, y), a Dataset or a loader.
        likelihood: How targets follow the outputs; Gaussian noise must be given.
        prior: The prior of the parameters. A number is the variance of independent Gaussians, and None is a
            flat prior.
        temperature: Divides the log joint; less than 1 gives a cold posterior.
        step_size: The step size ε; ε/2 is the learning rate of the summed log joint. None takes 0.1/λ at the
            start of each chain, where λ is the largest curvature there, so start at a trained network then.
        batch_size: The number of points of a minibatch; each chain shuffles by itself. None takes all.
        num_cycles: The number of cosine cycles, or None for a constant step size.
        precondition: Whether each parameter has a step size of its own, from the root mean square of its
            gradients during warmup. It stays fixed while draws are taken, so that it adds no bias.
        gradient_noise: Whether to estimate the variance V of minibatch gradients during warmup and to inject
            only the variance ε − ε²V/4. Minibatches are then drawn independently.
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
    >>> posterior = sgld(network, (x, x), Gaussian(noise_var=1.0), step_size=0.02, num_draws=50, warmup=50)
    >>> posterior.sample_weights(3)["weight"].shape
    torch.Size([3, 1, 1])

    References: Welling and Teh, Bayesian learning via stochastic gradient Langevin dynamics, ICML 2011; Li et
    al., Preconditioned stochastic gradient Langevin dynamics, AAAI 2016; Zhang et al., Cyclical stochastic
    gradient MCMC for Bayesian deep learning, ICLR 2020.
    """
    check_known(options, StochasticOptions)
    chosen = {**STOCHASTIC, **options}
    setup = prepare("sgld", (network, data, likelihood), prior, temperature, chosen)
    learned = tuned(setup, chosen)
    walk = setup.walk(chosen["batch_size"], independent=learned.gradient_noise)
    size = chosen_step(chosen["step_size"], setup, walk, lambda largest: STABLE / largest)
    return run(setup, SGLD(setup, size, learned), walk)
