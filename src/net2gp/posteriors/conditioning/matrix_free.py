"""Products with the Gram matrix, stored if it fits and matrix-free otherwise, and preconditioners."""

from __future__ import annotations

import torch
from torch import Tensor

from net2gp.inputs import rows
from net2gp.linalg import block_matmul, nystrom, pivoted_cholesky
from net2gp.linalg.low_rank import LowRankPlusIdentity
from net2gp.memory import available_memory
from net2gp.posteriors.conditioning.problem import Problem
from net2gp.posteriors.conditioning.solvers import CG, Nystrom
from net2gp.posteriors.conditioning.systems import GramProduct, MatrixFreeSystem


def matrix_free_system(problem: Problem, solver: CG) -> MatrixFreeSystem:
    """The system that conjugate gradients iterate on."""
    matmul = GramProduct(problem.kernel, problem.x, _stored_gram(problem, solver))
    return MatrixFreeSystem(
        matmul=matmul,
        precondition=lambda S: _preconditioner(solver, S, matmul),
        tol=solver.tol,
        max_iterations=solver.max_iterations,
        num_probes=solver.num_probes,
        seed=solver.seed,
    )


def _stored_gram(problem: Problem, solver: CG) -> Tensor | None:
    """K itself if it fits into a quarter of the free memory, since products with it cost far less."""
    store = solver.store_gram
    if store is None:
        store = 8 * problem.num_rows**2 < available_memory(problem.offset.device) / 4
    return problem.gram().detach() if store else None


def _preconditioner(solver: CG, S: Tensor, matmul: GramProduct) -> LowRankPlusIdentity | None:
    """I plus a low-rank approximation of SᵀKS."""
    chosen = solver.preconditioner
    if chosen is None:
        return None
    N, C = S.shape[:2]
    if isinstance(chosen, Nystrom):
        U, eigenvalues = nystrom(
            lambda v: block_matmul(S.mT, matmul(block_matmul(S, v)).to(S.dtype)),
            N * C,
            min(chosen.rank, N * C),
            generator=torch.Generator(device=S.device).manual_seed(chosen.seed),
            dtype=torch.float64,
            device=S.device,
        )
        return LowRankPlusIdentity(U, eigenvalues)
    blocks = S.mT @ matmul.kernel.blocks(matmul.x).to(S.dtype) @ S

    def columns(indices: Tensor) -> Tensor:
        """The columns of SᵀKS: column n·C + c mixes the C columns of K of point n by column c of S_n."""
        points, place = torch.unique(indices // C, return_inverse=True)
        if matmul.gram is not None:
            taken = (points[:, None] * C + torch.arange(C, device=points.device)).reshape(-1)
            K = matmul.gram[:, taken]
        else:
            K = matmul.kernel(matmul.x, rows(matmul.x, points))
        K = K.to(S.dtype).reshape(N * C, len(points), C)
        mixed = torch.einsum("rkc,kc->rk", K[:, place], S[indices // C, :, indices % C])
        return block_matmul(S.mT, mixed)

    diagonal = blocks.diagonal(dim1=1, dim2=2).reshape(-1)
    factor = pivoted_cholesky(diagonal, columns, min(chosen.rank, N * C), block=16)
    return LowRankPlusIdentity.from_factor(factor)
