"""The loop that climbs the bound, and goes on where it was stopped."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from net2gp.deep.inference.problem import DeepProblem, in_batches
from net2gp.deep.inference.settings import Ascent
from net2gp.deep.inference.sigma_points import SigmaStack
from net2gp.deep.inference.stack import Stack
from net2gp.deep.inference.starts import batch_of
from net2gp.deep.inference.steps.adam import FACTOR, STATE, adam, set_rate
from net2gp.deep.inference.steps.closing import close
from net2gp.deep.inference.steps.held_out import hold_out
from net2gp.deep.inference.steps.rates import falling, is_noisy, natural_rate
from net2gp.deep.inference.steps.recording import Recorder
from net2gp.deep.inference.steps.relevances import relevance_penalty
from net2gp.errors import BoundFell, InputError
from net2gp.likelihoods.traits import has_gaussian_noise

SETTLING = 20
"""The number of steps of the last layer alone at the end, in which its steps become shorter, unless its
optimum is known in closed form."""

COLLAPSE, CAUTION = 5.0, 1 / 64
"""By how many nats per row the average bound may fall below the best one before the steps since the last look
are taken back and repeated with half of their length, and the least part of it that is tried."""

BOUND_DRAWS = 2
"""The number of draws per row while the bound is climbed before the objective "predictive"."""

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
        turn: The step before which the bound is climbed, and from which on the objective "predictive" is;
            None if there is one objective for all steps.
    """

    def __init__(
        self,
        problem: DeepProblem,
        stack: Stack,
        ascent: Ascent,
        start: str,
        seed: int,
        turn: int | None = None,
    ) -> None:
        self.problem, self.stack, self.ascent = problem, stack, ascent
        self.start, self.seed = start, seed
        self.turn, self.turned = turn, False
        self.origin: tuple[float, dict[str, Tensor]] | None = None
        self.order: tuple[int, Tensor] = (-1, torch.empty(0))
        self.optimizer = self._adam()
        self.step = 0
        self.looks: list[float] = []
        self.errors: list[float] = []
        self.window: list[Tensor] = []
        self.flattered, self.stopped, self.caution = 0, False, 1.0
        self.noisy, self.whole = is_noisy(problem, stack.likelihood), True
        self.held_out = hold_out(problem, ascent, seed)
        self.take = Recorder(self._plain, stack, ascent.look_every + 1)
        self.safe: tuple[int, dict[str, Tensor]] = (0, {})

    def rows(self, step: int) -> Tensor:
        """The rows of a step: a part of a new order of all rows in every epoch."""
        size, used = self.ascent.batch_size, self._used()
        count = len(used)
        if size is None or size >= count:
            return used
        epoch, part = divmod(step, count // size)
        if self.order[0] != epoch:
            order = torch.randperm(count, generator=_seeded(self.seed, epoch, 1))
            self.order = (epoch, used[order.to(used.device)])
        return self.order[1][part * size : (part + 1) * size]

    def _used(self) -> Tensor:
        """The rows that are not kept back."""
        if self.held_out is not None:
            return self.held_out.others
        return torch.arange(self.problem.num_rows, device=self.problem.x.device)

    def climb(self, until: int, advance: Advance, keep: Callable[[], None]) -> None:
        """Take steps up to a number of them, or until there is no progress.

        Args:
            until: The number of steps in all.
            advance: Moves the progress bar.
            keep: Is called after every step, and may write a checkpoint.

        Raises:
            InputError: If the bound becomes infinite or NaN.
        """
        note = ""
        while self.step < until and not self.stopped:
            if self.step == self.turn and not self.turned:
                if self.window and not self._look():
                    continue
                self._end_of_bound()
            self.window.append(self._one())
            if not self.problem.x.is_cuda:
                note = f"bound {self._checked(self.window[-1:])[0]:.1f}"
            self.step += 1
            if len(self.window) == self.ascent.look_every or self.step == self.ascent.num_steps:
                if not self._look():
                    continue
                note = f"bound {self.looks[-1]:.1f}"
            keep()
            advance(note=note)
        self.take.rest()

    def _adam(self) -> torch.optim.Optimizer | None:
        quick = in_batches(self.problem, self.ascent) or self.ascent.objective == "predictive"
        return adam(self.stack, self.ascent.learning_rate, FACTOR if quick else 1.0)

    def _end_of_bound(self) -> None:
        """Go on with the objective "predictive", from the fit by the bound."""
        if has_gaussian_noise(self.problem.likelihood):
            close(self.problem, self.stack, BOUND_DRAWS, self.seed, self._used())
        self._make_points()
        leaves = {name: leaf.detach().clone() for name, leaf in self.stack.leaves.items()}
        self.origin = (self._objective(), leaves)
        if self.held_out is not None:
            self.held_out.look(self.problem, self.stack)

    @torch.no_grad()
    def _objective(self) -> float:
        """The objective "predictive" for all rows that are not kept back."""
        batch = batch_of(self.problem, self._used())
        return float(self.stack.estimate(batch, 1, torch.Generator()).bound)

    def _make_points(self) -> None:
        """Replace the draws through the layers by sigma points."""
        count, weight = self.ascent.num_samples, self.ascent.divergence_weight
        self.stack = SigmaStack.like(self.stack, count, weight, keeps_last=True)
        self.optimizer, possible = self._adam(), self.take.possible
        self.take = Recorder(self._plain, self.stack, self.ascent.look_every + 1)
        self.take.possible &= possible
        self.flattered, self.turned, self.caution = len(self.looks), True, 1.0

    def _share(self, step: int) -> float:
        """The share of the steps with the present objective that were taken before a step."""
        first, last = 0, self.ascent.num_steps
        if self.turn is not None:
            first, last = (self.turn, last) if self.turned else (0, self.turn)
        return (step - first) / max(1, last - first)

    def _rate(self, share: float) -> float:
        """The share of the way to its optimum that the last layer goes."""
        return natural_rate(self.problem, self.ascent, share, noisy=self.noisy)

    def _one(self) -> Tensor:
        """Take one step, and return the bound before the step of all but the last layer."""
        share = self._share(self.step)
        if self.optimizer is not None:
            short = self.caution * falling(share)
            set_rate(self.optimizer, self.ascent.learning_rate * short)
        if not self.window:
            self._keep_safe()
        rate = self._rate(share)
        rate = rate if rate == 1.0 else self.caution * rate
        generator = _seeded(self.seed, self.step, 0)
        return self.take(self.step, self.rows(self.step), generator, rate)

    def _plain(self, rows: Tensor, generator: torch.Generator, rate: float | Tensor) -> Tensor:
        batch = batch_of(self.problem, rows)
        before = self.turn is not None and not self.turned
        draws = BOUND_DRAWS if before else self.ascent.num_samples
        estimate = self.stack.estimate(batch, draws, generator, rate)
        if self.optimizer is not None:
            self.optimizer.zero_grad()
            prior = relevance_penalty(self.problem, self.stack)
            ((prior - estimate.bound) / self.problem.num_rows).backward()
            self.optimizer.step()
            self.stack.confine()
        return estimate.bound.detach()

    def _checked(self, bounds: list[Tensor]) -> list[float]:
        values = torch.stack(bounds).tolist()
        wrong = [value for value in values if not math.isfinite(value)]
        if wrong:
            raise InputError(
                f"the fit diverged: the bound is {wrong[0]} after {self.step} steps. Pass a smaller "
                "learning_rate, as Ascent(learning_rate=0.01), or scale inputs and targets to variance 1."
            )
        return values

    def _look(self) -> bool:
        """Look at the average bound, and return whether the steps since the last look are good."""
        first = self.step - len(self.window)
        found = torch.stack(self.window)
        if self.take.recording is not None and not bool(found.isfinite().all()):
            # more jitter may help, which only a step that looks at its matrices can choose
            self.take.stop()
            self._go_back()
            return False
        values = torch.tensor(self._checked(self.window), dtype=torch.float64)
        if self._collapsed(float(values.mean())) and self.caution > CAUTION:
            self.take.rest()
            self._go_back()
            self.caution /= 2
            return False
        self.looks.append(float(values.mean()))
        self.errors.append(_error(values))
        self.window = []
        if self.held_out is not None and isinstance(self.stack, SigmaStack):
            self.held_out.look(self.problem, self.stack)
        # a last layer that knows its batch has larger bounds, which are not compared with others
        whole = self._rate(self._share(max(1, first))) == 1.0
        if whole and self.noisy and in_batches(self.problem, self.ascent):
            self.flattered = len(self.looks)
        elif whole != self.whole:
            self.flattered = len(self.looks) - 1
        self.whole = whole
        self.noisy = is_noisy(self.problem, self.stack.likelihood)
        patience, looks = self.ascent.patience, self.looks[self.flattered :]
        early = self.turn is not None and not self.turned
        if patience is not None and len(looks) > patience and not early:
            self.stopped = max(looks[-patience:]) <= max(looks[:-patience])
        return True

    def _collapsed(self, value: float) -> bool:
        """Whether an average bound is far below the best one, by more than twice what was gained so far."""
        looks = self.looks[self.flattered :]
        looks = looks if self.origin is None else [self.origin[0], *looks]
        if not looks:
            return False
        lost, gained = max(looks) - value, max(looks) - looks[0]
        return lost > max(COLLAPSE * self.problem.num_rows, 2 * gained)

    def _keep_safe(self) -> None:
        self.safe = (self.step, {name: value.clone() for name, value in self._state().items()})

    def _go_back(self) -> None:
        """Take the steps since the last look back."""
        self.step, self.window = self.safe[0], []
        self._load(self.safe[1])

    def settle(self) -> Found:
        """Let the last layer come to rest, and check that the bound has grown.

        Raises:
            BoundFell: If the bound is lower than at the start.
        """
        if has_gaussian_noise(self.problem.likelihood) and self.ascent.objective == "bound":
            close(self.problem, self.stack, self.ascent.num_samples, self.seed, self._used())
        elif self.ascent.objective == "bound":
            self._rest()
        looks, errors = self.looks[self.flattered :], self.errors[self.flattered :]
        # The averages are estimates, so a fall counts if it is far beyond their errors.
        chance = 4 * (errors[0] + errors[-1]) + 0.01 * abs(looks[0]) + 1e-6 if looks else 0.0
        if looks and looks[-1] < looks[0] - chance and not self.turned:
            raise BoundFell(
                f"the bound fell from {looks[0]:.4g} to {looks[-1]:.4g} in {self.step} steps. Pass a smaller "
                "learning_rate, as Ascent(learning_rate=0.01), or more num_samples."
            )
        if self.held_out is not None:
            self.held_out.go_back(self.stack)
        elif self.origin is not None and not self._objective() >= self.origin[0]:
            with torch.no_grad():
                for name, value in self.origin[1].items():
                    self.stack.leaves[name].copy_(value)
        return Found(self.stack, self.start, tuple(self.looks), self.step)

    @torch.no_grad()
    def _rest(self) -> None:
        """Take ever shorter steps of the last layer alone."""
        number, first = self.ascent.num_steps, self._rate(1.0)
        for k in range(SETTLING):
            rate = first / (1 + k * first)
            generator = _seeded(self.seed, number + k, 0)
            batch = batch_of(self.problem, self.rows(number + k))
            self.stack.estimate(batch, self.ascent.num_samples, generator, rate)

    def _state(self) -> dict[str, Tensor]:
        """All that a step changes, by name."""
        state = {"precision": self.stack.precision, "shift": self.stack.shift}
        for name, leaf in self.stack.leaves.items():
            state[f"leaf.{name}"] = leaf.detach()
            for part, value in (self.optimizer.state[leaf] if self.optimizer else {}).items():
                state[f"adam.{part}.{name}"] = value
        return state

    def _load(self, state: dict[str, Tensor]) -> None:
        """Go back to such a state."""
        self.stack.precision.copy_(state["precision"])
        self.stack.shift.copy_(state["shift"])
        for name, leaf in self.stack.leaves.items():
            leaf.data.copy_(state[f"leaf.{name}"])
            if self.optimizer is None:
                continue
            own = {
                part: state[f"adam.{part}.{name}"]
                for part in STATE
                if f"adam.{part}.{name}" in state
            }
            self.optimizer.state[leaf] = {part: value.clone() for part, value in own.items()}

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """The state as tensors by name, now and at the last look."""
        safe = {f"safe.{name}": value for name, value in self.safe[1].items()}
        kept = self.held_out.leaves if self.held_out is not None else {}
        best = {f"best.{name}": value for name, value in kept.items()}
        first = {} if self.origin is None else self.origin[1]
        origin = {f"origin.{name}": value for name, value in first.items()}
        state = self._state() | safe | best | origin
        return {f"{prefix}.{name}": value for name, value in state.items()}

    def numbers(self) -> dict[str, object]:
        """The state as numbers."""
        return {
            "step": self.step,
            "looks": self.looks,
            "errors": self.errors,
            "window": [float(value) for value in self.window],
            "flattered": self.flattered,
            "whole": self.whole,
            "noisy": self.noisy,
            "origin": None if self.origin is None else self.origin[0],
            "stopped": self.stopped,
            "caution": self.caution,
            "safe_step": self.safe[0],
            "held_out": None if self.held_out is None else self.held_out.best,
        }

    def restore(self, prefix: str, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Go back to a state that was written."""
        own = _without(f"{prefix}.", tensors)
        if numbers.get("origin") is not None:
            self._make_points()
            self.origin = (numbers["origin"], _without("origin.", own))
            self.stack.anchors = {n: self.origin[1][n].clone() for n in self.stack.anchors}
        if (
            any(f"leaf.{name}" not in own for name in self.stack.leaves)
            or not {"safe_step", "origin"} <= numbers.keys()
        ):
            raise InputError(
                "the checkpoint was written by another version of net2gp, which has other variables. Delete "
                "the file, or pass another path."
            )
        self._load(own)
        self.safe = (numbers["safe_step"], _without("safe.", own))
        if self.held_out is not None and numbers["held_out"] is not None:
            self.held_out.best, self.held_out.leaves = numbers["held_out"], _without("best.", own)
        apart = ("safe_step", "held_out", "origin")
        numbers = {name: value for name, value in numbers.items() if name not in apart}
        for name, value in numbers.items():
            setattr(self, name, value)
        self.window = [self.problem.x.new_tensor(value) for value in numbers["window"]]


def _without(start: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names."""
    return {n.removeprefix(start): v for n, v in tensors.items() if n.startswith(start)}


def _error(values: Tensor) -> float:
    """The standard error of an average, by the median distance to the median: few values matter little."""
    distance = float((values - values.median()).abs().median())
    return 1.4826 * distance / len(values) ** 0.5


def _seeded(seed: int, step: int, kind: int) -> torch.Generator:
    """A generator for one step. The factors keep the streams of different steps and kinds apart."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step) * 2 + kind)
