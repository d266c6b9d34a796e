"""A weak prior on relevances: columns matter alike unless the data say otherwise."""

from __future__ import annotations

from torch import Tensor

from net2gp.deep.inference.problem import DeepProblem
from net2gp.deep.inference.stack import Stack

STD = 0.5
"""The standard deviation of the logarithms of length scales around their mean, in units of the columns."""


def relevance_penalty(problem: DeepProblem, stack: Stack) -> Tensor | float:
    """Minus the log density of the length scales of a single layer, up to a constant.

    The bound of a single layer prefers to switch columns off that matter a little, and then predicts worse:
    the first steps may send a length scale to infinity, from where it does not come back. In units of the
    standard deviations of the columns, the logarithms of the length scales are taken to be N(c, STD²) with a
    free center c, so that the prior says nothing about how smooth functions are. Layers of a deeper process
    have no such prior: each output of the first has length scales of its own, and outputs that are not
    needed must be switched off. The bound that is reported is without the prior.

    Args:
        problem: The data and the layers.
        stack: The layers.

    Returns:
        A number with gradients, or 0 if there is nothing to be compared.
    """
    columns = problem.x.shape[1]
    if len(problem.layers) > 1 or problem.x.dim() != 2 or columns == 1:
        return 0.0
    total: Tensor | float = 0.0
    for name, logs in stack.leaves.items():
        if name.endswith("lengthscale") and logs.numel() == columns:
            own = logs - problem.log_units
            total = total + 0.5 * ((own - own.mean()) / STD).square().sum()
    return total
