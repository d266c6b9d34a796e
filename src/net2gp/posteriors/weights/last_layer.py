"""Covariances over the weights of a last linear layer: predictions from its inputs φ alone.

f(x) = W φ(x), so that the covariance of f(x) needs φ and Σ, and never the Jacobian φ ⊗ I. Entries are in the
order (c, i), with the bias behind each class's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from net2gp.inputs import num_rows, ordinary_tensors, rows
from net2gp.linear.curvatures.head import features
from net2gp.linear.linearized import Linearized
from net2gp.posteriors.weights.kron import KronRoot
from net2gp.posteriors.weights.rooted import normal
from net2gp.types import Inputs

CHUNK_NUMBERS = 2**24
"""Numbers of one chunk of predictions."""


def _by_chunks(
    linearized: Linearized, x: Inputs, width: int, function: Callable[[Tensor], Tensor]
) -> Tensor:
    """`function` of the features of some points at a time, `width` numbers each."""
    size = max(1, CHUNK_NUMBERS // width)
    parts = []
    for start in range(0, num_rows(x), size):
        phi = features(linearized, rows(x, slice(start, start + size)))
        parts.append(function(phi))
    return torch.cat(parts)


def _flat(values: Tensor, bias: bool) -> Tensor:
    """Draws (C, D', S) in the order of the layer's parameters: (P, S)."""
    if not bias:
        return values.flatten(0, 1)
    return torch.cat([values[:, :-1].flatten(0, 1), values[:, -1]])


@dataclass(frozen=True, eq=False)
class LastLayerFull:
    """Σ = root rootᵀ with root = diag(deviations) L⁻ᵀ, (C·D', C·D'), made when it is first asked for."""

    L: Tensor
    deviations: Tensor
    num_classes: int
    bias: bool

    @cached_property
    @ordinary_tensors()
    def root(self) -> Tensor:
        """diag(deviations) L⁻ᵀ."""
        identity = torch.eye(len(self.L)).to(self.L)
        inverse = torch.linalg.solve_triangular(self.L.mT, identity, upper=True)
        return self.deviations[:, None] * inverse

    def _sides(self, phi: Tensor) -> Tensor:
        """(I ⊗ φᵀ) root: (B, C, C·D'), by one matrix product a class."""
        root = self.root.reshape(self.num_classes, -1, self.root.shape[1])
        return torch.einsum("bi,ciq->bcq", phi.double(), root)

    def blocks(self, linearized: Linearized, x: Inputs) -> Tensor:
        """φᵀ Σ_cd φ for each point: (N, C, C)."""

        def blocks(phi: Tensor) -> Tensor:
            sides = self._sides(phi)
            return (sides @ sides.mT).to(phi.dtype)

        return _by_chunks(linearized, x, self.num_classes * len(self.L), blocks)

    def variances(self, linearized: Linearized, x: Inputs) -> Tensor:
        """The diagonals of the blocks: (N, C)."""
        width = self.num_classes * len(self.L)
        function = lambda phi: self._sides(phi).square().sum(-1).to(phi.dtype)
        return _by_chunks(linearized, x, width, function)

    def joint(self, linearized: Linearized, x: Inputs) -> Tensor:
        """(N·C, N·C), in float64."""
        sides = self._sides(features(linearized, x)).flatten(0, 1)
        return sides @ sides.mT

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """root · z."""
        values = self.root @ normal(self.root[0], num_samples, generator)
        return _flat(values.reshape(self.num_classes, -1, num_samples), self.bias)


@dataclass(frozen=True, eq=False)
class LastLayerDiagonal:
    """Independent weights with the variances `variance` (C, D'): outputs are independent too."""

    variance: Tensor
    bias: bool

    def blocks(self, linearized: Linearized, x: Inputs) -> Tensor:
        """diag(Σ_i φ_i² variance_ci): (N, C, C)."""
        return torch.diag_embed(self.variances(linearized, x))

    def variances(self, linearized: Linearized, x: Inputs) -> Tensor:
        """Σ_i φ_i² variance_ci: (N, C)."""
        function = lambda phi: phi.square() @ self.variance.T.to(phi)
        return _by_chunks(linearized, x, sum(self.variance.shape), function)

    def joint(self, linearized: Linearized, x: Inputs) -> Tensor:
        """(N·C, N·C), in float64."""
        phi = features(linearized, x).double()
        K = torch.einsum("ni,ci,mi->ncm", phi, self.variance, phi)
        N, C = len(phi), len(self.variance)
        return (K[..., None] * torch.eye(C).to(K)[None, :, None, :]).reshape(N * C, N * C)

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """√variance · z."""
        values = self.variance.sqrt()[..., None] * normal(self.variance, num_samples, generator)
        return _flat(values, self.bias)


@dataclass(frozen=True, eq=False)
class LastLayerKron:
    """Σ in the eigenbasis of Σ φφᵀ and Σ Λ: P numbers, whatever C and D' are."""

    layer: KronRoot

    def _weights(self, phi: Tensor) -> Tensor:
        """The variance in each eigendirection of the outputs: (B, C)."""
        rotated = (phi.double() * self.layer.scale) @ self.layer.QA[0]
        return rotated.square() @ self.layer.spread[0].square().T

    def blocks(self, linearized: Linearized, x: Inputs) -> Tensor:
        """Q_G diag(u_n) Q_Gᵀ: (N, C, C)."""
        Q = self.layer.QG[0]

        def blocks(phi: Tensor) -> Tensor:
            return ((Q * self._weights(phi)[:, None, :]) @ Q.T).to(phi.dtype)

        return _by_chunks(linearized, x, len(Q) ** 2, blocks)

    def variances(self, linearized: Linearized, x: Inputs) -> Tensor:
        """The diagonals of the blocks: (N, C), in C² operations a point."""
        squares = self.layer.QG[0].square().T
        function = lambda phi: (self._weights(phi) @ squares).to(phi.dtype)
        return _by_chunks(linearized, x, len(squares) + len(self.layer.scale), function)

    def differences(self, linearized: Linearized, x: Inputs, top: Tensor) -> Tensor:
        """Var[f_c − f_top] for one output a point: (N, C), in C² operations a point."""
        Q = self.layer.QG[0]
        weights = _by_chunks(linearized, x, len(Q) + len(self.layer.scale), self._weights)
        own = weights @ Q.square().T
        best = own.gather(1, top[:, None])
        both = own + best - 2 * (weights * Q[top]) @ Q.T
        return both.clamp(min=0).to(linearized.example.dtype)

    def joint(self, linearized: Linearized, x: Inputs) -> Tensor:
        """(N·C, N·C), in float64."""
        phi = features(linearized, x).double()
        rotated = (phi * self.layer.scale) @ self.layer.QA[0]
        N, C, Q = len(phi), len(self.layer.QG[0]), self.layer.QG[0]
        K = phi.new_zeros(N, C, N, C)
        for o in range(C):
            gram = (rotated * self.layer.spread[0, o].square()) @ rotated.T
            K += gram[:, None, :, None] * (Q[:, o, None] * Q[:, o])[None, :, None, :]
        return K.reshape(N * C, N * C)

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """In the eigenbasis, and back."""
        return torch.cat(list(self.layer.draw(num_samples, generator).values()))
