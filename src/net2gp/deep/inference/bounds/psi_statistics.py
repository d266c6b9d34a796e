"""Expectations of squared-exponential kernels at uncertain inputs, and the bounds that they close."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from net2gp.deep.inference.inducing import InducingLayer, divergence, factor
from net2gp.deep.inference.process import Deep, InnerDraws
from net2gp.errors import InputError
from net2gp.kernels import RBF
from net2gp.likelihoods.traits import has_gaussian_noise
from net2gp.posteriors.posterior import Posterior


class PsiStatistics(NamedTuple):
    """Expectations over inputs h_n ~ N(m_n, diag s_n).

    Args:
        psi0: Σ_n E k(h_n, h_n), a number.
        psi1: E k(h_n, z_m), (N, M).
        psi2: Σ_n E k(z_m, h_n) k(h_n, z_l), (M, M).
    """

    psi0: Tensor
    psi1: Tensor
    psi2: Tensor


def psi_statistics(kernel: RBF, points: Tensor, mean: Tensor, variance: Tensor) -> PsiStatistics:
    """Compute the expectations of a squared-exponential kernel at uncertain inputs, in closed form.

    With length scales ℓ_d and z̄ = (z_m + z_l) / 2,

        ψ₁ = σ² ∏_d (1 + s_d/ℓ_d²)^(−1/2) exp(−½ (m_d − z_d)² / (ℓ_d² + s_d)),
        ψ₂ = σ⁴ Σ_n ∏_d (1 + 2s_d/ℓ_d²)^(−1/2) exp(−(z_md − z_ld)² / 4ℓ_d² − (m_d − z̄_d)² / (ℓ_d² + 2s_d)).

    The cost is N·M²·D in time and memory.

    Args:
        kernel: The kernel.
        points: The inducing points Z, (M, D).
        mean: The means of the inputs, (N, D).
        variance: Their variances, (N, D).

    Returns:
        The three expectations, in float64.

    Raises:
        InputError: If the kernel is not an RBF.

    >>> zero = torch.zeros(1, 1, dtype=torch.float64)
    >>> psi_statistics(RBF(), zero, zero, zero).psi2
    tensor([[1.]], dtype=torch.float64)

    Reference: Titsias & Lawrence, "Bayesian Gaussian process latent variable model", AISTATS 2010.
    """
    if not isinstance(kernel, RBF):
        raise InputError(
            "psi_statistics has closed forms for the squared-exponential kernel, n2g.RBF(...), but got a "
            f"{type(kernel).__name__}. Use deep.fit, which draws."
        )
    Z, m, s = points.double(), mean.double(), variance.double()
    square = torch.as_tensor(kernel.lengthscale, dtype=torch.float64, device=m.device).square()
    square = square.reshape(-1).expand(m.shape[1])
    power = torch.as_tensor(kernel.output_var, dtype=torch.float64, device=m.device)
    gaps = m[:, None] - Z
    width = square + s
    psi1 = power * torch.exp(
        -0.5 * (gaps.square() / width[:, None]).sum(-1)
        - 0.5 * (width / square).log().sum(-1)[:, None]
    )
    middle = 0.5 * (Z[:, None] + Z)
    apart = ((Z[:, None] - Z).square() / (4 * square)).sum(-1)
    wide = square + 2 * s
    away = ((m[:, None, None] - middle).square() / wide[:, None, None]).sum(-1)
    logs = -apart - away - 0.5 * (wide / square).log().sum(-1)[:, None, None]
    return PsiStatistics(len(m) * power, psi1, power.square() * logs.exp().sum(0))


def collapsed_by_psi(
    statistics: PsiStatistics, L: Tensor, targets: Tensor, noise_var: Tensor
) -> Tensor:
    """Compute the expected data term of a layer at uncertain inputs, with its best Gaussian, minus its KL.

    With B = I + L⁻¹ ψ₂ L⁻ᵀ / σ², K(Z, Z) = L Lᵀ and c = L⁻¹ ψ₁ᵀ y / σ², each output has

        −½ [N log 2πσ² + log |B| + yᵀy/σ² − cᵀB⁻¹c + (ψ₀ − tr L⁻¹ ψ₂ L⁻ᵀ) / σ²].

    Args:
        statistics: The expectations.
        L: The Cholesky factor of K(Z, Z).
        targets: Targets minus their mean function, (N, C).
        noise_var: The noise of each output, (C,).

    Returns:
        The sum over outputs, a number.
    """
    half = torch.linalg.solve_triangular(L, statistics.psi2, upper=False)
    whitened = torch.linalg.solve_triangular(L, half.mT, upper=False)
    projected = torch.linalg.solve_triangular(L, statistics.psi1.mT @ targets, upper=False)
    total, count = L.new_zeros(()), len(targets)
    rest = statistics.psi0 - whitened.trace()
    for y, b, noise in zip(targets.mT, projected.mT, noise_var, strict=True):
        R = torch.linalg.cholesky(torch.eye(len(L)).to(L) + whitened / noise)
        c = torch.linalg.solve_triangular(R, b[:, None] / noise, upper=False)
        total = total - 0.5 * (
            count * (2 * math.pi * noise).log() + (y.square().sum() + rest) / noise
        )
        total = total - R.diagonal().log().sum() + 0.5 * c.square().sum()
    return total


def two_layer_bound(posterior: Posterior) -> Tensor:
    """Compute the bound of a fitted two-layer process without draws, with its last layer at the optimum.

    The inner layer gives each row a Gaussian h_n ~ N(m_n, diag s_n), under which ψ-statistics close all
    expectations of the outer layer. It is at least the bound of the fit up to the error of its draws, and
    equal to it where the last layer has converged. The cost is N·M²·D.

    Args:
        posterior: What `deep.fit` returned for two layers, the last one with an `RBF`, and Gaussian noise.

    Returns:
        The bound, a number in float64.

    Raises:
        InputError: If the posterior is of another kind.

    >>> from net2gp.deep.inference.fit import fit
    >>> from net2gp.deep.inference.settings import Ascent
    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.linspace(-1, 1, 6, dtype=torch.float64)[:, None]
    >>> two_layer_bound(fit(2, (x, x), Gaussian(0.1), ascent=Ascent(num_steps=5))).shape
    torch.Size([])

    Reference: Damianou & Lawrence, "Deep Gaussian processes", AISTATS 2013.
    """
    process, likelihood = posterior.process, posterior.likelihood
    fits = isinstance(process, Deep) and isinstance(process.inner, InnerDraws)
    if not fits or len(process.layers) != 2 or not has_gaussian_noise(likelihood):  # type: ignore[attr-defined]
        raise InputError(
            "two_layer_bound is for two layers that deep.fit found by its bound, with Gaussian noise. Use "
            "posterior.log_marginal_likelihood() for other fits."
        )
    assert isinstance(process, Deep)
    assert has_gaussian_noise(likelihood)
    x, y = posterior.data
    assert isinstance(x, Tensor)
    inner, last = process.layers
    if last.mean.weight is not None:
        raise InputError(
            'two_layer_bound needs a last layer with mean="constant" or mean="zero", but its mean is linear.'
        )
    mean, variance = _outputs(inner, x.double())
    targets = y.reshape(len(y), -1).double() - last.mean(mean)
    noise = likelihood.noise_variance(targets)
    if not bool((noise == noise[:1]).all()):
        raise InputError("two_layer_bound needs the same noise at all rows, but each has its own.")
    statistics = psi_statistics(last.kernel, last.points, mean, variance)  # type: ignore[arg-type]
    L = factor(last.kernel.precise(), last.points)
    return collapsed_by_psi(statistics, L, targets, noise[0]) - divergence(inner.center, inner.root)


def _outputs(layer: InducingLayer, inputs: Tensor) -> tuple[Tensor, Tensor]:
    found = layer.project(inputs)
    return found.mean(layer.center), found.variance(layer.root)
