"""What weights do to the moments of a signal, or of two signals that share them."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from net2gp.limits.moments.evaluation import Evaluation, Pair
from net2gp.limits.signals import expressions as ex


def added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the sum of two tangent kernels, where None stands for zero."""
    if one is None or other is None:
        return one if other is None else other
    return one + other


def both(pair: Pair, function: Callable[[Tensor], Tensor]) -> Pair:
    """Apply the same linear function to covariance and tangent kernel."""
    cov, ntk = pair
    return function(cov), None if ntk is None else function(ntk)


def sum_of(tensors: list[Tensor]) -> Tensor:
    """Return the sum of a list of tensors."""
    total = tensors[0]
    for one in tensors[1:]:
        total = total + one
    return total


def affine(t: Tensor, factor: float | Tensor, shift: float | Tensor) -> Tensor:
    """Compute factor · t + shift, in one pass over memory."""
    if isinstance(factor, Tensor) or isinstance(shift, Tensor) or t.is_cuda:
        return factor * t + shift
    if shift == 0:
        return t * factor
    return torch.add(torch.tensor(shift, dtype=t.dtype), t, alpha=factor)


def through_weights(
    run: Evaluation, e: ex.Weighted, pair: Pair, full: bool, biased: bool = True
) -> Pair:
    """Compute the moments of W u and W v, which share weights and a window, from the moments of u and v.

    With `biased` they share biases too.
    """
    biased = biased and e.bias is not None
    narrow = full and not e.local
    rank = len(e.inputs[0][1].positions)
    cov, ntk = both(pair, lambda t: _windowed(t, e, rank, narrow))
    total = 1 if e.window is None else e.window.total
    weight_var, bias_var = run.prior.weight(e.weight) / total, run.prior.bias(e.bias)
    new = affine(cov, weight_var, bias_var if biased else 0.0)
    if not run.tangent:
        return _spread(new, e, full), None
    if run.prior.standard(e.weight):
        own = affine(cov, e.fan_in / total, 1.0 if biased else 0.0)
    else:
        own = new
    if ntk is None:
        ntk = own
    elif isinstance(weight_var, Tensor):
        ntk = own + weight_var * ntk
    else:
        ntk = torch.add(own, ntk, alpha=weight_var)
    return _spread(new, e, full), _spread(ntk, e, full)


def _windowed(t: Tensor, e: ex.Weighted, rank: int, full: bool) -> Tensor:
    # from the last axis on, so that the numbers of the axes before it stay valid
    for number in sorted(e.averaged, reverse=True):
        if full:
            t = torch.diagonal(t, 0, number, rank + number).mean(-1)
        else:
            t = t.mean(number)
        rank -= 1
    return t if e.window is None else e.window.sum(t, full)


def _spread(t: Tensor, e: ex.Weighted, full: bool) -> Tensor:
    """Spread moments at equal positions over all pairs: with local weights, other pairs are independent."""
    if not (e.local and full and e.positions):
        return t
    pairs = t.shape[len(e.positions) :]
    flat = t.reshape(prod(e.positions), -1)
    square = torch.diag_embed(flat.T).movedim(0, -1)
    return square.reshape(*e.positions, *e.positions, *pairs)
