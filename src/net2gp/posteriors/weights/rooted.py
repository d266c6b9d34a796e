"""J(x) Σ J(x)ᵀ from one primitive: `rooted`, which turns gradients J into factors of J Σ^{1/2}.

Gradients are scaled and rotated by a root of Σ, layer by layer, so that no prediction stores a Jacobian where
the layers' structure avoids it. A covariance with `rooted` takes the three functions as its methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from net2gp.inputs import follows, num_rows, rows
from net2gp.linear.curvatures.curvature import chunk_size
from net2gp.linear.forward.factors import (
    Direct,
    Factor,
    Outer,
    accumulate,
    add_blocks,
    in_dtype,
    jacobian,
    mirror,
)
from net2gp.linear.jacobians.capture import Plan, capture, gradients_apart, plan
from net2gp.linear.linearized import Linearized
from net2gp.types import Inputs


class Rooted(Protocol):
    """A covariance that turns gradients J into factors of J Σ^{1/2}."""

    def rooted(self, found: dict[str, Factor]) -> list[Factor]:
        """Factors whose products sum to J Σ Jᵀ."""


def normal(like: Tensor, num_samples: int, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers of the shape of `like` with an axis of samples behind."""
    device = like.device if generator is None else generator.device
    shape = (*like.shape, num_samples)
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=device).to(like.device)


def num_entries(factor: Factor) -> int:
    """p, the parameters that a factor is of."""
    return entry_shape(factor).numel()


def entry_shape(factor: Factor) -> torch.Size:
    """The axes of a factor's parameters, behind points and outputs."""
    if isinstance(factor, Direct):
        return factor.J.shape[2:]
    if isinstance(factor, Outer):
        return torch.Size((*factor.g.shape[2:4], factor.a.shape[-1]))
    return torch.Size((factor.num_embeddings, factor.g.shape[-1]))


def example(factor: Factor) -> Tensor:
    """One of its tensors (B, C, …), to read sizes, dtype and device from."""
    return factor.J if isinstance(factor, Direct) else factor.g


def times(factor: Factor, v: Tensor) -> Tensor:
    """J v for v (p, k): (B, C, k)."""
    return jacobian(factor) @ v


def _captured(covariance: Rooted, linearized: Linearized, x: Inputs, layout: Plan) -> list[Factor]:
    found = capture(linearized, x, layout)
    found |= {n: Direct(J) for n, J in gradients_apart(linearized, x, layout.leftover).items()}
    return covariance.rooted({name: found[name] for name in linearized.params})


def _parts(covariance: Rooted, linearized: Linearized, x: Inputs) -> Iterator[list[Factor]]:
    linearized.check(x)
    layout = plan(linearized, x, training=False)
    size = chunk_size(linearized, layout)
    for start in range(0, num_rows(x), size):
        yield _captured(covariance, linearized, rows(x, slice(start, start + size)), layout)


def rooted_blocks(covariance: Rooted, linearized: Linearized, x: Inputs) -> Tensor:
    """Σ of factor factorᵀ at each point: (N, C, C)."""
    results = []
    for factors in _parts(covariance, linearized, x):
        B, C = example(factors[0]).shape[:2]
        total = example(factors[0]).new_zeros(B, C, C)
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
        total = example(factors[0]).new_zeros(example(factors[0]).shape[:2])
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
    factors = _captured(covariance, linearized, x, plan(linearized, x, training=False))
    B, C = example(factors[0]).shape[:2]
    K = torch.zeros(B * C, B * C, dtype=torch.float64, device=linearized.example.device)
    with torch.set_grad_enabled(follows(x)):
        for factor in factors:
            precise = in_dtype(factor, torch.float64)
            accumulate(K, precise, precise, C)
        mirror(K, C)
    return K
