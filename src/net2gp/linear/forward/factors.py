"""Per-example parameter gradients in the form in which they are cheapest to multiply.

There are B points and C outputs, and output c of point b has the row b·C + c in every matrix here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from net2gp.linalg.split_products import add_product, product

CHUNK_BYTES = 2**27
"""The largest piece of a Jacobian that a contraction holds at a time, per side."""

TILE_ROWS = 400
"""The rows of a tile: many enough for an efficient matrix product, few enough to fit into the cache and to
leave out most of the tiles below the diagonal of a symmetric matrix."""

GPU_TILE_ROWS = 4096
"""The rows of a tile on a GPU, where each product must keep many cores busy."""

AT_ONCE = 2**19
"""Up to this many pairs of places, one product for all of them is faster than one product per pair."""

ELEMENTWISE = 24
"""The cost of one broadcast multiply-add per matrix entry, in operations of a matrix product."""


@dataclass(frozen=True, eq=False)
class Outer:
    """The gradient ∂f_c/∂W = Σ_t g_ct a_tᵀ of a weight W that is applied as W a_t at T places.

    Args:
        a: The inputs of the layer, (B, S, T, I) for B points and S groups.
        g: The gradients of the network's C outputs with respect to the layer's output, (B, C, S, O, T).
        scale: What multiplies the gradient: a tensor without axes, or one of shape (S, O, I).
        turned: Whether the weight keeps its entries as (S, I, O), as that of x @ W does.
    """

    a: Tensor
    g: Tensor
    scale: Tensor
    turned: bool = False

    def entries(self, matrices: Tensor) -> Tensor:
        """Return matrices in the order of the weight's own entries.

        Args:
            matrices: For each group a matrix of outputs and inputs, (…, S, O, I).

        Returns:
            The entries, (…, p).
        """
        return (matrices.mT if self.turned else matrices).flatten(-3)

    def matrices(self, entries: Tensor) -> Tensor:
        """Return the weight's own entries as matrices.

        Args:
            entries: The entries, (…, p).

        Returns:
            For each group a matrix of outputs and inputs, (…, S, O, I).
        """
        S, O, I = *self.g.shape[2:4], self.a.shape[3]
        if self.turned:
            return entries.unflatten(-1, (S, I, O)).mT
        return entries.unflatten(-1, (S, O, I))

    def traced(self) -> Outer:
        """Move outputs into the features, so that products sum over them; C becomes 1."""
        B, C, S, O, T = self.g.shape
        g = self.g.transpose(1, 2).reshape(B, 1, S, C * O, T)
        scale = self.scale.repeat(1, C, 1) if self.scale.dim() else self.scale
        return replace(self, g=g, scale=scale)

    @property
    def by_gram(self) -> bool:
        """Whether Σ_ts (a_t·a_s)(g_t·g_s) is cheaper than forming the gradients.

        It never is for several groups. Each has weights of its own, so few that one product of the gradients
        of all groups is the fastest way. All outputs of the network share the products of inputs, which count
        only for several places: for a single one they cost no more than forming the gradients.
        """
        C, S, O, T = self.g.shape[1:]
        I = self.a.shape[-1]
        inputs = 2 * I / C**2 if T > 1 else 0
        pairs = T * T * (inputs + 2 * O + ELEMENTWISE)
        return S == 1 and not self.scale.dim() and pairs <= 2 * O * I

    def slices(self) -> list[tuple[Tensor, Tensor]]:
        """Return inputs (B, I) and output gradients (B·C, O) per place, for a layer without groups."""
        B, C, _, O, T = self.g.shape
        g = self.g[:, :, 0].permute(3, 0, 1, 2).reshape(T, B * C, O)
        return [(self.a[:, 0, t], g[t]) for t in range(T)]

    def gradients(self, step: int) -> Iterator[Tensor]:
        """Compute the gradients for `step` outputs of the layer at a time.

        Args:
            step: The number of outputs of the layer.

        Yields:
            The gradients of the weights of these outputs, (B·C, p).
        """
        B, C, S, O, T = self.g.shape
        for start in range(0, O, step):
            piece = self.g[:, :, :, start : start + step]
            width = piece.shape[3]
            # the network's outputs join the layer's, so that one product per point serves all of them
            stacked = piece.transpose(1, 2).reshape(B, S, C * width, T)
            product = (stacked @ self.a).reshape(B, S, C, width, -1).transpose(1, 2)
            if self.scale.dim():
                product = product * self.scale[:, start : start + step]
            yield product.reshape(B * C, -1)

    def step(self) -> int:
        """Return how many outputs of the layer fit into CHUNK_BYTES."""
        B, C, S = self.g.shape[:3]
        return max(1, CHUNK_BYTES // (B * C * S * self.a.shape[-1] * self.a.element_size()))


@dataclass(frozen=True, eq=False)
class Lookup:
    """The gradient ∂f_c/∂E[v] = Σ_t 1[token_t = v] g_ct of the table E of an embedding.

    Args:
        ids: The tokens of B points at T places, (B, T). A negative id marks a place without a gradient.
        g: The gradients of the network's C outputs with respect to the embedded tokens, (B, C, T, O).
        scale: What multiplies the gradient: a tensor without axes, or one of shape (V, O).
        num_embeddings: The number V of rows of the table.
    """

    ids: Tensor
    g: Tensor
    scale: Tensor
    num_embeddings: int

    def traced(self) -> Lookup:
        """Move outputs into the features, so that products sum over them; C becomes 1."""
        B, C, T, O = self.g.shape
        g = self.g.transpose(1, 2).reshape(B, 1, T, C * O)
        scale = self.scale.repeat(1, C) if self.scale.dim() else self.scale
        return replace(self, g=g, scale=scale)

    def gradients(self, vocabulary: Tensor) -> Tensor:
        """Compute the gradients of some rows of the table.

        Args:
            vocabulary: The ids of U rows, sorted.

        Returns:
            The gradients, (B·C, U·O).
        """
        B, C, _, O = self.g.shape
        U = len(vocabulary)
        if U == 0:  # all places are padding
            return self.g.new_zeros(B * C, 0)
        place = torch.searchsorted(vocabulary, self.ids.contiguous()).clamp(max=U - 1)
        known = (vocabulary[place] == self.ids)[:, None, :, None]
        scale = self.scale[self.ids.clamp(min=0)][:, None] if self.scale.dim() else self.scale
        rows = torch.arange(B * C, device=place.device).reshape(B, C, 1)
        target = (rows * U + place[:, None]).reshape(-1)
        J = self.g.new_zeros(B * C * U, O)
        return J.index_add_(0, target, (self.g * scale * known).reshape(-1, O)).reshape(
            B * C, U * O
        )

    def step(self) -> int:
        """Return how many embeddings fit into CHUNK_BYTES."""
        B, C, _, O = self.g.shape
        return max(1, CHUNK_BYTES // (B * C * O * self.g.element_size()))


@dataclass(frozen=True, eq=False)
class Direct:
    """The gradients themselves.

    Args:
        J: The gradients of C outputs at B points with respect to the p entries of a parameter, (B, C, p).
    """

    J: Tensor

    def traced(self) -> Direct:
        """Move outputs into the features, so that products sum over them; C becomes 1."""
        return Direct(self.J.reshape(self.J.shape[0], 1, -1))


Factor = Outer | Lookup | Direct


def jacobian(factor: Factor) -> Tensor:
    """Return the gradients (B, C, p), in the order of the parameter's own entries."""
    if isinstance(factor, Direct):
        return factor.J
    B, C = factor.g.shape[:2]
    if isinstance(factor, Outer):
        S, O = factor.g.shape[2:4]
        return factor.entries(next(factor.gradients(O)).reshape(B, C, S, O, -1))
    everything = torch.arange(factor.num_embeddings, device=factor.ids.device)
    return factor.gradients(everything).reshape(B, C, -1)


