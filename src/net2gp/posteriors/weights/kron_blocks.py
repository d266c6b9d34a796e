"""One layer of `Kron()`: its curvature as Kronecker factors, a matrix or a diagonal, and a root of its Σ."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from net2gp.errors import InputError, NetworkError
from net2gp.linalg import psd_eigen
from net2gp.linear.forward.factors import Direct, Factor, Outer, jacobian, scaled, sum_of_squares
from net2gp.posteriors.weights.covariance import example, normal, num_entries
from net2gp.posteriors.weights.full import Dense
from net2gp.posteriors.weights.structure import prior_vector
from net2gp.tags import savable
from net2gp.types import Params

DENSE_BLOCK = 4096
"""Entries of a parameter without Kronecker factors up to which its block is kept as a matrix."""

SMALL_BLOCK = 256
"""The same where larger ones keep their variances: matrices of many such parameters cost minutes."""

B = TypeVar("B", bound="Block")


class Root(Protocol):
    """A root of the Σ of one layer."""

    def rooted(self, found: dict[str, Factor]) -> Factor:
        """A factor of J Σ^{1/2}."""

    def draw(self, num_samples: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Draws of each parameter of the layer, (p, S)."""


class Block(Protocol):
    """The curvature of one layer, in float64; `names` are its parameters."""

    @property
    def names(self) -> tuple[str, ...]:
        """The weight and, if it has one, the bias; or a parameter that is alone."""

    def plus(self: B, other: B) -> B:
        """The sum over the points of both."""

    def log_det(self, prior: Params, params: Params, scale: float | Tensor) -> Tensor:
        """The layer's part of the determinant."""

    def root(self, prior: Params, params: Params, scale: float) -> Root:
        """A root of the layer's Σ."""

    def trace(self) -> float:
        """The layer's part of tr H."""


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

    def plus(self, other: KronBlock) -> KronBlock:
        """The sum over the points of both."""
        A, G = self.A + other.A, self.G + other.G
        return KronBlock(self.names, A, G, self.places + other.places)

    def log_det(self, prior: Params, params: Params, scale: float | Tensor) -> Tensor:
        """By the products of the eigenvalues of both factors."""
        inputs = self._input_variances(prior)
        A, _, G, _ = self.spectrum
        if bool((inputs == inputs[0]).all()):
            A = inputs[0] * A
        else:
            root = inputs.sqrt()
            A = torch.linalg.eigvalsh(root[:, None] * self.A * root).clamp(min=0)
        return torch.log1p(scale * A[:, None, :] * G[:, :, None] / self.places).sum()

    def root(self, prior: Params, params: Params, scale: float) -> KronRoot:
        """The layer's Σ in the eigenbasis of its factors."""
        root = self._input_variances(prior).sqrt()
        A, QA, G, QG = self.spectrum
        if bool((root == root[0]).all()):
            A = A * root[0].square()
        else:
            A, QA = torch.linalg.eigh(root[:, None] * self.A * root)
        gain = A.clamp(min=0)[:, None, :] * G[:, :, None] / self.places
        return KronRoot(self.names, root, QA, QG, (1 + scale * gain).rsqrt())

    def trace(self) -> float:
        """tr A · tr G / places."""
        sizes = [m.diagonal(dim1=1, dim2=2).sum(1) for m in (self.A, self.G)]
        return float((sizes[0] * sizes[1]).sum()) / self.places

    def _input_variances(self, prior: Params) -> Tensor:
        """The prior variance of a weight by the input that it multiplies: (I,)."""
        for name in self.names:
            if prior[name].dim():
                raise InputError(
                    f"Kron() takes one prior variance for each parameter tensor, but prior_var for '{name}' "
                    f"has shape {tuple(prior[name].shape)}. Pass a number, or structure=Full(), Diagonal() "
                    "or FunctionSpace()."
                )
        I = self.A.shape[-1]
        weight = prior[self.names[0]].double()
        if len(self.names) == 1:
            return weight.expand(I)
        return torch.cat([weight.expand(I - 1), prior[self.names[1]].double()[None]])


