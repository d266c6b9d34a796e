"""Roots of batches of covariances that may be singular, without anything added to their diagonals."""

from __future__ import annotations

import torch
from torch import Tensor

from net2gp.errors import InputError, NotPositiveDefinite

DIGITS = 1e2 * torch.finfo(torch.float64).eps
"""The smallest pivot of a Cholesky factor, relative to the largest, that is more than rounding."""


def covariance_roots(covariance: Tensor, *, what: str = "the covariance") -> Tensor:
    """Compute L with L Lᵀ = covariance for each matrix of a batch, singular ones included, in float64.

    L is the Cholesky factor where its pivots keep some digits. Elsewhere it is the pivoted Cholesky factor,
    which stops where only rounding remains. Jitter would move the values of a draw apart that the covariance
    says are equal: 1e-10 on the diagonal is a distance of 1e-5. Here such values are equal in the draw as
    well. The cost is O(B n³/3), or O(B n r²) for matrices of rank r.

    Args:
        covariance: Positive semi-definite matrices, (B, n, n).
        what: The name of the matrices in messages.

    Returns:
        The roots, (B, n, n).

    Raises:
        InputError: If an entry is not finite.
        NotPositiveDefinite: If a matrix is clearly not positive semi-definite.

    >>> covariance_roots(torch.ones(1, 2, 2))
    tensor([[[1., 0.],
             [1., 0.]]], dtype=torch.float64)

    Reference: Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 10.3.
    """
    work = covariance.detach().to(torch.float64)
    if not bool(torch.isfinite(work.sum())) and not bool(torch.isfinite(work).all()):
        raise InputError(
            f"{what} must be finite, but has NaN or infinite entries. Look for an overflow in the kernel, or "
            "for variances that grow from layer to layer."
        )
    if work.shape[-1] == 0:
        return work
    root, info = torch.linalg.cholesky_ex(work)
    pivots = root.diagonal(dim1=-2, dim2=-1).square()
    # the comparison is false for NaN, so that failed factors count as failed
    sound = (info == 0) & (pivots.amin(-1) > DIGITS * pivots.amax(-1))
    if not bool(sound.all()):
        root[~sound] = _pivoted(work[~sound], what)
    return root


def _pivoted(K: Tensor, what: str) -> Tensor:
    """Factorize each matrix by its largest remaining diagonal entry, until only rounding remains."""
    count, n, _ = K.shape
    each = torch.arange(count, device=K.device)
    L = torch.zeros_like(K)
    remaining = K.diagonal(dim1=-2, dim2=-1).clone()
    largest = remaining.amax(-1)
    rounding = 4 * n * torch.finfo(K.dtype).eps * largest
    for step in range(n):
        value, pivot = remaining.max(-1)
        active = value > rounding
        if not bool(active.any()):
            break
        known = (L[:, :, :step] @ L[each, pivot, :step, None])[..., 0]
        scale = torch.where(active, value, 1.0).rsqrt()
        column = torch.where(active, scale, 0.0)[:, None] * (K[each, :, pivot] - known)
        L[:, :, step] = column
        remaining = remaining - column.square()
        remaining[each, pivot] = torch.where(active, 0.0, remaining[each, pivot])
    lowest = remaining.amin(-1)
    if bool((lowest < -1e-6 * largest).any()) or bool((largest < 0).any()):
        raise NotPositiveDefinite(
            f"{what} is not positive semi-definite: a conditional variance is {float(lowest.min()):.3g}. "
            "Check that the kernel is symmetric, and the sign of its terms."
        )
    return L
