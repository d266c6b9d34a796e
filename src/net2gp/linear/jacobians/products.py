"""Products of a Jacobian with vectors, from the factors of its layers, in float64 if necessary.

A pass through the network rounds as the network does. If a kernel matrix was built from factors in one
precision and multiplied in another, products with its features must come from the same factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from net2gp.inputs import chunks, num_rows
from net2gp.linear.forward.factors import CHUNK_BYTES, Direct, Factor, Lookup, in_dtype
from net2gp.linear.jacobians.capture import capture, gradients_apart
from net2gp.linear.planning.plans import Plan
from net2gp.types import Inputs

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized


def jacobian_times(
    linearized: Linearized, x: Inputs, layout: Plan, points: int, w: Tensor
) -> Tensor:
    """Compute J(x) w (N·C, k) for w (P, k), in the dtype of w, with `points` points at a time."""
    parts = []
    for part in chunks(x, points):
        factors = _factors(linearized, part, layout, w)
        parts.append(factors_times(linearized, factors, w).flatten(0, 1))
    return torch.cat(parts)


def factors_times(linearized: Linearized, factors: Sequence[Factor], w: Tensor) -> Tensor:
    """Compute J w (B, C, k) for w (P, k), from one factor per chosen parameter, in order."""
    total: Tensor | None = None
    for factor, piece in zip(factors, _split(linearized, w), strict=True):
        product = _times(factor, piece)
        total = product if total is None else total + product
    assert total is not None
    return total


def jacobian_transposed_times(
    linearized: Linearized, x: Inputs, layout: Plan, points: int, u: Tensor
) -> Tensor:
    """Compute J(x)ᵀ u (P, k) for u (N·C, k), in the dtype of u, with `points` points at a time."""
    C = layout.num_outputs
    total = u.new_zeros(linearized.num_params, u.shape[1])
    start = 0
    for part in chunks(x, points):
        stop = start + num_rows(part) * C
        own = u[start:stop].unflatten(0, (-1, C))
        pulled = [
            _transposed_times(factor, own) for factor in _factors(linearized, part, layout, u)
        ]
        total += torch.cat(pulled)
        start = stop
    return total


def _factors(linearized: Linearized, x: Inputs, layout: Plan, like: Tensor) -> list[Factor]:
    """Return one factor per chosen parameter, in order."""
    known = capture(linearized, x, layout)
    for names in _groups(linearized, layout.leftover, num_rows(x) * layout.num_outputs):
        apart = gradients_apart(linearized, x, names)
        known |= {name: Direct(J) for name, J in apart.items()}
    return [in_dtype(known[name], like.dtype) for name in linearized.params]


def _groups(linearized: Linearized, names: Sequence[str], num_rows: int) -> list[list[str]]:
    """Group parameters whose columns share the passes, so that each group fits into CHUNK_BYTES."""
    groups: list[list[str]] = []
    room = 0
    for name in names:
        size = linearized.params[name].numel() * num_rows * linearized.example.element_size()
        if not groups or size > room:
            groups.append([])
            room = CHUNK_BYTES
        groups[-1].append(name)
        room -= size
    return groups


def _split(linearized: Linearized, w: Tensor) -> tuple[Tensor, ...]:
    return w.split([value.numel() for value in linearized.params.values()])


def _times(factor: Factor, w: Tensor) -> Tensor:
    """Compute J w (B, C, k) for w (p, k)."""
    if isinstance(factor, Direct):
        return factor.J @ w
    if isinstance(factor, Lookup):
        rows = w.reshape(factor.num_embeddings, -1, w.shape[1])[factor.ids.clamp(min=0)]
        rows = rows * (factor.ids >= 0)[..., None, None]
        return torch.einsum("bcto,btok->bck", factor.g, rows)
    B, _, S, O, T = factor.g.shape
    step = max(1, CHUNK_BYTES // (B * S * O * T * w.element_size()))
    weights = factor.matrices(w.mT)
    parts = [
        torch.einsum("bcsot,bsotk->bck", factor.g, torch.einsum("bsti,ksoi->bsotk", factor.a, some))
        for some in weights.split(step)
    ]
    return torch.cat(parts, -1)


def _transposed_times(factor: Factor, u: Tensor) -> Tensor:
    """Compute Jᵀ u (p, k) for u (B, C, k)."""
    if isinstance(factor, Direct):
        return factor.J.flatten(0, 1).mT @ u.flatten(0, 1)
    if isinstance(factor, Lookup):
        known = factor.ids >= 0
        mixed = torch.einsum("bcto,bck->btok", factor.g, u)[known]
        rows = u.new_zeros(factor.num_embeddings, *mixed.shape[1:])
        return rows.index_add_(0, factor.ids[known], mixed).flatten(0, 1)
    B, _, S, O, T = factor.g.shape
    step = max(1, CHUNK_BYTES // (B * S * O * T * u.element_size()))
    parts = [
        torch.einsum("bsotk,bsti->ksoi", torch.einsum("bcsot,bck->bsotk", factor.g, some), factor.a)
        for some in u.split(step, -1)
    ]
    return factor.entries(torch.cat(parts)).mT
