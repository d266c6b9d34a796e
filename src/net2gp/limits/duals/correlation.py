"""Correlation and determinant of a pair of Gaussians, computed so that equal points stay equal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def recording(*tensors: Tensor) -> bool:
    """Whether autograd follows what is done with `tensors`, so that buffers must not be reused.

    Forward mode, within `torch.func.jvp` too, does not mark the tensors that it follows.
    """
    if getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0:
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def determinant(cov: Tensor, var1: Tensor, var2: Tensor) -> Tensor:
    """Compute var1·var2 − cov², which is never negative, and zero where it is zero up to a few roundings.

    Otherwise, at large variances, the rounding error of equal points would count as a distance.
    """
    outer = var1 * var2
    found = torch.addcmul(outer, cov, cov, value=-1)
    least = 16 * torch.finfo(cov.dtype).eps * outer
    if not recording(found):
        return torch.where(found > least, found, 0.0)
    # the value is clipped, but the derivative is the formula's, so that gradients at equal points stay right
    return found + (torch.where(found > least, found, 0.0) - found).detach()


def product(cov: Tensor, var1: Tensor, var2: Tensor, factor: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute cov · factor(var1) · factor(var2) in two passes over memory.

    The factors are computed on the variances, which are much smaller than the broadcast product.
    """
    first, second = factor(var1), factor(var2)
    result = cov * first
    if recording(result, second) or result.shape != torch.broadcast_shapes(
        result.shape, second.shape
    ):
        return result * second
    return result.mul_(second)


def inverse_root(x: Tensor) -> Tensor:
    """Compute 1/√x, and 0 at x = 0, since a constant correlates with nothing."""
    positive = x > 0
    return torch.where(positive, torch.rsqrt(torch.where(positive, x, 1.0)), 0.0)


def correlation(cov: Tensor, var1: Tensor, var2: Tensor) -> Tensor:
    """Compute cov / √(var1·var2) within [−1, 1]; the derivative stays the derivative of the quotient.

    Values that are one up to a few roundings become one, as they are for equal points: the angle
    between these would otherwise be the square root of the rounding error.
    """
    rho = product(cov, var1, var2, inverse_root)
    nearly = 1 - 8 * torch.finfo(cov.dtype).eps
    if not recording(rho):
        return rho.clamp_(-1, 1).masked_fill_(rho > nearly, 1.0)
    return rho + (rho.clamp(-1, 1).masked_fill(rho > nearly, 1.0) - rho).detach()
