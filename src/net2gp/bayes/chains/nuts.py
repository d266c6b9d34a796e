"""The No-U-Turn sampler for many chains at once, each with a tree of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
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
from net2gp.bayes.chains.hmc import DIVERGENT
from net2gp.bayes.chains.options import Options, settings_of
from net2gp.bayes.chains.runs import sample
from net2gp.bayes.model.prior import WeightPrior
from net2gp.linear.linearized import Linearized
from net2gp.posteriors.posterior import Posterior
from net2gp.types import Data, Likelihood

MAX_DEPTH = 10
"""Trees have at most 2¹⁰ leaves, as in Stan."""


@lru_cache
def _levels(depth: int) -> tuple[Array, Array]:
    """Where leaf n of a subtree is kept, and which kept leaves it is compared with.

    Leaf n completes a balanced subtree for each 1 at the end of its binary form. The first leaf of such a
    subtree is even and is kept at the place that counts the other 1s, so log₂ of the leaves are enough. Odd
    leaves go to a place that is never read.

    Returns:
        The places, (2^depth,), and a mask of the places to compare with, (2^depth, depth).
    """
    count = 2**depth
    leaf = np.arange(count)
    ones = np.array([bin(n >> 1).count("1") for n in range(count)])
    trailing = np.array([(n ^ (n + 1)).bit_length() - 1 for n in range(count)])
    place = np.where(leaf % 2 == 0, ones, depth)
    at = np.arange(depth)
    return place, (at <= ones[:, None]) & (at > (ones - trailing)[:, None])


@dataclass(frozen=True)
class Trees:
    """Trees of leapfrog steps that double until they turn around; one step of each chain at a time.

    A chain that has finished its tree starts the next one at once and waits for no other chain, so every
    gradient of every chain counts. In the state, `move` holds position, gradient, momentum and the sum of
    momenta of the leaf that each chain is at, (K, 4, P); `ends` the first three of both ends of its tree,
    (K, 2, 3, P); `kept` momentum and sum of the leaves that later ones are compared with.

    Args:
        max_depth: The number of doublings after which a tree ends.
    """

    max_depth: int = MAX_DEPTH
    name: str = "nuts"
    block: int = 256

    def begin(self, state: State, density: Density, metric: Metric) -> None:
        """Evaluate the log density where the chains are, and make room for the trees."""
        z = metric.locate(state["theta"])
        value, grad = density(z)
        chains, size = z.shape
        state |= {
            "best": np.stack([z, grad], 1), "best.value": value.copy(),
            "part": np.stack([z, grad], 1), "part.value": value.copy(),
            "move": np.zeros((chains, 4, size)), "ends": np.zeros((chains, 2, 3, size)),
            "kept": np.zeros((chains, self.max_depth + 1, 2, size)), "sum": np.zeros_like(z),
            "draw.z": z.copy(), "signed": np.zeros((chains, 1)),
        }  # fmt: skip
        for name in ("energy", "weight", "part.weight", "rate", "draw.acceptance"):
            state[name] = np.zeros(chains)
        for name in ("leaf", "depth", "side", "work", "draw.diverged", "draw.gradients"):
            state[name] = np.zeros(chains, dtype=np.int64)

    def restart(self, state: State, ended: Array, generator: torch.Generator) -> None:
        """Start a tree of one leaf at the last draw of these chains, with a new momentum."""
        best, ends = state["best"][ended], state["ends"]
        p = normal((len(ended), best.shape[2]), generator)
        start = np.concatenate([best, p[:, None]], 1)
        ends[ended, 0] = start
        ends[ended, 1] = start
        state["sum"][ended] = p
        state["energy"][ended] = state["best.value"][ended] - 0.5 * np.vecdot(p, p)
        for name in ("weight", "depth", "rate", "work"):
            state[name][ended] = 0
        self._double(state, ended, generator)

    def _double(self, state: State, chains: Array, generator: torch.Generator) -> None:
        """Let these chains start a subtree at one of both ends."""
        side = (uniform(len(chains), generator) < 0.5).astype(np.int64)
        move = state["move"]
        move[chains, :3] = state["ends"][chains, side]
        move[chains, 3] = 0.0
        state["side"][chains], state["leaf"][chains] = side, 0
        state["part.weight"][chains] = -np.inf
        state["signed"][chains, 0] = state["step"][chains] * (2 * side - 1)

    def advance(self, state: State, density: Density, generator: torch.Generator) -> Array:
        """Make one leapfrog step of every chain, and return the chains whose trees ended with it."""
        move = state["move"]
        z, g, p, total = move[:, 0], move[:, 1], move[:, 2], move[:, 3]
        value = leapfrog(z, g, p, state["signed"], density)
        total += p
        gain = value - 0.5 * np.vecdot(p, p) - state["energy"]
        gain[~np.isfinite(gain)] = -np.inf
        state["rate"] += np.exp(np.minimum(gain, 0.0))
        state["work"] += 1
        # multinomial choice within the subtree: each leaf in proportion to exp(−H)
        weight = np.logaddexp(state["part.weight"], gain)
        chance = np.log(uniform(2 * len(z), generator))
        taken = (chance[: len(z)] < gain - weight).nonzero()[0]
        state["part"][taken], state["part.value"][taken] = move[taken, :2], value[taken]
        state["part.weight"] = weight
        diverged = gain < -DIVERGENT
        stopped = self._turned(state) | diverged
        state["leaf"] += 1
        complete = state["leaf"] == 2 ** state["depth"]
        finished = (stopped | complete).nonzero()[0]
        if not len(finished):
            return finished
        return self._join(state, finished, stopped, diverged, chance[len(z) :], generator)

    def _turned(self, state: State) -> Array:
        """Whether a balanced subtree that ends at the present leaf turns around.

        With the sum ρ of its momenta less half of its first and last ones, it does if ρ·p ≤ 0 at either.
        """
        place, compare = _levels(self.max_depth)
        leaf, now, kept = state["leaf"], state["move"], state["kept"]
        kept[np.arange(len(leaf)), place[leaf]] = now[:, 2:]
        turned = np.zeros(len(leaf), dtype=bool)
        chain, level = compare[leaf].nonzero()
        if len(chain):
            first, last = kept[chain, level], now[chain, 2:]
            rho = last[:, 1] - first[:, 1] + 0.5 * (first[:, 0] - last[:, 0])
            back = (np.vecdot(rho, last[:, 0]) <= 0) | (np.vecdot(rho, first[:, 0]) <= 0)
            turned[chain[back]] = True
        return turned

    def _join(
        self,
        state: State,
        finished: Array,
        stopped: Array,
        diverged: Array,
        chance: Array,
        generator: torch.Generator,
    ) -> Array:
        """Join complete subtrees to their trees; return the chains whose trees end."""
        stop = stopped[finished]
        rows = finished[~stop]
        whole, part, move = state["weight"][rows], state["part.weight"][rows], state["move"]
        better = rows[chance[rows] < part - whole]  # the newer half is preferred, which moves on
        state["best"][better] = state["part"][better]
        state["best.value"][better] = state["part.value"][better]
        state["weight"][rows] = np.logaddexp(whole, part)
        state["ends"][rows, state["side"][rows]] = move[rows, :3]
        state["sum"][rows] += move[rows, 3]
        state["depth"][rows] += 1
        ends = state["ends"][finished, :, 2]
        rho = state["sum"][finished] - 0.5 * (ends[:, 0] + ends[:, 1])
        back = (np.vecdot(ends, rho[:, None]) <= 0).any(1)
        over = stop | back | (state["depth"][finished] >= self.max_depth)
        ended, going = finished[over], finished[~over]
        if len(going):
            self._double(state, going, generator)
        work = state["work"][ended]
        state["draw.z"][ended] = state["best"][ended, 0]
        state["draw.acceptance"][ended] = state["rate"][ended] / work
        state["draw.gradients"][ended] = work
        state["draw.diverged"][ended] = diverged[ended]
        return ended


def nuts(
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
    """Draw the parameters of a network by the No-U-Turn sampler with all data.

    Each draw grows a tree of leapfrog steps, forward or backward in time at random, until it turns around by
    the generalized criterion; the draw is one of its leaves, in proportion to exp(−H). No length of
    trajectories has to be chosen. All chains advance together in float64, one leapfrog step at a time, and
    each goes on to its next draw as soon as its own tree ends. In the warmup dual averaging adapts the step
    size of each chain, and the draws of all chains give the mass matrix. Judge the result with `diagnose`.

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
    >>> posterior = nuts(
    ...     nn.Linear(1, 1, bias=False), (x, x), Gaussian(noise_var=1.0), num_draws=50, warmup=50
    ... )
    >>> posterior.mean(x).shape
    torch.Size([4, 1])

    References: Hoffman and Gelman, The No-U-Turn sampler, JMLR 2014. Betancourt, A conceptual introduction
    to Hamiltonian Monte Carlo, 2017. Phan et al., Composable effects for flexible and accelerated
    probabilistic programming in NumPyro, 2019, on trees without recursion.
    """
    settings = settings_of(num_draws, num_chains, options)
    return sample(network, data, likelihood, prior, temperature, Trees(), settings)
