"""Observations that a posterior is conditioned on in batches, all of which share its factorization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

Joint = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From points (*b, q, d) to means (*b, q·C) and covariances (*b, q·C, q·C); rows run point by point."""


@dataclass(frozen=True, eq=False)
class Fantasies:
    """Batches of further observations y = f(x) + ε of a Gaussian process.

    With the joint law of f at the n' new and q other points, m = (m₁, m₂) and S = (A, B; Bᵀ, D), it is the
    Schur complement of one small matrix in each batch: m₂ + Bᵀ(A + Σ)⁻¹(y − m₁) and D − Bᵀ(A + Σ)⁻¹B. That is
    what a Cholesky factor of all data gives when it grows by n' rows, but the factor of the old data is one
    and the same for all batches. Cost for b batches: a joint law of n' + q points and (n'·C)³/3 each.

    Args:
        x: The points: (*b, n', d).
        y: The observations: (*b', n', C), where b' broadcasts with b.
        noise: The variance of ε: (*b', n', C), or a shape that broadcasts to it.
    """

    x: Tensor
    y: Tensor
    noise: Tensor

    @property
    def batch_shape(self) -> torch.Size:
        """The batch shape of points and observations together."""
        return torch.broadcast_shapes(self.x.shape[:-2], self.y.shape[:-2], self.noise.shape[:-2])

    def joined(self, x: Tensor, y: Tensor, noise: Tensor) -> Fantasies:
        """These observations and further ones."""
        y = y.expand(torch.broadcast_shapes(y.shape[:-2], self.batch_shape) + y.shape[-2:])
        noise = noise.expand(noise.shape[:-2] + y.shape[-2:])
        old = self.noise.expand(self.noise.shape[:-2] + self.y.shape[-2:])
        return Fantasies(_cat(self.x, x), _cat(self.y, y), _cat(old, noise))

    def condition(self, joint: Joint, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the law of f at `x` given these observations.

        Args:
            joint: The law of f without them.
            x: Points: (*b″, q, d).

        Returns:
            Means (*b, q·C) and covariances (*b, q·C, q·C), where b broadcasts all batches.
        """
        mean, covariance = joint(_cat(self.x, x))
        size = self.y.shape[-2] * self.y.shape[-1]
        noise = self.noise.expand(self.noise.shape[:-2] + self.y.shape[-2:]).flatten(-2)
        A = covariance[..., :size, :size]
        A = A + torch.diag_embed(noise.to(A))
        L = psd_safe_cholesky(A)
        V = torch.linalg.solve_triangular(L, covariance[..., :size, size:], upper=False)
        missed = self.y.flatten(-2).to(mean) - mean[..., :size]
        step = torch.linalg.solve_triangular(L, missed[..., None], upper=False)
        mean = mean[..., size:] + (V.mT @ step)[..., 0]
        covariance = covariance[..., size:, size:] - V.mT @ V
        batch = torch.broadcast_shapes(mean.shape[:-1], covariance.shape[:-2])
        covariance = 0.5 * (covariance + covariance.mT)
        return mean.expand(*batch, -1), covariance.expand(*batch, -1, -1)


def _cat(one: Tensor, other: Tensor) -> Tensor:
    """Join along the axis of the points, with the batches broadcast."""
    batch = torch.broadcast_shapes(one.shape[:-2], other.shape[:-2])
    return torch.cat(
        [one.expand(*batch, *one.shape[-2:]), other.expand(*batch, *other.shape[-2:])], -2
    )
