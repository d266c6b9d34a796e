"""Lanczos: a small tridiagonal matrix that represents a large symmetric one, from products with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import InputError, NotPositiveDefinite
from net2gp.linalg.chance import random_normal
from net2gp.linalg.cholesky import cholesky

_PROBE_BYTES = 2**30


@dataclass(frozen=True)
class Tridiagonal:
    """T = Qᵀ A Q on a Krylov space of A, or on several that are orthogonal to each other, in float64.

    Args:
        Q: An orthonormal basis of the space, (n, t).
        T: The tridiagonal matrix, (t, t).
    """

    Q: Tensor
    T: Tensor


@torch.no_grad()
def lanczos(
    matmul: Callable[[Tensor], Tensor],
    start: Tensor,
    rank: int,
    *,
    restart: torch.Generator | None = None,
) -> Tridiagonal:
    """Compute Q and T = Qᵀ A Q for the Krylov space span{s, A s, …, A^(rank−1) s} of symmetric A.

    Every new vector is orthogonalized twice against all earlier ones, so Q stays orthonormal up to rounding.
    The cost is `rank` products with (n, 1) in the dtype of `start`, and O(n rank²) more in float64.

    The space of one vector holds one direction per distinct eigenvalue, however often that eigenvalue occurs.
    With `restart`, a random vector that is orthogonal to the exhausted space starts another one, until there
    are min(rank, n) columns.

    Args:
        matmul: Computes A v.
        start: The vector s, (n,), not zero.
        rank: The largest dimension of the space.
        restart: The source of the random vectors. None stops where the first space is exhausted.

    Returns:
        Q and T. Without `restart` they have t < rank columns if the space is invariant under A earlier.

    Raises:
        InputError: If `start` is zero or not a vector, or `rank` is below 1.

    >>> A = torch.diag(torch.tensor([1.0, 2.0, 2.0]))
    >>> lanczos(lambda v: A @ v, torch.ones(3), 3).Q.shape
    torch.Size([3, 2])
    >>> lanczos(lambda v: A @ v, torch.ones(3), 3, restart=torch.Generator().manual_seed(0)).Q.shape
    torch.Size([3, 3])

    Reference: Parlett, The Symmetric Eigenvalue Problem, 1998, chapter 13.
    """
    if start.dim() != 1 or not bool(start.abs().sum() > 0):
        raise InputError(
            f"start must be a vector (n,) that is not zero, but has shape {tuple(start.shape)}"
            f" and norm {float(torch.linalg.vector_norm(start)):.3g}. Pass for example a mean of b."
        )
    _check_rank(rank)
    row = start.detach().to(torch.float64).unsqueeze(0)
    basis, alpha, beta = _lanczos(lambda v: matmul(v.to(start.dtype)), row, rank, restart)
    return Tridiagonal(basis[0].mT, _tridiagonal(alpha, beta[:, :-1])[0])


def inverse_root(tridiagonal: Tridiagonal) -> Tensor:
    """Compute R with R Rᵀ = Q T⁻¹ Qᵀ ≈ A⁻¹, the cache behind constant-time predictive variances, in O(n t²).

    ‖Rᵀ k_*‖² replaces k_*ᵀ A⁻¹ k_*. For positive definite A, Q (Qᵀ A Q)⁻¹ Qᵀ ⪯ A⁻¹ and it grows with the
    rank. So a cached variance k_** − ‖Rᵀ k_*‖² is never below the exact one and decreases towards it.

    Args:
        tridiagonal: What `lanczos` returned.

    Returns:
        R, (n, t).

    >>> A = torch.diag(torch.tensor([1.0, 4.0]))
    >>> R = inverse_root(lanczos(lambda v: A @ v, torch.ones(2), 2))
    >>> torch.allclose(R @ R.mT, A.inverse().double())
    True

    Reference: Pleiss, Gardner, Weinberger & Wilson, Constant-time predictive distributions for
    Gaussian processes (LOVE), 2018.
    """
    factor = cholesky(tridiagonal.T, what="the Lanczos matrix Qᵀ A Q")
    return factor.half_solve(tridiagonal.Q.mT).mT


@torch.no_grad()
def log_det_quadrature(
    matmul: Callable[[Tensor], Tensor],
    n: int,
    *,
    num_probes: int = 16,
    rank: int = 64,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Estimate log |A| for positive definite A, with the standard error over probes.

    log |A| = tr log A = E zᵀ (log A) z for random signs z. Each zᵀ (log A) z is n Σ_j τ_j² log θ_j with the
    eigenvalues θ_j of the Lanczos matrix of z and the first entries τ_j of its eigenvectors (Gauss
    quadrature). The standard error does not include the error of the quadrature. That error decreases
    geometrically with the rank, more slowly for a larger √condition. The cost is `rank` products with (n,
    num_probes), and O(n rank² num_probes) more in float64. Probes run together as long as their bases fit in
    1 GiB.

    Args:
        matmul: Computes A v.
        n: The size of A.
        num_probes: The number of random vectors, at least 2.
        rank: The number of Lanczos steps.
        generator: The source of random numbers. None means torch's global one.
        dtype: The dtype in which products are computed.
        device: Where they are computed.

    Returns:
        The estimate and its standard error.

    Raises:
        InputError: If `num_probes` is below 2 or `rank` below 1.
        NotPositiveDefinite: If an eigenvalue of a Lanczos matrix is not positive.

    >>> estimate, error = log_det_quadrature(lambda v: 2 * v, 10)
    >>> round(float(estimate / torch.tensor(2.0).log()), 6), float(error) < 1e-12
    (10.0, True)

    Reference: Ubaru, Chen & Saad, Fast estimation of tr(f(A)) via stochastic Lanczos quadrature,
    2017.
    """
    if num_probes < 2:
        raise InputError(
            f"num_probes must be at least 2, to have a standard error, but is {num_probes}."
        )
    _check_rank(rank)
    probes = random_normal((num_probes, n), generator=generator, device=device).sign()
    at_once = max(1, min(num_probes, _PROBE_BYTES // (8 * n * min(rank, n))))
    parts = []
    for some in probes.split(at_once):
        _, alpha, beta = _lanczos(lambda v: matmul(v.to(dtype)), some, rank)
        values, vectors = torch.linalg.eigh(_tridiagonal(alpha, beta[:, :-1]))
        _check_positive(values)
        parts.append(n * (vectors[:, 0].square() * values.log()).sum(-1))
    samples = torch.cat(parts)
    return samples.mean(), samples.std() / num_probes**0.5


def _lanczos(
    matmul: Callable[[Tensor], Tensor],
    start: Tensor,
    rank: int,
    restart: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run Lanczos from every row of start (s, n), each in its own space: basis (s, t, n), α, β (s, t).

    A row whose space is exhausted continues with zero vectors, α = 1 and β = 0. T is then block
    diagonal, and the added block has no weight in the first entries of the eigenvectors. Once all spaces are
    exhausted, `restart` begins new ones.
    """
    s, n = start.shape
    rank = min(rank, n)
    basis = start.new_zeros(s, rank, n)
    alpha, beta = start.new_ones(s, rank), start.new_zeros(s, rank)
    vector = start / torch.linalg.vector_norm(start, dim=1, keepdim=True)
    size = start.new_zeros(s)
    alive = torch.ones_like(size, dtype=torch.bool)
    for t in range(rank):
        basis[:, t] = vector
        product = matmul(vector.mT).mT
        image = product.to(torch.float64)
        alpha[:, t] = torch.where(alive, (vector * image).sum(1), 1.0)
        # A single pass would leave components along the basis where most of the image cancels.
        for _ in range(2):
            image = image - _project(basis[:, : t + 1], image)
        norm = torch.linalg.vector_norm(image, dim=1)
        # The largest ‖A q‖ so far is a lower bound on ‖A‖, the scale of rounding in A q.
        size = torch.maximum(size, torch.linalg.vector_norm(product.to(torch.float64), dim=1))
        alive = alive & (norm > 10 * n**0.5 * torch.finfo(product.dtype).eps * size)
        beta[:, t] = torch.where(alive, norm, 0.0)
        vector = image / norm.where(alive, torch.ones_like(norm)).unsqueeze(1) * alive.unsqueeze(1)
        if not bool(alive.any()):
            if restart is None or t + 1 == rank:
                break
            vector = _fresh(basis[:, : t + 1], restart)
            alive = torch.ones_like(alive)
    return basis[:, : t + 1], alpha[:, : t + 1], beta[:, : t + 1]


def _fresh(basis: Tensor, generator: torch.Generator) -> Tensor:
    """Draw unit vectors (s, n), each orthogonal to the rows of its basis (s, t, n) with t < n."""
    shape = (basis.shape[0], basis.shape[2])
    vector = random_normal(shape, generator=generator, device=basis.device)
    for _ in range(3):
        vector = vector - _project(basis, vector)
        vector = vector / torch.linalg.vector_norm(vector, dim=1, keepdim=True)
    return vector


def _project(basis: Tensor, v: Tensor) -> Tensor:
    """Return the part of each v (s, n) in the span of the orthonormal rows of basis (s, t, n)."""
    inner = torch.bmm(basis, v.unsqueeze(-1))
    return torch.bmm(inner.mT, basis).squeeze(1)


def _tridiagonal(alpha: Tensor, beta: Tensor) -> Tensor:
    """Build matrices (s, t, t) with diagonal α (s, t) and off-diagonals β (s, t − 1)."""
    off = torch.diag_embed(beta, offset=1)
    return torch.diag_embed(alpha) + off + off.mT


def _check_rank(rank: int) -> None:
    if rank < 1:
        raise InputError(f"rank must be at least 1, but is {rank}.")


def _check_positive(eigenvalues: Tensor) -> None:
    if not bool((eigenvalues > 0).all()):
        raise NotPositiveDefinite(
            "log |A| needs a positive definite A, but a Lanczos eigenvalue is "
            f"{float(eigenvalues.min()):.3g}. Raise noise_var, or compute the products in float64."
        )
