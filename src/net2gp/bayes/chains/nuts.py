"""The No-U-Turn sampler for many chains at once, each with a tree of its own."""

from __future__ import annotations

import math
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
    normal,
    uniform,
)
from net2gp.bayes.chains.hmc import DIVERGENT
from net2gp.bayes.chains.options import Options, settings_of
from net2gp.bayes.chains.runs import sample
from net2gp.bayes.model.prior import WeightPrior
from net2gp.errors import InputError, check_count
from net2gp.linear.linearized import Linearized
from net2gp.posteriors.posterior import Posterior
from net2gp.types import Data, Likelihood

LARGEST_DEPTH = 20
"""A tree of that depth has a million leaves."""

MAX_DEPTH = 10
"""Trees have at most 2¹⁰ leaves, as in Stan."""

FIRST_LEAVES = 31
"""The number of leaves of a tree that is expected before there is one."""

NEVER = 2**30
"""A step that is never reached."""

STRIDES = (1, 2, 4, 8, 16)
"""How many leapfrog steps may run between two looks at the trees."""

NUMBERS = 2**18
"""How many numbers the leapfrog steps between two looks at the trees may hold; beyond, they are fewer."""


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


@lru_cache
def _pairs(count: int) -> tuple[Array, Array]:
    """The first and the last leaves of all balanced subtrees of 2, 4, … up to `count` leaves."""
    sizes = [2**k for k in range(1, count.bit_length())]
    firsts = [np.arange(0, count, size) for size in sizes]
    lasts = [first + size - 1 for first, size in zip(firsts, sizes, strict=True)]
    return np.concatenate(firsts), np.concatenate(lasts)


