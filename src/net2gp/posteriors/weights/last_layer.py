"""`LastLayer()`: only the weights of the last linear layer, from its inputs φ alone.

f(x) = W φ(x), so that neither the curvature nor the covariance of f(x) needs the Jacobian φ ⊗ I. Entries are
in the order (c, i), with the bias behind each class's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import num_rows, ordinary_tensors, rows
from net2gp.linear.curvatures.curvature import Fisher
from net2gp.linear.curvatures.head import (
    features,
    has_features,
    last_linearized,
    weights_of,
)
from net2gp.linear.forward.places import channels_of
from net2gp.linear.linearized import Linearized
from net2gp.memory import check_memory
from net2gp.posteriors.weights.covariance import Covariance, normal
from net2gp.posteriors.weights.diagonal import Diagonal
from net2gp.posteriors.weights.full import Dense, Full
from net2gp.posteriors.weights.kron import Kron
from net2gp.posteriors.weights.kron_blocks import KronBlock, KronRoot
from net2gp.posteriors.weights.structure import Curvature, Structure, Traits, shown
from net2gp.posteriors.weights.tasks.head_rows import HeadRows, head_rows
from net2gp.posteriors.weights.tasks.task import Task
from net2gp.tags import savable
from net2gp.types import Inputs, Params

CHUNK_NUMBERS = 2**24
"""Numbers of one chunk of predictions, outer products or curvatures."""

CPU_NUMBERS = 2**21
"""Numbers of the outer products of one chunk of points on a CPU, which larger chunks do not make faster."""

SMALL = 4000
"""Weights up to which the whole precision is the default."""


@savable("structures.LastLayer")
@dataclass(frozen=True)
class LastLayer(Structure):
    """Only the weights of the last linear layer, its inputs as they are.

    The Jacobian φ ⊗ I of that layer is never built: N·(D² + C²) memory at most for D features and C outputs.

    Args:
        structure: What is kept of the precision of these weights: `Full()`, `Diagonal()` or `Kron()`. None
            means `Full()` up to 4000 weights, else `Kron()`.

    Raises:
        InputError: `structure` is none of these.
    """

    structure: Full | Diagonal | Kron | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.structure, Full | Diagonal | Kron | None):
            raise InputError(
                "LastLayer takes the structure of its weights, Full(), Diagonal(), Kron() or None, but got "
                f"{shown(self.structure)}. Pass for example LastLayer(Kron())."
            )

    def chosen(self, linearized: Linearized, x: Inputs) -> Linearized:
        """The network with the parameters of its last layer as the chosen ones."""
        return last_linearized(linearized, x)

    def settled(self, linearized: Linearized) -> LastLayer:
        """With a structure of its weights."""
        inner = Full() if linearized.num_params <= SMALL else Kron()
        return replace(self, structure=self.structure or inner)

    def curvature(self, task: Task) -> Curvature:
        """Σ_n Λ_n ⊗ φ_n φ_nᵀ, its diagonal, or its Kronecker factors Σ φφᵀ and Σ Λ."""
        inner = self.settled(task.linearized).structure
        assert inner is not None
        if not has_features(task.linearized, task.few()):
            return inner.curvature(task)
        if isinstance(inner, Full):
            return LastFullCurvature(task, Dense(_full(task, inner.fisher)))
        if isinstance(inner, Diagonal):
            return LastDiagonalCurvature(task, _diagonal(task, inner.fisher))
        return LastKronCurvature(task, _kron(task, inner.fisher))

    def traits(self) -> Traits:
        """Those of one layer, as exact as what is kept of it."""
        exact = self.structure is not None and self.structure.traits().exact
        return Traits(exact=exact, all_weights=False, one_layer=True)


def _rows(task: Task) -> Iterator[HeadRows]:
    """The rows of the task, so many at a time that their outer products fit into memory."""
    width = weights_of(task.params).shape[1]
    numbers = CPU_NUMBERS if task.device.type == "cpu" else CHUNK_NUMBERS
    return head_rows(task, max(1, numbers // width**2))


def _full(task: Task, fisher: Fisher) -> Tensor:
    """All (C·D')² entries, by one matrix product per chunk in float64: N·C²·D'²/2 operations.

    Λ_n and φ_nφ_nᵀ are symmetric, so a triangle of each is enough.
    """
    C, D = weights_of(task.params).shape
    check_memory(
        3 * 8 * (C * D) ** 2,
        task.linearized.example.device,
        f"the curvature of a last layer of {C} × {D} weights",
        "structure=LastLayer(Kron())",
    )
    like = task.linearized.example
    (i, j), (k, l) = (torch.triu_indices(n, n, device=like.device) for n in (C, D))
    triangle = like.new_zeros(len(i), len(k), dtype=torch.float64)
    for chunk in _rows(task):
        for part in chunk.parts(CHUNK_NUMBERS):
            # in float32 the sum would lose the small eigenvalues, which a wide prior brings out
            phi, Lam = part.phi.double(), part.curvatures(fisher)
            triangle += Lam[:, i, j].double().mT @ (phi[:, k] * phi[:, l])
    H = triangle[_mirrored(i, j, C)][:, _mirrored(k, l, D)]
    return H.reshape(C, C, D, D).transpose(1, 2).reshape(C * D, C * D)


def _mirrored(i: Tensor, j: Tensor, size: int) -> Tensor:
    """The place of each of the size² entries of a symmetric matrix in its upper triangle."""
    place = i.new_zeros(size, size)
    place[i, j] = place[j, i] = torch.arange(len(i), device=i.device)
    return place.reshape(-1)


def _diagonal(task: Task, fisher: Fisher) -> Tensor:
    """Σ_n Λ_ncc φ_ni²: (C·D',)."""
    weights = weights_of(task.params)
    total = weights.new_zeros(weights.shape, dtype=torch.float64)
    for chunk in _rows(task):
        for part in chunk.parts(CHUNK_NUMBERS):
            Lam = part.curvatures(fisher)
            total += Lam.diagonal(dim1=1, dim2=2).mT @ part.phi.square().to(Lam.dtype)
    return total.reshape(-1)


def _kron(task: Task, fisher: Fisher) -> KronBlock:
    """Σ φφᵀ ⊗ Σ Λ / N over N rows, without a curvature for each where the likelihood allows it."""
    C, D = weights_of(task.params).shape
    like = task.linearized.example
    A = like.new_zeros(D, D, dtype=torch.float64)
    G = like.new_zeros(C, C, dtype=torch.float64)
    count = 0
    for chunk in _rows(task):
        phi = chunk.counted().double()
        A += phi.mT @ phi
        G += chunk.summed(fisher)
        count += len(phi)
    return KronBlock(tuple(task.params), A[None], G[None], count)


def _by_class(task: Task, prior: Params) -> Tensor:
    """Prior variances in the order (c, i), the bias behind each class's weights: (C·D',)."""
    expanded = {n: prior[n].double().expand(value.shape) for n, value in task.params.items()}
    return weights_of(expanded).reshape(-1)


@dataclass(frozen=True, eq=False)
class LastFullCurvature(Curvature):
    """Σ_n Λ_n ⊗ φ_n φ_nᵀ of the weights W (C, D) and bias: (C·D', C·D')."""

    dense: Dense

    def log_det(self, prior: Params, scale: float | Tensor) -> Tensor:
        """By eigenvalues within a search, else by a Cholesky factor."""
        return self.dense.log_det(prior, _by_class(self.task, prior), scale)

    def covariance(self, prior: Params, scale: float) -> LastLayerFull:
        """By a Cholesky factor."""
        v, params = _by_class(self.task, prior), self.task.params
        C = len(next(iter(params.values())))
        return LastLayerFull(self.dense.factor(v, scale), v.sqrt(), C, len(params) == 2)

    def trace(self) -> float:
        """tr H."""
        return float(self.dense.H.trace())


@dataclass(frozen=True, eq=False)
class LastDiagonalCurvature(Curvature):
    """The diagonal of Σ_n Λ_n ⊗ φ_n φ_nᵀ: (C·D',)."""

    diagonal: Tensor

    def log_det(self, prior: Params, scale: float | Tensor) -> Tensor:
        """Σ log(1 + scale·v·h)."""
        return torch.log1p(scale * _by_class(self.task, prior) * self.diagonal).sum()

    def covariance(self, prior: Params, scale: float) -> LastLayerDiagonal:
        """v / (1 + scale·v·h)."""
        v, shape = _by_class(self.task, prior), weights_of(self.task.params).shape
        variance = (v / (1 + scale * v * self.diagonal)).reshape(shape)
        return LastLayerDiagonal(variance, len(self.task.params) == 2)


@dataclass(frozen=True, eq=False)
class LastKronCurvature(Curvature):
    """Σ φφᵀ ⊗ Σ Λ / N."""

    block: KronBlock

    def log_det(self, prior: Params, scale: float | Tensor) -> Tensor:
        """By the products of the eigenvalues of both factors."""
        return self.block.log_det(prior, self.task.params, scale)

    def covariance(self, prior: Params, scale: float) -> LastLayerKron:
        """In the eigenbasis of both factors."""
        return LastLayerKron(self.block.root(prior, self.task.params, scale))

    def trace(self) -> float:
        """tr H."""
        return self.block.trace()


def _by_chunks(
    linearized: Linearized, x: Inputs, width: int, function: Callable[[Tensor], Tensor]
) -> Tensor:
    """`function` of the features of some rows at a time, `width` numbers each; a point may have many rows."""
    most, start = max(1, CHUNK_NUMBERS // width), 0
    size = 1 if channels_of(linearized) is not None else most
    parts = []
    while start < num_rows(x):
        part = rows(x, slice(start, start + size))
        phi = features(linearized, part)
        parts += [function(some) for some in phi.split(most)]
        start += size
        size = max(1, most * num_rows(part) // len(phi))
    return torch.cat(parts)


def _flat(values: Tensor, bias: bool) -> Tensor:
    """Draws (C, D', S) in the order of the layer's parameters: (P, S)."""
    if not bias:
        return values.flatten(0, 1)
    return torch.cat([values[:, :-1].flatten(0, 1), values[:, -1]])


def _squares(roots: Tensor, phi: Tensor) -> Tensor:
    """φᵀ R_c R_cᵀ φ for each row and class, (B, C), from roots (C, D', r)."""
    return torch.einsum("bi,ciq->bcq", phi, roots).square().sum(-1)


@savable("last_layer.LastLayerFull")
@dataclass(frozen=True, eq=False)
class LastLayerFull(Covariance):
    """Σ = root rootᵀ with root = diag(deviations) L⁻ᵀ, (C·D', C·D'), made when it is first asked for."""

    by_place: ClassVar[bool] = True

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
        """(I ⊗ φᵀ) root: (B, C, C·D'), by one matrix product per class."""
        root = self.root.reshape(self.num_classes, -1, self.root.shape[1])
        return torch.einsum("bi,ciq->bcq", phi.double(), root)

    def blocks(self, linearized: Linearized, x: Inputs) -> Tensor:
        """φᵀ Σ_cd φ for each point: (N, C, C)."""

        def blocks(phi: Tensor) -> Tensor:
            sides = self._sides(phi)
            return (sides @ sides.mT).to(phi.dtype)

        return _by_chunks(linearized, x, self.num_classes * len(self.L), blocks)

    def variances(self, linearized: Linearized, x: Inputs) -> Tensor:
        """The diagonals of the blocks: (N, C), in C·D'² operations per point."""
        root = self._short(None)
        function = lambda phi: _squares(root, phi.double()).to(phi.dtype)
        return _by_chunks(linearized, x, len(self.L), function)

    def differences(self, linearized: Linearized, x: Inputs, top: Tensor) -> Tensor:
        """Var[f_c − f_top] for one output of each point: (N, C), in C·D'² operations per point."""
        done = 0

        def differences(phi: Tensor) -> Tensor:
            nonlocal done
            own, done = top[done : done + len(phi)], done + len(phi)
            found = phi.new_zeros(len(phi), self.num_classes, dtype=torch.float64)
            for number in own.unique().tolist():
                some = (own == number).nonzero()[:, 0]
                found = found.index_copy(0, some, _squares(self._short(number), phi[some].double()))
            return found.to(phi.dtype)

        return _by_chunks(linearized, x, len(self.L), differences)

    @ordinary_tensors()
    def _short(self, top: int | None) -> Tensor:
        """Roots (C, D', D') of the covariances of a class's weights, or of their difference from `top`'s."""
        if top not in self._shortened:
            root = self.root.reshape(self.num_classes, -1, self.root.shape[1])
            root = root if top is None else root - root[top]
            self._shortened[top] = torch.linalg.qr(root.mT, mode="r").R.mT
        return self._shortened[top]

    @cached_property
    def _shortened(self) -> dict[int | None, Tensor]:
        return {}

    def joint(self, linearized: Linearized, x: Inputs) -> Tensor:
        """(N·C, N·C), in float64."""
        sides = self._sides(features(linearized, x)).flatten(0, 1)
        return sides @ sides.mT

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """root · z."""
        values = self.root @ normal(self.root[0], num_samples, generator)
        return _flat(values.reshape(self.num_classes, -1, num_samples), self.bias)


@savable("last_layer.LastLayerDiagonal")
@dataclass(frozen=True, eq=False)
class LastLayerDiagonal(Covariance):
    """Independent weights with the variances `variance` (C, D'): outputs are independent too."""

    by_place: ClassVar[bool] = True

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


@savable("last_layer.LastLayerKron")
@dataclass(frozen=True, eq=False)
class LastLayerKron(Covariance):
    """Σ in the eigenbasis of Σ φφᵀ and Σ Λ: P numbers, whatever C and D' are."""

    by_place: ClassVar[bool] = True

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
        """The diagonals of the blocks: (N, C), in C² operations per point."""
        squares = self.layer.QG[0].square().T
        function = lambda phi: (self._weights(phi) @ squares).to(phi.dtype)
        return _by_chunks(linearized, x, len(squares) + len(self.layer.scale), function)

    def differences(self, linearized: Linearized, x: Inputs, top: Tensor) -> Tensor:
        """Var[f_c − f_top] for one output of each point: (N, C), in C² operations per point."""
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
