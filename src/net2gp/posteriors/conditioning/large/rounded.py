"""Conditioning by a Cholesky factor in float32, refined to float64 with products of the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from net2gp.errors import NotPositiveDefinite
from net2gp.inputs import chunks, num_rows
from net2gp.linalg import block_matmul
from net2gp.linalg.large import RoundedCholesky
from net2gp.memory import check_memory
from net2gp.posteriors.conditioning.problem import Problem
from net2gp.posteriors.conditioning.systems import GramProduct, MatrixFreeSystem

PART_BYTES = 2**27
"""How much memory the rows that are computed in float64 at a time may take."""

TOL = 1e-12
"""The relative residual that refinement reaches."""


def rounded_system(problem: Problem) -> MatrixFreeSystem:
    """I + SᵀKS with a factor in float32 as its preconditioner, and products in float64."""
    size = problem.num_rows
    check_memory(
        4 * size**2 + 2 * PART_BYTES,
        problem.offset.device,
        f"a {size} × {size} Gram matrix in float32",
        "pass solver=CG() or ADASAP(), or fewer points",
    )
    return MatrixFreeSystem(
        matmul=GramProduct(problem.precise_kernel, problem.x, None),
        precondition=lambda S: _factorized(problem, S),
        tol=TOL,
        max_iterations=100,
        num_probes=4,
        seed=0,
        num_steps=6,  # what is left for probes is the identity up to the rounding of float32
    )


@torch.no_grad()
def _factorized(problem: Problem, S: Tensor) -> RoundedCholesky:
    size, C = problem.num_rows, problem.rows_per_point
    A = torch.empty(size, size, dtype=torch.float32, device=S.device)
    kernel, start = problem.precise_kernel, 0
    for part in chunks(problem.x, max(1, PART_BYTES // (8 * C * size))):
        stop = start + num_rows(part)
        block = kernel(part, problem.x).double()
        block = block_matmul(S[start:stop].mT, block_matmul(S.mT, block.mT).mT)
        A[start * C : stop * C] = block
        start = stop
    A.diagonal().add_(1.0)
    try:
        return RoundedCholesky.of(A)
    except NotPositiveDefinite:
        noise = 8 * torch.finfo(torch.float32).eps * _largest(problem)
        raise NotPositiveDefinite(
            f"k(x, x) + noise, {size} × {size}, cannot be factorized in float32: the noise is below the "
            f"rounding of its largest eigenvalue. Gaussian(noise_var={noise:.1g}) would do; or pass "
            "solver=CG(), or Cholesky() if float64 fits into memory."
        ) from None


def _largest(problem: Problem) -> float:
    """About the largest eigenvalue of k(x, x), by power iteration on products."""
    kernel = problem.precise_kernel
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(problem.num_rows, 1, dtype=torch.float64, generator=generator)
    v, value = v.to(problem.offset.device), 0.0
    for _ in range(10):
        v = kernel.matmul(problem.x, problem.x, v / torch.linalg.vector_norm(v)).double()
        value = float(torch.linalg.vector_norm(v))
    return value