def _stride(leaves: float, look: float, most: int) -> int:
    """The number of steps between looks that gives the least time per tree.

    Args:
        leaves: The mean number of leaves of a tree.
        look: The time of a look, in gradients.
        most: The largest number allowed.

    Returns:
        One of `STRIDES`.

    >>> _stride(7, 4.0, 16), _stride(300, 4.0, 16), _stride(300, 0.0, 16)
    (2, 16, 1)
    """
    sizes = [2**k for k in range(max(1, round(math.log2(leaves + 1))))]
    cost = {m: sum(-(-size // m) for size in sizes) * (m + look) for m in STRIDES if m <= most}
    return min(cost, key=lambda m: (cost[m], m))


@dataclass(frozen=True)
class Trees:
    """Trees of leapfrog steps that double until they turn around; some steps of all chains at a time.

    A chain that has finished its tree starts the next one at once and waits for no other chain. Up to
    sixteen steps run between two looks at the trees, since a look takes as long as some gradients of a small
    network. What a chain computes beyond the end of its subtree is left out, so draws follow the same law.
    Steps between looks are a power of two, so the first of them is the only leaf among them with which later
    leaves are compared.

    In the state, `at` holds position, gradient, momentum and the sum of momenta of the leaf that each chain
    is at, (K, 4, P), and `path` those of the steps since the last look; `ends` the first three of both ends
    of its tree, (K, 2, 3, P); `kept` momentum and sum of the leaves that later ones are compared with.

    Args:
        max_depth: The number of doublings after which a tree ends.
    """

    max_depth: int = MAX_DEPTH
    name: str = "nuts"
    block: int = 64

    def begin(self, state: State, density: Density, metric: Metric) -> None:
        """Evaluate the log density where the chains are, and make room for the trees."""
        z = metric.locate(state["theta"])
        value, grad = density(z)
        chains, size = z.shape
        trees, leaves = state.get("trees", np.array([1, FIRST_LEAVES]))
        steps = _stride(leaves / trees, float(state["look"][0]), max(1, NUMBERS // (4 * z.size)))
        state |= {
            "best": np.stack([z, grad], 1), "best.value": value.copy(),
            "part": np.stack([z, grad], 1), "part.value": value.copy(),
            "at": np.zeros((chains, 4, size)), "ends": np.zeros((chains, 2, 3, size)),
            "path": np.zeros((steps, chains, 4, size)), "sum": np.zeros_like(z),
            "kept": np.zeros((chains, self.max_depth + 1, 2, size)),
            "draw.z": z.copy(), "signed": np.zeros((chains, 1)),
            "trees": np.zeros(2, dtype=np.int64),
        }  # fmt: skip
        for name in ("energy", "weight", "part.weight", "rate", "draw.acceptance"):
            state[name] = np.zeros(chains)
        for name in ("leaf", "depth", "side", "work", "leaves", "draw.diverged", "draw.gradients"):
            state[name] = np.zeros(chains, dtype=np.int64)

    def restart(self, state: State, ended: Array, generator: torch.Generator) -> None:
        """Start a tree of one leaf at the last draw of these chains, with a new momentum."""
        best, ends = state["best"][ended], state["ends"]
        p = normal((len(ended), best.shape[2]), generator)
        ends[ended, :, :2] = best[:, None]
        ends[ended, :, 2] = p[:, None]
        state["sum"][ended] = p
        state["energy"][ended] = state["best.value"][ended] - 0.5 * np.vecdot(p, p)
        for name in ("weight", "depth", "rate", "work", "leaves"):
            state[name][ended] = 0
        self._double(state, ended, uniform(len(ended), generator))

    def _double(self, state: State, chains: Array, chance: Array) -> None:
        """Let these chains start a subtree at one of both ends."""
        side = (chance < 0.5).astype(np.int64)
        at = state["at"]
        at[chains, :3] = state["ends"][chains, side]
        at[chains, 3] = 0.0
        state["side"][chains], state["leaf"][chains] = side, 0
        state["part.weight"][chains] = -np.inf
        state["signed"][chains, 0] = state["step"][chains] * (2 * side - 1)

    def advance(self, state: State, density: Density, generator: torch.Generator) -> Array:
        """Make some leapfrog steps of every chain, and return the chains whose trees ended with them."""
        leaf, count = state["leaf"], len(state["path"])
        left = 2 ** state["depth"] - leaf
        value = _walk(state, density)
        p = state["path"][:, :, 2]
        gain = value - 0.5 * np.vecdot(p, p) - state["energy"]
        gain = np.where(np.isfinite(gain), gain, -np.inf)
        most = np.minimum(left, count)
        stop = self._turn(state, most)
        diverged = gain < -DIVERGENT
        if diverged.any():
            stop = np.minimum(stop, np.where(diverged.any(0), diverged.argmax(0), NEVER))
        stopped = stop < most
        used = np.where(stopped, stop + 1, most)
        if used.min() < count:
            gain[np.arange(count)[:, None] >= used] = -np.inf
        state["rate"] += np.exp(np.minimum(gain, 0.0)).sum(0)
        state["leaves"] += used
        state["work"] += count
        chance = uniform(3 * len(left), generator).reshape(3, -1)
        _choose(state, value, gain, np.log(chance[0]))
        leaf += used
        (finished,) = (stopped | (used == left)).nonzero()
        state["at"][...] = state["path"][-1]
        if not len(finished):
            return finished
        over = stopped & diverged[used - 1, np.arange(len(used))]
        return self._join(state, finished, used - 1, (stopped, over), chance)

    def _turn(self, state: State, most: Array) -> Array:
        """The first step that completes a balanced subtree which turns around, or a large number, (K,).

        With the sum ρ of its momenta less half of its first and last ones, a subtree turns around if ρ·p ≤ 0
        at either of them.
        """
        place, compare = _levels(self.max_depth)
        leaf, kept, tracks = state["leaf"], state["kept"], state["path"][:, :, 2:]
        count, at = len(tracks), place[leaf]
        kept[np.arange(len(leaf)), at] = tracks[0]
        turn = np.full(len(leaf), NEVER)
        if count > 1:
            firsts, lasts = _pairs(count)
            back = _turned(tracks[firsts], tracks[lasts])
            if back.any():
                turn = np.where(back, lasts[:, None], NEVER).min(0)
        # the places before the first of these steps belong to subtrees of more leaves than these
        (chains,) = (most == count).nonzero()
        outer = compare[leaf[chains] + count - 1] & (at[chains, None] > np.arange(self.max_depth))
        which, level = outer.nonzero()
        if len(which):
            chain = chains[which]
            back = _turned(kept[chain, level], tracks[-1, chain])
            turn[chain[back]] = np.minimum(turn[chain[back]], count - 1)
        return turn

    def _join(
        self, state: State, finished: Array, last: Array, stops: tuple[Array, Array], chance: Array
    ) -> Array:
        """Join complete subtrees to their trees; return the chains whose trees end."""
        stop = stops[0][finished]
        rows = finished[~stop]
        whole, part = state["weight"][rows], state["part.weight"][rows]
        # the newer half is preferred, which moves on
        better = rows[np.log(chance[1, rows]) < part - whole]
        state["best"][better] = state["part"][better]
        state["best.value"][better] = state["part.value"][better]
        state["weight"][rows] = np.logaddexp(whole, part)
        found = state["path"][last[rows], rows]
        state["ends"][rows, state["side"][rows]] = found[:, :3]
        state["sum"][rows] += found[:, 3]
        state["depth"][rows] += 1
        ends = state["ends"][finished, :, 2]
        rho = state["sum"][finished] - 0.5 * (ends[:, 0] + ends[:, 1])
        back = (np.vecdot(ends, rho[:, None]) <= 0).any(1)
        over = stop | back | (state["depth"][finished] >= self.max_depth)
        ended, going = finished[over], finished[~over]
        if len(going):
            self._double(state, going, chance[2, going])
        state["trees"] += (len(ended), state["leaves"][ended].sum())
        state["draw.z"][ended] = state["best"][ended, 0]
        state["draw.acceptance"][ended] = state["rate"][ended] / state["leaves"][ended]
        state["draw.gradients"][ended] = state["work"][ended]
        state["draw.diverged"][ended] = stops[1][ended]
        return ended


def _walk(state: State, density: Density) -> Array:
    """Make leapfrog steps of all chains, into `path`, and return the log densities, (steps, K)."""
    z, g, p, total = state["at"].swapaxes(0, 1)
    step, half = state["signed"], 0.5 * state["signed"]
    places, slopes, momenta, sums = state["path"].transpose(2, 0, 1, 3)
    value = np.empty(places.shape[:2])
    push = half * g
    between = p + push
    for index, (place, slope, momentum) in enumerate(zip(places, slopes, momenta, strict=True)):
        z = np.add(z, step * between, out=place)
        value[index], grad = density(z)
        slope[...] = grad
        np.multiply(half, grad, out=push)
        np.add(between, push, out=momentum)
        np.add(momentum, push, out=between)
    np.add.accumulate(momenta, axis=0, out=sums)
    sums += total
    return value


def _turned(first: Array, last: Array) -> Array:
    """Whether subtrees turn around, from momentum and sum of momenta of their ends, (…, 2, P)."""
    p, q = first[..., 0, :], last[..., 0, :]
    rho = last[..., 1, :] - first[..., 1, :] + 0.5 * (p - q)
    return (np.vecdot(rho, p) <= 0) | (np.vecdot(rho, q) <= 0)


def _choose(state: State, value: Array, gain: Array, chance: Array) -> None:
    """Choose a leaf of each subtree in proportion to exp(−H): the earlier choice, or one of these steps."""
    weight = np.logaddexp.accumulate(np.concatenate([state["part.weight"][None], gain]))
    chosen = (weight[:-1] <= chance + weight[-1]).sum(0) - 1
    state["part.weight"] = weight[-1]
    (taken,) = (chosen >= 0).nonzero()
    at = chosen[taken]
    state["part"][taken], state["part.value"][taken] = (
        state["path"][at, taken, :2],
        value[at, taken],
    )


def nuts(
    network: nn.Module | Linearized,
    data: Data,
    likelihood: Likelihood,
    *,
    prior: WeightPrior | float | None = 1.0,
    temperature: float = 1.0,
    num_draws: int = 1000,
    num_chains: int | None = None,
    max_depth: int = MAX_DEPTH,
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
        max_depth: The number of doublings after which a tree ends, at 2^max_depth − 1 leapfrog steps. If most
            draws take that many gradients, a larger number gives more effective draws for the same time.
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
    check_count(max_depth, "max_depth", example=MAX_DEPTH)
    if max_depth > LARGEST_DEPTH:
        raise InputError(
            f"max_depth must be at most {LARGEST_DEPTH}, since a tree has up to 2^max_depth leaves, but is "
            f"{max_depth}. Try max_depth=12."
        )
    return sample(network, data, likelihood, prior, temperature, Trees(max_depth), settings)
