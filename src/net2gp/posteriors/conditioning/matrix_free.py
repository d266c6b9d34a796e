"""Products with the Gram matrix, stored if it fits and matrix-free otherwise, and preconditioners."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.inputs import rows
from net2gp.linalg import Pivots, block_matmul, nystrom, pivoted_cholesky
from net2gp.linalg.large import FactorPlusIdentity, random_pivots
from net2gp.linalg.low_rank import LowRankPlusIdentity
from net2gp.memory import available_memory, check_memory
from net2gp.posteriors.conditioning.problem import Problem
from net2gp.posteriors.conditioning.solvers import CG, Nystrom, RandomPivots
from net2gp.posteriors.conditioning.systems import GramProduct, LowRank, MatrixFreeSystem

MOST_PIVOTS = 10_000
"""The highest rank of a preconditioner that is chosen by size."""

SMALL_BYTES = 2**28
"""The size up to which a factor stays in float64, and of a block of columns."""


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


def _preconditioner(solver: CG, S: Tensor, matmul: GramProduct) -> LowRank | None:
    """I plus a low-rank approximation of SᵀKS."""
    chosen = solver.preconditioner
    if chosen is None:
        return None
    total = S.shape[0] * S.shape[1]
    if isinstance(chosen, Nystrom):
        U, eigenvalues = nystrom(
            lambda v: block_matmul(S.mT, matmul(block_matmul(S, v)).to(S.dtype)),
            total,
            min(chosen.rank, total),
            generator=torch.Generator(device=S.device).manual_seed(chosen.seed),
            dtype=torch.float64,
            device=S.device,
        )
        return LowRankPlusIdentity(U, eigenvalues)
    scaled = ScaledGram(matmul, S)
    if isinstance(chosen, RandomPivots):
        found = random_factor(scaled, chosen)
        return FactorPlusIdentity.from_factor(found.L, found.index)
    factor = pivoted_cholesky(scaled.diagonal(), scaled.columns, min(chosen.rank, total), block=16)
    return LowRankPlusIdentity.from_factor(factor)


@dataclass(frozen=True, eq=False)
class ScaledGram:
    """Entries of SᵀKS, of which column n·C + c mixes the C columns of K of point n by column c of S_n."""

    matmul: GramProduct
    S: Tensor

    def diagonal(self) -> Tensor:
        """The diagonal: (N·C,)."""
        blocks = self.matmul.kernel.blocks(self.matmul.x).to(self.S.dtype)
        return (self.S.mT @ blocks @ self.S).diagonal(dim1=1, dim2=2).reshape(-1)

    def columns(self, indices: Tensor) -> Tensor:
        """Some columns: (N·C, k)."""
        N, C = self.S.shape[:2]
        points, place = torch.unique(indices // C, return_inverse=True)
        if self.matmul.gram is not None:
            K = self.matmul.gram[:, self._rows(points)]
        else:
            K = self.matmul.kernel(self.matmul.x, rows(self.matmul.x, points))
        K = K.to(self.S.dtype).reshape(N * C, len(points), C)
        return block_matmul(self.S.mT, self._mixed(K, place, indices))

    def square(self, indices: Tensor) -> Tensor:
        """The entries among some rows: (k, k)."""
        C = self.S.shape[1]
        points, place = torch.unique(indices // C, return_inverse=True)
        if self.matmul.gram is not None:
            own = self._rows(points)
            K = self.matmul.gram[own][:, own]
        else:
            some = rows(self.matmul.x, points)
            K = self.matmul.kernel(some, some)
        count = len(points)
        K = self._mixed(K.to(self.S.dtype).reshape(count * C, count, C), place, indices)
        return self._mixed(K.mT.reshape(len(indices), count, C), place, indices).mT

    def _rows(self, points: Tensor) -> Tensor:
        C = self.S.shape[1]
        return (points[:, None] * C + torch.arange(C, device=points.device)).reshape(-1)

    def _mixed(self, K: Tensor, place: Tensor, indices: Tensor) -> Tensor:
        C = self.S.shape[1]
        weights = self.S[indices // C, :, indices % C]
        return torch.einsum("rkc,kc->rk", K[:, place], weights)


def random_factor(scaled: ScaledGram, chosen: RandomPivots) -> Pivots:
    """L with L Lᵀ ≈ SᵀKS, (N·C, r), at a rank that fits into memory.

    Rounding of L to float32 changes the preconditioned matrix by the rounding of the largest entry of SᵀKS
    beside the identity, so it has to stay below one.
    """
    diagonal = scaled.diagonal()
    n, device = len(diagonal), diagonal.device
    fits = float(diagonal.max()) * torch.finfo(torch.float32).eps < 0.01
    free = available_memory(device)
    rank = chosen.rank or max(1, min(int(10 * n**0.5), MOST_PIVOTS, free // (4 * 4 * n)))
    rank = min(rank, n)
    dtype = torch.float32 if fits and 8 * n * rank > SMALL_BYTES else torch.float64
    size = torch.finfo(dtype).bits // 8
    block = max(8, min(rank // 8, 512, max(SMALL_BYTES, free // 64) // (8 * n)))
    needed = n * (size * rank + 3 * 8 * block) + 4 * 8 * rank**2
    if needed > free:
        left = max(1, int((free / 2 - n * 3 * 8 * block) / (size * n)))
        check_memory(
            needed,
            device,
            f"a preconditioner of rank {rank} for {n} rows",
            f"pass CG(preconditioner=RandomPivots(rank={left})), which fits, or Centers()",
        )
    generator = torch.Generator().manual_seed(chosen.seed)
    return random_pivots(
        diagonal,
        scaled.columns,
        scaled.square,
        rank,
        generator=generator,
        block=block,
        dtype=dtype,
    )
