"""One layer of `Kron()`: its curvature as Kronecker factors, a matrix or a diagonal, and a root of its Σ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.linalg import psd_eigen
from net2gp.linear.forward.factors import (
    Direct,
    Factor,
    Lookup,
    Outer,
    jacobian,
    scaled,
)
from net2gp.posteriors.weights.covariance import example, normal
from net2gp.posteriors.weights.full import Dense
from net2gp.posteriors.weights.structure import prior_vector
from net2gp.tags import savable
from net2gp.types import Params

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
    `turned` says whether the weight keeps its entries as (S, I, O).
    """

    names: tuple[str, ...]
    A: Tensor
    G: Tensor
    places: int
    turned: bool = False

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Eigenvalues, none negative, and eigenvectors of A and of G."""
        (A, QA), (G, QG) = psd_eigen(self.A), psd_eigen(self.G)
        return A.clamp(min=0), QA, G.clamp(min=0), QG

    def plus(self, other: KronBlock) -> KronBlock:
        """The sum over the points of both."""
        A, G = self.A + other.A, self.G + other.G
        return replace(self, A=A, G=G, places=self.places + other.places)

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
        return KronRoot(self.names, root, QA, QG, (1 + scale * gain).rsqrt(), self.turned)

    def trace(self) -> float:
        """tr A · tr G / places."""
        sizes = [m.diagonal(dim1=1, dim2=2).sum(1) for m in (self.A, self.G)]
        return float((sizes[0] * sizes[1]).sum()) / self.places

    def _input_variances(self, prior: Params) -> Tensor:
        """The prior variance of a weight by the input that it multiplies: (I,)."""
        for name in self.names:
            _check_number(prior, name)
        I = self.A.shape[-1]
        weight = prior[self.names[0]].double()
        if len(self.names) == 1:
            return weight.expand(I)
        return torch.cat([weight.expand(I - 1), prior[self.names[1]].double()[None]])


@savable("kron.KronRoot")
@dataclass(frozen=True, eq=False)
class KronRoot:
    """One layer's Σ = D (Q_A ⊗ Q_G) diag(spread²) (Q_A ⊗ Q_G)ᵀ D for inputs scaled by D.

    scale: (I,) the prior's standard deviations by input; QA (S, I, I), QG (S, O, O), spread (S, O, I). The
    weight's own entries are (S, O, I), or (S, I, O) if it is `turned`.
    """

    names: tuple[str, ...]
    scale: Tensor
    QA: Tensor
    QG: Tensor
    spread: Tensor
    turned: bool = False

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
        S, O, I = self.spread.shape
        J = jacobian(found[self.names[0]]).double()
        I = I - len(self.names) + 1
        J = J.unflatten(-1, (S, I, O)).mT if self.turned else J.unflatten(-1, (S, O, I))
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
        weight, bias = values, {}
        if len(self.names) == 2:
            weight, bias = values[:, :, :-1], {self.names[1]: values[:, :, -1].flatten(0, 1)}
        weight = weight.transpose(1, 2) if self.turned else weight
        return {self.names[0]: weight.flatten(0, 2)} | bias


@dataclass(frozen=True, eq=False)
class TableBlock:
    """H of an embedding ≈ diag(counts) ⊗ G / places: the factors of a linear map of one-hot inputs.

    counts (V,) says how often each row is looked up, and G (D, D) is of the gradients of the rows.
    """

    names: tuple[str, ...]
    counts: Tensor
    G: Tensor
    places: int

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues, none negative, and eigenvectors of G."""
        G, QG = psd_eigen(self.G)
        return G.clamp(min=0), QG

    def plus(self, other: TableBlock) -> TableBlock:
        """The sum over the points of both."""
        counts, G = self.counts + other.counts, self.G + other.G
        return TableBlock(self.names, counts, G, self.places + other.places)

    def log_det(self, prior: Params, params: Params, scale: float | Tensor) -> Tensor:
        """By the eigenvalues of G, for each number of lookups once."""
        counts, often = self.counts.unique(return_counts=True)
        gain = counts[:, None] * self.spectrum[0] / max(self.places, 1)
        return often.double() @ torch.log1p(scale * self._variance(prior) * gain).sum(1)

    def root(self, prior: Params, params: Params, scale: float) -> TableRoot:
        """The Σ of each row in the eigenbasis of G."""
        (G, QG), v = self.spectrum, self._variance(prior)
        gain = v * self.counts[:, None] * G / max(self.places, 1)
        return TableRoot(self.names, QG, v.sqrt() * (1 + scale * gain).rsqrt())

    def trace(self) -> float:
        """Σ counts · tr G / places."""
        return float(self.counts.sum() * self.G.trace()) / max(self.places, 1)

    def _variance(self, prior: Params) -> Tensor:
        _check_number(prior, self.names[0])
        return prior[self.names[0]].double()


@savable("kron.TableRoot")
@dataclass(frozen=True, eq=False)
class TableRoot:
    """The Σ of an embedding, QG diag(spread_v²) QGᵀ for row v; QG (D, D), spread (V, D)."""

    names: tuple[str, ...]
    QG: Tensor
    spread: Tensor

    def rooted(self, found: dict[str, Factor]) -> Factor:
        """The gradients of the rows in the eigenbasis, times the spread."""
        factor = found[self.names[0]]
        if isinstance(factor, Lookup):
            return replace(factor, g=factor.g.double() @ self.QG, scale=self.spread)
        J = jacobian(factor).double().unflatten(-1, self.spread.shape)
        return Direct((J @ self.QG * self.spread).flatten(2))

    def draw(self, num_samples: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Draws of the rows, (V·D, S)."""
        z = self.spread[..., None] * normal(self.spread, num_samples, generator)
        return {self.names[0]: (self.QG @ z).flatten(0, 1)}


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


def _check_number(prior: Params, name: str) -> None:
    if prior[name].dim():
        raise InputError(
            f"Kron() takes one prior variance for each parameter tensor, but prior_var for '{name}' "
            f"has shape {tuple(prior[name].shape)}. Pass a number, or structure=Full(), Diagonal() "
            "or FunctionSpace()."
        )


def _variances(block: DenseBlock | DiagonalBlock, prior: Params, params: Params) -> Tensor:
    """The prior variances of a block's own parameters."""
    return prior_vector(prior, {name: params[name] for name in block.names})


def inputs_with_bias(factor: Outer, bias: bool) -> Tensor:
    """The layer's inputs (B, S, T, I), with the constant that a bias multiplies behind them."""
    return torch.cat([factor.a, torch.ones_like(factor.a[..., :1])], -1) if bias else factor.a
