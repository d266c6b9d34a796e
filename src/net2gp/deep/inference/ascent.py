"""The loop that climbs the bound, from several starts, and goes on where it was stopped."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.deep.inference.problem import DeepProblem, chosen_rows
from net2gp.deep.inference.settings import Ascent, Start
from net2gp.deep.inference.sigma_points import SigmaStack
from net2gp.deep.inference.stack import Batch, Stack
from net2gp.deep.inference.starts import MOST_ROWS, batch_of, initial, shallow_fit
from net2gp.errors import BoundFell, InputError
from net2gp.likelihoods.traits import has_gaussian_noise
from net2gp.linalg.checkpoint import Checkpoint
from net2gp.progress import progress

TRIAL_SHARE = 0.5
"""The share of the steps after which the best of several starts is chosen."""

MARGIN = 3.0
"""By how much the bound of a later start must be better: a factor of twenty in the evidence."""

SHORT_RATE = 0.1
"""The rate of the last layer where a single batch does not have its optimum."""

SETTLING = 20
"""The number of steps of the last layer alone at the end, in which its steps become shorter."""

Advance = Callable[..., None]


@dataclass(frozen=True)
class Found:
    """What a climb found.

    Args:
        stack: The layers.
        start: The name of the start.
        looks: The average bound between successive looks.
        num_steps: The number of steps.
    """

    stack: Stack
    start: str
    looks: tuple[float, ...]
    num_steps: int


class Climb:
    """One climb of the bound from one start.

    All random numbers of a step depend on the seed and the number of the step alone, so that the variables
    and the moments of Adam are the whole state.

    Args:
        problem: The data and the layers.
        stack: The layers at the start, which are changed.
        ascent: Settings.
        start: The name of the start.
        seed: The seed of batches and draws.
    """

    def __init__(
        self, problem: DeepProblem, stack: Stack, ascent: Ascent, start: str, seed: int
    ) -> None:
        self.problem, self.stack, self.ascent = problem, stack, ascent
        self.start, self.seed = start, seed
        self.natural_rate = natural_rate(problem, ascent)
        leaves = list(stack.leaves.values())
        self.optimizer = (
            torch.optim.Adam(leaves, lr=ascent.learning_rate, betas=(0.9, 0.99)) if leaves else None
        )
        self.step = 0
        self.looks: list[float] = []
        self.errors: list[float] = []
        self.window: list[float] = []
        self.stopped = False

    def batch(self, step: int) -> Batch:
        """The rows of a step: a part of a new order of all rows in every epoch."""
        size, count = self.ascent.batch_size, self.problem.num_rows
        if size is None or size >= count:
            return batch_of(self.problem, torch.arange(count, device=self.problem.x.device))
        epoch, part = divmod(step, count // size)
        order = torch.randperm(count, generator=_seeded(self.seed, epoch, 1))
        return batch_of(
            self.problem, order[part * size : (part + 1) * size].to(self.problem.x.device)
        )

    def climb(self, until: int, advance: Advance, keep: Callable[[], None]) -> None:
        """Take steps up to a number of them, or until there is no progress.

        Args:
            until: The number of steps in all.
            advance: Moves the progress bar.
            keep: Is called after every step, and may write a checkpoint.

        Raises:
            InputError: If the bound becomes infinite or NaN.
        """
        while self.step < until and not self.stopped:
            bound = self._one()
            self.window.append(bound)
            self.step += 1
            if len(self.window) == self.ascent.look_every or self.step == self.ascent.num_steps:
                self._look()
            keep()
            advance(note=f"bound {bound:.1f}")

    def _one(self) -> float:
        ascent = self.ascent
        rate = 1.0 if self.step == 0 else self.natural_rate
        generator = _seeded(self.seed, self.step, 0)
        estimate = self.stack.estimate(self.batch(self.step), ascent.num_samples, generator, rate)
        value = float(estimate.bound.detach())
        if not math.isfinite(value):
            raise InputError(
                f"the fit diverged: the bound is {value} after {self.step} steps. Pass a smaller "
                "learning_rate, as Ascent(learning_rate=0.01), or scale inputs and targets to variance 1."
            )
        if self.optimizer is not None:
            falling = 0.5 * (1 + math.cos(math.pi * self.step / ascent.num_steps))
            for group in self.optimizer.param_groups:
                group["lr"] = ascent.learning_rate * falling
            self.optimizer.zero_grad()
            (-estimate.bound / self.problem.num_rows).backward()
            self.optimizer.step()
        return value

    def _look(self) -> None:
        values = torch.tensor(self.window, dtype=torch.float64)
        self.looks.append(float(values.mean()))
        self.errors.append(float(values.std(correction=0)) / len(values) ** 0.5)
        self.window = []
        patience = self.ascent.patience
        if patience is not None and len(self.looks) > patience:
            self.stopped = max(self.looks[-patience:]) <= max(self.looks[:-patience])

    def settle(self) -> Found:
        """Let the last layer come to rest, and check that the bound has grown.

        Raises:
            BoundFell: If the bound is lower than at the start.
        """
        looks = self.looks
        with torch.no_grad():
            for k in range(SETTLING):
                rate = self.natural_rate / (1 + k * self.natural_rate)
                step = self.ascent.num_steps + k
                self.stack.estimate(
                    self.batch(step), self.ascent.num_samples, _seeded(self.seed, step, 0), rate
                )
        # The averages are estimates, so a fall counts if it is far beyond their errors.
        chance = 4 * (self.errors[0] + self.errors[-1]) + 0.01 * abs(looks[0]) + 1e-6
        if looks[-1] < looks[0] - chance:
            raise BoundFell(
                f"the bound fell from {looks[0]:.4g} to {looks[-1]:.4g} in {self.step} steps. Pass a smaller "
                "learning_rate, as Ascent(learning_rate=0.01), or more num_samples."
            )
        return Found(self.stack, self.start, tuple(looks), self.step)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """The state as tensors by name."""
        state = {"precision": self.stack.precision, "shift": self.stack.shift}
        for name, leaf in self.stack.leaves.items():
            state[f"leaf.{name}"] = leaf.detach()
            for part, value in (self.optimizer.state[leaf] if self.optimizer else {}).items():
                state[f"adam.{part}.{name}"] = value
        return {f"{prefix}.{name}": value for name, value in state.items()}

    def numbers(self) -> dict[str, object]:
        """The state as numbers."""
        return {
            "step": self.step,
            "looks": self.looks,
            "errors": self.errors,
            "window": self.window,
            "stopped": self.stopped,
        }

    def restore(self, prefix: str, tensors: dict[str, Tensor], numbers: dict[str, object]) -> None:
        """Go back to a state that was written."""
        own = {
            name.removeprefix(f"{prefix}."): value
            for name, value in tensors.items()
            if name.startswith(f"{prefix}.")
        }
        self.stack.precision, self.stack.shift = own["precision"], own["shift"]
        for name, leaf in self.stack.leaves.items():
            leaf.data.copy_(own[f"leaf.{name}"])
            parts = ("step", "exp_avg", "exp_avg_sq")
            if self.optimizer is not None and f"adam.step.{name}" in own:
                self.optimizer.state[leaf] = {p: own[f"adam.{p}.{name}"] for p in parts}
                self.optimizer.state[leaf]["step"] = own[f"adam.step.{name}"].cpu()
        for name, value in numbers.items():
            setattr(self, name, value)


def natural_rate(problem: DeepProblem, ascent: Ascent) -> float:
    """The share of the way to its optimum that the last layer goes in each step."""
    if ascent.natural_rate is not None:
        return ascent.natural_rate
    all_rows = ascent.batch_size is None or ascent.batch_size >= problem.num_rows
    return 1.0 if all_rows and has_gaussian_noise(problem.likelihood) else SHORT_RATE


def _seeded(seed: int, step: int, kind: int) -> torch.Generator:
    """A generator for one step. The factors keep the streams of different steps and kinds apart."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step) * 2 + kind)


