"""What chains without an accept step share: options, schedules, starts, checkpoints and their loop."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor, nn

from net2gp.bayes.chains.checkpoint import (
    network_key,
    problem_key,
    read_checkpoint,
    write_checkpoint,
)
from net2gp.bayes.chains.langevin.targets import Minibatches, Target
from net2gp.bayes.chains.starts import Start, count_chains, starts
from net2gp.bayes.model.model import Model, architecture_of
from net2gp.bayes.model.prior import WeightPrior
from net2gp.errors import ChainStuck, InputError, check_count, check_flag, check_seed
from net2gp.inputs import gather
from net2gp.linalg.checkpoint import Checkpoint, check_path
from net2gp.linear.linearized import Linearized, Output, Patterns
from net2gp.memory import check_memory
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.drawn import ByDrawing, drawn_posterior
from net2gp.posteriors.recipes.members import Members
from net2gp.progress import progress
from net2gp.types import Data, Likelihood

BLOCK = 64
"""Steps between two checks for divergence; other threads can use the network between blocks."""

SAVE_EVERY = 1000
"""Steps between two checkpoints."""

State = dict[str, Tensor]
"""What a chain remembers between steps, by name; "position" is (C, P)."""


class Options(TypedDict, total=False):
    """What all chains of this kind take: see `sgld`."""

    only: Patterns | None
    output: Output | None
    start: Start
    num_draws: int
    num_chains: int | None
    warmup: int
    thin: int
    seed: int
    vectorized: bool
    checkpoint: str | os.PathLike | None


DEFAULTS: dict[str, Any] = {
    "only": None,
    "output": None,
    "start": None,
    "num_draws": 1000,
    "num_chains": None,
    "warmup": 1000,
    "thin": 1,
    "seed": 0,
    "vectorized": True,
    "checkpoint": None,
}
"""The defaults of `Options`."""


@dataclass(frozen=True)
class Plan:
    """Which steps are for warmup and which give draws.

    Args:
        num_draws: The number of draws of each chain.
        warmup: The number of steps without draws, at the start of each cycle.
        thin: The number of steps from one draw to the next.
        num_cycles: The number of cosine cycles of the step size, or None for a constant step size.
    """

    num_draws: int
    warmup: int
    thin: int
    num_cycles: int | None = None

    def __post_init__(self) -> None:
        check_count(self.num_draws, "num_draws", example=1000)
        check_count(self.warmup, "warmup", zero=True, example=1000)
        check_count(self.thin, "thin")
        if self.num_cycles is None:
            return
        check_count(self.num_cycles, "num_cycles", example=4)
        if self.num_draws % self.num_cycles:
            near = max(1, self.num_draws // self.num_cycles) * self.num_cycles
            raise InputError(
                f"num_draws must be a multiple of num_cycles={self.num_cycles}, since each cycle gives "
                f"equally many, but is {self.num_draws}. Pass for example num_draws={near}."
            )

    @property
    def cycle(self) -> int:
        """The number of steps of a cycle."""
        return self.warmup + self.num_draws // (self.num_cycles or 1) * self.thin

    @property
    def total(self) -> int:
        """The number of all steps."""
        return self.cycle * (self.num_cycles or 1)

    def warming(self, step: int) -> bool:
        """Whether a step is before the draws of its cycle."""
        return step % self.cycle < self.warmup

    def keeps(self, step: int) -> bool:
        """Whether the position after a step is a draw."""
        late = step % self.cycle - self.warmup + 1
        return late > 0 and late % self.thin == 0

    def scale(self, step: int) -> float:
        """The factor of the step size: 1, or ½(1 + cos(π k/K)) at step k of a cycle of K steps."""
        if self.num_cycles is None:
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * (step % self.cycle) / self.cycle))

    def quiet(self, step: int) -> bool:
        """Whether a step has no noise: in the first part of a cycle, which looks for a new mode."""
        return self.num_cycles is not None and self.warming(step)


class Walk:
    """The chains while they run: their state, their random numbers and their minibatches.

    Args:
        state: What the dynamics remember.
        generator: The generator of the noise, on the device of the chains.
        batches: The minibatches.
    """

    def __init__(self, state: State, generator: torch.Generator, batches: Minibatches) -> None:
        self.state, self.generator, self.batches = state, generator, batches

    def noise(self) -> Tensor:
        """Standard normal numbers for every parameter of every chain: (C, P)."""
        like = self.state["position"]
        return torch.randn(
            like.shape, dtype=like.dtype, device=like.device, generator=self.generator
        )

    def tensors(self) -> State:
        """All that a checkpoint keeps."""
        return {
            **self.state,
            "random": self.generator.get_state(),
            "random_batches": self.batches.generator.get_state(),
            "order": self.batches.order,
        }

    def restore(self, tensors: State, place: int) -> None:
        """Go on from what `tensors` returned."""
        own = dict(tensors)
        self.generator.set_state(own.pop("random").cpu())
        self.batches.generator.set_state(own.pop("random_batches").cpu())
        self.batches.order, self.batches.place = own.pop("order").cpu(), place
        self.state = own


class Dynamics(Protocol):
    """How chains move."""

    def begin(self, walk: Walk) -> None:
        """Add what the dynamics remember to the state, which has the positions."""

    def step(self, walk: Walk, step: int) -> None:
        """Move all chains by one step."""

    def statistics(self, state: State) -> dict[str, Tensor]:
        """What the posterior reports, one entry per chain."""


@dataclass(frozen=True, eq=False)
class Setup:
    """A run of chains before its first step.

    Args:
        method: The name of the method.
        target: The density.
        start: Where the chains start: (C, P).
        plan: The numbers of steps.
        seed: The seed of all random numbers.
        checkpoint: The file of the checkpoint, or None.
        own: Options of the method, which a checkpoint must agree with.
    """

    method: str
    target: Target
    start: Tensor = field(repr=False)
    plan: Plan
    seed: int = 0
    checkpoint: str | os.PathLike | None = None
    own: dict[str, Any] = field(default_factory=dict)

    def walk(self, batch_size: int | None = None, *, independent: bool = False) -> Walk:
        """The chains at their start."""
        noise = torch.Generator(self.start.device).manual_seed(self.seed)
        shuffle = torch.Generator().manual_seed(self.seed + 1)
        count = self.target.num_data
        batches = Minibatches(count, batch_size, len(self.start), shuffle, independent=independent)
        return Walk({"position": self.start.clone()}, noise, batches)

    @property
    def key(self) -> str:
        """What a checkpoint must agree with to be continued."""
        model = self.target.model
        network = network_key(model.architecture, self.target.data[0])
        parts = (self.method, self.start, self.target.data, model.likelihood, model.prior)
        options = (model.temperature, self.plan, self.seed, self.own)
        return problem_key(*parts, network, self.target.fixed, *options)


def prepare(
    method: str,
    problem: tuple[nn.Module | Linearized, Data, Likelihood],
    prior: WeightPrior | float | None,
    temperature: float,
    options: Any,
) -> Setup:
    """Check what a method was given, and put it together.

    Args:
        method: The name of the method.
        problem: The network, data and likelihood.
        prior: The prior of the parameters.
        temperature: Divides the log joint.
        options: The options that were passed.

    Returns:
        The run before its first step.

    Raises:
        InputError: If an option is out of range or does not fit the network.
    """
    network, data, likelihood = problem
    chosen = {**DEFAULTS, **options}
    steps = {name: chosen[name] for name in ("num_draws", "warmup", "thin")}
    plan = Plan(**steps, num_cycles=chosen.get("num_cycles"))
    check_seed(chosen["seed"])
    check_path(chosen["checkpoint"])
    for name in ("vectorized", "precondition", "gradient_noise"):
        check_flag(chosen.get(name, False), name)
    chosen["num_chains"] = count_chains(chosen["num_chains"], chosen["start"])
    if not isinstance(network, Linearized):
        network = architecture_of(network, chosen["only"], chosen["output"])
    x, y = gather(data, network.example)
    network.check(x)
    model = Model.of(network, likelihood, prior, temperature=temperature)
    generator = torch.Generator(network.example.device).manual_seed(chosen["seed"])
    start, fixed = starts(model, chosen["start"], chosen["num_chains"], generator)
    target = Target(model, (x, y), fixed, chosen["vectorized"], chosen.get("chunk_size"))
    own = {n: v for n, v in chosen.items() if n not in ("only", "output", "start", "checkpoint")}
    return Setup(
        *(method, target.checked(start), start, plan),
        *(chosen["seed"], chosen["checkpoint"], own),
    )


def run(setup: Setup, dynamics: Dynamics, walk: Walk) -> Posterior:
    """Run the chains, from a checkpoint if there is one.

    Args:
        setup: The run.
        dynamics: How the chains move.
        walk: The chains at their start.

    Returns:
        The draws as a posterior.

    Raises:
        ChainStuck: If a chain leaves the region where its step size is stable.
    """
    plan, start = setup.plan, setup.start
    shape = (len(start), plan.num_draws, start.shape[1])
    size = math.prod(shape) * start.element_size()
    check_memory(
        size, start.device, f"{shape[:2]} draws", "a larger thin= with a smaller num_draws="
    )
    draws, step, count = start.new_empty(shape), 0, 0
    with torch.no_grad():
        with setup.target.ready():
            dynamics.begin(walk)
        limit = _limit(setup, walk)
        found = None
        if setup.checkpoint is not None:
            Checkpoint(Path(setup.checkpoint)).check_writable()
            found = read_checkpoint(setup.checkpoint, key=setup.key, device=start.device)
        if found is not None:
            tensors, meta = found
            step, count = meta["step"], meta["count"]
            draws[:, :count] = tensors.pop("draws")
            walk.restore(tensors, meta["place"])
        with progress(setup.method, plan.total) as advance:
            advance(step)
            while step < plan.total:
                end = min(plan.total, step + BLOCK)
                with setup.target.ready():
                    for now in range(step, end):
                        dynamics.step(walk, now)
                        if plan.keeps(now):
                            draws[:, count] = walk.state["position"]
                            count += 1
                _check(setup, walk, limit, end)
                if setup.checkpoint is not None and (end // SAVE_EVERY > step // SAVE_EVERY):
                    _save(setup, walk, draws[:, :count], end)
                advance(end - step)
                step = end
    if setup.checkpoint is not None:
        _save(setup, walk, draws, step)
    return _posterior(setup, draws, dynamics.statistics(walk.state))


def _save(setup: Setup, walk: Walk, draws: Tensor, step: int) -> None:
    assert setup.checkpoint is not None
    tensors = {**walk.tensors(), "draws": draws}
    meta = {"step": step, "count": draws.shape[1], "place": walk.batches.place}
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    write_checkpoint(setup.checkpoint, tensors, meta, key=setup.key)


def _limit(setup: Setup, walk: Walk) -> Tensor:
    """The log joints below which chains are lost: far below their start and all that warmth explains."""
    value = walk.state.get("value")
    if value is None:
        return setup.start.new_full((len(setup.start),), -math.inf)
    return value - 100 * (value.abs() + setup.start.shape[1]) - 1000


def _check(setup: Setup, walk: Walk, limit: Tensor, step: int) -> None:
    good = walk.state["position"].isfinite().all(1)
    if "value" in walk.state:
        good &= walk.state["value"] >= limit
    if not bool(good.all()):
        lost = (~good).nonzero()[:, 0].tolist()
        raise ChainStuck(
            f"{len(lost)} of {len(good)} chains of {setup.method} diverged before step {step} (chains "
            f"{', '.join(map(str, lost[:8]))}): their parameters or energies grow without bound. Pass a "
            "smaller step_size, a tenth of the present one, or start at a trained network."
        )


def _posterior(setup: Setup, draws: Tensor, statistics: dict[str, Tensor]) -> Posterior:
    network = setup.target.model.architecture
    pieces = draws.flatten(0, 1).split([v.numel() for v in network.params.values()], 1)
    values = {
        name: piece.reshape(-1, *own.shape)
        for (name, own), piece in zip(network.params.items(), pieces, strict=True)
    }
    for name, value in setup.target.fixed.items():
        values[name] = value.repeat_interleave(draws.shape[1], 0)
    model = setup.target.model
    recipe = ByDrawing(setup.method, model.temperature, len(draws), statistics)
    members = Members(network, values)
    return drawn_posterior(
        members, model.likelihood, setup.target.data, prior=model.prior, recipe=recipe
    )
