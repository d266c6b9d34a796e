"""Σ of a network's parameters, and J(x) Σ J(x)ᵀ from one primitive: `rooted`.

`rooted` turns gradients J into factors of J Σ^{1/2}. Gradients are scaled and rotated by a root of Σ, layer
by layer, so that no prediction stores a Jacobian where the structure of the layers avoids it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from net2gp.inputs import follows, num_rows, rows
from net2gp.linalg.chance import random_normal
from net2gp.linear.curvatures.curvature import chunk_size
from net2gp.linear.forward.factors import (
    Direct,
    Factor,
    Lookup,
    Outer,
    accumulate,
    add_blocks,
    in_dtype,
    jacobian,
    mirror,
)
from net2gp.linear.jacobians.capture import Plan, capture, gradients_apart, plan
from net2gp.linear.linearized import Linearized
from net2gp.tags import savable
from net2gp.types import Inputs


class Covariance:
    """Σ of θ − θ*, as predictions and samples need it.

    A kind is a frozen dataclass that writes `draw`, and either `rooted` or the three of `blocks`, `variances`
    and `joint`. It may also write `differences(linearized, x, top)`, the variances of f_c − f_top, (N, C),
    where it has them for less than `blocks`.

    Of a network with outputs at places, `by_place` says that `blocks`, `variances` and `joint` have a row for
    each place; the covariances of other kinds are estimated there by draws (`columns`).
    """

    by_place: ClassVar[bool] = False

    def rooted(self, found: dict[str, Factor]) -> list[Factor]:
        """Factors whose products sum to J Σ Jᵀ.

        Args:
            found: The gradients of some points, as a factor for each parameter, in the order of
                `Linearized.params`.

        Returns:
            One factor or more, each with the points and outputs of `found` in front.

        Raises:
            NotImplementedError: The kind has neither `rooted` nor `blocks`.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither rooted nor blocks.")

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """Draws of θ − θ*.

        Args:
            num_samples: How many, S.
            generator: The source of random numbers; None means torch's own.

        Returns:
            (P, S), in the order of `Linearized.flatten`.

        Raises:
            NotImplementedError: The kind has no `draw`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no draw.")

    def columns(self, num_draws: int) -> Tensor:
        """W with W Wᵀ close to Σ: fixed draws of θ − θ*, over the root of their number.

        Args:
            num_draws: How many, S. A kind that is made of draws returns these.

        Returns:
            (P, S).
        """
        return self.draw(num_draws, torch.Generator().manual_seed(0)) / num_draws**0.5

    def mask(self) -> Tensor | None:
        """1 for parameters that vary and 0 for those that are fixed: (P,); None if all vary."""
        return None

    def blocks(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J_n Σ J_nᵀ for each point.

        Args:
            linearized: The network.
            x: The points.

        Returns:
            (N, C, C).
        """
        results = []
        for factors in self._parts(linearized, x):
            B, C = example(factors[0]).shape[:2]
            total = example(factors[0]).new_zeros(B, C, C)
            for factor in factors:
                if isinstance(factor, Outer) and factor.g.shape[4] == 1:
                    u, g = _once_spread(factor), factor.g[..., 0]
                    total += torch.einsum("bcso,bso,bdso->bcd", g, u, g)
                else:
                    add_blocks(total, factor)
            results.append(total.to(linearized.example.dtype))
        return torch.cat(results)

    def variances(self, linearized: Linearized, x: Inputs) -> Tensor:
        """The diagonals of the blocks, which are not formed for it.

        Args:
            linearized: The network.
            x: The points.

        Returns:
            (N, C).
        """
        results = []
        for factors in self._parts(linearized, x):
            total = example(factors[0]).new_zeros(example(factors[0]).shape[:2])
            for factor in factors:
                if isinstance(factor, Outer) and factor.g.shape[4] == 1:
                    squares = factor.g[..., 0].square()
                    total += torch.einsum("bcso,bso->bc", squares, _once_spread(factor))
                elif isinstance(
                    factor, Lookup
                ):  # whose Jacobian has a column for every token there is
                    block = torch.diag_embed(torch.zeros_like(total))
                    add_blocks(block, factor)
                    total += block.diagonal(dim1=1, dim2=2)
                else:
                    total += jacobian(factor).square().sum(-1)
            results.append(total.to(linearized.example.dtype))
        return torch.cat(results)

    def joint(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J Σ Jᵀ over all points.

        Args:
            linearized: The network.
            x: The points.

        Returns:
            (N·C, N·C), in float64.
        """
        linearized.check(x)
        factors = self._captured(linearized, x, plan(linearized, x, training=False))
        B, C = example(factors[0]).shape[:2]
        K = torch.zeros(B * C, B * C, dtype=torch.float64, device=linearized.example.device)
        with torch.set_grad_enabled(follows(x)):
            for factor in factors:
                precise = in_dtype(factor, torch.float64)
                accumulate(K, precise, precise, C)
            mirror(K, C)
        return K

    def _captured(self, linearized: Linearized, x: Inputs, layout: Plan) -> list[Factor]:
        found = capture(linearized, x, layout)
        found |= {n: Direct(J) for n, J in gradients_apart(linearized, x, layout.leftover).items()}
        return self.rooted({name: found[name] for name in linearized.params})

    def _parts(self, linearized: Linearized, x: Inputs) -> Iterator[list[Factor]]:
        linearized.check(x)
        layout = plan(linearized, x, training=False)
        size = chunk_size(linearized, layout)
        for start in range(0, num_rows(x), size):
            yield self._captured(linearized, rows(x, slice(start, start + size)), layout)


def _once_spread(factor: Outer) -> Tensor:
    """Σ_i a_i² scale_oi² for a weight that is used once: (B, S, O)."""
    squares = factor.a[:, :, 0].square()
    if not factor.scale.dim():
        return (squares.sum(-1) * factor.scale**2)[..., None].expand(
            factor.g.shape[0], *factor.g.shape[2:4]
        )
    return torch.einsum("bsi,soi->bso", squares, factor.scale.square())


@savable("covariances.ScaledCovariance")
@dataclass(frozen=True, eq=False)
class ScaledCovariance(Covariance):
    """factor · Σ of another covariance."""

    inner: Covariance
    factor: float

    @property
    def by_place(self) -> bool:  # type: ignore[override]
        """Whether the other covariance has rows for places."""
        return self.inner.by_place

    def columns(self, num_draws: int) -> Tensor:
        """√factor times the columns of the other covariance."""
        return self.factor**0.5 * self.inner.columns(num_draws)

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

    def mask(self) -> Tensor | None:
        """1 for parameters that vary and 0 for those that are fixed: (P,); None if all vary."""
        return self.inner.mask()


def normal(like: Tensor, num_samples: int, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers of the shape of `like` with an axis of samples behind."""
    shape = (*like.shape, num_samples)
    return random_normal(shape, generator=generator, device=like.device, dtype=like.dtype)


def entry_shape(factor: Factor) -> torch.Size:
    """The axes of a factor's parameters, behind points and outputs."""
    if isinstance(factor, Direct):
        return factor.J.shape[2:]
    if isinstance(factor, Outer):
        return torch.Size((*factor.g.shape[2:4], factor.a.shape[-1]))
    return torch.Size((factor.num_embeddings, factor.g.shape[-1]))


def num_entries(factor: Factor) -> int:
    """How many entries the parameters of a factor have."""
    return entry_shape(factor).numel()


def example(factor: Factor) -> Tensor:
    """One of its tensors (B, C, …), to read sizes, dtype and device from."""
    return factor.J if isinstance(factor, Direct) else factor.g
