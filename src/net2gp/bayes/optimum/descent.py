"""The training loop of one or several networks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from net2gp.bayes.optimum.objective import (
    Batch,
    Noise,
    Objective,
    Shrinkage,
    evaluate,
    log_prior,
    score,
)
from net2gp.bayes.optimum.settings import Training
from net2gp.bayes.optimum.teams import Team
from net2gp.errors import InputError
from net2gp.progress import progress
from net2gp.types import Params

NOISE_DECAY = 0.9
"""The share of the old average of squared residuals that a batch leaves."""

Visit = Callable[[Team, int], None]
"""What is called with the networks after each step, and the number of steps so far."""


@dataclass(frozen=True, eq=False)
class Optimum:
    """What the training of S networks found.

    Args:
        state: Parameters and buffers by name, with an axis of length S in front.
        noise: The variance of the noise of each network, (S,), if it was open.
        statistics: "log_joint" of all training rows at the end, "steps" until the parameters that were kept,
            and "held_out_loss", the mean negative log density of the held-out rows: (S,) each.
    """

    state: Params
    noise: Tensor | None
    statistics: dict[str, Tensor] = field(default_factory=dict)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global random state of CPU and device within this context, and restore it afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        # torch.manual_seed would seed all other devices too
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def descend(
    team: Team,
    objective: Objective,
    training: Training,
    seeds: Sequence[int],
    *,
    held: Objective | None = None,
    visit: Visit | None = None,
) -> Optimum:
    """Train networks, each on its own batches.

    Args:
        team: The networks, which are changed.
        objective: What they minimize.
        training: How.
        seeds: The seed of each network.
        held: The rows for early stopping, with their likelihood.
        visit: Is called after each step.

    Returns:
        The parameters at the end, or with held-out rows at the best look at them.

    Raises:
        InputError: If the objective becomes infinite or NaN.
    """
    with seeded(seeds[0], team.leaves[0].device), torch.inference_mode(False), torch.enable_grad():
        looks = Looks(team, objective, training, held)
        _steps(team, objective, training, seeds, looks, visit)
        return looks.optimum()


def _steps(
    team: Team,
    objective: Objective,
    training: Training,
    seeds: Sequence[int],
    looks: Looks,
    visit: Visit | None,
) -> None:
    stepper = Stepper(team, objective, training)
    schedule = training.make_schedule(stepper.optimizer)
    by_loss = isinstance(schedule, ReduceLROnPlateau)
    if by_loss and looks.held is None:
        raise InputError(
            "ReduceLROnPlateau follows the loss of held-out rows, but there are none. Pass for example "
            "Training(schedule=..., held_out=0.1)."
        )
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    batches = objective.batches(training.batch_size, generators)
    with progress("training", training.num_steps) as advance:
        for step in range(1, training.num_steps + 1):
            value = stepper.step(next(batches))
            looks.step = step
            if schedule is not None and not by_loss:
                schedule.step()
            if visit is not None:
                visit(team, step)
            note = ""
            if step % training.look_every == 0 or step == training.num_steps:
                _check(value, step)
                note = f"loss {float(value.mean()):.3g}"
                if looks.look(schedule if by_loss else None):
                    return
            advance(note=note)


class Stepper:
    """The steps of an optimizer on the objective, with the variance of open noise.

    Args:
        team: The networks.
        objective: What they minimize.
        training: How.
    """

    def __init__(self, team: Team, objective: Objective, training: Training) -> None:
        self.team, self.objective = team, objective
        self.optimizer = training.make_optimizer(team.leaves)
        self.shrinkage = Shrinkage(team, objective)
        self.noise: Noise | None = None
        if objective.learns:
            all_rows = (training.batch_size or math.inf) >= objective.num_rows
            self.noise = Noise(objective.least_noise, 0.0 if all_rows else NOISE_DECAY)

    def step(self, batch: Batch) -> Tensor:
        """Take one step on a batch; return the objective of each network before it, (S,)."""
        self.batch, self.first = batch, cast(Tensor | None, None)
        if self.noise is not None:
            self.noise.frozen = False
        # mypy takes the closure of an optimizer to return a float
        self.optimizer.step(cast(Any, self.closure))
        assert self.first is not None
        return self.first

    def closure(self) -> Tensor:
        """Compute the objective and its gradient; some optimizers ask for it several times per step."""
        self.optimizer.zero_grad()
        value = self.objective.backward(self.team, self.batch, self.noise)
        value = value + self.shrinkage.backward()
        self.first = value if self.first is None else self.first
        return value.sum()


def _check(value: Tensor, step: int) -> None:
    wrong = (~value.isfinite()).nonzero().flatten().tolist()
    if wrong:
        which = f" of networks {wrong}" if len(value) > 1 else ""
        raise InputError(
            f"the training diverged: the objective{which} is not finite after {step} steps. Pass a smaller "
            "learning rate, as Training(learning_rate=0.001), or scale inputs and targets to variance 1."
        )


class Looks:
    """The looks at held-out rows, and the best parameters of each network so far.

    Args:
        team: The networks.
        objective: What they minimize.
        training: How they are trained.
        held: The held-out rows, or None.
    """

    def __init__(
        self,
        team: Team,
        objective: Objective,
        training: Training,
        held: Objective | None,
    ) -> None:
        self.team, self.objective, self.training, self.held = team, objective, training, held
        self.step = 0
        like = team.leaves[0]
        self.least = like.new_full((len(team),), math.inf)
        self.waited = torch.zeros(len(team), dtype=torch.long, device=like.device)
        self.steps = torch.zeros_like(self.waited)
        self.best: Params | None = None

    def look(self, schedule: Any) -> bool:
        """Compare the held-out loss with the best so far; return whether all networks are to stop."""
        if self.held is None:
            return False
        loss = self._held_loss()[0]
        if schedule is not None:
            schedule.step(float(loss.mean()))
        going = self.waited < self.training.patience
        better = going & (loss < self.least)
        self.least = torch.where(better, loss, self.least)
        self.waited = torch.where(better, 0, self.waited + going)
        self.steps = torch.where(better, self.step, self.steps)
        state = self.team.state()
        self.best = state if self.best is None else _chosen(better, state, self.best)
        return bool((self.waited >= self.training.patience).all())

    def _held_loss(self) -> tuple[Tensor, Tensor | None]:
        assert self.held is not None
        f = evaluate(self.team, self.held.x, self.training.batch_size)
        total, noise = score(self.held, f)
        return -total / self.held.num_rows, noise

    @torch.no_grad()
    def optimum(self) -> Optimum:
        """The best parameters, or the last without held-out rows, with the noise and log joint there."""
        if self.best is not None:
            self.team.load(self.best)
        objective = self.objective
        f = evaluate(self.team, objective.x, self.training.batch_size)
        found, noise = score(objective, f)
        statistics = {"steps": torch.full_like(self.steps, self.step)}
        if self.held is not None:
            loss, noise = self._held_loss()
            statistics = {"steps": self.steps, "held_out_loss": loss}
            found = objective.log_likelihood(f, noise)
        if objective.prior is not None:
            found = found + log_prior(objective.prior, self.team.params)
        return Optimum(self.team.state(), noise, {"log_joint": found, **statistics})


def _chosen(which: Tensor, one: Params, other: Params) -> Params:
    """The values of `one` for the networks of `which`, (S,), and of `other` for the rest."""
    return {
        name: torch.where(which.reshape(-1, *[1] * (value.dim() - 1)), value, other[name])
        for name, value in one.items()
    }
