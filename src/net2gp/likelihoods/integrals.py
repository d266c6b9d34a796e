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
"""The most numbers that an integrand holds at once. Points are taken in blocks that respect it."""

CROSSOVER = 4.5
"""The variance of f above which the logistic rule is more accurate than the Gauss–Hermite rule. At this
variance both are, with 32 points, within 5e-7 of E σ(f) and 2e-6 of E σ'(f). Each improves quickly on its
own side."""


@lru_cache(maxsize=16)
def _normal_rule(num_points: int) -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_points)
    return nodes, weights / weights.sum()


@lru_cache(maxsize=16)
def _logistic_rule(num_points: int) -> tuple[np.ndarray, np.ndarray]:
    # The monic polynomials that are orthogonal under the logistic density obey
    # p_{k+1} = t p_k − k⁴π²/(4k² − 1) p_{k−1}. Golub–Welsch turns the recurrence into nodes and weights.
    k = np.arange(1.0, num_points)
    off_diagonal = np.pi * k**2 / np.sqrt(4 * k**2 - 1)
    nodes, vectors = np.linalg.eigh(np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1))
    return nodes, vectors[0] ** 2


def normal_rule(num_points: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a Gauss–Hermite rule: Σ w g(z) ≈ E g(z) for z ~ N(0, 1).

    Args:
        num_points: The number K of nodes.
        like: A tensor whose dtype and device the rule takes.

    Returns:
        Nodes and weights, each (K,).

    >>> z, w = normal_rule(8, like=torch.zeros(1))
    >>> round(float((w * z**4).sum()), 4)
    3.0
    """
    nodes, weights = _normal_rule(num_points)
    return torch.from_numpy(nodes).to(like), torch.from_numpy(weights).to(like)


def logistic_rule(num_points: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a Gauss rule Σ w g(t) ≈ E g(t) for t with the logistic density σ'(t).

    Args:
        num_points: The number K of nodes.
        like: A tensor whose dtype and device the rule takes.

    Returns:
        Nodes and weights, each (K,).

    >>> t, w = logistic_rule(8, like=torch.zeros(1))
    >>> bool(((w * t**2).sum() - torch.pi**2 / 3).abs() < 1e-5)
    True

    Reference: Gautschi (2004), Orthogonal Polynomials: Computation and Approximation.
    """
    nodes, weights = _logistic_rule(num_points)
    return torch.from_numpy(nodes).to(like), torch.from_numpy(weights).to(like)


def _deviations(variance: Tensor) -> tuple[Tensor, Tensor]:
    """Clamp √v to either side of the crossover, so that the branch that is not taken stays finite."""
    tiny = torch.finfo(variance.dtype).tiny
    narrow = variance.clamp(tiny, CROSSOVER).sqrt()[..., None]
    return narrow, variance.clamp(min=CROSSOVER).sqrt()[..., None]


def log_expected_sigmoid(mean: Tensor, variance: Tensor, num_points: int) -> Tensor:
    """Compute log E σ(f) for f ~ N(m, v), accurately for any v and far into the tail of small probabilities.

    Below v = 4.5 a Gauss–Hermite rule is used. For larger v the logistic function looks like a step to that
    rule (with 32 points it is off by 5 % at v = 900). There, with t of logistic density, E σ(f) = E
    Φ((m − t)/√v), and this integrand becomes smoother as v grows. In the tail, σ(f) = e^f σ(−f) tilts the
    Gaussian: E σ(f) = e^{m + v/2} E σ(f') for f' ~ N(−m − v, v). Everything is computed in float64. The cost
    is O(num_points) per entry.

    Args:
        mean: m, of any shape.
        variance: v, in the same shape.
        num_points: The number of nodes of the rules.

    Returns:
        log E σ(f), in the shape of `mean`.

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
    """Compute E log(1 + e^f) for f ~ N(m, v) and its first two derivatives in m, E σ(f) and E σ'(f).

    The rules are the ones of `log_expected_sigmoid`. Above the crossover, softplus(f) = E (f − t)₊ gives
    E softplus(f) = E [√v φ(d) + (m − t) Φ(d)] with d = (m − t)/√v. The derivatives are exact for the rule.

    Args:
        mean: m, of any shape.
        variance: v, in the same shape.
        num_points: The number of nodes of the rules.

    Returns:
        The three expectations, each in the shape of `mean`.

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
    """Return mean (N, C), variance (N, C) and covariance (N, C, C) of `f`, with variances of at least zero.

    gpytorch's own `variance` has a floor (1e-6 in float32), and a noise-free posterior may lie below it.
    """
    covariance = f.covariance_matrix
    return f.mean, covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0), covariance


def mean_and_variance(f: MultivariateNormal) -> tuple[Tensor, Tensor]:
    """Return mean and variance (N, C) of `f`, without computing its covariances if they are lazy."""
    return f.mean, f.lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2).clamp(min=0)


def psd_root(covariance: Tensor) -> Tensor:
    """Compute R with R Rᵀ = covariance, which may be singular or zero.

    R is the Cholesky factor where its pivots keep some digits, else the symmetric root. The symmetric root
    has a gradient at a singular covariance too, as long as the rank does not change. The cost is O(C³).

    Args:
        covariance: Positive semi-definite matrices, (..., C, C).

    Returns:
        Roots in the same shape.

    >>> psd_root(torch.ones(2, 2, dtype=torch.float64)).square().sum(-1).round(decimals=9)
    tensor([1., 1.], dtype=torch.float64)
    """
    root, info = torch.linalg.cholesky_ex(covariance)
    pivots = root.detach().diagonal(dim1=-2, dim2=-1).square()
    digits = 1e2 * torch.finfo(covariance.dtype).eps * pivots.amax(-1)
    failed = (info != 0) | (pivots.amin(-1) <= digits)
    if not bool(failed.any()):
        return root
    # Factor a second time with the failures replaced by the identity: their infinite gradients would turn
    # the gradients of all other matrices into NaN.
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    root = torch.linalg.cholesky(torch.where(failed[..., None, None], eye, covariance))
    repaired = symmetric_root(covariance[failed])
    return root.index_put((failed,), repaired) if covariance.dim() > 2 else repaired[0]


def by_points(
    function: Callable[..., tuple[Tensor, ...]], arguments: tuple[Tensor, ...], numbers: int
) -> tuple[Tensor, ...]:
    """Apply `function` to the rows of `arguments` in blocks.

    Args:
        function: Takes blocks of rows and returns tensors with as many rows.
        arguments: Tensors with the same number of rows.
        numbers: How many numbers `function` holds per row.

    Returns:
        The results of all blocks, concatenated.
    """
    size = max(1, BLOCK // numbers)
    starts = range(0, max(1, arguments[0].shape[0]), size)
    parts = [function(*(value[i : i + size] for value in arguments)) for i in starts]
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))