@savable("kron.KronRoot")
@dataclass(frozen=True, eq=False)
class KronRoot:
    """One layer's Σ = D (Q_A ⊗ Q_G) diag(spread²) (Q_A ⊗ Q_G)ᵀ D for inputs scaled by D.

    scale: (I,) the prior's standard deviations by input; QA (S, I, I), QG (S, O, O), spread (S, O, I).
    """

    names: tuple[str, ...]
    scale: Tensor
    QA: Tensor
    QG: Tensor
    spread: Tensor

    def rooted(self, found: dict[str, Factor]) -> Outer | Direct:
        """The layer's inputs and gradients in the eigenbasis, times the spread."""
        factor = found[self.names[0]]
        if not isinstance(factor, Outer):
            return self._rooted_gradient(found)
        # in float32 a rotation leaves rounding in directions that the data know well, times a wide prior
        a = inputs_with_bias(factor, len(self.names) == 2).double()
        a = (a * self.scale) @ self.QA
        g = torch.einsum("sop,bcsot->bcspt", self.QG, factor.g.double())
        return Outer(a, g, self.spread)

    def _rooted_gradient(self, found: dict[str, Factor]) -> Direct:
        """The same from the gradient of the weight itself, which is smaller for weights of many places."""
        S, O = self.spread.shape[:2]
        J = jacobian(found[self.names[0]]).double()
        J = J.reshape(*J.shape[:2], S, O, -1)
        if len(self.names) == 2:
            bias = jacobian(found[self.names[1]]).double().reshape(*J.shape[:2], S, O, 1)
            J = torch.cat([J, bias], -1)
        rotated = self.QG.mT @ (J * self.scale) @ self.QA
        return Direct((rotated * self.spread).flatten(2))

    def draw(self, num_samples: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Draws of the weight (and bias), each (p, S)."""
        z = normal(self.spread, num_samples, generator)
        values = torch.einsum("sop,spin->soin", self.QG, self.spread[..., None] * z)
        values = torch.einsum("sij,sojn->soin", self.QA, values) * self.scale[:, None]
        if len(self.names) == 1:
            return {self.names[0]: values.flatten(0, 2)}
        weight, bias = values[:, :, :-1], values[:, :, -1]
        return {self.names[0]: weight.flatten(0, 2), self.names[1]: bias.flatten(0, 1)}


@dataclass(frozen=True, eq=False)
class DenseBlock:
    """H of one parameter, (p, p), for those that are not weights of a linear map."""

    names: tuple[str, ...]
    H: Tensor

    @cached_property
    def dense(self) -> Dense:
        """H with its eigenvalues."""
        return Dense(self.H)

    def plus(self, other: DenseBlock) -> DenseBlock:
        """The sum over the points of both."""
        return DenseBlock(self.names, self.H + other.H)

    def log_det(self, prior: Params, params: Params, scale: float | Tensor) -> Tensor:
        """By eigenvalues within a search, else by a Cholesky factor."""
        own = {name: prior[name] for name in self.names}
        return self.dense.log_det(own, _variances(self, prior, params), scale)

    def root(self, prior: Params, params: Params, scale: float) -> DenseRoot:
        """By a Cholesky factor and its inverse."""
        return DenseRoot(self.names, self.dense.root(_variances(self, prior, params), scale))

    def trace(self) -> float:
        """tr H."""
        return float(self.H.trace())


@savable("kron.DenseRoot")
@dataclass(frozen=True, eq=False)
class DenseRoot:
    """One parameter's Σ = root rootᵀ."""

    names: tuple[str, ...]
    root: Tensor

    def rooted(self, found: dict[str, Factor]) -> Direct:
        """J root."""
        return Direct(jacobian(found[self.names[0]]).double() @ self.root)

    def draw(self, num_samples: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        """root · z."""
        return {self.names[0]: self.root @ normal(self.root[0], num_samples, generator)}


@dataclass(frozen=True, eq=False)
class DiagonalBlock:
    """The diagonal of H of one parameter, (p,), for those whose block would be too large."""

    names: tuple[str, ...]
    diagonal: Tensor

    def plus(self, other: DiagonalBlock) -> DiagonalBlock:
        """The sum over the points of both."""
        return DiagonalBlock(self.names, self.diagonal + other.diagonal)

    def log_det(self, prior: Params, params: Params, scale: float | Tensor) -> Tensor:
        """Σ log(1 + scale·v·h)."""
        return torch.log1p(scale * _variances(self, prior, params) * self.diagonal).sum()

    def root(self, prior: Params, params: Params, scale: float) -> DiagonalRoot:
        """v / (1 + scale·v·h)."""
        v = _variances(self, prior, params)
        variance = v / (1 + scale * v * self.diagonal)
        return DiagonalRoot(self.names, variance.reshape(params[self.names[0]].shape))

    def trace(self) -> float:
        """tr H."""
        return float(self.diagonal.sum())


@savable("kron.DiagonalRoot")
@dataclass(frozen=True, eq=False)
class DiagonalRoot:
    """One parameter's Σ = diag(variance), of the parameter's own shape."""

    names: tuple[str, ...]
    variance: Tensor

    def rooted(self, found: dict[str, Factor]) -> Factor:
        """J diag(variance)^{1/2}."""
        factor = found[self.names[0]]
        return scaled(factor, self.variance.to(example(factor)))

    def draw(self, num_samples: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        """√variance · z."""
        flat = self.variance.reshape(-1)
        return {self.names[0]: flat.sqrt()[:, None] * normal(flat, num_samples, generator)}


def _variances(block: DenseBlock | DiagonalBlock, prior: Params, params: Params) -> Tensor:
    """The prior variances of a block's own parameters."""
    return prior_vector(prior, {name: params[name] for name in block.names})


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
    count, S, T, _ = a.shape
    flat = a.transpose(1, 2).reshape(count * T, S, -1)
    g = factor.g.permute(0, 1, 4, 2, 3).reshape(-1, S, factor.g.shape[3])
    if T > 1:  # places of padding have inputs but no gradient, and must not count
        flat = flat[(factor.g != 0).any(3).any(2).any(1).flatten()]
    return KronBlock(names, _outer_products(flat), _outer_products(g), max(1, len(flat)))


def _outer_products(rows: Tensor) -> Tensor:
    """Σ_n rows_n rows_nᵀ of each group, (N, S, I) to (S, I, I), in float64.

    Summed in float32, small eigenvalues would be rounding of large ones, which a wide prior brings out.
    """
    precise = rows.double().transpose(0, 1)
    return precise.mT @ precise


def inputs_with_bias(factor: Outer, bias: bool) -> Tensor:
    """The layer's inputs (B, S, T, I), with the constant that a bias multiplies behind them."""
    return torch.cat([factor.a, torch.ones_like(factor.a[..., :1])], -1) if bias else factor.a
