"""Expectations of a squared-exponential kernel over Gaussian inputs: the ψ-statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from net2gp.errors import InputError, check_finite, check_positive
from net2gp.inputs import describe
from net2gp.kernels import RBF


@dataclass(frozen=True, eq=False)
class GaussianRows:
    """N independent Gaussian vectors with diagonal covariances.

    Args:
        mean: The means, (N, Q).
        variance: The variances, (N, Q), or None for rows that are known.
    """

    mean: Tensor = field(repr=False)
    variance: Tensor | None = field(default=None, repr=False)


class PsiStatistics(NamedTuple):
    """The expectations of a kernel over q(x_n), for each of N rows.

    Args:
        psi0: E k(x_n, x_n): (N,).
        psi1: E k(x_n, z_m): (N, M).
        psi2: E k(x_n, z_m) k(x_n, z_m'): (N, M, M).
    """

    psi0: Tensor
    psi1: Tensor
    psi2: Tensor


def psi_statistics(
    kernel: RBF, mean: Tensor, variance: Tensor | None, points: Tensor
) -> PsiStatistics:
    """Compute the expectations of a squared-exponential kernel over Gaussian inputs, in closed form.

    For x ~ N(μ, diag(s)), a kernel v exp(−Σ_q (x_q − z_q)² / 2ℓ_q²) and z̄ = (z + z') / 2,

        ψ0 = v,
        ψ1 = v Π_q (1 + s_q/ℓ_q²)^(−1/2) exp(−(μ_q − z_q)² / 2(ℓ_q² + s_q)),
        ψ2 = v² Π_q (1 + 2s_q/ℓ_q²)^(−1/2) exp(−(z_q − z'_q)² / 4ℓ_q² − (μ_q − z̄_q)² / (ℓ_q² + 2s_q)).

    The cost is N·M²·Q.

    Args:
        kernel: The kernel, with one length scale or one per column.
        mean: The means μ of N inputs, (N, Q).
        variance: The variances s, (N, Q). None means inputs that are known.
        points: The inducing points z, (M, Q).

    Returns:
        ψ0, ψ1 and ψ2 of each row, in float64.

    Raises:
        InputError: If shapes do not agree, a variance is negative, or the kernel is not an RBF.

    >>> x = torch.zeros(1, 1, dtype=torch.float64)
    >>> psi_statistics(RBF(), x, x + 3.0, x).psi1  # (1 + 3)^(−1/2)
    tensor([[0.5000]], dtype=torch.float64)

    Reference: Titsias & Lawrence, "Bayesian Gaussian process latent variable model", AISTATS 2010.
    """
    if not isinstance(kernel, RBF):
        raise InputError(
            f"ψ-statistics are in closed form for n2g.RBF(), but the kernel is {describe(kernel)}."
        )
    wrong = mean.dim() != 2 or points.dim() != 2 or mean.shape[1:] != points.shape[1:]
    if wrong or (variance is not None and variance.shape != mean.shape):
        shapes = [None if t is None else tuple(t.shape) for t in (mean, variance, points)]
        raise InputError(
            "mean and variance must have one shape (N, Q) and points the shape (M, Q), but these are "
            f"{shapes[0]}, {shapes[1]} and {shapes[2]}."
        )
    for one, name in ((mean, "mean"), (points, "points")):
        check_finite(one, name)
    if variance is not None:
        check_positive(variance, "variance", zero=True)
        variance = variance.double()
    rows, Z, v = GaussianRows(mean.double(), variance), points.double(), _output_var(kernel)
    pairs = v**2 * psi2_pairs(_scales(kernel, Z), rows, Z)
    return PsiStatistics(
        v.expand(len(mean)), v * psi1_of(_scales(kernel, Z), rows, Z), symmetric(pairs, len(Z))
    )


def psi1_of(lengthscale: Tensor, rows: GaussianRows, points: Tensor) -> Tensor:
    """ψ1 of a kernel of variance 1 with length scales (Q,): (N, M)."""
    squares = lengthscale.square()
    width = squares if rows.variance is None else squares + rows.variance
    logs = (width / squares).log().sum(-1, keepdim=True) if rows.variance is not None else 0.0
    gap = (rows.mean[:, None] - points).square()
    return (-0.5 * ((gap / width.expand_as(rows.mean)[:, None]).sum(-1) + logs)).exp()


def psi2_pairs(lengthscale: Tensor, rows: GaussianRows, points: Tensor) -> Tensor:
    """ψ2 of a kernel of variance 1 for the pairs m ≥ m' of points, in the order of their indices.

    Args:
        lengthscale: The length scales, (Q,).
        rows: The inputs.
        points: The inducing points, (M, Q).

    Returns:
        (N, M(M + 1)/2).
    """
    one, other = lower(len(points), points.device)
    if rows.variance is None:
        psi1 = psi1_of(lengthscale, rows, points)
        return psi1[:, one] * psi1[:, other]
    squares = lengthscale.square()
    apart = ((points[one] - points[other]).square() / squares).sum(1)
    middle = 0.5 * (points[one] + points[other])
    width = squares + 2 * rows.variance
    # (μ − z̄)² as three products of matrices: no array of N·M²·Q numbers
    scaled = rows.mean / width
    near = (scaled * rows.mean + 0.5 * (width / squares).log()).sum(1, keepdim=True)
    near = near - 2 * scaled @ middle.mT + (1 / width) @ middle.square().mT
    return (-0.25 * apart - near).exp()


def lower(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The indices m ≥ m' of a lower triangle."""
    one, other = torch.tril_indices(size, size, device=device)
    return one, other


def symmetric(pairs: Tensor, size: int) -> Tensor:
    """The symmetric matrices with these lower triangles: (…, M(M + 1)/2) to (…, M, M)."""
    one, other = lower(size, pairs.device)
    place = torch.empty(size, size, dtype=torch.long, device=pairs.device)
    order = torch.arange(len(one), device=pairs.device)
    place[one, other], place[other, one] = order, order
    return pairs[..., place]


def _scales(kernel: RBF, points: Tensor) -> Tensor:
    scale = torch.as_tensor(kernel.lengthscale, dtype=torch.float64).to(points.device)
    return scale.reshape(-1).expand(points.shape[1])


def _output_var(kernel: RBF) -> Tensor:
    return torch.as_tensor(kernel.output_var, dtype=torch.float64).reshape(())
