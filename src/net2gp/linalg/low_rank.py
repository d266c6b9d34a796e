"""Low-rank approximations of positive semi-definite matrices, and I + U diag(λ) Uᵀ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.linalg.chance import random_normal

LARGE = 1024
"""The number of rows from which `psd_eigen` looks for a low rank."""


@dataclass(frozen=True)
class LowRankPlusIdentity:
    """The matrix I + U diag(λ) Uᵀ. Every product with (n, k) costs O(n r k).

    To precondition K + σ²I, take U and λ of K / σ²: conjugate gradients ignore scalar factors.

    Args:
        U: Orthonormal columns, (n, r).
        eigenvalues: λ ≥ 0, (r,).

    >>> matrix = LowRankPlusIdentity.from_factor(torch.tensor([[1.0], [0.0]]))
    >>> matrix.matmul(torch.ones(2, 1)).flatten()
    tensor([2., 1.], dtype=torch.float64)
    """

    U: Tensor
    eigenvalues: Tensor

    @classmethod
    def from_factor(cls, L: Tensor) -> LowRankPlusIdentity:
        """Build I + L Lᵀ with a QR and an SVD of the r × r factor, in O(n r²).

        LᵀL is not used, since it would square the condition number.

        Args:
            L: A matrix, (n, r).

        Returns:
            The matrix.
        """
        Q, R = torch.linalg.qr(L.to(torch.float64))
        V, singular, _ = torch.linalg.svd(R, full_matrices=False)
        return cls(Q @ V, singular.square())

    def matmul(self, v: Tensor) -> Tensor:
        """Compute (I + U λ Uᵀ) v for v (n,) or (n, k)."""
        return self._apply(self.eigenvalues, v)

    def inverse(self, v: Tensor) -> Tensor:
        """Compute (I + U λ Uᵀ)⁻¹ v = v − U λ/(1 + λ) Uᵀ v for v (n,) or (n, k)."""
        return self._apply(-self.eigenvalues / (1.0 + self.eigenvalues), v)

    def inverse_sqrt(self, v: Tensor) -> Tensor:
        """Compute (I + U λ Uᵀ)^(−1/2) v with the symmetric root, for v (n,) or (n, k)."""
        return self._apply((1.0 + self.eigenvalues).rsqrt() - 1.0, v)

    def log_det(self) -> Tensor:
        """Compute Σ log(1 + λ)."""
        return self.eigenvalues.log1p().sum()

    def _apply(self, weights: Tensor, v: Tensor) -> Tensor:
        inner = self.U.mT @ v.to(self.U.dtype)
        scaled = weights.unsqueeze(-1) * inner if v.dim() == 2 else weights * inner
        return v + self.U @ scaled


@torch.no_grad()
def pivoted_cholesky(
    diag: Tensor,
    columns: Callable[[Tensor], Tensor],
    rank: int,
    *,
    block: int = 1,
    tol: float = 0.0,
) -> Tensor:
    """Approximate K ≈ L Lᵀ from a few columns of K, such that K − L Lᵀ is positive semi-definite.

    The next pivot is the largest diagonal entry of the remainder K − L Lᵀ. With `block` > 1, a candidate
    that fell below half of the largest entry outside the block, because an earlier pivot explains it, is not
    used. The quality per rank therefore stays near the greedy rule. Beside the columns, the cost is O(n r²)
    in float64.

    Args:
        diag: The diagonal of K, (n,).
        columns: Maps indices (k,) to K[:, indices], (n, k).
        rank: The largest number of pivots.
        block: How many candidates are asked for at a time, which is cheaper for kernels.
        tol: Stop when the remaining trace is at most `tol` times the trace of K, or rounding only.

    Returns:
        L, (n, r) with r ≤ rank.

    >>> K = torch.tensor([[4.0, 2.0], [2.0, 1.0]])
    >>> pivoted_cholesky(K.diagonal(), lambda i: K[:, i], 2)
    tensor([[2.],
            [1.]], dtype=torch.float64)

    Reference: Harbrecht, Peters & Schneider, On the low-rank approximation by the pivoted Cholesky
    decomposition, 2012.
    """
    enough = tol * float(diag.to(torch.float64).sum())
    return pivots(diag, columns, rank, block=block, trace=enough).L


@dataclass(frozen=True, eq=False)
class Pivots:
    """A pivoted Cholesky factor. The rows of the pivots in L are the Cholesky factor of K among them.

    Args:
        L: The factor, (n, r).
        index: The r rows that are pivots, in order.
        remaining: The diagonal of K − L Lᵀ, (n,).
    """

    L: Tensor
    index: Tensor
    remaining: Tensor


@torch.no_grad()
def pivots(
    diag: Tensor,
    columns: Callable[[Tensor], Tensor],
    rank: int,
    *,
    block: int = 1,
    trace: float = 0.0,
    largest: float = 0.0,
) -> Pivots:
    """Find the pivots of `pivoted_cholesky`.

    Args:
        diag: The diagonal of K, (n,).
        columns: Maps indices (k,) to K[:, indices], (n, k).
        rank: The largest number of pivots.
        block: How many candidates are asked for at a time.
        trace: Stop when the trace of the remainder is at most this.
        largest: Stop when the largest diagonal entry of the remainder is at most this.

    Returns:
        The factor and the pivots.

    Raises:
        InputError: If `rank` is negative or `block` below 1.
    """
    n = diag.shape[0]
    if rank < 0 or block < 1:
        raise InputError(f"rank must be ≥ 0 and block ≥ 1, but rank={rank} and block={block} came.")
    remaining = diag.to(torch.float64, copy=True)
    rank = min(rank, n)
    rows = remaining.new_empty(min(rank, 4 * block), n)  # Lᵀ, so that a new vector is contiguous
    index = torch.empty(rank, dtype=torch.long, device=diag.device)
    floor, size = largest, 0
    while size < rank and remaining.sum() > trace and remaining.max() > floor:
        candidates = remaining.topk(min(block + 1, n))
        chosen, outside = candidates.indices[:block], float(candidates.values[-1])
        panel = columns(chosen)
        floor = max(largest, n * torch.finfo(panel.dtype).eps * float(diag.max()))
        panel = panel.to(torch.float64).mT - rows[:size, chosen].mT @ rows[:size]
        least = max(floor, 0.5 * outside if n > block else 0.0)
        order, T = _small_cholesky(panel[:, chosen], least, rank - size)
        if not len(order):
            break
        new = torch.linalg.solve_triangular(T, panel[order], upper=False)
        if size + len(order) > len(rows):
            room = rows.new_empty(min(rank, 2 * len(rows) + block), n)
            room[:size] = rows[:size]
            rows = room
        rows[size : size + len(order)] = new
        index[size : size + len(order)] = chosen[order]
        remaining -= new.square().sum(0)
        # Exactly zero, so that rounding never makes a pivot a candidate again.
        remaining[chosen[order]] = 0.0
        size += len(order)
    return Pivots(rows[:size].mT, index[:size], remaining.clamp_(min=0.0))


@torch.no_grad()
def psd_eigen(A: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ascending eigenvalues and eigenvectors of positive semi-definite matrices, fast at low rank.

    The inputs of a wide layer at few places leave most directions empty. The pivots of A = LLᵀ then give its
    rank r, the singular vectors of L (n, r) give the eigenvectors, and a QR factorization completes the
    basis. The cost is O(n²r) instead of some ten n³. If r exceeds a quarter of n, LAPACK does everything.

    Args:
        A: Positive semi-definite matrices, (…, n, n).

    Returns:
        Eigenvalues (…, n) and eigenvectors (…, n, n).

    >>> values, Q = psd_eigen(torch.ones(2, 2, dtype=torch.float64))
    >>> values
    tensor([0., 2.], dtype=torch.float64)
    """
    n = A.shape[-1]
    if n < LARGE:
        return torch.linalg.eigh(A)
    if A.dim() > 2:
        each = [psd_eigen(one) for one in A]
        return torch.stack([one[0] for one in each]), torch.stack([one[1] for one in each])
    trace = float(A.diagonal().sum())
    if not trace > 0:
        return A.diagonal().clone(), torch.eye(n).to(A)
    found = pivots(A.diagonal(), lambda index: A[:, index], n // 4, block=64)
    if float(found.remaining.sum()) > n * torch.finfo(A.dtype).eps * trace:
        return torch.linalg.eigh(A)
    U, roots, _ = torch.linalg.svd(found.L, full_matrices=False)
    rest = torch.linalg.qr(U, mode="complete").Q[:, len(roots) :]
    values = torch.cat([roots.new_zeros(n - len(roots)), roots.square().flip(0)])
    return values.to(A.dtype), torch.cat([rest, U.flip(1)], 1).to(A.dtype)


def _small_cholesky(A: Tensor, least: float, most: int) -> tuple[Tensor, Tensor]:
    """Find the pivots of a small matrix, greedily down to `least`, and the lower factor of A among them.

    It uses NumPy without BLAS: for so small a matrix, calls and waiting threads would dominate the time.
    """
    values = A.cpu().numpy()
    left, order = values.diagonal().copy(), []
    rows = np.zeros_like(values)  # Lᵀ
    for step in range(min(len(values), most)):
        best = int(left.argmax())
        if not left[best] > least:
            break
        row = values[best] - np.einsum("s,sk->k", rows[:step, best], rows[:step])
        rows[step] = row / np.sqrt(row[best])
        left -= rows[step] ** 2
        left[best] = -np.inf
        order.append(best)
    factor = torch.from_numpy(np.tril(rows[: len(order), order].T)).to(A.device)
    return torch.tensor(order, dtype=torch.long, device=A.device), factor


@torch.no_grad()
def nystrom(
    matmul: Callable[[Tensor], Tensor],
    n: int,
    rank: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Approximate A ≈ U diag(λ) Uᵀ from one product with A.

    With an orthonormal random Ω (n, rank) and Y = A Ω, the approximation is Y (Ωᵀ Y)⁺ Yᵀ. It is computed for
    A + νI with ν at rounding level, and ν is subtracted from λ. Without this shift, the small eigenvalues
    would be noise. The approximation lies below A: A − U λ Uᵀ is positive semi-definite up to ν. After the
    product, the cost is O(n rank²) in float64.

    Args:
        matmul: Computes A v.
        n: The size of A.
        rank: The number of columns of Ω.
        generator: The source of random numbers. None means torch's global one.
        dtype: The dtype in which Ω is passed to `matmul`.
        device: Where it is.

    Returns:
        Orthonormal U (n, r) and descending λ (r,). r < rank only if A has a lower numerical rank.

    Raises:
        InputError: If `rank` is not between 1 and n.

    >>> U, eigenvalues = nystrom(lambda v: 3 * v, 5, 2)
    >>> U.shape, eigenvalues.round(decimals=6)
    (torch.Size([5, 2]), tensor([3., 3.], dtype=torch.float64))

    References: Tropp, Yurtsever, Udell & Cevher, Fixed-rank approximation of a
    positive-semidefinite matrix from streaming data, 2017; Frangella, Tropp & Udell, Randomized
    Nyström preconditioning, 2023.
    """
    if not 1 <= rank <= n:
        raise InputError(f"rank must lie between 1 and n = {n}, but is {rank}.")
    probes = random_normal((n, rank), generator=generator, device=device)
    probes = orthonormal(probes).to(dtype)
    product = matmul(probes)
    eps = torch.finfo(product.dtype).eps
    omega, Y = probes.to(torch.float64), product.to(torch.float64)
    shift = n**0.5 * eps * float(torch.linalg.matrix_norm(Y))
    Y = Y + shift * omega
    inner = omega.mT @ Y
    values, vectors = torch.linalg.eigh(0.5 * (inner + inner.mT))
    # After the shift every eigenvalue should be at least ν. Smaller ones are rounding.
    keep = values > 0.5 * shift
    factor = Y @ (vectors[:, keep] / values[keep].sqrt())
    del probes, product, omega, Y
    U, squares = _left_vectors(factor)
    return U, (squares - shift).clamp(min=0.0)


TALL = 16
"""The ratio of rows to columns from which Gram matrices replace Householder reflections."""


def orthonormal(columns: Tensor) -> Tensor:
    """Compute an orthonormal basis of columns that are far from dependent.

    For a tall matrix, two rounds of Cholesky factors of its Gram matrix consist almost only of matrix
    products. They are many times faster on a GPU than reflections, and as accurate if the condition number
    is below 1e7.

    Args:
        columns: A matrix, (n, k).

    Returns:
        The basis, (n, k).

    Reference: Fukaya et al., CholeskyQR2, 2014.
    """
    n, k = columns.shape
    if n < TALL * k:
        return torch.linalg.qr(columns)[0]
    for _ in range(2):
        root, failed = torch.linalg.cholesky_ex(columns.mT @ columns)
        if int(failed):
            return torch.linalg.qr(columns)[0]
        # The inverse is small (k × k). The second round restores the digits that it loses.
        eye = torch.eye(k, dtype=root.dtype, device=root.device)
        columns = columns @ torch.linalg.solve_triangular(root, eye, upper=False).mT
    return columns


def _left_vectors(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the left singular vectors of (n, k), and the squares of the singular values, descending."""
    n, k = factor.shape
    if n < TALL * k or k == 0:
        U, singular, _ = torch.linalg.svd(factor, full_matrices=False)
        return U, singular.square()
    squares, V = torch.linalg.eigh(factor.mT @ factor)
    squares, V = squares.flip(0), V.flip(1)
    # Directions below this threshold are lost in the rounding of the largest one.
    keep = squares > 1e-10 * squares[0]
    return orthonormal(factor @ (V[:, keep] / squares[keep].sqrt())), squares[keep]
