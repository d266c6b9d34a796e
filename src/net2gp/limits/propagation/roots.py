"""Roots of many scalar functions at once: a search for a change of sign, then interpolation.

The functions are variances minus their images under a layer's map (see `phase`), one per row of a batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SMALLEST, LARGEST = 1e-12, 1e12
"""A variance that leaves this range on its way to a fixed point counts as 0 or as infinite."""

MARGINAL = 1e-11
"""A slope within this relative distance of one counts as one: its expectations are no more accurate."""


def bracket(
    excess: Callable[[Tensor, Tensor], Tensor], start: Tensor, floor: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Find two variances per row between which `excess` changes sign, next to `start`.

    The search doubles or halves the variance, in the direction in which `excess` moves it.

    Args:
        excess: V(q) − q for variances q (R,) of the rows with the given indices (R,).
        start: Where the search begins, (N,).
        floor: A lower bound of every root, (N,).

    Returns:
        The two ends (N,) each, and a third tensor (N,) with the answer (start, 0 or infinity) of rows
        that need no further search, and NaN for the others.
    """
    rows = torch.arange(len(start))
    first = excess(start, rows)
    result = torch.where(first.abs() <= MARGINAL * start, start, torch.nan)
    near, far, active = start.clone(), start.clone(), result.isnan()
    while bool(active.any()):
        rows = active.nonzero()[:, 0]
        up = first[rows] > 0
        near[rows] = far[rows]
        # V(q) ≥ σ_b², so no fixed point lies below it
        far[rows] = torch.where(up, far[rows] * 2, torch.maximum(far[rows] / 2, floor[rows]))
        value = excess(far[rows], rows) * first[rows].sign()
        # at the floor, rounding can leave a positive excess, so that the floor itself ends the search
        crossed = (value < -1e-15 * far[rows]) | (~up & (far[rows] == floor[rows]))
        lost = ~crossed & ((far[rows] > LARGEST) | (far[rows] < SMALLEST))
        result[rows[lost]] = torch.where(up[lost], torch.inf, 0.0).double()
        active[rows[crossed | lost]] = False
    return near, far, result


def root(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Find the root between `low` and `high`, entry by entry, to rounding (Chandrupatla, 1997).

    The method takes inverse quadratic interpolation where the last three points allow it, and
    bisection elsewhere.

    Args:
        function: A continuous function, applied entry by entry.
        low: One end of each bracket.
        high: The other end.

    Returns:
        The roots. If an end is itself a root, or both ends have the same sign, the result is the
        end where the function is smaller in size.
    """
    a, b, fa, fb = high, low, function(high), function(low)
    t, best = torch.full_like(a, 0.5), a
    done = torch.zeros_like(a, dtype=torch.bool)
    for _ in range(100):
        x = a + t * (b - a)
        fx = function(x)
        same = fx.sign() == fa.sign()
        c, fc = torch.where(same, a, b), torch.where(same, fa, fb)
        b, fb = torch.where(same, b, a), torch.where(same, fb, fa)
        a, fa = x, fx
        best = torch.where(done, best, torch.where(fa.abs() < fb.abs(), a, b))
        margin = (2e-16 * best.abs() + 1e-300) / (b - a).abs()
        done |= (margin > 0.5) | (torch.minimum(fa.abs(), fb.abs()) == 0)
        if bool(done.all()):
            break
        xi, ratio = (a - b) / (c - b), (fa - fb) / (fc - fb)
        smooth = (ratio.square() < xi) & ((1 - ratio).square() < 1 - xi)
        inverse = fa / (fb - fa) * fc / (fb - fc)
        inverse = inverse + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        t = torch.where(smooth & ~done, inverse, torch.full_like(t, 0.5))
        margin = margin.clamp(max=0.5)
        t = torch.minimum(torch.maximum(t, margin), 1 - margin)
        # a finished row has no interval left to interpolate in
        a, b = torch.where(done, best, a), torch.where(done, best, b)
    return best
