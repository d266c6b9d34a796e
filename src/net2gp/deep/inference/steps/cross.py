"""Kernel matrices between inducing points and the rows of a step, with as few passes as possible."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from net2gp.kernels import RBF

DEPTH = 100.0
"""Kernels are at least exp(−100) times their variance, which is nothing: products of smaller numbers would be
denormal, and a hundred times as slow."""


@singledispatch
def cross(kernel: Any, points: Tensor, inputs: Tensor) -> Tensor:
    """Compute k(Z, h) for inducing points Z and R inputs, with first derivatives.

    Args:
        kernel: The kernel.
        points: Z, (M, …) in float64.
        inputs: The inputs, (R, …) in float64.

    Returns:
        The matrix, (M, R).

    >>> cross(RBF(), torch.zeros(1, 1).double(), torch.ones(2, 1).double())
    tensor([[0.6065, 0.6065]], dtype=torch.float64)
    """
    return kernel(points, inputs)


@cross.register
def _(kernel: RBF, points: Tensor, inputs: Tensor) -> Tensor:
    scale, variance = numbers(kernel, points)
    center = points.detach().mean(0)
    parts = ((points - center) / scale, (inputs - center) / scale, variance.log())
    return bumps(*parts)


def numbers(kernel: RBF, like: Tensor) -> tuple[Tensor, Tensor]:
    """Length scales and variance of a kernel, as tensors."""
    scale, variance = (
        torch.as_tensor(value, dtype=like.dtype, device=like.device)
        for value in (kernel.lengthscale, kernel.output_var)
    )
    return scale, variance


def bumps(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Compute exp(c − ‖a_m − b_r‖² / 2), with first derivatives.

    Args:
        a: Points, (…, M, D).
        b: Points, (…, R, D).
        c: A number.

    Returns:
        The matrices, (…, M, R).

    >>> bumps(torch.zeros(1, 1), torch.ones(1, 1), torch.tensor(0.5))
    tensor([[1.]])
    """
    return _Bumps.apply(a, b, c)


class _Bumps(torch.autograd.Function):
    """The exponent is one product of longer vectors."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        heights = c - 0.5 * a.square().sum(-1, keepdim=True)
        left = torch.cat([a, heights, torch.ones_like(heights)], -1)
        depths = -0.5 * b.square().sum(-1, keepdim=True)
        right = torch.cat([b, torch.ones_like(depths), depths], -1)
        K = torch.clamp(left @ right.mT, c - DEPTH, c).exp_()
        ctx.save_for_backward(a, b, K)
        ctx.shape = c.shape
        return K

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b, K = ctx.saved_tensors
        E = gradient * K
        in_points = E.sum(-1, keepdim=True)
        in_a = E @ b - in_points * a
        in_b = E.mT @ a - E.sum(-2)[..., None] * b
        return in_a, in_b, in_points.sum().reshape(ctx.shape)
