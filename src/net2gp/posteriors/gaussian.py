"""Exact posteriors under Gaussian noise: by Cholesky, by conjugate gradients, in weight space."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from net2gp.errors import check_memory
from net2gp.linalg import Cholesky as CholeskyFactor
from net2gp.linalg import block_matmul, cholesky, inverse_root, lanczos
from net2gp.posteriors.function_space import Factor, FunctionPosterior, NoiseFactor
from net2gp.posteriors.matrix_free import matrix_free_system
from net2gp.posteriors.problem import Problem
from net2gp.posteriors.solvers import CG, Cholesky, Exact, Lanczos, Solver, WeightSpace
from net2gp.posteriors.systems import FeatureSystem, Sites
from net2gp.posteriors.weight_space import WeightPosterior
from net2gp.types import FeatureKernel

Matmul = Callable[[Tensor], Tensor]


def gaussian_dense(problem: Problem, solver: Cholesky) -> FunctionPosterior:
    """α = (K + D)⁻¹(y − m) and log N(y | m, K + D), from one Cholesky factor."""
    A = noisy_gram(problem)
    return from_factor(problem, solver, cholesky(A, what="k(x, x) + noise"))


def noisy_gram(problem: Problem) -> Tensor:
    """K + D in float64: (rows, rows)."""
    rows = problem.num_rows
    check_memory(
        2 * 8 * rows**2,
        problem.offset.device,
        f"a {rows} × {rows} Gram matrix and its factor",
        "pass solver=CG(), or fewer points",
    )
    return problem.gram() + torch.diag(noise_rows(problem))


def noise_rows(problem: Problem) -> Tensor:
    """The noise variance of each row of the Gram matrix."""
    return problem.noise.reshape(-1) if problem.kernel.joint else problem.noise[:, 0]


def as_rows(problem: Problem, value: Tensor) -> Tensor:
    """(N, C) as one column of rows n·C + c for joint kernels, as C columns otherwise."""
    return value.reshape(-1, 1) if problem.kernel.joint else value


def from_factor(problem: Problem, solver: Cholesky, factor: CholeskyFactor) -> FunctionPosterior:
    """The posterior from a Cholesky factor of K + D."""
    t = as_rows(problem, problem.target)
    alpha = factor.solve(t)
    evidence = gaussian_evidence((t * alpha).sum(), factor.log_det() * t.shape[1], t.numel())
    matmul = lambda v: factor.L @ (factor.L.mT @ v)
    cache = variance_cache(problem, solver.variance, matmul, t)
    return assemble(problem, solver, alpha, NoiseFactor(factor), evidence, cache)


def gaussian_evidence(quadratic: Tensor, log_det: Tensor, count: int) -> Tensor:
    """log N(t | 0, A) from tᵀA⁻¹t, log|A| and the number of entries of t."""
    return -0.5 * (quadratic + log_det + count * math.log(2 * math.pi))


def gaussian_cg(problem: Problem, solver: CG, start: Tensor | None = None) -> FunctionPosterior:
    """α = S (I + SᵀKS)⁻¹ Sᵀ (y − m) with S = D^{-1/2}, by block conjugate gradients.

    `start` is a first guess of α.
    """
    with torch.no_grad():
        noise = noise_rows(problem)
        C = problem.num_outputs if problem.kernel.joint else 1
        curvature = torch.diag_embed(noise.reciprocal().reshape(-1, C))
        system = matrix_free_system(problem, solver)
        factor = system.factor(curvature)
        t = as_rows(problem, problem.target)
        guess = None if start is None else start * noise.sqrt()[:, None]
        alpha = block_matmul(factor.S, factor.inner_solve(block_matmul(factor.S.mT, t), guess))
        log_det = (system.estimate_log_det(factor) + noise.log().sum()) * t.shape[1]
        evidence = gaussian_evidence((t * alpha).sum(), log_det, t.numel())
        root = None
        if isinstance(solver.variance, Lanczos):
            inner = block_matmul(factor.S.mT, t)
            root = block_matmul(factor.S, lanczos_root(factor.inner, inner, solver.variance.rank))
        return assemble(problem, solver, alpha, factor, evidence, to_features(problem, root))


def gaussian_weights(problem: Problem, solver: WeightSpace) -> WeightPosterior:
    """w = A⁻¹Φᵀ D⁻¹(y − m), A = I + ΦᵀD⁻¹Φ; the evidence by the determinant lemma."""
    system = feature_system(problem)
    t, noise = problem.target, problem.noise
    sites = Sites(t / noise, torch.diag_embed(noise.reciprocal()))
    state = system.solve(sites)
    quadratic = (sites.natural * (t - state.f)).sum()
    evidence = gaussian_evidence(quadratic, state.log_det + noise.log().sum(), t.numel())
    return weight_posterior(problem, solver, state.dual, state.factor, evidence)


def weight_posterior(
    problem: Problem, solver: WeightSpace, weights: Tensor, factor: object, evidence: Tensor
) -> WeightPosterior:
    """A WeightPosterior of the problem."""
    assert isinstance(problem.kernel, FeatureKernel)
    assert isinstance(factor, CholeskyFactor)
    return WeightPosterior(
        kernel=problem.kernel,
        mean=problem.mean,
        likelihood=problem.likelihood,
        x=problem.x,
        y=problem.y,
        num_outputs=problem.num_outputs,
        weights=weights,
        precision=factor,
        evidence=evidence,
        solver=solver,
    )


def feature_system(problem: Problem) -> FeatureSystem:
    """The features of the training points in float64, if they fit."""
    assert isinstance(problem.kernel, FeatureKernel)
    P = problem.kernel.num_features
    check_memory(
        8 * (2 * P**2 + 3 * problem.offset.numel() * P),
        problem.offset.device,
        f"the weight space of {P} parameters with {problem.offset.numel()} rows",
        "pass solver=Cholesky() or CG(), or choose fewer parameters with only=",
    )
    return FeatureSystem(problem.features())


def variance_cache(
    problem: Problem, variance: Exact | Lanczos, matmul: Matmul, t: Tensor
) -> Tensor | None:
    """The low-rank root of (K + D)⁻¹ that `Lanczos` asks for, carried over to the features if any."""
    if isinstance(variance, Exact):
        return None
    with torch.no_grad():
        return to_features(problem, lanczos_root(matmul, t, variance.rank))


def lanczos_root(matmul: Matmul, t: Tensor, rank: int) -> Tensor:
    """R with R Rᵀ ≈ A⁻¹, from Lanczos iterations that start at a random vector beside the data."""
    generator = torch.Generator(device=t.device).manual_seed(0)
    noise = torch.randn(t.shape[0], generator=generator, dtype=t.dtype, device=t.device)
    start = t.detach().sum(1) / t.norm().clamp(min=1e-300) + noise / noise.norm()
    return inverse_root(lanczos(matmul, start, min(rank, t.shape[0])))


@torch.no_grad()
def to_features(problem: Problem, rows: Tensor | None) -> Tensor | None:
    """Φ(X)ᵀ rows in float64 for kernels with features, whose cancellations need the digits; else rows."""
    if rows is None or not isinstance(problem.kernel, FeatureKernel):
        return rows
    precise = problem.precise_kernel
    assert isinstance(precise, FeatureKernel)
    return precise.adjoint(problem.x, rows.detach())


def assemble(
    problem: Problem,
    solver: Solver,
    alpha: Tensor,
    factor: Factor,
    evidence: Tensor,
    cache: Tensor | None,
) -> FunctionPosterior:
    """A FunctionPosterior of the problem, with its mean carried over to the features if any."""
    features = isinstance(problem.kernel, FeatureKernel)
    return FunctionPosterior(
        kernel=problem.kernel,
        mean=problem.mean,
        likelihood=problem.likelihood,
        x=problem.x,
        y=problem.y,
        num_outputs=problem.num_outputs,
        alpha=alpha,
        factor=factor,
        evidence=evidence,
        solver=solver,
        weights=to_features(problem, alpha) if features else None,
        cache=cache,
    )
