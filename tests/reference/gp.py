"""Gaussian processes by the textbook formulas, dense and slow: explicit inverses and autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Gaussian(NamedTuple):
    """Mean (n,) and covariance (n, n) of f at the test rows, and log p(y)."""

    mean: Tensor
    covariance: Tensor
    evidence: Tensor


def regression(K: Tensor, Ks: Tensor, Kss: Tensor, t: Tensor, noise: Tensor) -> Gaussian:
    """Function space, by the inverse of K + diag(noise).

    K (n, n), Ks (n, m), Kss (m, m) are prior covariances, t (n,) targets less their prior mean.
    Rasmussen and Williams (2006), equations 2.23 to 2.24 and 2.30.
    """
    A = K + torch.diag(noise)
    inverse = torch.linalg.inv(A)
    evidence = -0.5 * (t @ inverse @ t + torch.logdet(A) + len(t) * math.log(2 * math.pi))
    return Gaussian(Ks.T @ inverse @ t, Kss - Ks.T @ inverse @ Ks, evidence)


def weight_regression(Phi: Tensor, Phis: Tensor, t: Tensor, noise: Tensor) -> Gaussian:
    """Weight space: w ~ N(0, I), t = Φw + ε; p(t) as the law of ε integrated against w.

    Rasmussen and Williams (2006), equations 2.8 to 2.9.
    """
    D = torch.diag(1 / noise)
    S = torch.linalg.inv(torch.eye(Phi.shape[1], dtype=Phi.dtype) + Phi.T @ D @ Phi)
    w = S @ Phi.T @ D @ t
    error = t - Phi @ w
    evidence = (
        -0.5 * (error @ D @ error + w @ w)
        + 0.5 * torch.logdet(S)
        - 0.5 * (noise.log().sum() + len(t) * math.log(2 * math.pi))
    )
    return Gaussian(Phis @ w, Phis @ S @ Phis.T, evidence)


LogProb = Callable[[Tensor], Tensor]
"""f (n,) at the training rows to log p(y | f)."""


class Laplace(NamedTuple):
    """The mode (n,) of log p(y | f) + log N(f | m, K), the curvature (n, n) there, and log p(y)."""

    mode: Tensor
    curvature: Tensor
    evidence: Tensor

    def predict(self, K: Tensor, Ks: Tensor, Kss: Tensor, mean: Tensor) -> Gaussian:
        """f at test rows; `mean` is the prior mean of the training rows."""
        inverse = torch.linalg.inv(K)
        S = torch.linalg.inv(inverse + self.curvature)
        weights = inverse @ Ks
        covariance = Kss - Ks.T @ weights + weights.T @ S @ weights
        return Gaussian(weights.T @ (self.mode - mean), covariance, self.evidence)


def laplace(
    log_prob: LogProb, K: Tensor, mean: Tensor, curvature: Callable[[Tensor], Tensor] | None = None
) -> Laplace:
    """Newton's method with autograd's Hessian and step halving, on the inverse of K.

    `curvature` (n, n) at f replaces the Hessian in the answer, but not in the search for the mode.
    """
    inverse = torch.linalg.inv(K)

    def objective(f: Tensor) -> Tensor:
        return log_prob(f) - 0.5 * (f - mean) @ inverse @ (f - mean)

    f = mean.clone()
    for _ in range(200):
        gradient = torch.func.grad(objective)(f)
        values, vectors = torch.linalg.eigh(-torch.func.hessian(objective)(f))
        step = vectors @ ((vectors.T @ gradient) / values.abs().clamp(min=1e-9))
        size = 1.0
        while size > 1e-12 and not objective(f + size * step) >= objective(f):
            size /= 2
        f = f + size * step
        if step.abs().max() < 1e-10 * (1 + f.abs().max()):
            break
    Lam = -torch.func.hessian(log_prob)(f) if curvature is None else curvature(f)
    determinant = torch.logdet(torch.eye(len(f), dtype=f.dtype) + Lam @ K)
    return Laplace(f, Lam, objective(f) - 0.5 * determinant)


def evidence_by_importance(
    log_prob: LogProb, K: Tensor, mean: Tensor, proposal: Gaussian, num_samples: int = 200_000
) -> tuple[float, float]:
    """log ∫ p(y | f) N(f | mean, K) df and its standard error, sampling f from a wide proposal.

    The proposal is Student's t with five degrees of freedom, whose tails are heavier than any of the
    posteriors here have.
    """
    generator = torch.Generator().manual_seed(0)
    n, nu = len(mean), 5.0
    root = torch.linalg.cholesky(proposal.covariance)
    z = torch.randn(num_samples, n, generator=generator, dtype=mean.dtype)
    chi = torch.randn(num_samples, int(nu), generator=generator, dtype=mean.dtype).square().sum(1)
    f = proposal.mean + (z / (chi / nu).sqrt()[:, None]) @ root.T
    density = torch.distributions.MultivariateNormal(mean, K).log_prob(f)
    distance = torch.linalg.solve_triangular(root, (f - proposal.mean).T, upper=False).square()
    constant = math.lgamma((nu + n) / 2) - math.lgamma(nu / 2) - n / 2 * math.log(nu * math.pi)
    student = constant - root.diagonal().log().sum()
    student = student - (nu + n) / 2 * torch.log1p(distance.sum(0) / nu)
    weights = torch.func.vmap(log_prob)(f) + density - student
    top = weights.max()
    ratio = (weights - top).exp()
    error = ratio.std() / ratio.mean() / num_samples**0.5
    return float(top + ratio.mean().log()), float(error)


def evidence_by_quadrature(
    log_prob: LogProb, K: Tensor, mean: Tensor, num_nodes: int = 60
) -> float:
    """log ∫ p(y | f) N(f | mean, K) df for two or three rows, on a grid of Gauss–Hermite nodes."""
    import numpy as np

    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    axes = [torch.as_tensor(nodes, dtype=mean.dtype)] * len(mean)
    z = torch.cartesian_prod(*axes).reshape(-1, len(mean))
    logs = torch.as_tensor(np.log(weights / weights.sum()), dtype=mean.dtype)
    log_weights = torch.cartesian_prod(*[logs] * len(mean)).reshape(-1, len(mean)).sum(1)
    f = mean + z @ torch.linalg.cholesky(K).T
    return float((torch.func.vmap(log_prob)(f) + log_weights).logsumexp(0))
