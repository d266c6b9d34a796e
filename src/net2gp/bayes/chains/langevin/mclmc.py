"""Microcanonical Langevin Monte Carlo, with a chain from each network of an ensemble."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from net2gp.bayes.chains.langevin.isokinetic import (
    INTEGRATORS,
    Integrator,
    Particle,
    correlation_length,
    refresh,
)
from net2gp.bayes.chains.langevin.walks import DEFAULTS as COMMON
from net2gp.bayes.chains.langevin.walks import Options, Setup, State, Walk, prepare, run
from net2gp.bayes.model.prior import WeightPrior
from net2gp.errors import ChainStuck, Divergences, InputError, check_count, check_positive, warn
from net2gp.inputs import describe, ordinary_tensors
from net2gp.keywords import check_known, lists
from net2gp.linalg.chance import fixed_choice
from net2gp.linear.linearized import Linearized
from net2gp.posteriors.posterior import Posterior
from net2gp.types import Data, Likelihood

MEMORY = 149 / 151
"""How much of the averages behind the step size is kept in a step: about 150 steps count."""

SPREAD = 1.5
"""How much an energy error may say about the step size: errors e^(6·1.5) off the target count e^(−½)."""

LARGEST = 1000.0
"""An energy error of one step beyond which the step is a divergence."""

COORDINATES = 32
"""The number of parameters whose autocorrelations set the length L."""


class MicrocanonicalOptions(Options, total=False):
    """The options of `microcanonical`."""

    energy_variance: float
    step_size: float | None
    length: float | None
    precondition: bool
    integrator: str
    chunk_size: int | None


DEFAULTS: dict[str, Any] = {
    "energy_variance": 5e-4,
    "step_size": None,
    "length": None,
    "precondition": False,
    "integrator": "minimal_norm",
    "chunk_size": None,
    **COMMON,
}


@dataclass(frozen=True, eq=False)
class Microcanonical:
    """The steps of `microcanonical`, and the tuning of step size and length in warmup.

    The first quarter of warmup tunes the step size, the second also measures variances, which then set the
    length and the scales, the third tunes the step size again, and the last measures autocorrelations, which
    set the final length.

    Args:
        setup: The run.
        integrator: What moves chains.
        target: The energy variance per dimension of one step.
        step_size: The given step size, or None.
        length: The given length, or None.
        precondition: Whether parameters are scaled by their standard deviations.
    """

    setup: Setup
    integrator: Integrator = field(repr=False)
    target: float
    step_size: float | None
    length: float | None
    precondition: bool

    def begin(self, walk: Walk) -> None:
        """Choose directions, and a first step size by doubling and halving."""
        state, position = walk.state, walk.state["position"]
        count, size = position.shape
        noise = walk.noise()
        state["direction"] = noise / noise.norm(dim=1, keepdim=True)
        state["value"], state["slope"] = self.setup.target.both(position)
        # the sixth powers of small steps need the range of float64
        one = torch.ones(count, 1, dtype=torch.float64, device=position.device)
        state["length"] = one * (self.length or math.sqrt(size))
        given = self.step_size
        state["step_size"] = one * given if given is not None else self._first_size(state, one)
        state["largest"] = one * math.inf
        for name in ("sums", "weights", "divergences", "energy", "steps"):
            state[name] = torch.zeros_like(one)
        state["mean"], state["spread"] = torch.zeros_like(position), torch.zeros_like(position)
        quarter = self.setup.plan.warmup // 4
        self_chosen = self.length is None and quarter >= 10
        shape = (quarter if self_chosen else 0, count, min(COORDINATES, size))
        state["series"] = position.new_zeros(shape)
        state["places"] = fixed_choice(size, COORDINATES).to(position.device)

    def _first_size(self, state: State, one: Tensor) -> Tensor:
        """The largest power of two for which one step has an energy error below its target."""
        particle = _particle(state)
        size, low, high = one.clone(), torch.zeros_like(one), one * math.inf
        for _ in range(40):
            step = size.to(particle.position.dtype)
            error = self.integrator(particle, step, state.get("scale"))[1][:, None].square()
            good = error <= self.target * particle.position.shape[1]  # a NaN is not
            low, high = torch.where(good, size, low), torch.where(good, high, size)
            size = torch.where(good, size * 2, size / 2)
            if bool(((low > 0) & high.isfinite()).all()):
                break
            size = torch.where((low > 0) & high.isfinite(), low, size)
        return torch.where(low > 0, low, size)

    def step(self, walk: Walk, step: int) -> None:
        """Move all chains, and learn from the energy errors during warmup."""
        state, warmup = walk.state, self.setup.plan.warmup
        before = _particle(state)
        size, length = (state[n].to(before.position.dtype) for n in ("step_size", "length"))
        after, change = self.integrator(before, size, state.get("scale"))
        noise = walk.noise()
        good = (change.abs() < LARGEST) & after.slope.isfinite().all(1)
        if not bool(good.all()):
            after = Particle(
                *(torch.where(_like(good, a), a, b) for a, b in zip(after, before, strict=True))
            )
            fresh = noise / noise.norm(dim=1, keepdim=True)
            after = after._replace(direction=torch.where(good[:, None], after.direction, fresh))
            change = torch.where(good, change, 0)
        state["direction"] = refresh(after.direction, size, length, noise)
        state["position"], state["value"], state["slope"] = after.position, after.value, after.slope
        if step < warmup:
            self._learn(state, step, change[:, None].double(), good[:, None])
        else:
            state["divergences"] += (~good)[:, None]
            state["energy"] += change[:, None].square() / before.position.shape[1]
            state["steps"] += 1

    def _learn(self, state: State, step: int, change: Tensor, good: Tensor) -> None:
        quarter = self.setup.plan.warmup // 4
        stage = min(3, step // max(1, quarter))
        if self.step_size is None and stage < 3:
            self._tune_size(state, change, good)
        if stage == 1:
            self._measure(state, step - quarter)
            if step + 1 == 2 * quarter:
                self._scale(state, quarter)
        rest = step - 3 * quarter
        if stage == 3 and rest < len(state["series"]):
            state["series"][rest] = state["position"][:, state["places"]]
            if rest + 1 == len(state["series"]):
                steps = correlation_length(state["series"]).double()[:, None]
                state["length"] = 0.4 * state["step_size"] * steps
                state["series"] = state["series"][:0].clone()

    def _tune_size(self, state: State, change: Tensor, good: Tensor) -> None:
        """ε ← the root at which the average of ΔE²/ε⁶, times ε⁶, is the target; errors are of order ε³."""
        size = state["step_size"]
        ratio = change.square() / (self.target * state["position"].shape[1]) + 1e-8
        weight = torch.where(good, (-0.5 * (ratio.log() / (6 * SPREAD)).square()).exp(), 0)
        state["sums"] = MEMORY * state["sums"] + weight * ratio / size**6
        state["weights"] = MEMORY * state["weights"] + weight
        largest = torch.where(good, state["largest"], torch.minimum(state["largest"], 0.8 * size))
        found = (state["weights"] / state["sums"]) ** (1 / 6)
        found = torch.where(found.isfinite(), found, size)
        state["largest"], state["step_size"] = largest, torch.minimum(found, largest)

    def _measure(self, state: State, count: int) -> None:
        gap = state["position"] - state["mean"]
        state["mean"] += gap / (count + 1)
        state["spread"] += gap * (state["position"] - state["mean"])

    def _scale(self, state: State, count: int) -> None:
        """L = √(Σ variances); with scales, all variances are 1 and L = √P."""
        variances = state.pop("spread") / max(1, count - 1)
        del state["mean"]
        total = variances.sum(1, keepdim=True).sqrt().double()
        if self.precondition:
            least = 1e-6 * variances.mean(1, keepdim=True)
            state["scale"] = (variances + least).sqrt()
            unit = (total / math.sqrt(variances.shape[1])).clamp_min(1e-30)
            state["step_size"] = state["step_size"] / unit
            state["largest"] = state["largest"] / unit
            state["sums"], state["weights"] = state["sums"] * 0, state["weights"] * 0
            total = torch.ones_like(total) * math.sqrt(variances.shape[1])
        if self.length is None:
            state["length"] = total.clamp_min(1e-30)

    def statistics(self, state: State) -> dict[str, Tensor]:
        """Step size, length, divergences and energy variance per dimension of each chain."""
        steps = state["steps"].clamp_min(1)
        named = {n: state[n][:, 0].clone() for n in ("step_size", "length", "divergences")}
        share = state["divergences"] / steps
        if bool((share > 0.1).any()):
            raise ChainStuck(
                f"{float(share.max()):.0%} of the steps of a chain of microcanonical diverged: their energy "
                "jumps. Pass a smaller energy_variance or step_size, a longer warmup, or start= an ensemble "
                "of trained networks."
            )
        if bool((share > 0).any()):
            warn(
                f"{int(state['divergences'].sum())} steps of microcanonical diverged and were taken back, so "
                "the draws may miss regions of strong curvature. Pass a smaller energy_variance.",
                Divergences,
            )
        return {**named, "energy_variance": (state["energy"] / steps)[:, 0]}


def _particle(state: State) -> Particle:
    return Particle(*(state[name] for name in ("position", "direction", "value", "slope")))


def _like(mask: Tensor, value: Tensor) -> Tensor:
    return mask if value.dim() == 1 else mask[:, None]


@lists(**DEFAULTS)
@ordinary_tensors()
def microcanonical(
    network: nn.Module | Linearized,
    data: Data,
    likelihood: Likelihood,
    *,
    prior: WeightPrior | float | None = 1.0,
    temperature: float = 1.0,
    **options: Unpack[MicrocanonicalOptions],
) -> Posterior:
    """Draw networks from the posterior by microcanonical Langevin Monte Carlo.

    Parameters move at constant speed, θ̇ = u with ‖u‖ = 1, and the direction turns towards larger densities,
    u̇ = (I − uuᵀ) ∇ log p(θ)/(P − 1). The energy (P − 1) log‖v‖ − log p(θ) of the unscaled momentum v is then
    constant, and θ has the law p if the directions are mixed, which a small random turn after every step
    does: a direction is forgotten over the length L. There is no accept step. The step size ε is tuned so
    that the energy error of a step has the variance `energy_variance` per parameter, and L first from the
    variances of the parameters and then from their autocorrelations, for each chain by itself.

    With an ensemble as `start`, each of its networks starts a chain, and all chains run at once: a
    microcanonical Langevin ensemble. Cost of a step: two gradients on all data.

    Args:
        network: The network; its parameters are where chains start, unless `start` says otherwise.
        data: The training data, (x, y), a Dataset or a loader.
        likelihood: How targets follow the outputs; Gaussian noise must be given.
        prior: The prior of the parameters. A number is the variance of independent Gaussians, and None is a
            flat prior.
        temperature: Divides the log joint; less than 1 gives a cold posterior.
        energy_variance: The variance of the energy error of a step, divided by the number of parameters. The
            bias of the draws falls with it.
        step_size: The step size ε, or None to tune it.
        length: The length L over which directions are forgotten, or None to tune it.
        precondition: Whether to scale parameters by their standard deviations, as warmup measures them.
        integrator: "minimal_norm", or "leapfrog" with one gradient per step.
        chunk_size: The number of points whose gradients are computed together; None takes all.
        only: Chooses parameters by name pattern, as in `linearize`; the others stay fixed.
        output: Picks the tensor of outputs from what the network returns.
        start: A posterior whose networks start the chains, such as an ensemble; "network" or None for the
            network itself, "prior" for draws from the prior, or parameters by name with an axis of chains.
        num_draws: The number of draws of each chain.
        num_chains: The number of chains. None takes one per network of `start`, or 4 without it.
        warmup: The number of steps before the first draw.
        thin: The number of steps from one draw to the next.
        seed: The seed of all random numbers.
        vectorized: Whether chains share passes by vmap; False runs them one by one in less memory.
        checkpoint: A file to keep the chains in. A run that was killed goes on from it to the same draws.

    Returns:
        A posterior of the draws, those of the first chain first. `posterior.recipe.statistics` has the step
        size, length, divergences and energy variance of each chain.

    Raises:
        InputError: If an option is out of range, or data, prior or start do not fit the network.
        NetworkError: If the network has dropout or batch statistics in training mode.
        ChainStuck: If many steps of a chain diverge.

    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.ones(4, 2, dtype=torch.float64)
    >>> data = x, x[:, :1]
    >>> network = nn.Linear(2, 1).double()
    >>> posterior = microcanonical(network, data, Gaussian(noise_var=1.0), num_draws=50, warmup=100)
    >>> posterior.recipe.statistics["divergences"]
    tensor([0., 0., 0., 0.], dtype=torch.float64)

    References: Robnik, De Luca, Silverstein and Seljak, Microcanonical Hamiltonian Monte Carlo, JMLR 2023;
    Robnik and Seljak, Fluctuation without dissipation: microcanonical Langevin Monte Carlo, 2023; Sommer,
    Robnik, Nozadze, Seljak and Rügamer, Microcanonical Langevin ensembles, ICLR 2025.
    """
    check_known(options, MicrocanonicalOptions)
    chosen = {**DEFAULTS, **options}
    _check_options(chosen)
    setup = prepare("microcanonical", (network, data, likelihood), prior, temperature, chosen)
    if setup.start.shape[1] < 2:
        raise InputError(
            "microcanonical needs two parameters or more, since one number has no direction to turn. Use "
            "sghmc instead."
        )
    integrator = Integrator(setup.target.both, chosen["integrator"])
    names = ("energy_variance", "step_size", "length", "precondition")
    return run(setup, Microcanonical(setup, integrator, *(chosen[n] for n in names)), setup.walk())


def _check_options(chosen: dict[str, Any]) -> None:
    check_positive(chosen["energy_variance"], "energy_variance", single=True)
    for name in ("step_size", "length"):
        if chosen[name] is not None:
            check_positive(chosen[name], name, single=True)
            chosen[name] = float(chosen[name])
    if chosen["chunk_size"] is not None:
        check_count(chosen["chunk_size"], "chunk_size", example=1000)
    if not isinstance(chosen["integrator"], str) or chosen["integrator"] not in INTEGRATORS:
        raise InputError(
            f"integrator must be one of {', '.join(INTEGRATORS)}, but is "
            f"{chosen['integrator']!r} ({describe(chosen['integrator'])})."
        )
    check_count(chosen["warmup"], "warmup", zero=True, example=1000)
    if chosen["warmup"] < 40 and None in (chosen["step_size"], chosen["length"]):
        raise InputError(
            f"step size and length are tuned during warmup, which must be 40 steps or more, but is "
            f"{chosen['warmup']}. Pass for example warmup=1000, or both step_size= and length=."
        )
