"""Inner layers whose outputs have length scales and inducing points of their own, during a fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from net2gp.deep.inference.inducing import Law, inverse
from net2gp.deep.inference.sparse_layer import AffineMean
from net2gp.deep.inference.steps.cross import DEPTH, bumps, numbers
from net2gp.kernels import RBF

ROWS = 1024
"""The most rows of a block on a CPU, which has one output, so that it stays in the cache."""


class OwnLayer(NamedTuple):
    """Such a layer at the present values of the variables.

    Args:
        kernel: The kernel, of inputs that were multiplied by the factors.
        points: The inducing points Z of each output, (C, M, D).
        L: The Cholesky factors of K(Z, Z), without derivatives, (C, M, M).
        mean: The mean function.
        scale: The factor of each output, (C,), or None for 1.
        factors: What the inputs of the kernel of each output are multiplied by, (C, D).
    """

    kernel: RBF
    points: Tensor
    L: Tensor
    mean: AffineMean
    scale: Tensor | None
    factors: Tensor

    def moments(self, inputs: Tensor, law: Law) -> tuple[Tensor, Tensor]:
        """Compute means and variances of the outputs.

        The weights L⁻¹ k(Z, h) are never formed: with u = L⁻ᵀ m and Q = L⁻ᵀ (S Sᵀ − I) L⁻¹ the mean is
        uᵀ k and the variance k(h, h) + kᵀ Q k.

        Args:
            inputs: R inputs h, (R, D).
            law: The law of the whitened values, with the mean m and the root S of the covariance.

        Returns:
            Means and variances, (R, C) each.
        """
        scale, variance = numbers(self.kernel, self.points)
        grams = own_grams(self.kernel, self.points, self.factors)
        u, Q = _OwnWeights.apply(grams, law.center.mT, law.root, self.L)
        middle = self.points.detach().mean((0, 1))
        parts = (self.points - middle, inputs - middle, (self.factors / scale).square())
        mean, forms = _OwnMoments.apply(*parts, variance.log(), u, Q)
        found = torch.maximum(variance + forms, 1e-14 * variance.detach()).mT
        if self.scale is None:
            return mean.mT + self.mean(inputs), found
        return mean.mT * self.scale + self.mean(inputs), found * self.scale.square()


def own_grams(kernel: RBF, points: Tensor, factors: Tensor) -> Tensor:
    """Compute K(Z, Z) of each output.

    Args:
        kernel: The kernel, of inputs that were multiplied by the factors.
        points: Z, (C, M, D).
        factors: The factors, (C, D).

    Returns:
        The matrices, (C, M, M).
    """
    scale, variance = numbers(kernel, points)
    a = (points - points.detach().mean(1, keepdim=True)) * (factors / scale)[:, None]
    return bumps(a, a, variance.log())


class _OwnWeights(torch.autograd.Function):
    """u = L⁻ᵀ m and Q = L⁻ᵀ (S Sᵀ − I) L⁻¹ for the Cholesky factors L of kernel matrices, which are known.

    The derivatives in the kernel matrices are those of the factorization, with the inverse of L at hand. They
    take seven products of matrices, and no solving.
    """

    @staticmethod
    def forward(ctx: Any, K: Tensor, m: Tensor, S: Tensor, L: Tensor) -> tuple[Tensor, Tensor]:
        whitener = inverse(L)
        T = whitener.mT @ S
        ctx.save_for_backward(whitener, m, S, T)
        Q = torch.baddbmm(whitener.mT @ whitener, T, T.mT, beta=-1)
        return (m[:, None] @ whitener)[:, 0], Q

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, in_u: Tensor, in_Q: Tensor) -> tuple[Tensor | None, ...]:
        whitener, m, S, T = ctx.saved_tensors
        in_Q = in_Q + in_Q.mT
        in_T = in_Q @ T
        in_whitener = torch.baddbmm(S @ in_T.mT, whitener, in_Q, alpha=-1)
        in_whitener += m[..., None] * in_u[:, None]
        middle = (in_whitener @ whitener.mT).tril_().neg_()
        middle.diagonal(dim1=-2, dim2=-1).mul_(0.5)
        in_K = 0.5 * (whitener.mT @ (middle + middle.mT) @ whitener)
        return in_K, (in_u[:, None] @ whitener.mT)[:, 0], whitener @ in_T, None


class _OwnMoments(torch.autograd.Function):
    """u_cᵀ k_cr and k_crᵀ Q_c k_cr, (C, R) each, for k_cmr = exp(v − Σ_d w_cd (a_cmd − b_rd)² / 2).

    Everything is taken in blocks that stay in the cache, and the inputs b are not copied for each output. The
    matrices Q_c are symmetric, so that gradients of the forms need no third product.
    """

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, w: Tensor, v: Tensor, u: Tensor, Q: Tensor
    ) -> tuple[Tensor, Tensor]:
        means, forms = (a.new_empty(len(a), len(b)) for _ in range(2))
        kept = []
        scaled, heights = a * w[:, None], -0.5 * (w @ b.square().mT)
        depths = v - 0.5 * (scaled * a).sum(2, keepdim=True)
        for some, rows in _blocks(a, b):
            part = scaled[some] @ b[rows].mT
            part += depths[some]
            part += heights[some, None, rows]
            part = part.clamp_(v - DEPTH, v).exp_()
            product = Q[some] @ part
            means[some, rows] = (u[some, None] @ part)[:, 0]
            forms[some, rows] = (product * part).sum(1)
            kept.append((part, product))
        ctx.save_for_backward(a, b, w, u)
        ctx.shape, ctx.kept = v.shape, kept
        return means, forms

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, in_means: Tensor, in_forms: Tensor) -> tuple[Tensor | None, ...]:
        a, b, w, u = ctx.saved_tensors
        in_u, in_Q = torch.zeros_like(u), u.new_zeros(*u.shape, u.shape[1])
        moved, in_points = torch.zeros_like(a), u.new_zeros(*u.shape, 1)
        in_rows = u.new_empty(len(u), len(b))
        in_b = torch.zeros_like(b) if ctx.needs_input_grad[1] else None
        scaled = a * w[:, None]
        for (some, rows), (part, product) in zip(_blocks(a, b), ctx.kept, strict=True):
            means, forms = in_means[some, None, rows], in_forms[some, None, rows]
            in_u[some] += (part @ means.mT)[..., 0]
            in_Q[some] += (part * forms) @ part.mT
            E = product * (2 * forms)
            E += u[some, :, None] * means
            E *= part
            in_points[some] += E.sum(2, keepdim=True)
            in_rows[some, rows] = E.sum(1)
            moved[some] += E @ b[rows]
            if in_b is not None:
                in_b[rows] += E.flatten(0, 1).mT @ scaled[some].flatten(0, 1)
        in_a = (moved - in_points * a) * w[:, None]
        in_w = (a * (moved - 0.5 * in_points * a)).sum(1) - 0.5 * in_rows @ b.square()
        if in_b is not None:
            in_b -= b * (in_rows.mT @ w)
        return in_a, in_b, in_w, in_points.sum().reshape(ctx.shape), in_u, in_Q


def _blocks(a: Tensor, b: Tensor) -> Iterator[tuple[slice, slice]]:
    """Outputs and rows that are taken together: all of them on a GPU."""
    if a.is_cuda:
        yield slice(None), slice(None)
        return
    for index in range(len(a)):
        for start in range(0, len(b), ROWS):
            yield slice(index, index + 1), slice(start, start + ROWS)
