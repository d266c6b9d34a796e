"""Gaussian covariances over parameters in the structures that can be afforded.

Each gives, for points x, factors whose products are J(x) Σ J(x)ᵀ: gradients scaled and rotated by a root of
Σ, layer by layer, so that no prediction stores a Jacobian where the layers' structure avoids it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from net2gp.inputs import num_rows, rows
from net2gp.linear.capture import Plan, capture, leftover_jacobian, plan
from net2gp.linear.curvature import chunk_size
from net2gp.linear.factors import (
    Direct,
    Factor,
    Outer,
    accumulate,
    add_blocks,
    in_dtype,
    jacobian,
    mirror,
    scaled,
)
from net2gp.linear.linearized import Linearized
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


class Rooted(Protocol):
    """A covariance that turns gradients J into factors of J Σ^{1/2}."""

    def rooted(self, found: dict[str, Factor]) -> list[Factor]:
        """Factors whose products sum to J Σ Jᵀ."""


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
            yield v.to(_example(factor)).reshape(_entry_shape(factor))
            start += size

    def blocks(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J_n Σ J_nᵀ for each point: (N, C, C)."""
        return rooted_blocks(self, linearized, x)

    def variances(self, linearized: Linearized, x: Inputs) -> Tensor:
        """The diagonals of the blocks: (N, C)."""
        return rooted_variances(self, linearized, x)

    def joint(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J Σ Jᵀ over all points: (N·C, N·C)."""
        return rooted_joint(self, linearized, x)

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
            part = times(one, self.factor[start : start + size].to(_example(one)))
            products = part if products is None else products + part
            start += size
        assert products is not None
        return [*DiagonalCovariance(self.diagonal).rooted(found), Direct(products)]

    def blocks(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J_n Σ J_nᵀ for each point: (N, C, C)."""
        return rooted_blocks(self, linearized, x)

    def variances(self, linearized: Linearized, x: Inputs) -> Tensor:
        """The diagonals of the blocks: (N, C)."""
        return rooted_variances(self, linearized, x)

    def joint(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J Σ Jᵀ over all points: (N·C, N·C)."""
        return rooted_joint(self, linearized, x)

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
        prior, less = self._parts(x, linearized)
        return rooted_blocks(prior, linearized, x) - less @ less.mT

    def variances(self, linearized: Linearized, x: Inputs) -> Tensor:
        """The diagonals of the blocks: (N, C)."""
        prior, less = self._parts(x, linearized)
        return (rooted_variances(prior, linearized, x) - less.square().sum(-1)).clamp(min=0)

    def joint(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J Σ Jᵀ over all points: (N·C, N·C)."""
        prior, less = self._parts(x, linearized)
        return rooted_joint(prior, linearized, x) - less.flatten(0, 1) @ less.flatten(0, 1).mT

    def _parts(self, x: Inputs, linearized: Linearized) -> tuple[DiagonalCovariance, Tensor]:
        root = self.U * self.shrink.sqrt()
        products = linearized.kernel().apply(x, root.to(linearized.example))
        return DiagonalCovariance(self.prior), products.reshape(num_rows(x), -1, root.shape[1])

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

    def blocks(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J_n Σ J_nᵀ for each point: (N, C, C)."""
        return rooted_blocks(self, linearized, x)

    def variances(self, linearized: Linearized, x: Inputs) -> Tensor:
        """The diagonals of the blocks: (N, C)."""
        return rooted_variances(self, linearized, x)

    def joint(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J Σ Jᵀ over all points: (N·C, N·C)."""
        return rooted_joint(self, linearized, x)

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

    def blocks(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J_n Σ J_nᵀ for each point: (N, C, C)."""
        return rooted_blocks(self, linearized, x)

    def variances(self, linearized: Linearized, x: Inputs) -> Tensor:
        """The diagonals of the blocks: (N, C)."""
        return rooted_variances(self, linearized, x)

    def joint(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J Σ Jᵀ over all points: (N·C, N·C)."""
        return rooted_joint(self, linearized, x)

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """root · z at the chosen parameters, zero at the others."""
        values = self.root.new_zeros(self.num_params, num_samples)
        values[self.index] = self.root @ normal(self.root[0], num_samples, generator)
        return values


def normal(like: Tensor, num_samples: int, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers of the shape of `like` with an axis of samples behind."""
    device = like.device if generator is None else generator.device
    shape = (*like.shape, num_samples)
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=device).to(like.device)


def num_entries(factor: Factor) -> int:
    """p, the parameters that a factor is of."""
    return _entry_shape(factor).numel()


def _entry_shape(factor: Factor) -> torch.Size:
    if isinstance(factor, Direct):
        return factor.J.shape[2:]
    if isinstance(factor, Outer):
        return torch.Size((*factor.g.shape[2:4], factor.a.shape[-1]))
    return torch.Size((factor.num_embeddings, factor.g.shape[-1]))


def _example(factor: Factor) -> Tensor:
    return factor.J if isinstance(factor, Direct) else factor.g


def times(factor: Factor, v: Tensor) -> Tensor:
    """J v for v (p, k): (B, C, k)."""
    return jacobian(factor) @ v


def _captured(covariance: Rooted, linearized: Linearized, x: Inputs, layout: Plan) -> list[Factor]:
    found = capture(linearized, x, layout)
    if layout.leftover:
        J = leftover_jacobian(linearized, x, layout.leftover)
        sizes = [linearized.params[name].numel() for name in layout.leftover]
        parts = J.split(sizes, -1)
        found |= {n: Direct(part) for n, part in zip(layout.leftover, parts, strict=True)}
    return covariance.rooted({name: found[name] for name in linearized.params})


def _parts(covariance: Rooted, linearized: Linearized, x: Inputs) -> Iterator[list[Factor]]:
    linearized.check(x)
    layout = plan(linearized, x)
    size = chunk_size(linearized, layout)
    for start in range(0, num_rows(x), size):
        yield _captured(covariance, linearized, rows(x, slice(start, start + size)), layout)


def rooted_blocks(covariance: Rooted, linearized: Linearized, x: Inputs) -> Tensor:
    """Σ of factor factorᵀ at each point: (N, C, C)."""
    results = []
    for factors in _parts(covariance, linearized, x):
        B, C = _example(factors[0]).shape[:2]
        total = _example(factors[0]).new_zeros(B, C, C)
        for factor in factors:
            if _once(factor):
                assert isinstance(factor, Outer)
                u, g = _once_spread(factor), factor.g[..., 0]
                total += torch.einsum("bcso,bso,bdso->bcd", g, u, g)
            else:
                add_blocks(total, factor)
        results.append(total.to(linearized.example.dtype))
    return torch.cat(results)


def rooted_variances(covariance: Rooted, linearized: Linearized, x: Inputs) -> Tensor:
    """The diagonals of the blocks: (N, C), never forming them."""
    results = []
    for factors in _parts(covariance, linearized, x):
        total = _example(factors[0]).new_zeros(_example(factors[0]).shape[:2])
        for factor in factors:
            if _once(factor):
                assert isinstance(factor, Outer)
                squares = factor.g[..., 0].square()
                total += torch.einsum("bcso,bso->bc", squares, _once_spread(factor))
            else:
                total += jacobian(factor).square().sum(-1)
        results.append(total.to(linearized.example.dtype))
    return torch.cat(results)


def _once(factor: Factor) -> bool:
    return isinstance(factor, Outer) and factor.g.shape[4] == 1


def _once_spread(factor: Outer) -> Tensor:
    """Σ_i a_i² scale_oi² for a weight that is used once: (B, S, O)."""
    squares = factor.a[:, :, 0].square()
    if not factor.scale.dim():
        return (squares.sum(-1) * factor.scale**2)[..., None].expand(
            factor.g.shape[0], *factor.g.shape[2:4]
        )
    return torch.einsum("bsi,soi->bso", squares, factor.scale.square())


def rooted_joint(covariance: Rooted, linearized: Linearized, x: Inputs) -> Tensor:
    """Σ of factor factorᵀ over all points: (N·C, N·C), in float64."""
    linearized.check(x)
    factors = _captured(covariance, linearized, x, plan(linearized, x))
    B, C = _example(factors[0]).shape[:2]
    K = torch.zeros(B * C, B * C, dtype=torch.float64, device=linearized.example.device)
    for factor in factors:
        precise = in_dtype(factor, torch.float64)
        accumulate(K, precise, precise, C)
    mirror(K, C)
    return K
