"""One layer between Gaussian rows: its bound with the best law of the inducing values, and that law."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from net2gp.deep.latent.psi import GaussianRows, psi1_of, psi2_pairs, symmetric
from net2gp.errors import InputError

JITTER_KNOWN = 1e-10
"""What is added to the diagonal of K(Z, Z), relative to it, for inputs that are known."""

JITTER = 1e-6
"""The same for uncertain inputs, where ψ2 is no product of ψ1, and rounding grows by 1/jitter.

It makes the inducing values noisy copies of f(Z), so that the bound remains a bound.
"""

TRIES = 5
"""The number of jitters, each ten times the last."""


class Targets(NamedTuple):
    """What a layer is to explain: the moments of its outputs, and which of them are there.

    Args:
        mean: (N, D), with 0 for what is missing.
        variance: (N, D), or None for targets that are known.
        present: (N, D) of zeros and ones, or None if nothing is missing.
    """

    mean: Tensor
    variance: Tensor | None = None
    present: Tensor | None = None


class _Solved(NamedTuple):
    """Matrices of a layer given its inputs, in whitened coordinates, for G groups of outputs.

    Args:
        whitener: L⁻¹, with K(Z, Z) = L Lᵀ for a kernel of variance 1: (M, M).
        root: R, with R Rᵀ = I + (v/σ²) L⁻¹ Ψ2 L⁻ᵀ: (G, M, M).
        weights: V = R⁻¹ √(v/σ²) L⁻¹ Ψ1ᵀ: (G, M, N).
        open_part: Σ_n ψ0_n − tr K⁻¹ Ψ2 for a kernel of variance 1: (G,) or (1,).
        num_rows: The number of rows: (G,) or (1,).
    """

    whitener: Tensor
    root: Tensor
    weights: Tensor
    open_part: Tensor
    num_rows: Tensor


@dataclass(frozen=True, eq=False)
class LatentLayer:
    """D Gaussian processes with a common squared-exponential correlation, and noise.

    Output d has the covariance v_d exp(−Σ_q (x_q − x'_q)² / 2ℓ_q²) and noise of variance σ_d².

    Args:
        lengthscale: The length scales ℓ, (Q,).
        output_var: The variances v, (D,), or (1,) for all outputs.
        noise_var: The variances σ² of the noise, (D,), or (1,) for all outputs.
        points: The inducing points Z, (M, Q).
    """

    lengthscale: Tensor
    output_var: Tensor
    noise_var: Tensor
    points: Tensor = field(repr=False)

    def bound(self, rows: GaussianRows, targets: Targets) -> Tensor:
        """Compute the bound on E log p(targets | rows), with the best law of the inducing values.

        Given the targets t_d of output d, the inducing values u have the best law q(u | t_d). With
        A = K(Z, Z) + Ψ2/σ² and Ψ2 = Σ_n ψ2_n the bound is

            Σ_d E [ −(N/2) log 2πσ² − |t_d|²/2σ² + t_dᵀ Ψ1 A⁻¹ Ψ1ᵀ t_d / 2σ⁴
                    + ½ log |K(Z, Z)| − ½ log |A| − (Σ_n ψ0_n − tr K(Z, Z)⁻¹Ψ2) / 2σ² ]

        with the expectation over the targets, if these are uncertain. Their entropy is not part of it.

        Args:
            rows: The inputs.
            targets: The outputs.

        Returns:
            A number.
        """
        found = self._solved(rows, targets.present)
        t, noise = _grouped(targets.mean, len(found.root)), self.noise_var
        gap = t.square().sum((1, 2)) - (found.weights @ t).square().sum((1, 2))
        if targets.variance is not None:
            s = _grouped(targets.variance, len(found.root))
            gap = gap + (s.sum(2) * (1 - found.weights.square().sum(1))).sum(1)
        logs = found.num_rows * (2 * math.pi * noise).log()
        logs = logs + 2 * found.root.diagonal(dim1=1, dim2=2).log().sum(1)
        each = logs + self.output_var / noise * found.open_part
        return -0.5 * (gap / noise + t.shape[2] * each).sum()

    @torch.no_grad()
    def fitted(self, rows: GaussianRows, targets: Targets) -> FittedLayer:
        """The layer with the law of its inducing values."""
        found = self._solved(rows, targets.present)
        t, v = _grouped(targets.mean, len(found.root)), self.output_var[:, None, None]
        noise = self.noise_var[:, None, None]
        back = torch.linalg.solve_triangular(found.root.mT, found.weights, upper=True)
        center = ((v / noise).sqrt() * (back @ t)).permute(1, 0, 2).flatten(1)
        closed = v * (torch.eye(len(self.points)).to(v) - torch.cholesky_inverse(found.root))
        if targets.variance is not None:
            s = _grouped(targets.variance, len(found.root))
            closed = closed - v / noise * (back * s.mT) @ back.mT
        return FittedLayer(self, found.whitener, center, closed)

    def _solved(self, rows: GaussianRows, present: Tensor | None) -> _Solved:
        L = _root(self.lengthscale, self.points, rows.variance is None)
        psi1 = psi1_of(self.lengthscale, rows, self.points)
        W = torch.linalg.solve_triangular(L, psi1.mT, upper=False)
        # one group has all outputs; if some are missing, each output has its own rows
        mask = W.new_ones(1, len(psi1)) if present is None else present.mT
        if rows.variance is None:
            inner = (W * mask[:, None]) @ W.mT
        else:
            sums = mask @ psi2_pairs(self.lengthscale, rows, self.points)
            half = torch.linalg.solve_triangular(L, symmetric(sums, len(L)), upper=False)
            inner = torch.linalg.solve_triangular(L, half.mT, upper=False)
        ratio = (self.output_var / self.noise_var)[:, None, None]
        identity = torch.eye(len(L), dtype=L.dtype, device=L.device)
        root = torch.linalg.cholesky(identity + ratio * 0.5 * (inner + inner.mT))
        weights = torch.linalg.solve_triangular(root, ratio.sqrt() * W, upper=False)
        count = mask.sum(1)
        open_part = (count - inner.diagonal(dim1=1, dim2=2).sum(1)).clamp(min=0)
        whitener = torch.linalg.solve_triangular(L, identity, upper=False)
        return _Solved(whitener, root, weights, open_part, count)


@dataclass(frozen=True, eq=False)
class FittedLayer:
    """A layer with the Gaussian law of its inducing values after the data.

    Args:
        layer: The layer.
        whitener: L⁻¹, (M, M).
        center: The mean of whitened values, times the root of v: (M, D).
        closed: The variance that the data take away, in whitened coordinates: (D, M, M) or (1, M, M).
    """

    layer: LatentLayer
    whitener: Tensor = field(repr=False)
    center: Tensor = field(repr=False)
    closed: Tensor = field(repr=False)

    def moments(self, rows: GaussianRows) -> GaussianRows:
        """Compute mean and variance of the noise-free outputs at uncertain inputs, without approximation.

        Args:
            rows: R inputs.

        Returns:
            The moments, (R, D).
        """
        scale, Z = self.layer.lengthscale, self.layer.points
        w = psi1_of(scale, rows, Z) @ self.whitener.mT
        mean, v = w @ self.center, self.layer.output_var
        if rows.variance is None:
            taken = torch.einsum("ni,dij,nj->nd", w, self.closed, w)
            return GaussianRows(mean, (v - taken).clamp(min=0).expand_as(mean))
        inner = self.whitener @ symmetric(psi2_pairs(scale, rows, Z), len(Z)) @ self.whitener.mT
        taken = torch.einsum("nij,dij->nd", inner, self.closed)
        second = ((inner @ self.center) * self.center).sum(1)
        return GaussianRows(mean, (v - taken + second - mean.square()).clamp(min=0))


def _grouped(values: Tensor, groups: int) -> Tensor:
    """(N, D) as one group (1, N, D), or as D groups (D, N, 1)."""
    return values[None] if groups == 1 else values.mT[..., None]


def _root(lengthscale: Tensor, points: Tensor, known: bool) -> Tensor:
    """L with K(Z, Z) + jitter = L Lᵀ."""
    K = psi1_of(lengthscale, GaussianRows(points), points)
    identity = torch.eye(len(K), dtype=K.dtype, device=K.device)
    for power in range(TRIES):
        jitter = (JITTER_KNOWN if known else JITTER) * 10**power
        L, info = torch.linalg.cholesky_ex(K + jitter * identity)
        if int(info) == 0:
            return L
    raise InputError(
        f"the kernel matrix of the {len(K)} inducing points is not finite or singular. Pass fewer inducing "
        "points, or scale the inputs to variance 1."
    )
