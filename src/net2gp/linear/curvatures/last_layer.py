"""The last linear layer of a network: its inputs, and its curvature without its Jacobian φ ⊗ I."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import check_memory
from net2gp.inputs import num_rows, rows
from net2gp.likelihoods.traits import of_points, summed_curvature
from net2gp.linear.curvatures.curvature import DiagonalCurvature, ExactFisher, FullCurvature, Source
from net2gp.linear.curvatures.head import features_and_outputs, weights_of
from net2gp.linear.curvatures.kron_blocks import KronBlock

CHUNK_NUMBERS = 2**24
"""Numbers of a chunk's outer products and curvatures."""


@dataclass(frozen=True, eq=False)
class LastLayerCurvature:
    """Σ_n Λ_n ⊗ φ_n φ_nᵀ of the weights W (C, D) and bias, entries in the order (c, i), the bias at i = D.

    `inner` is all of it, its diagonal, or its Kronecker factors Σ φφᵀ and Σ Λ.
    """

    names: tuple[str, ...]
    inner: FullCurvature | DiagonalCurvature | KronBlock


def _parts(source: Source) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The first point, features and outputs chunk by chunk."""
    count = num_rows(source.x)
    width = weights_of(source.linearized.params).shape[1]
    size = max(1, CHUNK_NUMBERS // width**2)
    for start in range(0, count, size):
        part = rows(source.x, slice(start, start + size))
        yield start, *features_and_outputs(source.linearized, part)


def _curvatures(source: Source, first: int, f: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Λ_n of some points at a time: (B, C, C); f are those from the point `first` on."""
    size = max(1, CHUNK_NUMBERS // f.shape[1] ** 2)
    for start in range(0, len(f), size):
        some = slice(start, min(start + size, len(f)))
        points = slice(first + some.start, first + some.stop)
        if isinstance(source.fisher, ExactFisher):
            # diag(p) − ppᵀ in float32 is indefinite by its rounding, which a wide prior brings out
            yield some, of_points(source.likelihood, points).curvature(f[some].double())
        else:
            y = source.y[points]
            R = source.fisher.root(source.likelihood, f[some], y, points.start)
            yield some, R @ R.mT


def last_layer_full(source: Source) -> LastLayerCurvature:
    """All (C·D')² entries, by one matrix product a chunk in float64: N·C²·D'²/2 operations.

    Λ_n and φ_nφ_nᵀ are symmetric, so a triangle of each is enough.
    """
    C, D = weights_of(source.linearized.params).shape
    check_memory(
        3 * 8 * (C * D) ** 2,
        source.linearized.example.device,
        f"the curvature of a last layer of {C} × {D} weights",
        "structure=LastLayer(Kron())",
    )
    like = source.linearized.example
    (i, j), (k, l) = (torch.triu_indices(n, n, device=like.device) for n in (C, D))
    triangle = like.new_zeros(len(i), len(k), dtype=torch.float64)
    for first, phi, f in _parts(source):
        for some, Lam in _curvatures(source, first, f):
            # in float32 the sum would lose the small eigenvalues, which a wide prior brings out
            part = phi[some].double()
            triangle += Lam[:, i, j].double().mT @ (part[:, k] * part[:, l])
    H = triangle[_mirrored(i, j, C)][:, _mirrored(k, l, D)]
    H = H.reshape(C, C, D, D).transpose(1, 2).reshape(C * D, C * D)
    return LastLayerCurvature(tuple(source.linearized.params), FullCurvature(H))


def _mirrored(i: Tensor, j: Tensor, size: int) -> Tensor:
    """Where each of the size² entries of a symmetric matrix is among those of its triangle."""
    place = i.new_zeros(size, size)
    place[i, j] = place[j, i] = torch.arange(len(i), device=i.device)
    return place.reshape(-1)


def last_layer_diagonal(source: Source) -> LastLayerCurvature:
    """Σ_n Λ_ncc φ_ni²."""
    total = weights_of(source.linearized.params).new_zeros(
        weights_of(source.linearized.params).shape, dtype=torch.float64
    )
    for first, phi, f in _parts(source):
        for some, Lam in _curvatures(source, first, f):
            total += Lam.diagonal(dim1=1, dim2=2).mT @ phi[some].square().to(Lam.dtype)
    inner = DiagonalCurvature(total.reshape(-1))
    return LastLayerCurvature(tuple(source.linearized.params), inner)


def last_layer_kron(source: Source) -> LastLayerCurvature:
    """Σ φφᵀ ⊗ Σ Λ / N; never a curvature of its own for each point where the likelihood allows it."""
    C, D = weights_of(source.linearized.params).shape
    like = source.linearized.example
    A = like.new_zeros(D, D, dtype=torch.float64)
    G = like.new_zeros(C, C, dtype=torch.float64)
    for first, phi, f in _parts(source):
        A += phi.double().mT @ phi.double()
        if isinstance(source.fisher, ExactFisher):
            part = of_points(source.likelihood, slice(first, first + len(f)))
            G += summed_curvature(part, f.double())
        else:
            G += sum(Lam.sum(0) for _, Lam in _curvatures(source, first, f))
    names = tuple(source.linearized.params)
    return LastLayerCurvature(names, KronBlock(names, A[None], G[None], num_rows(source.x)))
