"""Kernel matrices of many sets of points at once."""

from __future__ import annotations

from functools import reduce, singledispatch
from operator import add, mul
from typing import Any

import torch
from torch import Tensor

from net2gp.kernels import RBF, Linear, Periodic, Product, Scaled, Sum
from net2gp.kernels.base import Precise
from net2gp.kernels.periodic import circle

NUMBERS = 2**23
"""The most differences of coordinates that are held at once."""

POINTS = 64
"""The number of points up to which sets are put into one call of a kernel that has no batched form."""


def squared_gaps(a: Tensor, b: Tensor) -> Tensor:
    """Compute ‖a_sn − b_sm‖² from differences, which keep their digits however near points are: (S, N, M)."""
    pairs = max(1, len(a) * a.shape[1] * b.shape[1])
    parts = zip(
        *(one.split(max(1, NUMBERS // pairs), dim=-1) for one in (a, b)),
        strict=True,
    )
    return reduce(add, ((u[:, :, None] - v[:, None]).square().sum(-1) for u, v in parts))


@singledispatch
def grams(kernel: Any, a: Tensor, b: Tensor) -> Tensor:
    """Compute k(a_s, b_s) for each set s.

    A kernel without a batched form is called for several small sets together, and what belongs to different
    sets is dropped: a call costs more than the arithmetic of a few points.

    Args:
        kernel: The kernel.
        a: Points, (S, N, D).
        b: Points, (S, M, D). If it is `a` itself, the kernel is called with one argument.

    Returns:
        Matrices, (S, N, M), or (S, N·C, M·C) if C outputs are coupled.
    """
    group = max(1, POINTS // max(a.shape[1], b.shape[1]))
    parts = []
    for start in range(0, len(a), group):
        left = a[start : start + group]
        count = len(left)
        rows = left.flatten(0, 1)
        K = kernel(rows) if b is a else kernel(rows, b[start : start + group].flatten(0, 1))
        K = K.reshape(count, K.shape[0] // count, count, K.shape[1] // count)
        parts.append(K.diagonal(dim1=0, dim2=2).movedim(-1, 0))
    return torch.cat(parts)


@grams.register
def _(kernel: RBF, a: Tensor, b: Tensor) -> Tensor:
    kernel.check(a.flatten(0, 1))
    scale, variance = (
        torch.as_tensor(value, dtype=a.dtype, device=a.device)
        for value in (kernel.lengthscale, kernel.output_var)
    )
    return variance * torch.exp(-0.5 * squared_gaps(a / scale, b / scale))


@grams.register
def _(kernel: Linear, a: Tensor, b: Tensor) -> Tensor:
    kernel.check(a.flatten(0, 1))
    slope, offset = (
        torch.as_tensor(value, dtype=a.dtype, device=a.device)
        for value in (kernel.weight_var, kernel.bias_var)
    )
    return slope * (a @ b.mT) + offset


@grams.register
def _(kernel: Periodic, a: Tensor, b: Tensor) -> Tensor:
    around = RBF(kernel.lengthscale, kernel.output_var, kernel.product_dtype)
    period = torch.as_tensor(kernel.period, dtype=a.dtype, device=a.device)
    return grams(around, circle(a, period), circle(b, period))


@grams.register
def _(kernel: Precise, a: Tensor, b: Tensor) -> Tensor:
    return grams(kernel.kernel, a, b)


@grams.register
def _(kernel: Scaled, a: Tensor, b: Tensor) -> Tensor:
    K = grams(kernel.kernel, a, b)
    return K * torch.as_tensor(kernel.variance, dtype=K.dtype, device=K.device)


@grams.register
def _(kernel: Sum, a: Tensor, b: Tensor) -> Tensor:
    return _combined(kernel, a, b, add)


@grams.register
def _(kernel: Product, a: Tensor, b: Tensor) -> Tensor:
    return _combined(kernel, a, b, mul)


def _combined(kernel: Sum | Product, a: Tensor, b: Tensor, operation: Any) -> Tensor:
    parts = [grams(one, a, b) for one in kernel.kernels]
    if len({part.shape for part in parts}) > 1:
        # some couple outputs and some do not: the kernel itself knows how to join them
        return grams.dispatch(object)(kernel, a, b)
    return reduce(operation, parts)
