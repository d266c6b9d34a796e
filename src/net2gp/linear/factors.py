"""Per-example parameter gradients in the form in which they are cheapest to multiply.

Inside this room, rows of a batch of B points run output-major: gradients are (C, B, …), so that the
innermost axis of every product is a long run of points.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

CHUNK_BYTES = 2**27
"""The largest piece of a Jacobian that a contraction holds at a time, per side."""

ELEMENTWISE = 24
"""Cost of one broadcast multiply-add per matrix entry, in floating-point operations of a matrix product."""


@dataclass(frozen=True, eq=False)
class Outer:
    """∂f_c/∂W = Σ_t g_ct a_tᵀ, for a weight applied as W a_t at T places.

    a: (B, S, T, I) inputs, g: (C, B, S, T, O) output gradients; S are the groups of a grouped layer.
    `scale` multiplies the gradient: a number, or a tensor (S, O, I).
    """

    a: Tensor
    g: Tensor
    scale: Tensor

    def rows(self, index: slice) -> Outer:
        """The points that `index` picks."""
        return replace(self, a=self.a[index], g=self.g[:, index])

    def traced(self) -> Outer:
        """Outputs moved behind the features, so that products sum over them: C becomes 1."""
        C, B, S, T, O = self.g.shape
        g = self.g.permute(1, 2, 3, 0, 4).reshape(1, B, S, T, C * O)
        scale = self.scale.repeat(1, C, 1) if self.scale.dim() else self.scale
        return replace(self, g=g, scale=scale)

    @property
    def by_gram(self) -> bool:
        """Whether Σ_ts (a_t·a_s)(g_t·g_s) is cheaper than forming the gradients."""
        _, _, S, T, O = self.g.shape
        I = self.a.shape[-1]
        return not self.scale.dim() and S * T * T * (2 * O + ELEMENTWISE) <= 2 * S * O * I

    def gradients(self) -> Iterator[Tensor]:
        """The gradients (C, B, p) in pieces over the outputs of the layer, each under CHUNK_BYTES."""
        C, B, S, _, O = self.g.shape
        I = self.a.shape[-1]
        step = max(1, CHUNK_BYTES // (C * B * S * I * self.a.element_size()))
        for start in range(0, O, step):
            piece = self.g[..., start : start + step]
            width = piece.shape[-1]
            # (C, B, S, o, T) @ (B, S, T, I): a batched product, which einsum would reorder with a copy
            product = piece.transpose(-1, -2) @ self.a
            scale = self.scale[:, start : start + step] if self.scale.dim() else self.scale
            yield (product * scale).reshape(C, B, S * width * I)

    def jacobian(self) -> Tensor:
        """The gradients (C, B, S·O·I), in the order of the weight's own entries."""
        C, B = self.g.shape[:2]
        return ((self.g.transpose(-1, -2) @ self.a) * self.scale).reshape(C, B, -1)