def sum_of_squares(factor: Factor) -> Tensor:
    """Sum the squared gradients over points and outputs, (p,), without the whole Jacobian of an embedding."""
    if not isinstance(factor, Lookup):
        return jacobian(factor).square().sum((0, 1))
    total = factor.g.new_zeros(factor.num_embeddings, factor.g.shape[3])
    for n in range(len(factor.ids)):
        point = replace(factor, ids=factor.ids[n : n + 1], g=factor.g[n : n + 1])
        seen = factor.ids[n].unique()
        seen = seen[seen >= 0]
        if not len(seen):  # a point of padding alone
            continue
        squares = point.gradients(seen).square().sum(0).reshape(len(seen), -1)
        total[seen] += squares
    return total.reshape(-1)


def in_dtype(factor: Factor, dtype: torch.dtype) -> Factor:
    """Return `factor` with its floating-point tensors in another dtype."""
    if isinstance(factor, Direct):
        return Direct(factor.J.to(dtype))
    if isinstance(factor, Lookup):
        return replace(factor, g=factor.g.to(dtype), scale=factor.scale.to(dtype))
    a, g, scale = (value.to(dtype) for value in (factor.a, factor.g, factor.scale))
    return replace(factor, a=a, g=g, scale=scale)


def scaled(factor: Factor, variance: Tensor) -> Factor:
    """Multiply `factor` by the square root of a prior variance (a number, or of the parameter's shape)."""
    root = variance.sqrt()
    if isinstance(factor, Direct):
        return Direct(factor.J * (root.reshape(-1) if root.dim() else root))
    if isinstance(factor, Lookup):
        return replace(factor, scale=root)
    if root.dim():
        return replace(factor, scale=factor.matrices(root.flatten()))
    return replace(factor, a=factor.a * root)


