"""The mean alone, from a kernel at some centers: least squares with a preconditioner of the centers."""

from __future__ import annotations

import torch
from torch import Tensor

from net2gp.inputs import rows
from net2gp.linalg import block_cg, cholesky, pivots
from net2gp.linalg.chance import fixed_choice
from net2gp.linalg.large import RoundedCholesky
from net2gp.memory import check_memory
from net2gp.posteriors.conditioning.conditioned import Conditioned, Refusal
from net2gp.posteriors.conditioning.gaussian import Solved, as_rows, noise_rows
from net2gp.posteriors.conditioning.problem import Problem
from net2gp.posteriors.conditioning.solvers import Centers
from net2gp.progress import progress
from net2gp.types import FeatureKernel

MOST_CENTERS = 20_000
"""The most centers that are chosen by the number of points."""


@torch.no_grad()
def gaussian_centers(problem: Problem, solver: Centers) -> Solved:
    """f(x) = k(x, Z) a with (K_zx Λ K_xz + K_zz) a = K_zx Λ (y − m).

    With K_zz = BBᵀ and a = B⁻ᵀβ the matrix is I + ΦᵀΛΦ with Φ = K_xz B⁻ᵀ. Since Z is a random part of X,
    ΦᵀΛΦ is about (N / M) λ BᵀB with the mean λ of Λ, whose factor is the preconditioner.
    """
    count, C = len(problem.offset), problem.rows_per_point
    M = min(solver.num_centers or min(int(10 * count**0.5), MOST_CENTERS), count)
    check_memory(
        4 * 8 * (M * C) ** 2,
        problem.offset.device,
        f"the factors of {M} centers",
        f"pass Centers({max(1, M // 2)}), or fewer still",
    )
    chosen = fixed_choice(count, M, solver.seed).to(problem.offset.device)
    Z, kernel = rows(problem.x, chosen), problem.precise_kernel
    K = kernel(Z).double()
    # Centers that others determine are left out, so that their factor has an inverse.
    found = pivots(K.diagonal(), lambda index: K[:, index], len(K), block=16)
    place, B = found.index, found.L[found.index]
    weight = noise_rows(problem).reciprocal()[:, None]

    def combined(beta: Tensor) -> Tensor:
        weights = torch.linalg.solve_triangular(B.mT, beta, upper=True)
        return torch.zeros(len(K), beta.shape[1]).to(beta).index_copy_(0, place, weights)

    def projected(values: Tensor) -> Tensor:
        image = kernel.matmul(Z, problem.x, values).double()[place]
        return torch.linalg.solve_triangular(B, image, upper=False)

    def matmul(beta: Tensor) -> Tensor:
        values = kernel.matmul(problem.x, Z, combined(beta)).double()
        return beta + projected(weight * values)

    near = count / M * float(weight.mean()) * (B.mT @ B)
    near.diagonal().add_(1.0)
    right = projected(weight * as_rows(problem, problem.target))
    with progress("centers", solver.max_iterations) as advance:
        beta = block_cg(
            matmul,
            right,
            preconditioner=RoundedCholesky(cholesky(near, what="I + ΦᵀΛΦ of the centers").L),
            tol=solver.tol,
            max_iterations=solver.max_iterations,
            on_step=lambda _, residual: advance(note=f"residual {residual:.1e}"),
        ).x
    alpha = combined(beta)
    refusal = Refusal(
        "Centers() gives the mean alone. Pass solver=ADASAP() or CG() for variances, or use posterior.mean(x)"
    )
    process = Conditioned(
        kernel=problem.kernel,
        prior_mean=problem.mean,
        x=Z,
        num_outputs=problem.num_outputs,
        alpha=alpha,
        factor=refusal,
        weights=kernel.adjoint(Z, alpha) if isinstance(kernel, FeatureKernel) else None,
    )
    return Solved(process, None)
