"""How chains of one kind run: warmup, draws, checkpoints, and the posterior that comes out."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from net2gp.bayes.chains.adaptation import (
    SMALLEST_STEP,
    Array,
    Density,
    Metric,
    State,
    add_moments,
    average_step,
    learned_metric,
    reasonable_step,
    settle_step,
    start_averaging,
    start_moments,
)
from net2gp.bayes.chains.checkpoint import network_key, problem_key
from net2gp.bayes.chains.flat import FlatModel, flat_model
from net2gp.bayes.chains.options import Settings
from net2gp.bayes.chains.perceptrons import ArrayPerceptron, array_perceptron
from net2gp.bayes.chains.starts import starts
from net2gp.bayes.model.model import Model
from net2gp.bayes.model.prior import WeightPrior
from net2gp.errors import (
    ChainStuck,
    Divergences,
    InputError,
    NotAvailable,
    warn,
)
from net2gp.inputs import gather
from net2gp.linalg.checkpoint import Checkpoint
from net2gp.linear.linearized import Linearized
from net2gp.memory import check_memory
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.drawn import ByDrawing, drawn_posterior
from net2gp.posteriors.recipes.members import Members
from net2gp.progress import Advance, progress
from net2gp.types import Data, Likelihood

STUCK = 0.01
"""A chain that accepts less than this share of its proposals does not move."""


class Sampler(Protocol):
    """A kind of chain, as a transition of the arrays in a `State`.

    The state has `theta`, the last draw of each chain (K, P), and `step`, the step sizes (K,).
    """

    @property
    def name(self) -> str:
        """The name of the method."""

    @property
    def block(self) -> int:
        """How many transitions run between two looks at the clock."""

    def begin(self, state: State, density: Density, metric: Metric) -> None:
        """Prepare all chains to go on from `theta`."""

    def advance(self, state: State, density: Density, generator: torch.Generator) -> Array:
        """Do some work; return the chains that have a new draw in `draw.z`, with `draw.acceptance`."""

    def restart(self, state: State, ended: Array, generator: torch.Generator) -> None:
        """Let these chains start their next draw, with their new step sizes."""


@dataclass(frozen=True, eq=False)
class Run:
    """One run of chains: what is sampled, how, and with which settings."""

    flat: FlatModel
    sampler: Sampler
    settings: Settings
    prior: WeightPrior | None = field(repr=False)
    precise: bool = True
    arrays: ArrayPerceptron | None = field(default=None, repr=False)

    def draw(self) -> State:
        """Run all parts, from the checkpoint if there is one, and return the final state."""
        setup, checkpoint = self.settings, None
        generator = torch.Generator().manual_seed(setup.seed)
        state, part = None, 0
        if setup.checkpoint is not None:
            checkpoint = Checkpoint(
                Path(setup.checkpoint), self._key(), every_seconds=setup.checkpoint_seconds
            )
            checkpoint.check_writable()
            found = checkpoint.load("cpu")
            if found is not None:
                part = int(found[1]["part"])  # type: ignore[call-overload]
                generator.set_state(found[0].pop("generator"))
                state = {name: value.numpy() for name, value in found[0].items()}
        total = setup.num_chains * (setup.warmup + setup.num_draws)
        # a divergent trajectory overflows, and is rejected for it
        quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore")
        with progress(self.sampler.name, total) as advance, torch.no_grad(), quiet:
            if state is None:
                state = self._start(generator)
            for number in range(part, len(setup.parts)):
                self._part(state, number, generator, advance, checkpoint)
        if checkpoint is not None:
            self._write(checkpoint, state, len(setup.parts), generator)
        return state

    def _key(self) -> str:
        setup = {
            name: value
            for name, value in vars(self.settings).items()
            if not name.startswith("checkpoint") and name != "output"
        }
        if not isinstance(setup["start"], str | dict):
            setup["start"] = self._starts(torch.Generator().manual_seed(self.settings.seed))
        model = self.flat.model
        network = network_key(model.architecture, self.flat.data[0])
        return problem_key(
            self.sampler, setup, self.flat.data, model.params, network,
            model.prior, model.likelihood, model.temperature,
        )  # fmt: skip

    def _start(self, generator: torch.Generator) -> State:
        flat, setup = self.flat, self.settings
        theta = self._starts(generator).double().cpu().contiguous().numpy().copy()
        with flat.running():
            value, grad = self._density(theta)
        bad = ~(np.isfinite(value) & np.isfinite(grad).all(1))
        if bad.any():
            raise ChainStuck(
                f"the log joint or its gradient is not finite where chain {bad.argmax()} starts. "
                'Check the scale of the data and of the prior, or pass start="network".'
            )
        root = np.ones(flat.num_params)
        if flat.precision is not None:
            root = (flat.precision.rsqrt() * min(1.0, flat.model.temperature**0.5)).cpu().numpy()
        shape = (len(theta), setup.num_draws, flat.num_params)
        device = torch.device("cpu")
        check_memory(8 * math.prod(shape), device, f"{shape[:2]} draws", "a smaller num_draws=")
        state = {
            "theta": theta,
            "root": np.diag(root) if setup.mass == "dense" else root,
            "acceptance": np.zeros(len(theta)),
            "look": np.array([self._look()]),
            "draws": np.zeros(shape, dtype=np.float64 if self.precise else np.float32),
        }
        for name in ("count", "divergences", "gradients"):
            state[name] = np.zeros(len(theta), dtype=np.int64)
        return state

    def _look(self) -> float:
        """About how many gradients take as long as to look at all chains once, from sizes alone.

        The microseconds were measured for small perceptrons; a clock would make draws depend on the machine.
        """
        chains, rows = self.settings.num_chains, len(self.flat.data[1])
        numbers = chains * self.flat.num_params
        gradient = (20.0 if self.arrays is not None else 200.0) + 1e-3 * rows * numbers
        return (100.0 + 0.05 * numbers) / gradient

    def _density(self, theta: Array) -> tuple[Array, Array]:
        """The log joint and its gradient, with arrays in and out."""
        if self.arrays is not None:
            return self.arrays(theta)
        where = self.flat.data[1].device
        value, grad = self.flat(torch.from_numpy(theta).to(where))
        return value.cpu().numpy(), grad.cpu().numpy()

    def _starts(self, generator: torch.Generator) -> Tensor:
        model, start, count = self.flat.model, self.settings.start, self.settings.num_chains
        if isinstance(start, str) and start == "prior":
            # a prior that is flat somewhere has no draws, and leaves the network's own values
            with contextlib.suppress(NotAvailable):
                return starts(model, "network" if model.prior is None else start, count, generator)[
                    0
                ]
            start = "network"
        theta, fixed = starts(model, start, count, generator)
        if fixed:
            raise InputError(
                f"start has other values of '{next(iter(fixed))}', which {self.sampler.name} keeps as the "
                "network has them. Pass the network that start belongs to, or use sghmc or microcanonical."
            )
        return theta

    def _part(
        self,
        state: State,
        number: int,
        generator: torch.Generator,
        advance: Advance,
        checkpoint: Checkpoint | None,
    ) -> None:
        """Run one part of the warmup, or the draws, to its end."""
        length, learn = self.settings.parts[number]
        metric = Metric(state["root"])
        density = metric.density(self._density)
        if "part.begun" not in state:
            self._begin(state, number, density, metric, generator)
        while True:
            with self.flat.running():
                for _ in range(self.sampler.block):
                    ended = self.sampler.advance(state, density, generator)
                    if len(ended):
                        advance(self._take(state, ended, number, metric))
                        if int(state["count"].min()) >= length:
                            break
                        self.sampler.restart(state, ended, generator)
            if int(state["count"].min()) >= length:
                break
            if checkpoint is not None and checkpoint.due:
                self._write(checkpoint, state, number, generator)
        del state["part.begun"]
        if learn:
            state["root"] = learned_metric(state, metric).root

    def _begin(
        self,
        state: State,
        number: int,
        density: Density,
        metric: Metric,
        generator: torch.Generator,
    ) -> None:
        setup, chains = self.settings, self.settings.num_chains
        last = number == len(setup.parts) - 1
        state["part.begun"] = np.ones(1)
        state["count"][:] = 0
        if setup.step_size is not None:
            state["step"] = np.full(chains, float(setup.step_size))
        elif not last or setup.warmup == 0:
            first = state.get("step", np.full(chains, 0.1))
            with self.flat.running():
                step = reasonable_step(density, metric.locate(state["theta"]), generator, first)
            start_averaging(state, step)
        else:
            settle_step(state)
            _check_steps(state["step"])
        start_moments(state, setup.mass == "dense")
        if last:
            for name in ("divergences", "gradients", "acceptance"):
                state[name][:] = 0
        with self.flat.running():
            self.sampler.begin(state, density, metric)
        self.sampler.restart(state, np.arange(chains), generator)

    def _take(self, state: State, ended: Array, number: int, metric: Metric) -> int:
        """Record the draws of the chains that ended one, and adapt; return how many counted."""
        length, learn = self.settings.parts[number]
        last = number == len(self.settings.parts) - 1
        ended = ended[state["count"][ended] < length]
        if not len(ended):
            return 0
        theta, acceptance = metric.place(state["draw.z"][ended]), state["draw.acceptance"][ended]
        state["theta"][ended] = theta
        if last:
            state["draws"][ended, state["count"][ended]] = theta
            state["divergences"][ended] += state["draw.diverged"][ended]
            state["gradients"][ended] += state["draw.gradients"][ended]
            state["acceptance"][ended] += acceptance
        elif self.settings.step_size is None:
            average_step(state, ended, acceptance, self.settings.target_acceptance)
        if learn:
            add_moments(state, ended, theta, self.settings.mass == "dense")
        state["count"][ended] += 1
        return len(ended)

    def _write(
        self, checkpoint: Checkpoint, state: State, part: int, generator: torch.Generator
    ) -> None:
        tensors = {name: torch.from_numpy(value) for name, value in state.items()}
        checkpoint.write({**tensors, "generator": generator.get_state()}, {"part": part})


def _check_steps(step: Array) -> None:
    if (step < SMALLEST_STEP).any() or not np.isfinite(step).all():
        raise ChainStuck(
            f"the warmup left chain {step.argmin()} with a step size of {float(step.min()):.1e}, which "
            "moves nothing. Use more warmup, a less extreme noise variance, or another start."
        )


def sample(
    network: nn.Module | Linearized,
    data: Data,
    likelihood: Likelihood,
    prior: WeightPrior | float | None,
    temperature: float,
    sampler: Sampler,
    settings: Settings,
) -> Posterior:
    """Run chains of one kind and return the posterior that they drew.

    Raises:
        ChainStuck: If a chain cannot move.
    """
    model = Model.of(
        network, likelihood, prior,
        temperature=temperature, only=settings.only, output=settings.output,
    )  # fmt: skip
    pair = gather(data, model.architecture.example)
    flat, precise = flat_model(model, pair), model.architecture.example.dtype == torch.float64
    state = Run(flat, sampler, settings, model.prior, precise, array_perceptron(flat)).draw()
    statistics = {
        "divergences": torch.from_numpy(state["divergences"]),
        "acceptance": torch.from_numpy(state["acceptance"] / settings.num_draws),
        "step_size": torch.from_numpy(state["step"]),
        "gradients": torch.from_numpy(state["gradients"]),
    }
    _judge(statistics, settings)
    values = {
        name: value.to(model.params[name])
        for name, value in flat.unflatten(torch.from_numpy(state["draws"]).flatten(0, 1)).items()
    }
    recipe = ByDrawing(sampler.name, model.temperature, settings.num_chains, statistics)
    members = Members(model.architecture, values)
    return drawn_posterior(members, likelihood, pair, prior=model.prior, recipe=recipe)


def _judge(statistics: dict[str, Tensor], settings: Settings) -> None:
    """Raise if a chain did not move, and warn of divergences."""
    rate = statistics["acceptance"]
    if float(rate.min()) < STUCK:
        adapted = "Use more warmup, a larger target_acceptance, or another start."
        advice = adapted if settings.step_size is None else "Leave out step_size to adapt it."
        raise ChainStuck(
            f"chain {int(rate.argmin())} accepted {100 * float(rate.min()):.2g} % of its proposals, so it "
            f"did not move. {advice}"
        )
    count = int(statistics["divergences"].sum())
    if count:
        warn(
            f"{count} of {settings.num_chains * settings.num_draws} trajectories diverged, so some regions "
            "of the posterior may be missed. Raise target_acceptance (0.95, 0.99), use more warmup, or "
            'choose a prior with lighter tails; recipe.statistics["divergences"] counts them per chain.',
            Divergences,
        )
