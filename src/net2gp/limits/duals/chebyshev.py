"""Chebyshev series whose coefficients are small matrix products: Σ_k T_k(t) (U C_k Vᵀ)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from net2gp.limits.duals.correlation import correlation, recording

_FEW = 1 << 14  # entries times degrees up to which all terms of a series are held at once


def unit_nodes(count: int) -> Tensor:
    """Return the zeros of T_count, in rising order.

    >>> unit_nodes(2)
    tensor([-0.7071,  0.7071], dtype=torch.float64)
    """
    index = torch.arange(count, dtype=torch.float64)
    return -torch.cos((index + 0.5) * (math.pi / count))


@lru_cache
def to_coefficients(count: int) -> Tensor:
    """Return the matrix that maps values at `unit_nodes(count)` to Chebyshev coefficients."""
    matrix = vandermonde(unit_nodes(count), count).mT * (2 / count)
    matrix[0] /= 2
    return matrix


def vandermonde(x: Tensor, count: int) -> Tensor:
    """Return T_0(x), …, T_{count−1}(x) along a new last axis.

    >>> vandermonde(torch.tensor([0.5]), 3)
    tensor([[ 1.0000,  0.5000, -0.5000]])
    """
    if not recording(x):
        return cosines(x, torch.arange(count, device=x.device))
    columns = [torch.ones_like(x), x]
    while len(columns) < count:
        columns.append(2 * x * columns[-1] - columns[-2])
    return torch.stack(columns[:count], -1)


def cosines(x: Tensor, degrees: Tensor) -> Tensor:
    """Compute T_k(x) = cos(k acos x) for all degrees, along a new last axis, in three operations."""
    return torch.cos(torch.acos(x.clamp(-1, 1))[..., None] * degrees)


@dataclass(frozen=True)
class Layout:
    """A broadcast triple as batches of matrices: cov (B, R, C), var1 (B, R) and var2 (B, C).

    Axes along which only var1 varies become rows, axes along which only var2 varies become columns, and
    axes along which both vary become batches. `order` (of the axes) and `sizes` undo this.
    """

    cov: Tensor
    var1: Tensor
    var2: Tensor
    order: tuple[int, ...]
    sizes: tuple[int, ...]

    def correlation(self) -> Tensor:
        """Compute cov / √(var1·var2), in [−1, 1]: (B, R, C)."""
        return correlation(self.cov, self.var1[:, :, None], self.var2[:, None, :])

    def restore(self, x: Tensor) -> Tensor:
        """Return `x`, which has the shape of `cov`, in the broadcast shape."""
        shape = [self.sizes[axis] for axis in self.order]
        inverse = [self.order.index(axis) for axis in range(len(self.order))]
        return x.reshape(shape).permute(inverse)


def layout_of(cov: Tensor, var1: Tensor, var2: Tensor) -> Layout:
    """Sort the axes of a broadcast triple into batches, rows and columns."""
    sizes = torch.broadcast_shapes(cov.shape, var1.shape, var2.shape)
    dim = len(sizes)
    cov = cov.expand(sizes)
    one, two = (v.reshape((1,) * (dim - v.dim()) + tuple(v.shape)) for v in (var1, var2))
    batch = [a for a in range(dim) if one.shape[a] > 1 and two.shape[a] > 1]
    columns = [a for a in range(dim) if two.shape[a] > 1 and a not in batch]
    rows = [a for a in range(dim) if a not in batch and a not in columns]
    order = (*batch, *rows, *columns)
    num_batches = math.prod(sizes[a] for a in batch)
    num_rows = math.prod(sizes[a] for a in rows)

    def flat(v: Tensor, axes: list[int]) -> Tensor:
        shape = [sizes[a] if a in batch or a in axes else 1 for a in range(dim)]
        return v.expand(shape).permute(order).reshape(num_batches, -1)

    matrix = cov.permute(order).reshape(num_batches, num_rows, -1)
    return Layout(matrix, flat(one, rows), flat(two, columns), order, tuple(sizes))


def series(
    t: Tensor, degrees: Sequence[int], coefficients: Tensor, first: Tensor, second: Tensor
) -> Tensor:
    """Compute Σ_k T_{degrees[k]}(t) · (first C_k secondᵀ) by Clenshaw's recurrence.

    `t` is (B, R, C). `first` is (B, R, n) and `second` (B, C, n), or both are (n,) for the same coefficients
    everywhere. A series that has only odd or only even degrees runs in T_2(t), at half the length.
    """
    if t.numel() * len(degrees) <= _FEW and first.dim() > 1 and not recording(t, first, second):
        return _direct(t, degrees, coefficients, first, second)
    parity = {degree % 2 for degree in degrees}
    if len(parity) == 1 and len(degrees) > 1:
        return _halved(t, degrees, coefficients, first, second)
    table = dict(zip(degrees, coefficients, strict=True))
    return _clenshaw(2 * t, table, first, second, t)


def _direct(
    t: Tensor, degrees: Sequence[int], coefficients: Tensor, first: Tensor, second: Tensor
) -> Tensor:
    """Sum all terms at once, in a handful of operations, where a recurrence takes two per degree."""
    waves = cosines(t, torch.tensor(degrees, device=t.device)).movedim(-1, 0)
    inner = coefficients[:, None]
    if first.shape[1] <= second.shape[1]:
        matrices = (first @ inner) @ second.mT
    else:
        matrices = first @ (inner @ second.mT)
    return (waves * matrices).sum(0)


def _halved(
    t: Tensor, degrees: Sequence[int], coefficients: Tensor, first: Tensor, second: Tensor
) -> Tensor:
    """Run Clenshaw in s = 2t² − 1: T_{2j}(t) = T_j(s), and T_{2j+1}(t) = t·V_j(s) with V_1 = (2s − 1)V_0."""
    odd = degrees[0] % 2
    s = torch.addcmul(torch.full_like(t[:1, :1, :1], -2.0), t, t, value=4.0)
    table = {degree // 2: c for degree, c in zip(degrees, coefficients, strict=True)}
    if not odd:
        return _clenshaw(s, table, first, second, s / 2)
    return t * _clenshaw(s, table, first, second, s - 1)


def _clenshaw(
    double: Tensor, table: dict[int, Tensor], first: Tensor, second: Tensor, start: Tensor
) -> Tensor:
    """Compute Σ_j c_j p_j with p_0 = 1, p_1 = `start`, p_{j+1} = double·p_j − p_{j−1}."""
    top = max(table)
    inplace = not recording(double, first, second)
    now, before = torch.zeros_like(double), torch.zeros_like(double)
    for j in range(top, -1, -1):
        # b_j = c_j − b_{j+2} + double·b_{j+1}; at the last step p_1 takes the place of double
        before = _minus(table.get(j), before, first, second, inplace)
        factor = double if j else start
        if inplace:
            before.addcmul_(factor, now)
        else:
            before = torch.addcmul(before, factor, now)
        now, before = before, now
    return now


def _minus(c: Tensor | None, x: Tensor, first: Tensor, second: Tensor, inplace: bool) -> Tensor:
    """Compute first c secondᵀ − x, and overwrite x with it if `inplace`."""
    if c is None:
        return x.neg_() if inplace else -x
    if first.dim() == 1:
        return torch.sub(first @ c @ second, x, out=x if inplace else None)
    if inplace:
        return x.baddbmm_(first @ c, second.mT, beta=-1)
    return torch.baddbmm(x, first @ c, second.mT, beta=-1)
