"""The end of a fit with Gaussian noise: the last layer at its optimum for all rows, and the best noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from net2gp.deep.inference.problem import DeepProblem
from net2gp.deep.inference.stack import Stack
from net2gp.deep.inference.starts import batch_of
from net2gp.likelihoods.traits import of_points

DRAWS, MOST_DRAWS = 20_000, 64
"""How many draws there are of all rows together at least, and the most of one row."""

PART = 8192
"""The number of draws that are taken together."""

ROUNDS = 100
"""The most rounds between the last layer and the noise."""


@torch.no_grad()
def close(problem: DeepProblem, stack: Stack, num_samples: int, seed: int, used: Tensor) -> None:
    """Move the last layer, and open noise, to where the bound is largest given all other variables.

    A step sees a batch, and a last layer at the optimum of a batch fits it more closely than all rows. For
    the weights A of draws and targets t around the mean function, the optimum for all rows is

        P = I + Σ_n E[A_n A_nᵀ] / σ²,   P m = Σ_n E[A_n t_n] / σ²,

    and the noise that is best for the last layer is σ² = Σ_n E[(y_n − f_n)²] / N. Each needs only sums over
    the rows, which are taken once; the two are then repeated until they stand still. The cost is N·S·M² for
    S draws of each row, plus M³ per round.

    Args:
        problem: The data and the layers.
        stack: The layers, with Gaussian noise, which are changed.
        num_samples: The number of draws of each row in a step. There are more here if there are few rows.
        seed: The seed of the draws.
        used: The numbers of the rows; those that a fit keeps back are not among them.
    """
    count = max(num_samples, min(MOST_DRAWS, math.ceil(DRAWS / len(used))))
    generator = torch.Generator().manual_seed(seed)
    squares, seen = problem.x.new_zeros(problem.num_outputs), 0
    for rows in used.split(max(1, PART // count)):
        batch, seen = batch_of(problem, rows), seen + len(rows)
        projection, _, drawn = stack.propagate(batch.x, count, generator)
        y = batch.y.repeat(drawn, *[1] * (batch.y.dim() - 1))
        likelihood = of_points(stack.likelihood, rows.repeat(drawn))
        rate = len(rows) / seen  # all parts count alike in the end
        stack.step(projection, y, likelihood, len(used) / (len(rows) * drawn), rate)
        gaps = y.reshape(-1, problem.num_outputs) - projection.offset
        squares += (gaps.square() + projection.residual).sum(0) / drawn
    if problem.learns_noise:
        _with_noise(problem, stack, squares / len(used), len(used))


def _with_noise(problem: DeepProblem, stack: Stack, squares: Tensor, num_rows: int) -> None:
    """Repeat the optimum of the noise given the last layer, and of the last layer given the noise.

    Args:
        problem: The data and the layers.
        stack: The layers, whose last one is at its optimum for the noise.
        squares: The mean of E[t_n²] and of what the inducing values leave open of f, together: (C,).
        num_rows: The number of rows N.
    """
    leaf = stack.leaves["log_noise"]
    noise = leaf.exp().expand(problem.num_outputs)
    eye = torch.eye(stack.precision.shape[-1]).to(stack.precision)
    grams = (stack.precision - eye) * noise[:, None, None]
    sums = stack.shift * noise[:, None]
    for _ in range(ROUNDS):
        center, root = stack.law(len(stack.plans) - 1)
        moments = center.mT[:, :, None] * center.mT[:, None] + root @ root.mT
        left = (grams * moments).sum((1, 2)) - 2 * (center.mT * sums).sum(1)
        # rounding of the sums must not make the noise zero
        each = (squares + left / num_rows).clamp(min=1e-12 * problem.scale)
        found = each if leaf.dim() else each.mean()
        change = (found.log() - leaf).abs().max()
        leaf.copy_(found.log())
        noise = leaf.exp().expand(problem.num_outputs)
        stack.precision.copy_(grams / noise[:, None, None] + eye)
        stack.shift.copy_(sums / noise[:, None])
        if float(change) < 1e-6:
            return
