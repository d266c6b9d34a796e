"""Conditioning by sketch-and-project: a solver that sees some rows of the kernel matrix at a time."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from net2gp.inputs import rows, tensors
from net2gp.linalg import Checkpoint, block_matmul
from net2gp.linalg.large import Blocks, sketch_and_project
from net2gp.memory import available_memory, check_memory
from net2gp.posteriors.conditioning.conditioned import Refusal
from net2gp.posteriors.conditioning.gaussian import Solved, as_rows, assemble, noise_rows
from net2gp.posteriors.conditioning.large.pathwise import draw
from net2gp.posteriors.conditioning.matrix_free import ScaledGram
from net2gp.posteriors.conditioning.problem import Problem
from net2gp.posteriors.conditioning.solvers import ADASAP
from net2gp.posteriors.conditioning.systems import GramProduct
from net2gp.progress import progress
from net2gp.types import Inputs

LEAST, MOST = 1000, 10_000
"""The limits of a block size that is chosen by the number of points."""


@torch.no_grad()
def gaussian_sketched(problem: Problem, solver: ADASAP, start: Tensor | None = None) -> Solved:
    """α = S (I + SᵀKS)⁻¹ Sᵀ (y − m), S = D^{-1/2}, together with the draws of `Pathwise`."""
    noise, C = noise_rows(problem), problem.rows_per_point
    S = torch.diag_embed(noise.rsqrt().reshape(-1, C))
    t = as_rows(problem, problem.target)
    right = block_matmul(S.mT, t)
    guess = None if start is None else start * noise.sqrt()[:, None]
    drawn = None
    if solver.variance is not None:
        drawn = draw(problem, S, None, solver.variance)
        right = torch.cat([right, drawn.right], 1)
        if guess is not None:
            guess = torch.cat([guess, torch.zeros_like(drawn.right)], 1)
    weights = block_matmul(S, _solved(problem, solver, S, right, guess))
    alpha = weights[:, : t.shape[1]].contiguous()
    cache = None if drawn is None else drawn.finish(weights[:, t.shape[1] :])
    refusal = Refusal(
        "ADASAP(variance=None) gives the mean alone. Pass solver=ADASAP() for variances from draws"
        if drawn is None
        else "ADASAP() solves nothing after it has ended. Pass solver=CG() for draws of functions"
    )
    return assemble(problem, alpha, refusal, None, cache)


def _solved(
    problem: Problem, solver: ADASAP, S: Tensor, right: Tensor, guess: Tensor | None
) -> Tensor:
    """(I + SᵀKS)⁻¹ times right-hand sides."""
    C, count = problem.rows_per_point, len(S)
    blocks = Blocks(
        _block_size(solver, count, C, S.device),
        solver.rank,
        solver.passes,
        solver.tol,
        solver.seed,
        C,
    )
    scaled = ScaledGram(GramProduct(problem.kernel, problem.x, None), S)

    def product(index: Tensor, v: Tensor) -> Tensor:
        points = index[::C] // C
        image = problem.kernel.matmul(rows(problem.x, points), problem.x, block_matmul(S, v))
        return block_matmul(S[points].mT, image.to(S.dtype))

    checkpoint = None
    if solver.checkpoint is not None:
        checkpoint = Checkpoint(
            solver.checkpoint, _key(problem, blocks, right), solver.every_seconds
        )
        checkpoint.check_writable()
    steps = -(-count // blocks.block_size)
    with progress("passes", solver.passes * steps) as advance:
        return sketch_and_project(
            product,
            scaled.square,
            right,
            blocks,
            x0=guess,
            on_step=lambda _, residual: advance(note=f"residual {residual:.1e}"),
            checkpoint=checkpoint,
        ).x


def _block_size(solver: ADASAP, count: int, C: int, device: torch.device) -> int:
    """The number of points of a block, whose square has to fit into memory several times."""
    if solver.block_size is None:
        size = max(LEAST, min(MOST, count // 100))
        # The square, its product with directions, and what the kernel holds to compute it.
        while size > LEAST and 4 * 8 * (size * C) ** 2 > available_memory(device) / 2:
            size //= 2
        return min(size, count)
    size = min(solver.block_size, count)
    most = int((available_memory(device) / 32) ** 0.5) // C
    check_memory(
        4 * 8 * (size * C) ** 2,
        device,
        f"a block of {size} points and its approximation",
        f"pass ADASAP(block_size={max(1, most // 2)}), which fits",
    )
    return size


def _key(problem: Problem, blocks: Blocks, right: Tensor) -> str:
    """What tells a problem from others: data, noise, draws, a piece of the kernel matrix, blocks."""
    first: Inputs = rows(problem.x, slice(0, 20))
    seen = [*tensors(problem.x), noise_rows(problem), right, problem.kernel(first)]
    digest = hashlib.sha256(
        f"{blocks.block_size} {blocks.rank} {blocks.tol} {blocks.seed}".encode()
    )
    for tensor in seen:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
