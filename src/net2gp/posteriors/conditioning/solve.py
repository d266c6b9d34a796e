"""Solve a problem: exactly under Gaussian noise, by Laplace or variational inference otherwise."""

from __future__ import annotations

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import describe
from net2gp.likelihoods.traits import has_gaussian_noise
from net2gp.memory import check_memory
from net2gp.posteriors.conditioning.gaussian import (
    Solved,
    assemble,
    estimated,
    feature_system,
    gaussian_cg,
    gaussian_dense,
    gaussian_weights,
    site_cache,
    whitened,
)
from net2gp.posteriors.conditioning.inference import Inferred, infer
from net2gp.posteriors.conditioning.matrix_free import matrix_free_system
from net2gp.posteriors.conditioning.problem import Problem
from net2gp.posteriors.conditioning.sketching.centers import gaussian_centers
from net2gp.posteriors.conditioning.sketching.sketched import gaussian_sketched
from net2gp.posteriors.conditioning.solvers import (
    ADASAP,
    CG,
    Centers,
    Cholesky,
    Inference,
    Laplace,
    Solver,
    Variational,
    WeightCholesky,
)
from net2gp.posteriors.conditioning.systems import CurvatureFactor, DenseSystem, IterativeFactor


def solve(problem: Problem, solver: Solver, inference: Inference | None) -> Solved:
    """The process given the data of the problem, in function or weight space as the solver says."""
    if inference is not None:
        return approximate(problem, solver, inference)
    if isinstance(solver, WeightCholesky):
        return gaussian_weights(problem)
    if isinstance(solver, Cholesky) and solver.dtype == torch.float64:
        return gaussian_dense(problem, solver)
    if isinstance(solver, ADASAP):
        return gaussian_sketched(problem, solver)
    if isinstance(solver, Centers):
        return gaussian_centers(problem, solver)
    return gaussian_cg(problem, solver)


def choose_inference(
    problem: Problem, solver: Solver, inference: Inference | None
) -> Inference | None:
    """The given inference, checked, or Laplace's by default; None for Gaussian noise, which is exact."""
    if has_gaussian_noise(problem.likelihood):
        if inference is not None:
            raise InputError("with Gaussian noise the posterior is exact: leave inference out.")
        return None
    chosen = inference or Laplace()
    if not isinstance(chosen, Laplace | Variational):
        raise InputError(
            f"inference must be Laplace(), Variational() or None, but is {describe(chosen)}."
        )
    if isinstance(solver, Cholesky) and solver.dtype != torch.float64:
        raise InputError(
            "Cholesky(dtype=torch.float32) is for Gaussian noise: each step of other inference would "
            "factorize anew. Pass solver=Cholesky() or CG()."
        )
    if isinstance(solver, ADASAP | Centers):
        raise InputError(
            f"{type(solver).__name__}() is for Gaussian noise. Pass solver=CG(), or likelihood=Gaussian(...)."
        )
    if isinstance(chosen, Variational) and isinstance(solver, CG):
        raise InputError(
            "Variational() needs the covariance of every training point, which CG() does not give. "
            "Pass solver=Cholesky() or WeightCholesky(), or inference=Laplace()."
        )
    return chosen


def approximate(
    problem: Problem, solver: Solver, inference: Inference, start: Tensor | None = None
) -> Solved:
    """Laplace or variational inference; `start` is a first guess of f − m at the training points."""
    assert not isinstance(solver, ADASAP | Centers)
    if isinstance(solver, WeightCholesky):
        system = feature_system(problem)
        found = infer(system, problem.likelihood, problem.offset, problem.y, inference, start)
        state = found.state
        return whitened(problem, state.dual, state.factor, found.evidence, found.sites)
    if isinstance(solver, CG):
        free = matrix_free_system(problem, solver)
        found = infer(free, problem.likelihood, problem.offset, problem.y, inference, start)
        return _from_sites(problem, solver, found, None)
    rows = problem.num_rows
    check_memory(
        4 * 8 * rows**2,
        problem.offset.device,
        f"inference with a {rows} × {rows} Gram matrix",
        "pass solver=CG() or WeightCholesky(), or fewer points",
    )
    return with_gram(problem, solver, inference, problem.gram(), start)


def with_gram(
    problem: Problem, solver: Cholesky, inference: Inference, K: Tensor, start: Tensor | None
) -> Solved:
    """`approximate` in function space, with the Gram matrix K of the problem already computed."""
    found = infer(DenseSystem(K), problem.likelihood, problem.offset, problem.y, inference, start)
    return _from_sites(problem, solver, found, K)


def _from_sites(
    problem: Problem, solver: Cholesky | CG, found: Inferred, K: Tensor | None
) -> Solved:
    factor, dual = found.state.factor, found.state.dual
    assert isinstance(factor, CurvatureFactor | IterativeFactor)
    cache = site_cache(problem, solver, factor, found.state.f.reshape(-1, 1))
    evidence = estimated(solver, found.evidence)
    return assemble(problem, dual, factor, evidence, cache, found.sites, K)
