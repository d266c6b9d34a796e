"""Exact conditioning under Gaussian noise: by Cholesky, by conjugate gradients, in weight space."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import WideVariances, warn
from net2gp.inputs import num_rows, rows, tensors
from net2gp.linalg import Cholesky as CholeskyFactor
from net2gp.linalg import block_matmul, cholesky, inverse_root, lanczos
from net2gp.memory import check_memory
from net2gp.posteriors.conditioning.conditioned import Conditioned, Factor, NoiseFactor
from net2gp.posteriors.conditioning.large.pathwise import PathwiseVariances, can_draw, draw
from net2gp.posteriors.conditioning.large.rounded import rounded_system
from net2gp.posteriors.conditioning.matrix_free import matrix_free_system
from net2gp.posteriors.conditioning.problem import Problem
from net2gp.posteriors.conditioning.solvers import CG, Cholesky, Exact, Lanczos, Pathwise
from net2gp.posteriors.conditioning.systems import (
    CurvatureFactor,
    FeatureSystem,
    IterativeFactor,
    Sites,
)
from net2gp.posteriors.conditioning.whitened import Whitened
from net2gp.types import FeatureKernel

Matmul = Callable[[Tensor], Tensor]

NUM_CHECKED = 8
"""The number of training points at which variances of drawn networks are compared with solved ones."""

ALLOWED = 1.5
"""The ratio of both from which a warning is due; the draws alone let it vary by a few percent."""


@dataclass(frozen=True, eq=False)
class Solved:
    """A process given data, and log p(y), or None if the solver leaves it out."""

    process: Conditioned | Whitened
    evidence: Tensor | None


def gaussian_dense(problem: Problem, solver: Cholesky) -> Solved:
    """α = (K + D)⁻¹(y − m) and log N(y | m, K + D), from one Cholesky factor."""
    A = noisy_gram(problem)
    return from_factor(problem, solver, cholesky(A, what="k(x, x) + noise"))


def noisy_gram(problem: Problem) -> Tensor:
    """K + D in float64: (rows, rows)."""
    size = problem.num_rows
    check_memory(
        2 * 8 * size**2,
        problem.offset.device,
        f"a {size} × {size} Gram matrix and its factor",
        "pass solver=CG(), or fewer points",
    )
    return problem.gram() + torch.diag(noise_rows(problem))


def noise_rows(problem: Problem) -> Tensor:
    """The noise variance of each row of the Gram matrix."""
    return problem.noise[:, : problem.rows_per_point].reshape(-1)


def as_rows(problem: Problem, value: Tensor) -> Tensor:
    """(N, C) as one column with rows n·C + c for coupled outputs, and as C columns otherwise."""
    return value.reshape(-1, 1) if problem.coupled else value


def from_factor(problem: Problem, solver: Cholesky, factor: CholeskyFactor) -> Solved:
    """The process from a Cholesky factor of K + D."""
    t = as_rows(problem, problem.target)
    alpha = factor.solve(t)
    evidence = gaussian_evidence((t * alpha).sum(), factor.log_det() * t.shape[1], t.numel())
    matmul = lambda v: factor.L @ (factor.L.mT @ v)
    cache = variance_cache(problem, solver.variance, matmul, t)
    return assemble(problem, alpha, NoiseFactor(factor), evidence, cache)


def gaussian_evidence(quadratic: Tensor, log_det: Tensor, count: int) -> Tensor:
    """log N(t | 0, A) from tᵀA⁻¹t, log|A| and the number of entries of t."""
    return -0.5 * (quadratic + log_det + count * math.log(2 * math.pi))


def gaussian_cg(problem: Problem, solver: CG | Cholesky, start: Tensor | None = None) -> Solved:
    """α = S (I + SᵀKS)⁻¹ Sᵀ (y − m) with S = D^{-1/2}, by block conjugate gradients from a guess of α.

    The scaled matrix I + SᵀKS has no eigenvalue below one, whatever the noise is, and it is the matrix that
    inference with other likelihoods solves too. A `Cholesky` solver preconditions with its factor in float32.
    """
    with torch.no_grad():
        noise = noise_rows(problem)
        curvature = torch.diag_embed(noise.reciprocal().reshape(-1, problem.rows_per_point))
        if isinstance(solver, CG):
            system = matrix_free_system(problem, solver)
        else:
            system = rounded_system(problem)
        factor = system.factor(curvature)
        t = as_rows(problem, problem.target)
        guess = None if start is None else start * noise.sqrt()[:, None]  # the unknown is S⁻¹α
        right, variance = block_matmul(factor.S.mT, t), variance_of(problem, solver, factor)
        drawn = None
        if isinstance(variance, Pathwise):
            drawn = draw(problem, factor.S, factor.preconditioner, variance)
            right = torch.cat([right, drawn.right], 1)
            if guess is not None:
                guess = torch.cat([guess, torch.zeros_like(drawn.right)], 1)
        solution = block_matmul(factor.S, factor.inner_solve(right, guess))
        alpha = solution[:, : t.shape[1]].contiguous()
        log_det = (system.estimate_log_det(factor) + noise.log().sum()) * t.shape[1]
        evidence = gaussian_evidence((t * alpha).sum(), log_det, t.numel())
        if drawn is None:
            cache = site_cache(problem, solver, factor, t)
        else:
            cache = checked_draws(problem, factor, drawn.finish(solution[:, t.shape[1] :]))
        return assemble(problem, alpha, factor, estimated(solver, evidence), cache)


def gaussian_weights(problem: Problem) -> Solved:
    """w = A⁻¹Φᵀ D⁻¹(y − m), A = I + ΦᵀD⁻¹Φ; the evidence by the determinant lemma."""
    system = feature_system(problem)
    t, noise = problem.target, problem.noise
    sites = Sites(t / noise, torch.diag_embed(noise.reciprocal()))
    state = system.solve(sites)
    # (K + D)⁻¹t = D⁻¹(t − f) for the posterior mean f, so nothing more is solved
    quadratic = (sites.natural * (t - state.f)).sum()
    evidence = gaussian_evidence(quadratic, state.log_det + noise.log().sum(), t.numel())
    return whitened(problem, state.dual, state.factor, evidence)


def whitened(
    problem: Problem, weights: Tensor, factor: object, evidence: Tensor, sites: Sites | None = None
) -> Solved:
    """The process of the problem in weight space."""
    assert isinstance(problem.kernel, FeatureKernel)
    assert isinstance(factor, CholeskyFactor)
    kernel, mean, C = problem.kernel, problem.mean, problem.num_outputs
    return Solved(Whitened(kernel, mean, C, weights, factor, sites), evidence)


def estimated(solver: Cholesky | CG, evidence: Tensor) -> Tensor | None:
    """The evidence, or None if the solver leaves its estimate out."""
    return None if isinstance(solver, CG) and solver.num_probes == 0 else evidence


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
    """The low-rank root of (K + D)⁻¹ that `Lanczos` asks for, in feature space if the kernel has one."""
    if isinstance(variance, Exact):
        return None
    with torch.no_grad():
        return to_features(problem, lanczos_root(matmul, t, variance.rank))


def lanczos_root(matmul: Matmul, t: Tensor, rank: int) -> Tensor:
    """R with R Rᵀ ≈ A⁻¹, from Lanczos iterations that start at the data plus a random vector.

    The data alone could miss eigenvectors that they are orthogonal to; the random vector cannot. Eigenvalues
    that occur several times, as with independent outputs, need several spaces; with as many columns as rows
    the root is exact.
    """
    generator = torch.Generator(device=t.device).manual_seed(0)
    noise = torch.randn(t.shape[0], generator=generator, dtype=t.dtype, device=t.device)
    start = t.detach().sum(1) / t.norm().clamp(min=1e-300) + noise / noise.norm()
    return inverse_root(lanczos(matmul, start, rank, restart=generator))


def variance_of(
    problem: Problem, solver: Cholesky | CG, factor: CurvatureFactor | IterativeFactor
) -> Exact | Lanczos | Pathwise:
    """How variances are computed: as the solver says, or by what there is."""
    if solver.variance is not None:
        return solver.variance
    stored = not isinstance(factor, IterativeFactor) or factor.matmul.gram is not None
    if stored or not can_draw(problem):
        return Exact()
    return Pathwise(seed=solver.seed if isinstance(solver, CG) else 0)


@torch.no_grad()
def site_cache(
    problem: Problem, solver: Cholesky | CG, factor: CurvatureFactor | IterativeFactor, seen: Tensor
) -> Tensor | PathwiseVariances | None:
    """What variances are computed from if the solver asks for it: a low-rank root of (K + Λ⁻¹)⁻¹, or draws.

    Lanczos starts at Sᵀ `seen`.
    """
    variance = variance_of(problem, solver, factor)
    if isinstance(variance, Exact):
        return None
    if isinstance(variance, Pathwise):
        assert isinstance(factor, IterativeFactor)
        drawn = draw(problem, factor.S, factor.preconditioner, variance)
        weights = block_matmul(factor.S, factor.inner_solve(drawn.right))
        return checked_draws(problem, factor, drawn.finish(weights))
    inner = block_matmul(factor.S.mT, seen)
    root = block_matmul(factor.S, lanczos_root(factor.inner, inner, variance.rank))
    return to_features(problem, root)


@torch.no_grad()
def checked_draws(
    problem: Problem, factor: IterativeFactor, draws: PathwiseVariances
) -> PathwiseVariances:
    """The draws. Warn if those of networks of finite width give other variances than solves.

    They are compared at training points, where variances are smallest.
    """
    if draws.functions.exact:
        return draws
    count = num_rows(problem.x)
    index = torch.linspace(0, count - 1, min(count, NUM_CHECKED)).long()
    some = rows(problem.x, index.to(tensors(problem.x)[0].device))
    kernel = problem.precise_kernel
    cross, prior = kernel(problem.x, some), kernel.diag(some)
    exact = prior - (cross * factor.solve(cross, prior)).sum(0)
    drawn = draws.covariance(kernel, some, cross, 1).reshape(-1)
    # A variance below this floor is rounding error, and its ratio says nothing.
    floor = 1e-10 * float(prior.max())
    ratio = float(drawn.sum() / exact.clamp(min=floor).sum())
    if not 1 / ALLOWED < ratio < ALLOWED:
        warn(
            f"variances from drawn networks of finite width are {ratio:.3g} times those of solves at "
            f"{len(index)} training points. Pass CG(variance=Exact()) for a solve at each prediction, or a "
            "higher rank: CG(variance=Pathwise(rank=...)).",
            WideVariances,
        )
    return draws


@torch.no_grad()
def to_features(problem: Problem, value: Tensor | None) -> Tensor | None:
    """Φ(X)ᵀ value for kernels with features, otherwise the value itself.

    The product is in float64, since its terms cancel and float32 would not leave enough digits.
    """
    if value is None or not isinstance(problem.kernel, FeatureKernel):
        return value
    precise = problem.precise_kernel
    assert isinstance(precise, FeatureKernel)
    return precise.adjoint(problem.x, value.detach())


def assemble(
    problem: Problem,
    alpha: Tensor,
    factor: Factor,
    evidence: Tensor | None,
    cache: Tensor | PathwiseVariances | None,
    sites: Sites | None = None,
    gram: Tensor | None = None,
) -> Solved:
    """The process of the problem in function space; kernels with features also get the mean as weights."""
    features = isinstance(problem.kernel, FeatureKernel)
    process = Conditioned(
        kernel=problem.kernel,
        prior_mean=problem.mean,
        x=problem.x,
        num_outputs=problem.num_outputs,
        alpha=alpha,
        factor=factor,
        noise=noise_rows(problem) if sites is None else None,
        sites=sites,
        gram=gram,
        weights=to_features(problem, alpha) if features else None,
        cache=cache if isinstance(cache, Tensor) else None,
        draws=cache if isinstance(cache, PathwiseVariances) else None,
    )
    return Solved(process, evidence)
