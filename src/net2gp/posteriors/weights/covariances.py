"""Gaussian covariances over parameters in the structures that can be afforded.

Each that has a root gives it as `rooted`, from which `net2gp.posteriors.weights.rooted` makes J(x) Σ J(x)ᵀ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from net2gp.linear.forward.factors import Direct, Factor, jacobian, scaled
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.linear.linearized import Linearized
from net2gp.posteriors.weights.rooted import (
    entry_shape,
    example,
    normal,
    num_entries,
    rooted_blocks,
    rooted_joint,
    rooted_variances,
    times,
)
from net2gp.types import Inputs


class Covariance(Protocol):
    """Σ of θ − θ*, as predictions and samples need it."""

    def blocks(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J_n Σ J_nᵀ for each point: (N, C, C)."""

    def variances(self, linearized: Linearized, x: Inputs) -> Tensor:
        """The diagonals of the blocks: (N, C)."""

    def joint(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J Σ Jᵀ over all points: (N·C, N·C)."""

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """(P, S) draws of θ − θ*, in the order of `Linearized.flatten`."""


@dataclass(frozen=True, eq=False)
class DiagonalCovariance:
    """Σ = diag(variance), (P,).

    >>> covariance = DiagonalCovariance(torch.tensor([1.0, 4.0]))
    >>> covariance.draw(3, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3])
    """

    variance: Tensor

    def rooted(self, found: dict[str, Factor]) -> list[Factor]:
        """Each gradient times its parameter's standard deviation."""
        return [
            scaled(factor, v) for factor, v in zip(found.values(), self._split(found), strict=True)
        ]

    def _split(self, found: dict[str, Factor]) -> Iterator[Tensor]:
        start = 0
        for factor in found.values():
            size = num_entries(factor)
            v = self.variance[start : start + size]
            yield v.to(example(factor)).reshape(entry_shape(factor))
            start += size

    blocks, variances, joint = rooted_blocks, rooted_variances, rooted_joint

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """√variance · z."""
        return self.variance.sqrt()[:, None] * normal(self.variance, num_samples, generator)


@dataclass(frozen=True, eq=False)
class LowRankPlusDiagonal:
    """Σ = diag(diagonal) + factor factorᵀ, with factor (P, k)."""

    diagonal: Tensor
    factor: Tensor

    def rooted(self, found: dict[str, Factor]) -> list[Factor]:
        """The diagonal's factors, and the products with the k columns."""
        products: Tensor | None = None
        start = 0
        for one in found.values():
            size = num_entries(one)
            part = times(one, self.factor[start : start + size].to(example(one)))
            products = part if products is None else products + part
            start += size
        assert products is not None
        return [*DiagonalCovariance(self.diagonal).rooted(found), Direct(products)]

    blocks, variances, joint = rooted_blocks, rooted_variances, rooted_joint

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """√diagonal · z + factor · z'."""
        one = self.diagonal.sqrt()[:, None] * normal(self.diagonal, num_samples, generator)
        return one + self.factor @ normal(self.factor[0], num_samples, generator)


@dataclass(frozen=True, eq=False)
class Subtracted:
    """Σ = V − U diag(shrink) Uᵀ with a diagonal V (P,) and shrink > 0: what data leave of the prior.

    The form of a low-rank curvature: directions without data keep the prior. Kept as a difference, so
    that (P, P) is never formed. U (P, k) is given as V^{1/2} times orthonormal columns.
    """

    prior: Tensor
    U: Tensor
    shrink: Tensor

    def blocks(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J_n Σ J_nᵀ for each point: (N, C, C)."""
        prior, root = self._prior(linearized)
        own, less = prior.blocks_and_products(x, root)
        return (own - less @ less.mT).to(linearized.example.dtype)

    def variances(self, linearized: Linearized, x: Inputs) -> Tensor:
        """The diagonals of the blocks: (N, C)."""
        prior, root = self._prior(linearized)
        own, less = prior.blocks_and_products(x, root)
        difference = own.diagonal(dim1=1, dim2=2) - less.square().sum(-1)
        return difference.clamp(min=0).to(linearized.example.dtype)

    def joint(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J Σ Jᵀ over all points: (N·C, N·C)."""
        prior, root = self._prior(linearized)
        less = prior.apply(x, root)
        return prior(x) - less @ less.mT

    def _prior(self, linearized: Linearized) -> tuple[TangentKernel, Tensor]:
        """The prior's kernel, and V^{-1/2} U shrink^{1/2}: products in float64, from the same gradients.

        Where data are many or exact the two nearly cancel, and float32 would leave nothing but its rounding.
        """
        prior = linearized.kernel(linearized.unflatten(self.prior)).precise()
        return prior, self.U / self.prior.sqrt()[:, None] * self.shrink.sqrt()

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """V^{1/2} (I − Q diag(1 − √(1 − shrink)) Qᵀ) z with Q = V^{-1/2} U."""
        root = self.prior.sqrt()[:, None]
        z = normal(self.prior, num_samples, generator)
        Q = self.U / root
        less = 1 - (1 - self.shrink).clamp(min=0).sqrt()
        return root * (z - Q @ (less[:, None] * (Q.mT @ z)))


@dataclass(frozen=True, eq=False)
class FullCovariance:
    """Σ = root rootᵀ with root (P, P) = V^{1/2} L⁻ᵀ, in float64."""

    root: Tensor

    def rooted(self, found: dict[str, Factor]) -> list[Factor]:
        """J root, as one dense factor."""
        J = torch.cat([jacobian(factor) for factor in found.values()], -1)
        return [Direct(J.double() @ self.root)]

    blocks, variances, joint = rooted_blocks, rooted_variances, rooted_joint

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """root · z."""
        return self.root @ normal(self.root[0], num_samples, generator)


@dataclass(frozen=True, eq=False)
class SubsetCovariance:
    """Σ = root rootᵀ over the parameters `index` (k,), all others known: root (k, k)."""

    index: Tensor
    root: Tensor
    num_params: int

    def rooted(self, found: dict[str, Factor]) -> list[Factor]:
        """The chosen columns of J, times root."""
        parts, start = [], 0
        for factor in found.values():
            size = num_entries(factor)
            mine = self.index[(self.index >= start) & (self.index < start + size)] - start
            if len(mine):
                parts.append(jacobian(factor)[..., mine])
            start += size
        J = torch.cat(parts, -1)
        return [Direct(J.double() @ self.root)]

    blocks, variances, joint = rooted_blocks, rooted_variances, rooted_joint

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """root · z at the chosen parameters, zero at the others."""
        values = self.root.new_zeros(self.num_params, num_samples)
        values[self.index] = self.root @ normal(self.root[0], num_samples, generator)
        return values


@dataclass(frozen=True, eq=False)
class ScaledCovariance:
    """factor · Σ of another covariance."""

    inner: Covariance
    factor: float

    def blocks(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J_n Σ J_nᵀ for each point: (N, C, C)."""
        return self.factor * self.inner.blocks(linearized, x)

    def variances(self, linearized: Linearized, x: Inputs) -> Tensor:
        """The diagonals of the blocks: (N, C)."""
        return self.factor * self.inner.variances(linearized, x)

    def joint(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J Σ Jᵀ over all points: (N·C, N·C)."""
        return self.factor * self.inner.joint(linearized, x)

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """√factor times a draw."""
        return self.factor**0.5 * self.inner.draw(num_samples, generator)
