"""Gaussian processes given by the law of their values at inducing points, in whitened coordinates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from net2gp.deep.inference.sparse_layer import AffineMean
from net2gp.deep.inference.steps.cross import cross
from net2gp.deep.inference.steps.forms import quadratic_forms
from net2gp.errors import InputError, readable
from net2gp.tags import savable
from net2gp.types import Kernel

JITTER = {torch.float64: 1e-10, torch.float32: 1e-6}
"""What is added to the diagonal of K(Z, Z), relative to its mean, for products of a dtype; ten times more
wherever it is needed."""

TRIES = 7
"""The number of jitters, each ten times the last."""


class Projection(NamedTuple):
    """What a layer needs to know of R inputs.

    Args:
        weights: A = L⁻¹ k(Z, h) with K(Z, Z) = L Lᵀ: (M, R).
        residual: k(h, h) − AᵀA, the variance that the inducing values leave open: (R,).
        offset: The mean function: (R, C), or a number.
        scale: The factor of each output, (C,); None for 1.
    """

    weights: Tensor
    residual: Tensor
    offset: Tensor | float
    scale: Tensor | None = None

    def mean(self, center: Tensor) -> Tensor:
        """s Aᵀm + offset, for the mean m of whitened values, (M, C): (R, C)."""
        center = center if self.scale is None else center * self.scale
        return self.weights.mT @ center.to(self.weights.dtype) + self.offset

    def variance(self, root: Tensor) -> Tensor:
        """The variances of the outputs, for roots S of the covariance of whitened values: (R, C).

        Args:
            root: S with covariance S Sᵀ, (C, M, M).
        """
        spread = (root.mT @ self.weights).square().sum(1).mT
        return self.scaled(self.residual[:, None] + spread)

    def variance_by(self, covariance: Tensor) -> Tensor:
        """The same for covariances of whitened values, with products of their dtype: (R, C).

        Args:
            covariance: W, (C, M, M).
        """
        return self.scaled(self.residual[:, None] + quadratic_forms(self.weights, covariance))

    def scaled(self, variance: Tensor) -> Tensor:
        """Multiply variances by the squared factor of each output, which is the last axis."""
        return variance if self.scale is None else variance * self.scale.square().to(variance.dtype)


def factor(kernel: Kernel, points: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Compute the Cholesky factor of K(Z, Z), with as little jitter as it takes.

    Args:
        kernel: The kernel, in float64.
        points: Z, with M rows.
        dtype: The dtype of products with the inverse of the factor.

    Returns:
        L, (M, M), in float64.

    Raises:
        InputError: If the matrix is not finite, or is singular whatever is added.
    """
    K = kernel(points)
    scale = K.diagonal().mean().detach()
    identity = torch.eye(len(K), dtype=K.dtype, device=K.device)
    if not readable(K):
        # a singular matrix must then show in the bound
        L, info = torch.linalg.cholesky_ex(K + (JITTER[dtype] * scale) * identity)
        return torch.where(info == 0, L, math.nan)
    if not bool(torch.isfinite(scale)) or not float(scale) > 0:
        raise InputError(
            "the kernel matrix of the inducing points is not finite: training diverged, or the kernel gives "
            "no variance. Pass a smaller learning_rate, or scale the inputs to variance 1."
        )
    for power in range(TRIES):
        L, info = torch.linalg.cholesky_ex(K + (JITTER[dtype] * 10**power * scale) * identity)
        if int(info) == 0:
            return L
    raise InputError(
        f"the kernel matrix of the {len(K)} inducing points is singular, even with a jitter of "
        f"{JITTER[dtype] * 10 ** (TRIES - 1):g}. Pass fewer inducing points, or a shorter length scale."
    )


