"""The curvature of one layer: Kronecker factors, a matrix, or its diagonal. All in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from net2gp.errors import NetworkError
from net2gp.linalg import psd_eigen
from net2gp.linear.forward.factors import Direct, Factor, Lookup, Outer, jacobian, sum_of_squares

DENSE_BLOCK = 4096
"""Entries of a parameter without Kronecker factors up to which its block is kept as a matrix."""

SMALL_BLOCK = 256
"""The same where larger ones keep their variances: matrices of many such parameters cost minutes."""


@dataclass(frozen=True, eq=False)
class KronBlock:
    """H of one layer ≈ A ⊗ G / places, with inputs' A (S, I, I) and output gradients' G (S, O, O).

    `names` are the weight and, if it has one, the bias, whose input is a constant 1 behind the others.
    """

    names: tuple[str, ...]
    A: Tensor
    G: Tensor
    places: int

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Eigenvalues, none negative, and eigenvectors of A and of G."""
        (A, QA), (G, QG) = psd_eigen(self.A), psd_eigen(self.G)
        return A.clamp(min=0), QA, G.clamp(min=0), QG

    def plus(self, other: Block) -> KronBlock:
        """The sum over the points of both."""
        assert isinstance(other, KronBlock)
        A, G = self.A + other.A, self.G + other.G
        return KronBlock(self.names, A, G, self.places + other.places)


@dataclass(frozen=True, eq=False)
class DenseBlock:
    """H of one parameter, (p, p), for those that are not weights of a linear map."""

    names: tuple[str, ...]
    H: Tensor

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Of H, none negative."""
        return torch.linalg.eigvalsh(self.H).clamp(min=0)

    def plus(self, other: Block) -> DenseBlock:
        """The sum over the points of both."""
        assert isinstance(other, DenseBlock)
        return DenseBlock(self.names, self.H + other.H)


@dataclass(frozen=True, eq=False)
class DiagonalBlock:
    """The diagonal of H of one parameter, (p,), for those whose block would be too large."""

    names: tuple[str, ...]
    diagonal: Tensor

    def plus(self, other: Block) -> DiagonalBlock:
        """The sum over the points of both."""
        assert isinstance(other, DiagonalBlock)
        return DiagonalBlock(self.names, self.diagonal + other.diagonal)


Block = KronBlock | DenseBlock | DiagonalBlock


def layers(found: dict[str, Factor]) -> list[tuple[str, ...]]:
    """The parameters in groups: a weight with the bias of its layer, all else alone."""
    owners = {
        f"{name.removesuffix('weight')}bias": name
        for name, factor in found.items()
        if isinstance(factor, Outer) and name.endswith("weight")
    }
    biases = {
        owners[name]: name
        for name, factor in found.items()
        if name in owners and _belongs(factor, found[owners[name]])
    }
    return [
        (name, biases[name]) if name in biases else (name,)
        for name in found
        if name not in biases.values()
    ]


def _belongs(bias: Factor, weight: Factor) -> bool:
    """Whether a bias has no other gradient than through the layer of this weight, at some of the points."""
    assert isinstance(weight, Outer)
    some = slice(None, None, max(1, len(weight.g) // 8))
    return isinstance(bias, Direct) and torch.allclose(
        bias.J[some], weight.g[some].sum(4).flatten(2), rtol=1e-4, atol=1e-6
    )


def num_entries(factor: Factor) -> int:
    """How many entries the parameter has."""
    if isinstance(factor, Direct):
        return factor.J.shape[2]
    if isinstance(factor, Lookup):
        return factor.num_embeddings * factor.g.shape[3]
    return factor.g.shape[2] * factor.g.shape[3] * factor.a.shape[3]


def check_factors(found: dict[str, Factor]) -> None:
    """Raise, with all their names, if parameters have neither factors nor a block that is small."""
    large = {
        name: num_entries(factor)
        for name, factor in found.items()
        if not isinstance(factor, Outer) and num_entries(factor) > DENSE_BLOCK
    }
    if large:
        shown = ", ".join(f"'{name}' ({size} entries)" for name, size in large.items())
        left = ", ".join(f"'!{name}'" for name in large)
        raise NetworkError(
            f"Kron() has no factors for {shown}: these are no weights of a Linear or convolution "
            "that treats all points alike, and have "
            f"more than the {DENSE_BLOCK} entries of which a matrix is kept. Pass "
            "structure=Kron(rest=Diagonal()) to keep only their variances, leave them out with "
            f"only=['*', {left}], or pass structure=Diagonal(), LowRank() or FunctionSpace()."
        )


def make_block(
    names: tuple[str, ...], found: dict[str, Factor], diagonal_rest: bool = False
) -> Block:
    """The curvature of a layer from the gradients of some points."""
    factor = found[names[0]]
    if not isinstance(factor, Outer):
        limit = min(SMALL_BLOCK, DENSE_BLOCK) if diagonal_rest else DENSE_BLOCK
        if num_entries(factor) > limit:
            return DiagonalBlock(names, sum_of_squares(factor).double())
        J = jacobian(factor).flatten(0, 1).double()
        return DenseBlock(names, J.mT @ J)
    a = inputs_with_bias(factor, len(names) == 2)
    B, S, T, _ = a.shape
    flat = a.transpose(1, 2).reshape(B * T, S, -1)
    g = factor.g.permute(0, 1, 4, 2, 3).reshape(-1, S, factor.g.shape[3])
    return KronBlock(names, _outer_products(flat), _outer_products(g), B * T)


def _outer_products(rows: Tensor) -> Tensor:
    """Σ_n rows_n rows_nᵀ of each group, (N, S, I) to (S, I, I), in float64.

    Summed in float32, small eigenvalues would be rounding of large ones, which a wide prior brings out.
    """
    precise = rows.double().transpose(0, 1)
    return precise.mT @ precise


def inputs_with_bias(factor: Outer, bias: bool) -> Tensor:
    """The layer's inputs (B, S, T, I), with the constant that a bias multiplies behind them."""
    return torch.cat([factor.a, torch.ones_like(factor.a[..., :1])], -1) if bias else factor.a