def climb_all(problem: DeepProblem, ascent: Ascent, checkpoint: Checkpoint | None) -> Found:
    """Try all starts, and follow the best of them to the end.

    Args:
        problem: The data and the layers.
        ascent: Settings.
        checkpoint: Where the state is kept, or None.

    Returns:
        The layers at the end.
    """
    climbs = _climbs(problem, ascent)
    trial = ascent.num_steps if len(climbs) == 1 else math.ceil(TRIAL_SHARE * ascent.num_steps)
    trial = max(trial, min(ascent.num_steps, ascent.look_every))
    _restore(climbs, checkpoint)

    def keep(now: bool = False) -> None:
        if checkpoint is not None and (now or checkpoint.due):
            parts = [climb.tensors(f"{i}") for i, climb in enumerate(climbs)]
            numbers: dict[str, object] = {f"{i}": climb.numbers() for i, climb in enumerate(climbs)}
            checkpoint.write({k: v for part in parts for k, v in part.items()}, numbers)

    total = trial * len(climbs) + ascent.num_steps - trial
    with progress("deep Gaussian process", total) as advance:
        for climb in climbs:
            climb.climb(trial, advance, keep)
        best = _best(climbs, trial)
        best.climb(ascent.num_steps, advance, keep)
    keep(now=True)
    return best.settle()


def _best(climbs: list[Climb], trial: int) -> Climb:
    """The first climb, unless a later one is clearly better at the end of the trial."""
    best = climbs[0]
    for climb in climbs[1:]:
        if _after(climb, trial) > _after(best, trial) + MARGIN:
            best = climb
    return best


def _after(climb: Climb, trial: int) -> float:
    """The average bound before the last look of the trial."""
    count = min(len(climb.looks), max(1, trial // climb.ascent.look_every))
    return climb.looks[count - 1]


def _climbs(problem: DeepProblem, ascent: Ascent) -> list[Climb]:
    generator = torch.Generator().manual_seed(ascent.seed)
    rows = chosen_rows(problem.x, MOST_ROWS, generator)
    shallow = shallow_fit(problem, rows, ascent)
    starts: tuple[Start, ...] = ascent.starts if len(problem.layers) > 1 else ("linear",)
    pairs = [(start, k) for k in range(ascent.num_restarts) for start in starts]
    climbs = []
    for start, k in pairs:
        seed = ascent.seed + 7919 * k
        stack = initial(problem, shallow, rows, start, ascent, seed)
        if ascent.objective == "predictive":
            count, weight = ascent.num_samples, ascent.divergence_weight
            stack = SigmaStack.like(stack, problem, count, weight)
        climbs.append(Climb(problem, stack, ascent, start, seed))
    return climbs


def _restore(climbs: list[Climb], checkpoint: Checkpoint | None) -> None:
    known = None if checkpoint is None else checkpoint.load("cpu")
    if known is None:
        return
    tensors, numbers = known
    for index, climb in enumerate(climbs):
        device = climb.problem.x.device
        moved = {name: value.to(device) for name, value in tensors.items()}
        own = numbers[f"{index}"]
        assert isinstance(own, dict)
        climb.restore(f"{index}", moved, own)