def with_bias(weight: Outer, bias_variance: Tensor) -> Outer:
    """Join a layer's weight and bias to one factor, where the bias is the weight of a constant input."""
    constant = bias_variance.sqrt().to(weight.a).expand(*weight.a.shape[:-1], 1)
    return replace(weight, a=torch.cat([weight.a, constant], -1))


def accumulate(
    K: Tensor,
    left: Factor,
    right: Factor,
    C: int,
    D: int | None = None,
    *,
    tolerance: float = 0.0,
) -> None:
    """Add J_left J_rightᵀ to K (B·C, M·D) in place, where D is C unless it is given.

    If `right` is `left`, only tiles on and above the diagonal are written; `mirror` fills the rest. Products
    in float32 on a GPU may have the relative error `tolerance`.
    """
    D = C if D is None else D
    if (
        isinstance(left, Outer)
        and isinstance(right, Outer)
        and left.turned == right.turned
        and left.by_gram
        and right.by_gram
    ):
        if K.numel() * left.a.shape[2] * right.a.shape[2] <= AT_ONCE and left.a.shape[2] > 1:
            K += _gram(left, right)
            return
        pairs = [(one, other) for one in left.slices() for other in right.slices()]
        for n, m in _tiles(K, C, D, left is right):
            for (a, g), (b, h) in pairs:
                tile, sides = K[_rows(n, C), _rows(m, D)], (g[_rows(n, C)], h[_rows(m, D)])
                _add_gram(tile, a[n], sides[0], b[m], sides[1], tolerance)
        return
    for J, H in _gradient_pairs(left, right):
        for n, m in _tiles(K, C, D, left is right):
            tile = K[_rows(n, C), _rows(m, D)]
            add_product(tile, J[_rows(n, C)], H[_rows(m, D)].mT, tolerance)


def _gram(left: Outer, right: Outer) -> Tensor:
    """Compute Σ_ts (a_t·b_s)(g_t·h_s), (B·C, M·D), with the products of all places at once."""
    (B, C, _, O, T), (M, D, _, _, S) = left.g.shape, right.g.shape
    weights = left.a.flatten(0, 2) @ right.a.flatten(0, 2).mT
    g, h = (side.g[:, :, 0].mT.reshape(-1, O) for side in (left, right))
    products = (g @ h.mT).reshape(B, C, T, M, D, S)
    weighted = products * weights.reshape(B, 1, T, M, 1, S)
    return weighted.sum((2, 5)).reshape(B * C, M * D)


def _add_gram(
    K: Tensor, a: Tensor, g: Tensor, b: Tensor, h: Tensor, tolerance: float = 0.0
) -> None:
    """Add (a bᵀ ⊗ 1) ∘ (g hᵀ) to one tile in place: products of inputs times products of gradients."""
    B, M = len(a), len(b)
    C, D = len(g) // B, len(h) // M
    weights = product(a, b.mT, tolerance)
    weights = weights if D == 1 else weights.repeat_interleave(D, 1)
    gradients = product(g, h.mT, tolerance).reshape(B, C, M * D)
    K.unflatten(0, (B, C)).addcmul_(gradients, weights[:, None, :])


