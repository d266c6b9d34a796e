"""Integrals against Gaussians: Gauss rules, logistic integrals, roots of covariances."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.nn.functional import logsigmoid

from net2gp.linalg import symmetric_root

BLOCK = 2**22
"""How many numbers an integrand may hold at once; points are taken in blocks that keep to it."""

CROSSOVER = 4.5
"""The variance of f from which on the logistic rule is the better one. There, with 32 points, both
are within 5e-7 of E σ(f) and 2e-6 of E σ'(f), and each gains quickly on its own side."""


@lru_cache(maxsize=16)
def _normal_rule(num_points: int) -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_points)
    return nodes, weights / weights.sum()


@lru_cache(maxsize=16)
def _logistic_rule(num_points: int) -> tuple[np.ndarray, np.ndarray]:
    # The monic polynomials orthogonal under the logistic density obey
    # p_{k+1} = t p_k − k⁴π²/(4k² − 1) p_{k−1}; Golub–Welsch turns that into nodes and weights.
    k = np.arange(1.0, num_points)
    off_diagonal = np.pi * k**2 / np.sqrt(4 * k**2 - 1)
    nodes, vectors = np.linalg.eigh(np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1))
    return nodes, vectors[0] ** 2


def normal_rule(num_points: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights (K,) with Σ w g(z) ≈ E g(z), z ~ N(0, 1).

    >>> z, w = normal_rule(8, like=torch.zeros(1))
    >>> round(float((w * z**4).sum()), 4)
    3.0
    """
    nodes, weights = _normal_rule(num_points)
    return torch.from_numpy(nodes).to(like), torch.from_numpy(weights).to(like)


def logistic_rule(num_points: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights (K,) with Σ w g(t) ≈ E g(t), t with the logistic density σ'(t).

    Reference: Gautschi (2004), Orthogonal Polynomials: Computation and Approximation.

    >>> t, w = logistic_rule(8, like=torch.zeros(1))
    >>> bool(((w * t**2).sum() - torch.pi**2 / 3).abs() < 1e-5)
    True
    """
    nodes, weights = _logistic_rule(num_points)
    return torch.from_numpy(nodes).to(like), torch.from_numpy(weights).to(like)


def _deviations(variance: Tensor) -> tuple[Tensor, Tensor]:
    """√v held below and above the crossover, so that the branch not taken stays finite."""
    tiny = torch.finfo(variance.dtype).tiny
    narrow = variance.clamp(tiny, CROSSOVER).sqrt()[..., None]
    return narrow, variance.clamp(min=CROSSOVER).sqrt()[..., None]


def log_expected_sigmoid(mean: Tensor, variance: Tensor, num_points: int) -> Tensor:
    """log E σ(f), f ~ N(m, v), accurate for any v and far into the tail of small probabilities.

    Below v = 4.5 by Gauss–Hermite. Above it the logistic function looks like a step to that rule
    (32 points: off by 5 % at v = 900); there, with t of logistic density, E σ(f) = E Φ((m − t)/√v),
    whose integrand is the smoother the larger v is. In the tail, σ(f) = e^f σ(−f) tilts the
    Gaussian: E σ(f) = e^{m + v/2} E σ(f'), f' ~ N(−m − v, v). Float64 inside. Cost O(num_points) an
    entry.

    >>> log_expected_sigmoid(torch.tensor([-900.0]), torch.tensor([2.0]), 32)
    tensor([-899.])
    """
    m, v = mean.double(), variance.double()
    tail = m < -v / 2
    centre = torch.where(tail, -m - v, m)[..., None]
    narrow, wide = _deviations(v)
    z, z_weight = normal_rule(num_points, like=m)
    t, t_weight = logistic_rule(num_points, like=m)
    value = torch.where(
        v < CROSSOVER,
        torch.logsumexp(z_weight.log() + logsigmoid(centre + narrow * z), -1),
        torch.logsumexp(t_weight.log() + torch.special.log_ndtr((centre - t) / wide), -1),
    )
    return (value + torch.where(tail, m + v / 2, 0)).to(mean.dtype)


def expected_softplus(
    mean: Tensor, variance: Tensor, num_points: int
) -> tuple[Tensor, Tensor, Tensor]:
    """E log(1 + e^f) and its first two derivatives in m, E σ(f) and E σ'(f), f ~ N(m, v).

    The rules are those of `log_expected_sigmoid`; above the crossover softplus(f) = E (f − t)₊
    gives E softplus(f) = E [√v φ(d) + (m − t) Φ(d)], d = (m − t)/√v. The derivatives are exact for
    the rule.

    >>> expected_softplus(torch.tensor([0.0]), torch.tensor([9.0]), 32)[1]
    tensor([0.5000])
    """
    m, v = mean.double()[..., None], variance.double()
    narrow, wide = _deviations(v)
    z, z_weight = normal_rule(num_points, like=m)
    t, t_weight = logistic_rule(num_points, like=m)
    f, d = m + narrow * z, (m - t) / wide
    density = torch.exp(-d.square() / 2) / (2 * torch.pi) ** 0.5
    below = (-logsigmoid(-f), f.sigmoid(), f.sigmoid() * (-f).sigmoid())
    probability = torch.special.ndtr(d)
    above = (wide * density + (m - t) * probability, probability, density / wide)
    softplus, sigmoid, slope = (
        torch.where(v < CROSSOVER, (lower * z_weight).sum(-1), (upper * t_weight).sum(-1))
        for lower, upper in zip(below, above, strict=True)
    )
    return softplus.to(mean.dtype), sigmoid.to(mean.dtype), slope.to(mean.dtype)


def moments(f: MultivariateNormal) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (N, C), variance (N, C) and covariance (N, C, C) of `f`, variances not below zero.

    gpytorch's own `variance` has a floor (1e-6 in float32) that a noise-free posterior lies below.
    """
    covariance = f.covariance_matrix
    return f.mean, covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0), covariance


def mean_and_variance(f: MultivariateNormal) -> tuple[Tensor, Tensor]:
    """Mean and variance (N, C) of `f`, without its covariances where they are not there yet."""
    return f.mean, f.lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2).clamp(min=0)


def psd_root(covariance: Tensor) -> Tensor:
    """R with R Rᵀ = covariance (..., C, C), which may be singular or zero.

    Cholesky where it succeeds with digits left, else the symmetric root, which has a gradient at a
    singular covariance too as long as its rank stays. Cost O(C³).

    >>> psd_root(torch.ones(2, 2, dtype=torch.float64)).square().sum(-1).round(decimals=9)
    tensor([1., 1.], dtype=torch.float64)
    """
    root, info = torch.linalg.cholesky_ex(covariance)
    pivots = root.detach().diagonal(dim1=-2, dim2=-1).square()
    digits = 1e2 * torch.finfo(covariance.dtype).eps * pivots.amax(-1)
    failed = (info != 0) | (pivots.amin(-1) <= digits)
    if not bool(failed.any()):
        return root
    # Factor again without the failures: their infinite gradients would spoil those of the others.
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    root = torch.linalg.cholesky(torch.where(failed[..., None, None], eye, covariance))
    repaired = symmetric_root(covariance[failed])
    return root.index_put((failed,), repaired) if covariance.dim() > 2 else repaired[0]


def by_points(
    function: Callable[..., tuple[Tensor, ...]], arguments: tuple[Tensor, ...], numbers: int
) -> tuple[Tensor, ...]:
    """`function` of the rows of `arguments`, in blocks; it holds `numbers` numbers for a row."""
    size = max(1, BLOCK // numbers)
    starts = range(0, max(1, arguments[0].shape[0]), size)
    parts = [function(*(value[i : i + size] for value in arguments)) for i in starts]
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))
