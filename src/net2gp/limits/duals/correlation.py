"""Correlation and determinant of a pair of Gaussians, such that equal points are equal despite rounding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def recording(*tensors: Tensor) -> bool:
    """Whether autograd follows what is done with `tensors`, so that buffers must not be reused."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def determinant(cov: Tensor, var1: Tensor, var2: Tensor) -> Tensor:
    """var1·var2 − cov², which is not negative, and zero where it is so up to a few roundings.

    At large variances the rounding of equal points would count as a distance between them.
    """
    outer = var1 * var2
    found = torch.addcmul(outer, cov, cov, value=-1)
    least = 16 * torch.finfo(cov.dtype).eps * outer
    if not recording(found):
        return torch.where(found > least, found, 0.0)
    return found + (torch.where(found > least, found, 0.0) - found).detach()


def product(cov: Tensor, var1: Tensor, var2: Tensor, factor: Callable[[Tensor], Tensor]) -> Tensor:
    """cov · factor(var1) · factor(var2): row and column factors, in two passes over memory."""
    first, second = factor(var1), factor(var2)
    result = cov * first
    if recording(result, second) or result.shape != torch.broadcast_shapes(
        result.shape, second.shape
    ):
        return result * second
    return result.mul_(second)


def inverse_root(x: Tensor) -> Tensor:
    """1/√x, and 0 at x = 0: what has no variance correlates with nothing."""
    positive = x > 0
    return torch.where(positive, torch.rsqrt(torch.where(positive, x, 1.0)), 0.0)


def correlation(cov: Tensor, var1: Tensor, var2: Tensor) -> Tensor:
    """cov / √(var1·var2) within [−1, 1]; the derivative stays that of the quotient.

    What is one up to a few roundings is one, as for points that are equal: the angle between them would
    be the square root of the rounding.
    """
    rho = product(cov, var1, var2, inverse_root)
    nearly = 1 - 8 * torch.finfo(cov.dtype).eps
    if not recording(rho):
        return rho.clamp_(-1, 1).masked_fill_(rho > nearly, 1.0)
    return rho + (rho.clamp(-1, 1).masked_fill(rho > nearly, 1.0) - rho).detach()
