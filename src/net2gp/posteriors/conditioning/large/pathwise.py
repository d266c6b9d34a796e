"""Posterior variances from drawn functions, of which a part of low rank is known exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import chunks, map_inputs, num_rows, rows
from net2gp.linalg import block_matmul, cholesky, pivots
from net2gp.linalg.chance import fixed_choice
from net2gp.linalg.large import FactorPlusIdentity
from net2gp.posteriors.conditioning.large.prior_functions import (
    Draw,
    FeatureFunctions,
    PriorFunctions,
    prior_functions,
)
from net2gp.posteriors.conditioning.problem import Problem
from net2gp.posteriors.conditioning.solvers import Pathwise
from net2gp.posteriors.conditioning.systems import Approximation
from net2gp.tags import savable
from net2gp.types import FeatureKernel, Inputs, Kernel

PART_BYTES = 2**27
"""How much memory the features of some points may take."""

MOST_FEATURES = 1000
"""The rank of the part that is known exactly, unless it is given."""


@savable("drawn.LowRankPart")
@dataclass(frozen=True, eq=False)
class LowRankPart:
    """The process of the features φ(x) = B⁻¹ k(P, x) of r pivots P, k(P, P) = BBᵀ, given the data.

    Its prior is the part of f that the values at the pivots determine. Given the data that a process with
    this prior would have, its covariance is φ(x)ᵀ M⁻¹ φ(x') with M = I + ΦᵀΛΦ.

    Args:
        x: The points of the pivots.
        place: The rows of k(x, ·) that are pivots, (r,).
        root: B, (r, r), lower.
        precision: The Cholesky factor of M, (r, r), lower.
        shift: What makes the part of low rank of each drawn function exactly Gaussian, (r, S).
        errors: The error θ of each draw in coordinates of φ, whose covariance is M⁻¹, (r, S).
    """

    x: Inputs
    place: Tensor
    root: Tensor
    precision: Tensor
    shift: Tensor
    errors: Tensor

    def features(self, kernel: Kernel, x: Inputs) -> Tensor:
        """φ(x): (r, N), or (r, N·C)."""
        return torch.linalg.solve_triangular(
            self.root, kernel(self.x, x)[self.place].double(), upper=False
        )


@savable("drawn.PathwiseVariances")
@dataclass(frozen=True, eq=False)
class PathwiseVariances:
    """Variances from S draws of f and of data, and the error that prediction makes in each of them.

    For a draw g of the prior, and noise ε, the error e(x) = g(x) − k(x, X) (K + Λ⁻¹)⁻¹ (g(X) + ε) has the
    posterior covariance, whatever the data are. The error r(x) that a process of low rank makes for the same
    draw is close to e(x), and its covariance V is known. So

        mean(e e') − √(γ γ') (mean(r r') − V),   γ = E[e r]² / V²

    has the same expectation as mean(e e'), with a variance that is smaller by 1 − corr(e, r)⁴. Each half of
    the draws takes γ from the other half, so that nothing is biased.

    Args:
        functions: g, or for kernels with features e.
        weights: (K + Λ⁻¹)⁻¹ (g(X) + ε), (rows, S); None if `functions` are the errors themselves.
        part: The process of low rank; None for the mean over draws alone.

    References: Wilson et al., Pathwise conditioning of Gaussian processes, 2021; Owen, Monte Carlo theory,
    methods and examples, 2013, section 8.9 (control variates).
    """

    functions: PriorFunctions
    weights: Tensor | None
    part: LowRankPart | None

    def covariance(self, kernel: Kernel, x: Inputs, cross: Tensor | None, together: int) -> Tensor:
        """Estimate the covariance of groups of rows.

        Args:
            kernel: The kernel in float64.
            x: N points.
            cross: k(X, x), (rows, N) or (rows, N·C); None if it is not needed.
            together: How many successive rows form a group.

        Returns:
            One matrix per group, (groups, together, together), positive semi-definite.
        """
        e = self.functions(x)
        phi = None if self.part is None else self.part.features(kernel, x)
        if self.part is not None and phi is not None:
            e = e + phi.mT @ self.part.shift
        if self.weights is not None:
            assert cross is not None
            e = e - cross.mT @ self.weights
        e = e.reshape(-1, together, e.shape[1])
        if self.part is None or phi is None:
            return e @ e.mT / e.shape[2]
        r = (phi.mT @ self.part.errors).reshape(e.shape)
        R = torch.linalg.solve_triangular(self.part.precision, phi, upper=False)
        R = R.mT.reshape(len(e), together, -1)
        return _semi_definite(_controlled(e, r, R @ R.mT))


def _controlled(e: Tensor, r: Tensor, V: Tensor) -> Tensor:
    """The estimate of both halves of the draws, each with γ from the other."""
    half = e.shape[2] // 2
    halves = [(e[..., :half], r[..., :half]), (e[..., half:], r[..., half:])]
    known = V.diagonal(dim1=1, dim2=2).clamp(min=1e-300)
    found = []
    for own, other in (halves, halves[::-1]):
        # √γ is at most one: no more than the part of low rank itself is taken out.
        root = ((other[0] * other[1]).mean(2) / known).clamp(0.0, 1.0)
        count = own[0].shape[2]
        left = own[1] @ own[1].mT / count - V
        found.append(own[0] @ own[0].mT / count - root[:, :, None] * left * root[:, None, :])
    return (half * found[0] + (e.shape[2] - half) * found[1]) / e.shape[2]


def _semi_definite(covariance: Tensor) -> Tensor:
    """The nearest positive semi-definite matrices, with the variances that they had."""
    variances = covariance.diagonal(dim1=1, dim2=2).clamp(min=0.0)
    if covariance.shape[1] == 1:
        return variances[..., None]
    values, vectors = torch.linalg.eigh(covariance)
    clamped = vectors * values.clamp(min=0.0)[:, None, :] @ vectors.mT
    scale = (variances / clamped.diagonal(dim1=1, dim2=2).clamp(min=1e-300)).sqrt()
    return scale[:, :, None] * clamped * scale[:, None, :]


@dataclass(frozen=True, eq=False)
class Drawn:
    """Draws of functions and of data, before the systems of the data are solved.

    Args:
        right: Sᵀ (g(X) + ε), (rows, S): right-hand sides of I + SᵀKS.
        finish: Makes variances of (K + Λ⁻¹)⁻¹ (g(X) + ε).
    """

    right: Tensor
    finish: Callable[[Tensor], PathwiseVariances]


def can_draw(problem: Problem) -> bool:
    """Whether functions can be drawn from the prior of a problem."""
    one = map_inputs(problem.x, lambda v: v[:1])
    draw = Draw(1, one, torch.Generator().manual_seed(0))
    return (
        isinstance(problem.kernel, FeatureKernel)
        or prior_functions(problem.kernel, draw) is not None
    )


@torch.no_grad()
def draw(
    problem: Problem, S: Tensor, preconditioner: Approximation | None, chosen: Pathwise
) -> Drawn:
    """Draw functions and data, with sites SSᵀ = Λ.

    Raises:
        InputError: If nothing is known of functions with this kernel.
    """
    generator = torch.Generator().manual_seed(chosen.seed)
    source = Draw(chosen.num_samples, problem.x, generator)
    kernel = problem.precise_kernel
    functions = prior_functions(kernel, source)
    if functions is None:
        raise InputError(
            f"Pathwise() draws functions from the prior, but for {type(problem.kernel).__name__} there is no "
            "way to. Pass variance=Exact(), which solves for each prediction, or variance=Lanczos(rank=...), "
            "which gives upper bounds."
        )
    values = functions(problem.x)
    noise = source.normal(*values.shape)
    part = None
    if chosen.rank != 0:
        known = _pivot_rows(problem, preconditioner, chosen)
        part = _low_rank_part(problem, S, known, functions, source, noise)
        values = values + _apply(kernel, problem.x, part)

    def finish(weights: Tensor) -> PathwiseVariances:
        if not isinstance(functions, FeatureFunctions):
            return PathwiseVariances(functions, weights, part)
        assert isinstance(kernel, FeatureKernel)
        errors = functions.weights - kernel.adjoint(problem.x, weights)
        return PathwiseVariances(replace(functions, weights=errors), None, part)

    return Drawn(block_matmul(S.mT, values) + noise, finish)


def _pivot_rows(problem: Problem, preconditioner: Approximation | None, chosen: Pathwise) -> Tensor:
    """The rows of the pivots: those of the preconditioner, or any."""
    total = problem.num_rows
    rank = min(chosen.rank or min(int(10 * total**0.5), MOST_FEATURES), total)
    if isinstance(preconditioner, FactorPlusIdentity) and preconditioner.index is not None:
        return preconditioner.index[:rank]
    return fixed_choice(total, rank, chosen.seed).to(problem.offset.device)


def _low_rank_part(
    problem: Problem,
    S: Tensor,
    known: Tensor,
    functions: PriorFunctions,
    source: Draw,
    noise: Tensor,
) -> LowRankPart:
    C, kernel = problem.rows_per_point, problem.precise_kernel
    points, place = torch.unique(known // C, return_inverse=True)
    x = rows(problem.x, points)
    place = place * C + known % C
    K = kernel(x)[place][:, place].double()
    # Rows that others determine are left out.
    found = pivots(K.diagonal(), lambda index: K[:, index], len(place), block=16)
    place, root = place[found.index], found.L[found.index]
    normal = source.normal(len(place), noise.shape[1])
    there = torch.linalg.solve_triangular(root, functions(x)[place], upper=False)
    empty = torch.zeros_like(root)
    part = LowRankPart(x, place, root, empty, normal - there, normal)
    M, product = torch.eye(len(root)).to(root), torch.zeros_like(normal)
    size = max(1, PART_BYTES // (8 * C * len(root)))
    start = 0
    for some in chunks(problem.x, size):
        count = num_rows(some)
        phi = part.features(kernel, some)
        scaled = block_matmul(S[start : start + count].mT, phi.mT)
        M += scaled.mT @ scaled
        product += scaled.mT @ noise[start * C : (start + count) * C]
        start += count
    precision = cholesky(M, what="I + ΦᵀΛΦ")
    return replace(part, precision=precision.L, errors=precision.solve(normal - product))


def _apply(kernel: Kernel, x: Inputs, part: LowRankPart) -> Tensor:
    """Φ(x) shift, as one product with the kernel."""
    weights = torch.linalg.solve_triangular(part.root.mT, part.shift, upper=True)
    count = kernel.outputs(x) or 1
    wide = weights.new_zeros(num_rows(part.x) * count, weights.shape[1])
    wide.index_add_(0, part.place, weights)
    return kernel.matmul(x, part.x, wide).double()