@dataclass(frozen=True, eq=False)
class Lookup:
    """∂f_c/∂E[v] = Σ_t 1[token_t = v] g_ct, for an embedding: ids (B, T), g (C, B, T, O).

    Negative ids mark places without a gradient (padding). `scale` is a number or a tensor (V, O).
    """

    ids: Tensor
    g: Tensor
    scale: Tensor
    num_embeddings: int

    def rows(self, index: slice) -> Lookup:
        """The points that `index` picks."""
        return replace(self, ids=self.ids[index], g=self.g[:, index])

    def traced(self) -> Lookup:
        """Outputs moved behind the features, so that products sum over them: C becomes 1."""
        C, B, T, O = self.g.shape
        g = self.g.permute(1, 2, 0, 3).reshape(1, B, T, C * O)
        scale = self.scale.repeat(1, C) if self.scale.dim() else self.scale
        return replace(self, g=g, scale=scale)

    def gradients(self, vocabulary: Tensor) -> Iterator[Tensor]:
        """The gradients (C, B, p) of the embeddings in `vocabulary` (sorted ids), in pieces."""
        C, B, _, O = self.g.shape
        U = len(vocabulary)
        place = torch.searchsorted(vocabulary, self.ids.contiguous()).clamp(max=max(U - 1, 0))
        known = vocabulary[place] == self.ids
        target = (torch.arange(B, device=place.device)[:, None] * U + place)[known]
        step = max(1, CHUNK_BYTES // (C * B * U * self.g.element_size()))
        for start in range(0, O, step):
            piece = self.g[..., start : start + step]
            width = piece.shape[-1]
            if self.scale.dim():
                piece = piece * self.scale[self.ids.clamp(min=0), start : start + step]
            else:
                piece = piece * self.scale
            J = piece.new_zeros(C, B * U, width).index_add_(1, target, piece[:, known])
            yield J.reshape(C, B, U * width)

    def jacobian(self) -> Tensor:
        """The gradients (C, B, V·O), in the order of the embedding's own entries."""
        everything = torch.arange(self.num_embeddings, device=self.ids.device)
        C, B, _, O = self.g.shape
        pieces = [
            piece.reshape(C, B, self.num_embeddings, -1) for piece in self.gradients(everything)
        ]
        return torch.cat(pieces, -1).reshape(C, B, self.num_embeddings * O)


@dataclass(frozen=True, eq=False)
class Direct:
    """The gradients themselves, J: (C, B, p), already scaled."""

    J: Tensor

    def rows(self, index: slice) -> Direct:
        """The points that `index` picks."""
        return Direct(self.J[:, index])

    def traced(self) -> Direct:
        """Outputs moved behind the features, so that products sum over them: C becomes 1."""
        return Direct(self.J.transpose(0, 1).reshape(1, self.J.shape[1], -1))

    def jacobian(self) -> Tensor:
        """The gradients themselves."""
        return self.J


Factor = Outer | Lookup | Direct


def scaled(factor: Factor, variance: Tensor) -> Factor:
    """`factor` times the square root of a prior variance (a number, or of the parameter's shape)."""
    root = variance.sqrt()
    if isinstance(factor, Direct):
        return Direct(factor.J * (root.reshape(-1) if root.dim() else root))
    if isinstance(factor, Lookup):
        return replace(factor, scale=root)
    if root.dim():
        S, O, I = factor.g.shape[2], factor.g.shape[4], factor.a.shape[3]
        return replace(factor, scale=root.reshape(S, O, I))
    return replace(factor, a=factor.a * root)


def with_bias(weight: Outer, bias_variance: Tensor) -> Outer:
    """A layer's weight and bias as one factor: the bias is the weight of a constant input."""
    constant = bias_variance.sqrt().expand(*weight.a.shape[:-1], 1)
    return replace(weight, a=torch.cat([weight.a, constant.to(weight.a)], -1))


def accumulate(K: Tensor, left: Factor, right: Factor, *, symmetric: bool) -> None:
    """K += J_left J_rightᵀ in place, K of shape (C, B, C, M).

    With `symmetric`, left and right are the same and only tiles on and above the diagonal (in points)
    are written.
    """
    if isinstance(left, Outer) and isinstance(right, Outer) and left.by_gram and right.by_gram:
        for n, m in _tiles(K, symmetric):
            _add_gram(K[:, n, :, m], left.rows(n), right.rows(m))
        return
    for J, H in _gradient_pairs(left, right, symmetric):
        for n, m in _tiles(K, symmetric):
            product = J[:, n].flatten(0, 1) @ H[:, m].flatten(0, 1).T
            K[:, n, :, m] += product.reshape(K[:, n, :, m].shape)


def _gradient_pairs(left: Factor, right: Factor, same: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Matching pieces of the two sides' gradients."""
    if isinstance(left, Direct) and isinstance(right, Direct):
        yield left.J, right.J
    elif isinstance(left, Outer) and isinstance(right, Outer):
        # the larger side decides how the outputs are cut, so that the pieces match
        larger, smaller = (left, right) if left.g.shape[1] >= right.g.shape[1] else (right, left)
        start = 0
        for piece in larger.gradients():
            S, I = larger.a.shape[1], larger.a.shape[3]
            stop = start + piece.shape[-1] // (S * I)
            scale = smaller.scale[:, start:stop] if smaller.scale.dim() else smaller.scale
            other = (
                piece
                if same
                else replace(smaller, g=smaller.g[..., start:stop], scale=scale).jacobian()
            )
            yield (piece, other) if larger is left else (other, piece)
            start = stop
    elif isinstance(left, Lookup) and isinstance(right, Lookup):
        common = torch.unique(left.ids)
        common = common[torch.isin(common, torch.unique(right.ids)) & (common >= 0)]
        if len(common):
            half = [side.g.shape[1] for side in (left, right)]
            bigger = left if half[0] >= half[1] else right
            yield from _lookup_pairs(left, right, bigger, common)


def _lookup_pairs(
    left: Lookup, right: Lookup, bigger: Lookup, common: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    C, B, _, O = bigger.g.shape
    step = max(1, CHUNK_BYTES // (C * B * O * bigger.g.element_size()))
    for start in range(0, len(common), step):
        some = common[start : start + step]
        yield from zip(left.gradients(some), right.gradients(some), strict=True)


def _add_gram(K: Tensor, left: Outer, right: Outer) -> None:
    """K += Σ_ts (a_t·a_s)(g_t·g_s) for one tile, K of shape (C, B, C, M)."""
    C, B, S, T, _ = left.g.shape
    D, M, R = right.g.shape[0], right.g.shape[1], right.g.shape[3]
    for s in range(S):
        for t in range(T):
            g_t, a_t = left.g[:, :, s, t].flatten(0, 1), left.a[:, s, t]
            for r in range(R):
                g_r, a_r = right.g[:, :, s, r].flatten(0, 1), right.a[:, s, r]
                inner = (g_t @ g_r.T).view(C, B, D, M)
                K.addcmul_(inner, (a_t @ a_r.T)[None, :, None, :])


TILE_ROWS = 1024
"""Rows (outputs × points) of a tile: large enough for the matrix product, small enough for the cache."""


def _tiles(K: Tensor, symmetric: bool) -> Iterator[tuple[slice, slice]]:
    C, B, _, M = K.shape
    size = max(1, TILE_ROWS // C)
    for start in range(0, B, size):
        for other in range(start if symmetric else 0, M, size):
            yield slice(start, min(B, start + size)), slice(other, min(M, other + size))


def mirror(K: Tensor) -> None:
    """Fill the part below the diagonal tiles of K (C, B, C, B) from the part above."""
    C, B = K.shape[:2]
    size = max(1, TILE_ROWS // C)
    for start in range(0, B, size):
        stop = min(B, start + size)
        K[:, stop:, :, start:stop] = K[:, start:stop, :, stop:].permute(2, 3, 0, 1)


def add_blocks(blocks: Tensor, factor: Factor) -> None:
    """blocks += J_n J_nᵀ for each point, blocks of shape (B, C, C)."""
    if isinstance(factor, Outer) and factor.by_gram:
        gram = (factor.a @ factor.a.mT)[None, ..., None]  # (1, B, S, T, T, 1)
        mixed = (gram * factor.g[:, :, :, None]).sum(-2)  # (C, B, S, T, O)
        blocks += torch.einsum("cbsto,dbsto->bcd", mixed, factor.g)
        return
    for J in _own_gradients(factor):
        by_point = J.transpose(0, 1)
        blocks += by_point @ by_point.mT


def _own_gradients(factor: Factor) -> Iterator[Tensor]:
    if isinstance(factor, Direct):
        yield factor.J
    elif isinstance(factor, Outer):
        yield from factor.gradients()
    else:
        present = torch.unique(factor.ids)
        present = present[present >= 0]
        if len(present):
            for J, _ in _lookup_pairs(factor, factor, factor, present):
                yield J
