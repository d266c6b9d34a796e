"""The mean alone, from a kernel at some centers: least squares with a preconditioner of the centers."""

from __future__ import annotations

from dataclasses import dataclass

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
from net2gp.types import FeatureKernel, Inputs, Kernel

MOST_CENTERS = 20_000
"""The most centers that are chosen by the number of points."""

REFUSAL = (
    "Centers() gives the mean alone. Pass solver=ADASAP() or CG() for variances, or use mean(x)"
)


@dataclass(frozen=True, eq=False)
class CenterSystem:
    """I + ΦᵀΛΦ with Φ = K_xz B⁻ᵀ and K_zz = BBᵀ, by products with the kernel.

    Args:
        kernel: The kernel in float64.
        x: The data X.
        z: The centers Z.
        size: The number of rows of K_zz.
        place: The rows of it that are used.
        root: B.
        weight: The diagonal of Λ as a column.
    """

    kernel: Kernel
    x: Inputs
    z: Inputs
    size: int
    place: Tensor
    root: Tensor
    weight: Tensor

    def combined(self, beta: Tensor) -> Tensor:
        """a = B⁻ᵀβ, and zero for rows that are not used."""
        weights = torch.linalg.solve_triangular(self.root.mT, beta, upper=True)
        return weights.new_zeros(self.size, beta.shape[1]).index_copy_(0, self.place, weights)

    def projected(self, values: Tensor) -> Tensor:
        """ΦᵀΛ v."""
        image = self.kernel.matmul(self.z, self.x, self.weight * values).double()[self.place]
        return torch.linalg.solve_triangular(self.root, image, upper=False)

    def matmul(self, beta: Tensor) -> Tensor:
        """(I + ΦᵀΛΦ) β."""
        values = self.kernel.matmul(self.x, self.z, self.combined(beta)).double()
        return beta + self.projected(values)

    def preconditioner(self, ratio: float) -> RoundedCholesky:
        """The factor of I + (N / M) λ BᵀB for random centers and the mean λ of Λ."""
        near = ratio * float(self.weight.mean()) * (self.root.mT @ self.root)
        near.diagonal().add_(1.0)
        return RoundedCholesky(cholesky(near, what="I + ΦᵀΛΦ of the centers").L)


@torch.no_grad()
def gaussian_centers(problem: Problem, solver: Centers) -> Solved:
    """f(x) = k(x, Z) a with (K_zx Λ K_xz + K_zz) a = K_zx Λ (y − m)."""
    count, C = len(problem.offset), problem.rows_per_point
    M = min(solver.num_centers or min(int(10 * count**0.5), MOST_CENTERS), count)
    check_memory(
        4 * 8 * (M * C) ** 2,
        problem.offset.device,
        f"the factors of {M} centers",
        f"pass Centers({max(1, M // 2)}), or fewer still",
    )
    chosen = fixed_choice(count, M, solver.seed).to(problem.offset.device)
    z, kernel = rows(problem.x, chosen), problem.precise_kernel
    K = kernel(z).double()
    # Centers that others determine are left out, so that their factor has an inverse.
    found = pivots(K.diagonal(), lambda index: K[:, index], len(K), block=16)
    weight = noise_rows(problem).reciprocal()[:, None]
    root = found.L[found.index]
    system = CenterSystem(kernel, problem.x, z, len(K), found.index, root, weight)
    with progress("centers", solver.max_iterations) as advance:
        beta = block_cg(
            system.matmul,
            system.projected(as_rows(problem, problem.target)),
            preconditioner=system.preconditioner(count / M),
            tol=solver.tol,
            max_iterations=solver.max_iterations,
            on_step=lambda _, residual: advance(note=f"residual {residual:.1e}"),
        ).x
    alpha = system.combined(beta)
    process = Conditioned(
        kernel=problem.kernel,
        prior_mean=problem.mean,
        x=z,
        num_outputs=problem.num_outputs,
        alpha=alpha,
        factor=Refusal(REFUSAL),
        weights=kernel.adjoint(z, alpha) if isinstance(kernel, FeatureKernel) else None,
    )
    return Solved(process, None)