def _gradient_pairs(left: Factor, right: Factor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield matching pieces of the two sides' gradients, (B·C, p) and (M·C, p)."""
    if isinstance(left, Direct) and isinstance(right, Direct):
        yield left.J.flatten(0, 1), right.J.flatten(0, 1)
    elif isinstance(left, Outer) and isinstance(right, Outer) and left.turned == right.turned:
        step = min(left.step(), right.step())
        if left is right:
            yield from ((J, J) for J in left.gradients(step))
        else:
            yield from zip(left.gradients(step), right.gradients(step), strict=True)
    elif isinstance(left, Lookup) and isinstance(right, Lookup):
        common = torch.unique(left.ids)
        common = common[torch.isin(common, torch.unique(right.ids)) & (common >= 0)]
        for some in common.split(min(left.step(), right.step())):
            if len(some):
                J = left.gradients(some)
                yield J, J if left is right else right.gradients(some)
    else:
        # points of different lengths on the two sides may have their gradients in different forms
        yield jacobian(left).flatten(0, 1), jacobian(right).flatten(0, 1)


def _tiles(K: Tensor, C: int, D: int, symmetric: bool) -> Iterator[tuple[slice, slice]]:
    """Yield the tiles of K as slices of points; a single one if autograd records, which copies K per tile."""
    B, M = K.shape[0] // C, K.shape[1] // D
    rows = TILE_ROWS if K.device.type == "cpu" else GPU_TILE_ROWS
    rows = max(K.shape) if torch.is_grad_enabled() else rows
    size, width = max(1, rows // C), max(1, rows // D)
    for start in range(0, B, size):
        for other in range(start if symmetric else 0, M, width):
            yield slice(start, min(B, start + size)), slice(other, min(M, other + width))


def _rows(points: slice, C: int) -> slice:
    return slice(points.start * C, points.stop * C)


def mirror(K: Tensor, C: int) -> None:
    """Fill K (B·C, B·C) below its diagonal tiles from above them."""
    for n, m in _tiles(K, C, C, symmetric=True):
        if m.start > n.start:
            K[_rows(m, C), _rows(n, C)] = K[_rows(n, C), _rows(m, C)].mT


def pulled(factor: Factor, v: Tensor) -> Tensor:
    """Compute Jᵀv (p,) for v (B, C)."""
    if isinstance(factor, Direct):
        return factor.J.flatten(0, 1).mT @ v.flatten()
    if isinstance(factor, Lookup):
        known = factor.ids >= 0
        rows = (v[:, None] @ factor.g.flatten(2)).reshape(*factor.ids.shape, -1)[known]
        table = rows.new_zeros(factor.num_embeddings, rows.shape[1])
        return (table.index_add_(0, factor.ids[known], rows) * factor.scale).flatten()
    g = (v[:, None] @ factor.g.flatten(2)).reshape(len(v), *factor.g.shape[2:])  # (B, S, O, T)
    g = g.permute(1, 2, 0, 3).flatten(2)
    return factor.entries((g @ factor.a.transpose(0, 1).flatten(1, 2)) * factor.scale)


def pushed(factor: Factor, w: Tensor) -> Tensor:
    """Compute J w (B, C) for w (p,)."""
    if not isinstance(factor, Outer):
        return jacobian(factor) @ w
    weight = factor.matrices(w) * factor.scale
    a = factor.a.transpose(0, 1)  # (S, B, T, I): one product for all points and places
    moved = (a.flatten(1, 2) @ weight.mT).unflatten(1, a.shape[1:3]).permute(1, 0, 3, 2)
    return (factor.g.flatten(2) @ moved.flatten(1)[..., None])[..., 0]


def mixed(factor: Factor, mix: Tensor) -> Factor:
    """Return the gradients of Σ_c mix_bck f_c for mix (B, C, K), a factor with K outputs."""
    if isinstance(factor, Direct):
        return Direct(mix.mT.to(factor.J) @ factor.J)
    g = mix.mT.to(factor.g) @ factor.g.flatten(2)
    return replace(factor, g=g.unflatten(2, factor.g.shape[2:]))


def picked(factor: Factor, points: Tensor, rows: Tensor) -> Factor:
    """Return some rows n·C + c of a factor, each as a point with one output; `points` are their n."""
    if isinstance(factor, Direct):
        return Direct(factor.J.flatten(0, 1)[rows][:, None])
    g = factor.g.flatten(0, 1)[rows][:, None]
    if isinstance(factor, Lookup):
        return replace(factor, ids=factor.ids[points], g=g)
    return replace(factor, a=factor.a[points], g=g)


def add_blocks(blocks: Tensor, factor: Factor) -> None:
    """Add J_b J_bᵀ per point to `blocks` (B, C, C) in place."""
    if isinstance(factor, Outer) and factor.by_gram:
        mixed = factor.g @ (factor.a @ factor.a.mT)[:, None]  # (B, C, S, O, T)
        blocks += mixed.flatten(2) @ factor.g.flatten(2).mT
        return
    for J, _ in _gradient_pairs(factor, factor):
        by_point = J.unflatten(0, blocks.shape[:2])
        blocks += by_point @ by_point.mT