def project(
    kernel: Kernel,
    points: Tensor,
    L: Tensor,
    mean: AffineMean,
    inputs: Tensor,
    dtype: torch.dtype = torch.float64,
    scale: Tensor | None = None,
) -> Projection:
    """Compute what a layer needs to know of its inputs. The cost is M² for each of them.

    Args:
        kernel: The kernel, in float64.
        points: The inducing points Z.
        L: The Cholesky factor of K(Z, Z).
        mean: The mean function.
        inputs: R inputs.
        dtype: The dtype of products with the inverse of L, and of weights and residual variances.
        scale: The factor of each output, (C,); None for 1.

    Returns:
        Weights, residual variances and means.
    """
    # A product with the inverse of L takes half of the time of a triangular solve with many columns.
    identity = torch.eye(len(L), dtype=L.dtype, device=L.device)
    whitener = torch.linalg.solve_triangular(L, identity, upper=False).to(dtype)
    A = whitener @ cross(kernel, points, inputs, dtype)
    return Projection(A, residual(kernel, A, inputs), mean(inputs), scale)


def residual(kernel: Kernel, A: Tensor, inputs: Tensor) -> Tensor:
    """k(h, h) − AᵀA, which rounding must not make negative: (R,)."""
    own = kernel.diag(inputs).to(A.dtype)
    least = 1e-14 if A.dtype == torch.float64 else 1e-7
    return torch.maximum(own - A.square().sum(0), least * own.detach().mean())


def divergence(center: Tensor, root: Tensor) -> Tensor:
    """Compute KL(N(m, S Sᵀ) ‖ N(0, I)), summed over outputs.

    Args:
        center: m, (M, C).
        root: S, lower triangular with a positive diagonal, (C, M, M).

    Returns:
        A number.

    >>> float(divergence(torch.ones(2, 1), torch.eye(2)[None]))
    1.0
    """
    logs = root.diagonal(dim1=-2, dim2=-1).log().sum()
    return 0.5 * (center.square().sum() + root.square().sum() - center.numel()) - logs


@savable("deep.InducingLayer")
@dataclass(frozen=True, eq=False)
class InducingLayer:
    """A fitted layer: C Gaussian processes, given by the law of their whitened values v at inducing points.

    The values at the inducing points are s L v plus the mean function, with K(Z, Z) = L Lᵀ and a factor s of
    each output, so that v ~ N(0, I) before the data and N(center, root rootᵀ) after.

    Args:
        kernel: The kernel, with its trained numbers.
        mean: The mean function.
        points: The inducing points Z, with M rows.
        whitener: L⁻¹, (M, M).
        center: The mean of v, (M, C).
        root: A root of the covariance of v, lower triangular, (C, M, M).
        scale: The factor s of each output, (C,); None for 1.
    """

    kernel: Kernel
    mean: AffineMean
    points: Tensor = field(repr=False)
    whitener: Tensor = field(repr=False)
    center: Tensor = field(repr=False)
    root: Tensor = field(repr=False)
    scale: Tensor | None = field(default=None, repr=False)

    @property
    def width(self) -> int:
        """The number of outputs C."""
        return self.center.shape[1]

    def project(self, inputs: Tensor) -> Projection:
        """What the layer needs to know of R inputs, by products alone."""
        kernel = self.kernel.precise()
        A = self.whitener @ kernel(self.points, inputs)
        return Projection(A, residual(kernel, A, inputs), self.mean(inputs), self.scale)

    def stretched(self, values: Tensor) -> Tensor:
        """Multiply values around the mean function by the factor of each output, which is the last axis."""
        return values if self.scale is None else values * self.scale

    def covariance(self, inputs: Tensor, *, given: bool = False) -> Tensor:
        """Compute the covariance of each output over R inputs, given everything before the layer.

        Args:
            inputs: R inputs.
            given: Whether the values at the inducing points are given as well.

        Returns:
            The covariances, (C, R, R).
        """
        kernel = self.kernel.precise()
        A = self.whitener @ kernel(self.points, inputs)
        found = (kernel(inputs) - A.mT @ A).expand(self.width, -1, -1)
        if not given:
            spread = self.root.mT @ A
            found = found + spread.mT @ spread
        return found if self.scale is None else found * self.scale.square()[:, None, None]
