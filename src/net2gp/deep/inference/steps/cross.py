"""Kernel matrices between inducing points and the rows of a step, with as few passes as possible."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from net2gp.kernels import RBF


@singledispatch
def cross(kernel: Any, points: Tensor, inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute k(Z, h) for inducing points Z and R inputs, with first derivatives.

    Args:
        kernel: The kernel.
        points: Z, (M, …) in float64.
        inputs: The inputs, (R, …) in float64.
        dtype: The dtype of the result.

    Returns:
        The matrix, (M, R).

    >>> cross(RBF(), torch.zeros(1, 1).double(), torch.ones(2, 1).double(), torch.float64)
    tensor([[0.6065, 0.6065]], dtype=torch.float64)
    """
    return kernel(points, inputs).to(dtype)


@cross.register
def _(kernel: RBF, points: Tensor, inputs: Tensor, dtype: torch.dtype) -> Tensor:
    scale, variance = (
        torch.as_tensor(value, dtype=points.dtype, device=points.device)
        for value in (kernel.lengthscale, kernel.output_var)
    )
    center = points.detach().mean(0)
    parts = ((points - center) / scale, (inputs - center) / scale, variance.log())
    return _Bumps.apply(*(part.to(dtype) for part in parts))


class _Bumps(torch.autograd.Function):
    """exp(c − ‖a_m − b_r‖² / 2), whose exponent is one product of longer vectors."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        heights = c - 0.5 * a.square().sum(1, keepdim=True)
        left = torch.cat([a, heights, a.new_ones(len(a), 1)], 1)
        right = torch.cat([b, b.new_ones(len(b), 1), -0.5 * b.square().sum(1, keepdim=True)], 1)
        K = torch.minimum((left @ right.mT), c).exp_()
        ctx.save_for_backward(a, b, K)
        ctx.shape = c.shape
        return K

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b, K = ctx.saved_tensors
        E = gradient * K
        in_points = E.sum(1, keepdim=True)
        in_a = E @ b - in_points * a
        in_b = E.mT @ a - E.sum(0)[:, None] * b
        return in_a, in_b, in_points.sum().reshape(ctx.shape)
