"""Gaussian processes given by the law of their values at inducing points, in whitened coordinates."""

from __future__ import annotations

import math
from collections.abc import Iterator
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

JITTER = 1e-10
"""What is added to the diagonal of K(Z, Z), relative to its mean; ten times more wherever it is needed."""

TRIES = 7
"""The number of jitters, each ten times the last."""


class Projection(NamedTuple):
    """What a layer needs to know of R inputs.

    Args:
        weights: A = L⁻¹ k(Z, h) with K(Z, Z) = L Lᵀ: (M, R), or (C, M, R) for kernels of each output.
        residual: k(h, h) − AᵀA, the variance that the inducing values leave open: (R, 1) or (R, C).
        offset: The mean function: (R, C), or a number.
        scale: The factor of each output, (C,); None for 1.
    """

    weights: Tensor
    residual: Tensor
    offset: Tensor | float
    scale: Tensor | None = None

    def mean(self, center: Tensor) -> Tensor:
        """s Aᵀm + offset, for the mean m of whitened values, (M, C): (R, C)."""
        center = (center if self.scale is None else center * self.scale).to(self.weights.dtype)
        if self.weights.dim() == 2:
            return self.weights.mT @ center + self.offset
        return torch.einsum("cmr,mc->rc", self.weights, center) + self.offset

    def variance(self, root: Tensor) -> Tensor:
        """The variances of the outputs, for roots S of the covariance of whitened values: (R, C).

        Args:
            root: S with covariance S Sᵀ, (C, M, M).
        """
        return self.scaled(self.residual + (root.mT @ self.weights).square().sum(1).mT)

    def variance_by(self, covariance: Tensor) -> Tensor:
        """The same for covariances of whitened values, with products of their dtype: (R, C).

        Args:
            covariance: W, (C, M, M).
        """
        A = self.weights
        if A.dim() == 2:
            return self.scaled(self.residual + quadratic_forms(A, covariance))
        return self.scaled(self.residual + (covariance.to(A.dtype) @ A * A).sum(1).mT)

    def given(self, values: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Compute the outputs for whitened values of their own in each of S draws.

        Args:
            values: The whitened values, (S, M, C).
            num_rows: The number of rows N. R is N if the rows are the same in all draws, and else S·N.

        Returns:
            Means, (S, N, C), and the variances that the values leave open, which have as many axes.
        """
        lead = self.weights.shape[:-1]
        A = self.weights.reshape(*lead, -1, num_rows).expand(*lead, len(values), num_rows)
        mean = torch.einsum("msn,smc->snc" if A.dim() == 3 else "cmsn,smc->snc", A, values)
        offset = self.offset
        if isinstance(offset, Tensor) and offset.dim() > 1:
            offset = offset.reshape(-1, num_rows, offset.shape[-1])
        open_part = self.residual.reshape(-1, num_rows, self.residual.shape[1])
        mean = mean if self.scale is None else mean * self.scale
        return mean + offset, self.scaled(open_part)

    def scaled(self, variance: Tensor) -> Tensor:
        """Multiply variances by the squared factor of each output, which is the last axis."""
        return variance if self.scale is None else variance * self.scale.square().to(variance.dtype)


def factor(kernel: Kernel, points: Tensor) -> Tensor:
    """Compute the Cholesky factor of K(Z, Z), with as little jitter as it takes.

    Args:
        kernel: The kernel, in float64.
        points: Z, with M rows.

    Returns:
        L, (M, M), in float64.

    Raises:
        InputError: If the matrix is not finite, or is singular whatever is added.
    """
    return factored(kernel(points), JITTER)


def factored(K: Tensor, jitter: float) -> Tensor:
    """Compute the Cholesky factors of kernel matrices, with as little jitter as it takes.

    Args:
        K: The matrices, (…, M, M) in float64.
        jitter: What is added to the diagonal at least, relative to its mean.

    Returns:
        The factors.

    Raises:
        InputError: If a matrix is not finite, or is singular whatever is added.
    """
    scale = K.diagonal(dim1=-2, dim2=-1).mean().detach()
    count = K.shape[-1]
    identity = torch.eye(count, dtype=K.dtype, device=K.device)
    if not readable(K):
        # a singular matrix must then show in the bound
        L, info = torch.linalg.cholesky_ex(K + (jitter * scale) * identity)
        return torch.where((info == 0)[..., None, None], L, math.nan)
    if not bool(torch.isfinite(scale)) or not float(scale) > 0:
        raise InputError(
            "the kernel matrix of the inducing points is not finite: training diverged, or the kernel gives "
            "no variance. Pass a smaller learning_rate, or scale the inputs to variance 1."
        )
    for power in range(TRIES):
        L, info = torch.linalg.cholesky_ex(K + (jitter * 10**power * scale) * identity)
        if not bool(info.any()):
            return L
    raise InputError(
        f"the kernel matrix of the {count} inducing points is singular, even with a jitter of "
        f"{jitter * 10 ** (TRIES - 1):g}. Pass fewer inducing points, or a shorter length scale."
    )


def inverse(L: Tensor) -> Tensor:
    """The inverse of lower triangular matrices: products with it take half of the time of solving."""
    identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L)
    return torch.linalg.solve_triangular(L, identity, upper=False)


def project(
    kernel: Kernel,
    points: Tensor,
    L: Tensor,
    mean: AffineMean,
    inputs: Tensor,
    scale: Tensor | None = None,
) -> Projection:
    """Compute what a layer needs to know of its inputs. The cost is M² for each of them.

    The residual variance is a small difference of large numbers, and the inverse of L enlarges errors of the
    kernel by up to 1e5, so everything here is float64.

    Args:
        kernel: The kernel, in float64.
        points: The inducing points Z.
        L: The Cholesky factor of K(Z, Z).
        mean: The mean function.
        inputs: R inputs.
        scale: The factor of each output, (C,); None for 1.

    Returns:
        Weights, residual variances and means.
    """
    A = inverse(L) @ cross(kernel, points, inputs)
    return Projection(A, residual(kernel, A, inputs), mean(inputs), scale)


def residual(kernel: Kernel, A: Tensor, inputs: Tensor) -> Tensor:
    """k(h, h) − AᵀA, which rounding must not make negative: (R, 1)."""
    own = kernel.diag(inputs)
    return torch.maximum(own - A.square().sum(0), 1e-14 * own.detach().mean())[:, None]


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


class Law(NamedTuple):
    """The Gaussian over the whitened values of a layer.

    Args:
        center: Its mean, (M, C).
        root: A lower triangular root of its covariance, (C, M, M).
        divergence: Its divergence from the prior.
    """

    center: Tensor
    root: Tensor
    divergence: Tensor

    def covariance(self) -> Tensor:
        """The covariance, (C, M, M), in the dtype of products with it.

        While the bound is climbed, the products for variances are taken in float32: its gradients are noisy
        anyway, and these products are most of the work.
        """
        root = self.root.float() if torch.is_grad_enabled() else self.root
        return root @ root.mT


@savable("deep.InducingLayer")
@dataclass(frozen=True, eq=False)
class InducingLayer:
    """A fitted layer: C Gaussian processes, given by the law of their whitened values v at inducing points.

    The values at the inducing points are s L v plus the mean function, with K(Z, Z) = L Lᵀ and a factor s of
    each output, so that v ~ N(0, I) before the data and N(center, root rootᵀ) after.

    Args:
        kernel: The kernel, with its trained numbers.
        mean: The mean function.
        points: The inducing points Z, with M rows; (C, M, D) if outputs have kernels of their own.
        whitener: L⁻¹, (M, M) or (C, M, M).
        center: The mean of v, (M, C).
        root: A root of the covariance of v, lower triangular, (C, M, M).
        scale: The factor s of each output, (C,); None for 1.
        factors: What the inputs of the kernel of each output are multiplied by, (C, D); None if all outputs
            have the same kernel and points.
    """

    kernel: Kernel
    mean: AffineMean
    points: Tensor = field(repr=False)
    whitener: Tensor = field(repr=False)
    center: Tensor = field(repr=False)
    root: Tensor = field(repr=False)
    scale: Tensor | None = field(default=None, repr=False)
    factors: Tensor | None = field(default=None, repr=False)

    @property
    def width(self) -> int:
        """The number of outputs C."""
        return self.center.shape[1]

    @property
    def input_shape(self) -> torch.Size:
        """The shape of one input."""
        return self.points.shape[1:] if self.factors is None else self.points.shape[2:]

    def project(self, inputs: Tensor) -> Projection:
        """What the layer needs to know of R inputs, by products alone."""
        kernel = self.kernel.precise()
        parts = [(A, residual(kernel, A, own)) for own, A in self._outputs(inputs)]
        A, open_part = _joined([A for A, _ in parts]), torch.cat([r for _, r in parts], 1)
        return Projection(A, open_part, self.mean(inputs), self.scale)

    def _outputs(self, inputs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs of the kernel and weights A, (M, R), of each output, or once if all have the same."""
        kernel = self.kernel.precise()
        if self.factors is None:
            yield inputs, self.whitener @ kernel(self.points, inputs)
            return
        for factors, points, whitener in zip(self.factors, self.points, self.whitener, strict=True):
            own = inputs * factors
            yield own, whitener @ kernel(points * factors, own)

    def covariance(self, inputs: Tensor, *, given: bool = False) -> Tensor:
        """Compute the covariance of each output over R inputs, given everything before the layer.

        Args:
            inputs: R inputs.
            given: Whether the values at the inducing points are given as well.

        Returns:
            The covariances, (C, R, R).
        """
        found = self.open_covariance(inputs).expand(self.width, -1, -1)
        if not given:
            spread = self.root.mT @ _joined([A for _, A in self._outputs(inputs)])
            found = found + spread.mT @ spread
        return found if self.scale is None else found * self.scale.square()[:, None, None]

    def open_covariance(self, inputs: Tensor) -> Tensor:
        """What inducing values leave open, before the factors s: (C, R, R), or (1, R, R) for all outputs."""
        kernel = self.kernel.precise()
        return torch.stack([kernel(own) - A.mT @ A for own, A in self._outputs(inputs)])


def _joined(matrices: list[Tensor]) -> Tensor:
    """The matrices of all outputs, or the one that they share."""
    return torch.stack(matrices) if len(matrices) > 1 else matrices[0]
