"""Cholesky factors as values, with a jitter ladder that reports what it added, and with growth by blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import InputError, JitterAdded, NotPositiveDefinite, warn

RELATIVE_JITTERS = (1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4)
"""The rungs of the ladder, as fractions of the mean diagonal."""


@dataclass(frozen=True)
class Cholesky:
    """The factor L of A + jitter·I = L Lᵀ, in float64. A solve with k right-hand sides costs O(n² k).

    Args:
        L: The lower triangular factor, (n, n).
        jitter: The most that was added to a diagonal entry. It is zero unless a `JitterAdded` warning was
            given.

    >>> factor = cholesky(torch.tensor([[4.0, 2.0], [2.0, 3.0]]))
    >>> factor.solve(torch.tensor([2.0, 1.0]))
    tensor([0.5000, 0.0000], dtype=torch.float64)
    """

    L: Tensor
    jitter: float = 0.0

    def solve(self, b: Tensor) -> Tensor:
        """Compute A⁻¹ b = L⁻ᵀ L⁻¹ b.

        Args:
            b: Right-hand sides, (n,) or (n, k).

        Returns:
            The solutions, in the shape of b, in float64.
        """
        # torch.cholesky_solve would copy L; two triangular solves do not.
        return _solve_triangular(self.L.mT, self.half_solve(b), upper=True)

    def half_solve(self, b: Tensor) -> Tensor:
        """Compute L⁻¹ b. Its columns have the Gram matrix bᵀ A⁻¹ b.

        Args:
            b: Right-hand sides, (n,) or (n, k).

        Returns:
            L⁻¹ b, in the shape of b, in float64.
        """
        return _solve_triangular(self.L, b.to(self.L.dtype), upper=False)

    def log_det(self) -> Tensor:
        """Compute log |A| = 2 Σ log L_ii."""
        return 2.0 * self.L.diagonal().log().sum()

    def extend(self, cross: Tensor, block: Tensor) -> Cholesky:
        """Compute the factor of [[A, cross], [crossᵀ, block]] from this one.

        With W = L⁻¹ cross, the new rows are [Wᵀ, chol(block − Wᵀ W)]. The cost is O(n² m + n m² + m³)
        instead of O((n + m)³). The jitter of this factor is added to the new diagonal entries too. If the
        Schur complement needs more, the ladder (relative to the diagonal of `block`) adds it there alone.

        Args:
            cross: The new columns of the old rows, (n, m).
            block: The new rows and columns, (m, m).

        Returns:
            The factor of size n + m.

        Raises:
            InputError: If the shapes do not fit.

        >>> small = cholesky(torch.tensor([[4.0]]))
        >>> small.extend(torch.tensor([[2.0]]), torch.tensor([[5.0]])).L
        tensor([[2., 0.],
                [1., 2.]], dtype=torch.float64)
        """
        n, m = self.L.shape[0], block.shape[-1]
        if cross.shape != (n, m) or block.shape != (m, m):
            raise InputError(
                f"a factor of size {n} is extended by cross ({n}, m) and block (m, m), but cross "
                f"is {tuple(cross.shape)} and block is {tuple(block.shape)}. Pass cross = "
                "k(old, new) and block = k(new, new)."
            )
        W = self.half_solve(cross)
        block = block.to(self.L.dtype)
        scale = _mean_diagonal(block)
        corner = _climb(
            block - W.mT @ W, scale, self.jitter, "the Schur complement of the new rows"
        )
        L = W.new_zeros(n + m, n + m).mT
        L[:n, :n] = self.L
        L[n:, :n] = W.mT
        L[n:, n:] = corner.L
        return Cholesky(L, max(self.jitter, corner.jitter))


def cholesky(A: Tensor, *, what: str = "the matrix") -> Cholesky:
    """Factorize a symmetric positive definite matrix in float64, whatever its dtype is.

    The matrix is tried as it is first. Then 1e-10, 1e-9, …, 1e-4 of its mean diagonal is added to the
    diagonal, with a `JitterAdded` warning. Only the lower triangle is used. The cost is O(n³/3), and the
    memory beside A is one n × n buffer if no gradient is needed. Gradients flow to A; the jitter counts as a
    constant.

    Args:
        A: The matrix, (n, n).
        what: The name of the matrix in messages.

    Returns:
        The factor.

    Raises:
        InputError: If A is not square or not finite.
        NotPositiveDefinite: If the largest jitter does not suffice.

    >>> cholesky(torch.tensor([[4.0, 2.0], [2.0, 5.0]])).L
    tensor([[2., 0.],
            [1., 2.]], dtype=torch.float64)

    Reference: Golub & Van Loan, Matrix Computations, 4th ed., section 4.2.
    """
    if A.dim() != 2 or A.shape[0] != A.shape[1]:
        raise InputError(f"{what} must be square, (n, n), but has shape {tuple(A.shape)}.")
    return _climb(A, _mean_diagonal(A), 0.0, what)


def _climb(A: Tensor, scale: float, base: float, what: str) -> Cholesky:
    """Factorize A + (base + rung·scale)·I for the lowest rung that works, starting with none."""
    _check_finite(A, what)
    for rung in (0.0, *RELATIVE_JITTERS):
        jitter = base + rung * scale
        L = _try(A, jitter)
        if L is not None:
            if rung > 0.0:
                warn(
                    f"{what} ({A.shape[0]} x {A.shape[0]}) is not positive definite to working "
                    f"precision: {rung * scale:.3g} was added to its diagonal ({rung:.0e} of the "
                    "mean diagonal) to factorize it. A larger noise_var, float64 inputs or "
                    "removing duplicated points avoids this.",
                    JitterAdded,
                )
            return Cholesky(L, jitter)
        if not scale > 0.0:
            break
    raise NotPositiveDefinite(_diagnosis(A.detach(), scale, what))


def _try(A: Tensor, jitter: float) -> Tensor | None:
    """Return the lower factor of A + jitter·I, or None if it does not exist."""
    if A.requires_grad and torch.is_grad_enabled():
        work = A.to(torch.float64)
        if jitter > 0.0:
            work = work + torch.diag_embed(work.new_full((A.shape[0],), jitter))
        L, info = torch.linalg.cholesky_ex(work)
        return L if int(info) == 0 else None
    # LAPACK wants contiguous columns. If such a buffer is both input and output, it works in place.
    L = torch.empty(A.shape, dtype=torch.float64, device=A.device).mT.copy_(A.detach())
    L.diagonal().add_(jitter)
    info = torch.empty((), dtype=torch.int32, device=A.device)
    with torch.no_grad():
        torch.linalg.cholesky_ex(L, out=(L, info))
    return L if int(info) == 0 else None


def _mean_diagonal(A: Tensor) -> float:
    return float(A.detach().diagonal().to(torch.float64).mean()) if A.shape[0] else 0.0


def _check_finite(A: Tensor, what: str) -> None:
    # A sum allocates nothing and propagates every NaN and infinity, whereas isfinite() needs a copy of A.
    if bool(torch.isfinite(A.detach().sum())):
        return
    counts = torch.stack([(~torch.isfinite(row)).sum() for row in A.detach()])
    if int(counts.sum()):
        row = int(counts.nonzero()[0])
        raise InputError(
            f"{what} must be finite, but {int(counts.sum())} of its {A.numel()} entries are NaN or "
            f"infinite (first in row {row}). Look for NaN in point {row} of the inputs, or for an "
            "overflow in the network: convert both with .double()."
        )


def _diagnosis(A: Tensor, scale: float, what: str) -> str:
    """Say what was tried, what is probably wrong, and what to type."""
    n = A.shape[0]
    lowest = float(A.diagonal().min())
    asymmetry = max(float((A[i] - A[:, i]).abs().max()) for i in range(n))
    tried = (
        f"adding up to {RELATIVE_JITTERS[-1] * scale:.3g} (1e-04 of the mean diagonal) did not help"
    )
    if not scale > 0.0:
        tried = f"its mean diagonal is {scale:.3g}"
    if lowest < 0.0:
        cause = (
            f"its smallest diagonal entry is {lowest:.3g}, so it is not a covariance. Check the "
            "sign and the variances of the kernel, e.g. prior_var=1.0"
        )
    elif asymmetry > 1e-3 * abs(scale):
        cause = (
            f"it differs from its transpose by up to {asymmetry:.3g}. Symmetrize it, "
            "A = (A + A.mT) / 2, and check how it was filled"
        )
    else:
        cause = (
            f"its diagonal is fine (smallest entry {lowest:.3g}), so rounding or nearly equal rows "
            "are likely. Pass noise_var=1e-3 or more, remove duplicated points, or compute the "
            "kernel in float64"
        )
    return f"{what} ({n} x {n}) is not positive definite: {tried}, and {cause}."


def _solve_triangular(L: Tensor, b: Tensor, *, upper: bool) -> Tensor:
    if b.shape[0] != L.shape[0]:
        raise InputError(
            f"a factor of size {L.shape[0]} solves right-hand sides (n,) or (n, k) with n = "
            f"{L.shape[0]}, but b has shape {tuple(b.shape)}."
        )
    columns = b.unsqueeze(-1) if b.dim() == 1 else b
    return torch.linalg.solve_triangular(L, columns, upper=upper).reshape(b.shape)
