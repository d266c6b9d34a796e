"""A Cholesky factor in float32, and solutions that are refined to float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import NotConverged, NotPositiveDefinite, trying, warn
from net2gp.linalg.cg import Matmul, Solution, block_cg

INNER_TOL = 1e-5
"""What a correction may leave of a residual: rounding of the factor lets directions drift below it."""


@dataclass(frozen=True, eq=False)
class RoundedCholesky:
    """L Lᵀ ≈ A from a factorization in float32, as a preconditioner of A.

    Args:
        L: The lower factor, (n, n), float32.

    >>> A = torch.tensor([[4.0, 2.0], [2.0, 5.0]])
    >>> RoundedCholesky.of(A.clone()).log_det()
    tensor(2.7726, dtype=torch.float64)
    """

    L: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, A: Tensor) -> RoundedCholesky:
        """Factorize a matrix in float32 in its own memory.

        Args:
            A: A symmetric matrix, (n, n), float32, which is overwritten.

        Returns:
            The factor.

        Raises:
            NotPositiveDefinite: If a pivot is not positive.
        """
        # LAPACK wants columns that are contiguous, and A is symmetric: its transpose needs no copy.
        info = torch.empty((), dtype=torch.int32, device=A.device)
        L, failed = torch.linalg.cholesky_ex(A.mT, out=(A.mT, info))
        if int(failed):
            raise NotPositiveDefinite(
                f"a matrix of {len(A)} rows is not positive definite in float32: pivot {int(failed)} is not "
                "positive. Raise noise_var, or factorize in float64."
            )
        return cls(L)

    def inverse_sqrt(self, v: Tensor) -> Tensor:
        """Compute L⁻¹ v for v (n, k)."""
        return torch.linalg.solve_triangular(self.L, v.to(self.L.dtype), upper=False).to(v.dtype)

    def inverse_sqrt_transposed(self, v: Tensor) -> Tensor:
        """Compute L⁻ᵀ v for v (n, k)."""
        return torch.linalg.solve_triangular(self.L.mT, v.to(self.L.dtype), upper=True).to(v.dtype)

    def log_det(self) -> Tensor:
        """Compute log |L Lᵀ|."""
        return 2 * self.L.diagonal().double().log().sum()


@torch.no_grad()
def refined_cg(
    matmul: Matmul,
    b: Tensor,
    *,
    preconditioner: RoundedCholesky,
    x0: Tensor | None = None,
    tol: float = 1e-12,
    max_iterations: int = 100,
    on_step: Callable[[int, float], None] | None = None,
) -> Solution:
    """Solve A x = b to float64 with a factor of A in float32, by corrections that are solved for roughly.

    A product with the preconditioner is rounded to float32, so conjugate gradients drift. Each correction
    starts them anew on the true residual in float64, of which it leaves about 1e-5.

    Args:
        matmul: Computes A v in float64.
        b: Right-hand sides, (n, k).
        preconditioner: The factor.
        x0: Where to start. None means zero.
        tol: The relative residual that every column must reach, or the rounding of the products.
        max_iterations: The most iterations of all corrections together.
        on_step: Is called with the iteration and the largest residual after each correction.

    Returns:
        The solution and how it was reached.

    Reference: Higham, Accuracy and Stability of Numerical Algorithms, 2002, chapter 12.
    """
    norms = torch.linalg.vector_norm(b, dim=0)
    scale = norms.where(norms > 0, torch.ones_like(norms))
    x = torch.zeros_like(b) if x0 is None else x0.to(b)
    residual = b if x0 is None else b - matmul(x)
    relative = torch.linalg.vector_norm(residual, dim=0) / scale
    history, iterations = [float(relative.max())], 0
    while history[-1] > tol and iterations < max_iterations:
        with trying():
            step = block_cg(
                matmul,
                residual,
                preconditioner=preconditioner,
                tol=max(INNER_TOL, 0.5 * tol / history[-1]),
                max_iterations=max_iterations - iterations,
            )
        iterations += step.iterations
        new_x = x + step.x
        new = b - matmul(new_x)
        reached = torch.linalg.vector_norm(new, dim=0) / scale
        if float(reached.max()) > 0.5 * history[-1]:
            # Products round by about eps·‖A‖‖x‖, below which no residual can be seen; ‖A‖ ≤ tr A = ‖L‖²_F.
            size = float(torch.linalg.matrix_norm(preconditioner.L)) ** 2
            lengths = torch.linalg.vector_norm(x, dim=0) / scale
            tol = max(tol, torch.finfo(torch.float64).eps * size * float(lengths.max()))
            break
        x, residual, relative = new_x, new, reached
        history.append(float(reached.max()))
        if on_step is not None:
            on_step(iterations, history[-1])
    if history[-1] > tol:
        warn(
            f"refinement of a factor in float32 stopped at a relative residual of {history[-1]:.2e}, above "
            f"the tolerance of {tol:.2e}, after {iterations} iterations. Raise noise_var, or pass "
            "solver=Cholesky() if float64 fits, or CG().",
            NotConverged,
        )
    return Solution(x, relative, iterations, history[-1] <= tol, tuple(history))
