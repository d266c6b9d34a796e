"""Rows that a fit keeps back, to end where it predicts them best."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from net2gp.deep.inference.problem import DeepProblem, has_many_rows
from net2gp.deep.inference.settings import Ascent
from net2gp.deep.inference.stack import Stack
from net2gp.deep.inference.starts import batch_of

SHARE, LEAST = 0.1, 10
"""The share of the rows that is kept back, and the least number of them by which a fit can be judged."""

DRAWS = 16
"""The number of draws per row by which fits by the bound are judged."""


class HeldOut:
    """Rows that are kept back, and the variables under which they were most likely.

    A deep sigma point process has no evidence that would hold it back: with few rows it becomes too certain
    if it is trained for long. What is kept is the state at the look with the largest log density of these
    rows.

    Args:
        rows: The numbers of the rows that are kept back.
        others: The numbers of all other rows.
    """

    def __init__(self, rows: Tensor, others: Tensor) -> None:
        self.rows, self.others = rows, others
        self.best, self.leaves = -math.inf, dict[str, Tensor]()

    @torch.no_grad()
    def density(self, problem: DeepProblem, stack: Stack) -> float:
        """The log density of the rows, or its expectation while the bound is climbed."""
        generator = torch.Generator().manual_seed(0)
        found = stack.estimate(batch_of(problem, self.rows), DRAWS, generator)
        return float(found.log_probs.mean(0).sum())

    @torch.no_grad()
    def look(self, problem: DeepProblem, stack: Stack) -> None:
        """Keep the variables if the rows are more likely than at any look before."""
        value = self.density(problem, stack)
        if value > self.best:
            self.best = value
            self.leaves = {name: leaf.clone() for name, leaf in stack.leaves.items()}

    @torch.no_grad()
    def go_back(self, stack: Stack) -> None:
        """Give the layers the variables that were kept."""
        for name, value in self.leaves.items():
            stack.leaves[name].copy_(value)


def hold_out(problem: DeepProblem, ascent: Ascent, seed: int) -> HeldOut | None:
    """Choose rows to keep back, or None if the objective is a bound, or there are very few rows or many.

    Args:
        problem: The data and the layers.
        ascent: Settings.
        seed: The seed of the choice.

    Returns:
        The rows.
    """
    count, device = round(SHARE * problem.num_rows), problem.x.device
    wrong = ascent.objective != "predictive" or not ascent.hold_out
    if wrong or count < LEAST or has_many_rows(problem):
        return None
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(problem.num_rows, generator=generator).to(device)
    return HeldOut(order[:count].sort().values, order[count:].sort().values)
