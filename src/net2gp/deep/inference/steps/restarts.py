"""Climbs from several starts, and the one that is followed to the end."""

from __future__ import annotations

import math

import torch

from net2gp.deep.inference.ascent import Climb, Found
from net2gp.deep.inference.problem import DeepProblem, chosen_rows, has_few_rows
from net2gp.deep.inference.settings import Ascent, Start
from net2gp.deep.inference.sigma_points import SigmaStack
from net2gp.deep.inference.starts import MOST_ROWS, initial, shallow_fit
from net2gp.linalg.checkpoint import Checkpoint
from net2gp.progress import progress

TRIAL_SHARE = 0.5
"""The share of the steps after which the best of several starts is chosen."""

MARGIN = 3.0
"""By how much the bound of a later start must be better: a factor of twenty in the evidence."""

BOUND_SHARE = 0.5
"""The share of the steps in which the bound is climbed before the objective "predictive", if there are few
rows: sigma points from scratch then become too certain before they are close."""


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
    """The average bound before the last look of the trial, or the log density of rows that are kept back."""
    if climb.held_out is not None:
        return climb.held_out.density(climb.problem, climb.stack)
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
        stack, turn = initial(problem, shallow, rows, start, ascent, seed), None
        if ascent.objective == "predictive" and has_few_rows(problem):
            turn = math.floor(BOUND_SHARE * ascent.num_steps)
        elif ascent.objective == "predictive":
            count, weight = ascent.num_samples, ascent.divergence_weight
            stack = SigmaStack.like(stack, count, weight, keeps_last=False)
        climbs.append(Climb(problem, stack, ascent, start, seed, turn))
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
