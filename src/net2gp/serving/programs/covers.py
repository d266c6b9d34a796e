"""J Σ Jᵀ of each point, in the forms that take a program the fewest operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from net2gp.linear.forward.factors import Factor, Outer, in_dtype
from net2gp.posteriors.weights.covariance import Covariance
from net2gp.posteriors.weights.kron import KronCovariance
from net2gp.posteriors.weights.kron_blocks import KronRoot, Root
from net2gp.posteriors.weights.last_layer import LastLayerDiagonal, LastLayerFull, LastLayerKron
from net2gp.serving.programs.gradients import blocks, squared

WIDTH = 64
"""Features of one block of a quadratic form: fewer save operations, more save calls."""


def head_cover(covariance: Covariance, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return the function from features φ (B, D') to the covariances of W φ, (B, C, C).

    Args:
        covariance: That of the weights of a last layer.
        dtype: In what to multiply.
    """
    if isinstance(covariance, LastLayerFull):
        return _full(covariance, dtype)
    if isinstance(covariance, LastLayerDiagonal):
        variance = covariance.variance.to(dtype).mT
        return lambda phi: torch.diag_embed(phi.to(dtype).square() @ variance)
    assert isinstance(covariance, LastLayerKron)
    layer = covariance.layer
    turn = (layer.scale[:, None] * layer.QA[0]).to(dtype)
    spread, Q = layer.spread[0].square().mT.to(dtype), layer.QG[0].to(dtype)

    def kron(phi: Tensor) -> Tensor:
        weights = (phi.to(dtype) @ turn).square() @ spread
        return (Q * weights[:, None, :]) @ Q.mT

    return kron


def _full(covariance: LastLayerFull, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """φᵀ Σ_cd φ for c ≤ d, as a product of the numbers φ_i φ_j with a matrix of one column for each pair.

    That is a quarter of C² D'² operations, as both Σ and φφᵀ are symmetric; a product with a root of Σ takes
    C² D'². φ goes in blocks of some features, so that few numbers φ_i φ_j below the diagonal are made.
    """
    C, root = covariance.num_classes, covariance.root
    if C == 1:
        side = root.to(dtype)
        return lambda phi: (phi.to(dtype) @ side).square().sum(1)[:, None, None]
    D = len(root) // C
    sigma = (root @ root.mT).unflatten(0, (C, D)).unflatten(2, (C, D)).transpose(1, 2)
    c, d = torch.triu_indices(C, C, device=root.device)
    pairs = (sigma[c, d] + sigma[d, c]) / 2  # (pairs, D', D')
    place = torch.zeros(C, C, dtype=torch.long, device=root.device)
    place[c, d] = place[d, c] = torch.arange(len(c), device=root.device)
    spans = [(start, min(start + WIDTH, D)) for start in range(0, D, WIDTH)]
    columns = []
    for start, end in spans:
        part = pairs[:, start:end, start:].clone()
        part[:, :, end - start :] *= 2
        columns.append(part.flatten(1).mT.contiguous().to(dtype))

    def full(phi: Tensor) -> Tensor:
        phi = phi.to(dtype)
        total: Tensor | None = None
        for (start, end), column in zip(spans, columns, strict=True):
            products = phi[:, start:end, None] * phi[:, None, start:]
            part = products.flatten(1) @ column
            total = part if total is None else total + part
        assert total is not None
        return total[:, place.flatten()].unflatten(1, (C, C))

    return full


def rooted_cover(
    covariance: Covariance, names: tuple[str, ...], dtype: torch.dtype
) -> Callable[[dict[str, Factor]], Tensor]:
    """Return the function from gradients J to J Σ Jᵀ, (B, C, C), summed over the parts of Σ.

    Args:
        covariance: That of all weights, with `rooted`.
        names: The parameters, in order.
        dtype: In what to multiply.
    """
    if isinstance(covariance, KronCovariance):
        covers = [_of_layer(layer, dtype) for layer in covariance.layers]
        return lambda found: torch.stack([cover(found).double() for cover in covers]).sum(0)

    def cover(found: dict[str, Factor]) -> Tensor:
        chosen = {name: in_dtype(found[name], dtype) for name in names}
        roots = covariance.rooted(chosen)
        return torch.stack([blocks(factor).double() for factor in roots]).sum(0)

    return cover


def _of_layer(root: Root, dtype: torch.dtype) -> Callable[[dict[str, Factor]], Tensor]:
    if isinstance(root, KronRoot):
        return _kron(root, dtype)
    return lambda found: blocks(root.rooted(found))


def _kron(root: KronRoot, dtype: torch.dtype) -> Callable[[dict[str, Factor]], Tensor]:
    """The part of one layer, with products of matrices of two axes wherever one factor is a constant."""
    turn = (root.scale[:, None] * root.QA).to(dtype)  # (S, I, I)
    turn_g, spread, biased = root.QG.to(dtype), root.spread.to(dtype), len(root.names) == 2
    squares = spread.square().mT

    def cover(found: dict[str, Factor]) -> Tensor:
        factor = found[root.names[0]]
        if not isinstance(factor, Outer) or factor.g.shape[2] > 1:
            return blocks(root.rooted(found))
        a, g = factor.a[:, 0].to(dtype), factor.g[:, :, 0].to(dtype)
        if g.shape[3] == 1:
            a, g = _rotated(a[:, 0], turn[0], biased), g[..., 0] @ turn_g[0]
            return (g * (a.square() @ squares[0])[:, None]) @ g.mT
        return squared(_gradients(a, g, (turn[0], turn_g[0], spread[0]), biased))

    return cover


def _rotated(a: Tensor, turn: Tensor, biased: bool) -> Tensor:
    """a Q for rows a, with the constant that a bias multiplies behind them."""
    return a @ turn[:-1] + turn[-1] if biased else a @ turn


def _gradients(a: Tensor, g: Tensor, turns: tuple[Tensor, Tensor, Tensor], biased: bool) -> Tensor:
    """The entries of Q_Gᵀ (Σ_t g_ct a_tᵀ) Q_A times the spread, (B, C, O·I) in any order.

    Inputs (B, T, I) are turned before they are multiplied by the gradients (B, C, O, T), or their product is,
    whichever is less; likewise the gradients.
    """
    turn, turn_g, spread = turns
    (C, O, T), I = g.shape[1:], a.shape[2]
    early, early_g = T < C * O, T < I
    g = (g.mT @ turn_g).mT if early_g else g
    a = _rotated(a, turn, biased) if early else a
    J = (g.flatten(1, 2) @ a).unflatten(1, (C, O))
    if biased and not early:
        J = torch.cat([J, g.sum(-1, keepdim=True)], -1)
    J = J if early else J @ turn
    if early_g:
        return (J * spread).flatten(2)
    return ((J.mT @ turn_g) * spread.mT).flatten(2)
