"""Condition a Gaussian process on data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from net2gp.errors import InputError, check_memory
from net2gp.inputs import describe, gather, join, num_rows, ordinary_tensors, tensors
from net2gp.likelihoods.traits import has_gaussian_noise
from net2gp.linalg import Cholesky as CholeskyFactor
from net2gp.linalg import cholesky
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.posteriors.function_space import FunctionPosterior, NoiseFactor, SpectralFactor
from net2gp.posteriors.gaussian import (
    assemble,
    feature_system,
    from_factor,
    gaussian_cg,
    gaussian_dense,
    gaussian_evidence,
    gaussian_weights,
    noise_rows,
    site_cache,
    weight_posterior,
)
from net2gp.posteriors.inference import Inferred, infer
from net2gp.posteriors.matrix_free import matrix_free_system
from net2gp.posteriors.problem import Problem, choose_solver, make_problem
from net2gp.posteriors.solvers import (
    CG,
    Cholesky,
    Inference,
    Laplace,
    Solver,
    Variational,
    WeightCholesky,
)
from net2gp.posteriors.systems import CurvatureFactor, DenseSystem, IterativeFactor, precision
from net2gp.posteriors.weight_space import WeightPosterior
from net2gp.types import Data, Inputs, Kernel, Likelihood, Mean, Observed


def condition(
    kernel: Kernel,
    data: Data,
    likelihood: Observed,
    *,
    mean: Mean | None = None,
    solver: Solver | None = None,
    inference: Inference | None = None,
) -> FunctionPosterior[Observed] | WeightPosterior[Observed]:
    """The posterior of f ~ GP(mean, kernel) given data seen through the likelihood.

    With Gaussian noise it is exact. Otherwise `inference` says how the posterior is approximated by a
    Gaussian: `Laplace()` (default) or `Variational()`. `solver` is `Cholesky()` (function space),
    `WeightCholesky()`, or `CG()`; left out, the smaller exact one is taken, and CG where neither fits into
    memory. Factorizations are in float64 whatever the data's dtype; predictions come in the data's.

    The evidence is differentiable in every variance and length scale that requires a gradient
    (not with CG).

    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    >>> posterior = condition(RBF(), (x, torch.sin(x)), Gaussian(noise_var=1e-6))
    >>> posterior.marginal(torch.tensor([[0.5]], dtype=torch.float64)).mean
    tensor([[0.4622]], dtype=torch.float64)

    Reference: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, ch. 2 and 3.
    """
    with ordinary_tensors():
        found = _conditioned(kernel, data, likelihood, mean, solver, inference)
    return cast("FunctionPosterior[Observed] | WeightPosterior[Observed]", found)


def _conditioned(
    kernel: Kernel,
    data: Data,
    likelihood: Likelihood,
    mean: Mean | None,
    solver: Solver | None,
    inference: Inference | None,
) -> FunctionPosterior | WeightPosterior:
    problem = make_problem(kernel, data, likelihood, mean)
    solver = choose_solver(problem, solver)
    if has_gaussian_noise(likelihood):
        if inference is not None:
            raise InputError("with Gaussian noise the posterior is exact: leave inference out.")
        if isinstance(solver, WeightCholesky):
            return gaussian_weights(problem, solver)
        return (
            gaussian_dense(problem, solver)
            if isinstance(solver, Cholesky)
            else gaussian_cg(problem, solver)
        )
    return _approximate(problem, solver, _checked(inference or Laplace(), solver))


def _checked(inference: Inference, solver: Solver) -> Inference:
    if not isinstance(inference, Laplace | Variational):
        raise InputError(
            f"inference must be Laplace(), Variational() or None, but is {describe(inference)}."
        )
    if isinstance(inference, Variational) and isinstance(solver, CG):
        raise InputError(
            "Variational() needs the covariance of every training point, which CG() does not give. "
            "Pass solver=Cholesky() or WeightCholesky(), or inference=Laplace()."
        )
    return inference


def _approximate(
    problem: Problem, solver: Solver, inference: Inference, start: Tensor | None = None
) -> FunctionPosterior | WeightPosterior:
    """Laplace or variational inference, in the space of the solver."""
    if isinstance(solver, WeightCholesky):
        system = feature_system(problem)
        found = infer(system, problem.likelihood, problem.offset, problem.y, inference, start)
        posterior = weight_posterior(
            problem, solver, found.state.dual, found.state.factor, found.evidence
        )
        return replace(posterior, inference=inference, sites=found.sites)
    if isinstance(solver, CG):
        free = matrix_free_system(problem, solver)
        found = infer(free, problem.likelihood, problem.offset, problem.y, inference, start)
        return _from_sites(problem, solver, inference, found, None)
    rows = problem.num_rows
    check_memory(
        4 * 8 * rows**2,
        problem.offset.device,
        f"inference with a {rows} × {rows} Gram matrix",
        "pass solver=CG() or WeightCholesky(), or fewer points",
    )
    return _with_gram(problem, solver, inference, problem.gram(), start)


def _with_gram(
    problem: Problem, solver: Cholesky, inference: Inference, K: Tensor, start: Tensor | None
) -> FunctionPosterior:
    found = infer(DenseSystem(K), problem.likelihood, problem.offset, problem.y, inference, start)
    return _from_sites(problem, solver, inference, found, K)


def _from_sites(
    problem: Problem, solver: Cholesky | CG, inference: Inference, found: Inferred, K: Tensor | None
) -> FunctionPosterior:
    factor = found.state.factor
    assert isinstance(factor, CurvatureFactor | IterativeFactor)
    cache = site_cache(problem, solver, factor, found.state.f.reshape(-1, 1))
    posterior = assemble(problem, solver, found.state.dual, factor, found.evidence, cache)
    return replace(posterior, inference=inference, sites=found.sites, gram=K)


@ordinary_tensors()
def extend(
    posterior: FunctionPosterior, data: Data, likelihood: Likelihood | None = None
) -> FunctionPosterior:
    """Condition a function-space posterior on more data."""
    solver = posterior.solver
    new, problem = _grown(posterior, data, likelihood)
    if _expanded(problem):
        grown = _tempered(problem, solver)
        assert isinstance(grown, FunctionPosterior)
        return grown
    if posterior.sites is not None:
        assert posterior.inference is not None
        start = _present_mode(posterior, new)
        if posterior.gram is None or not isinstance(solver, Cholesky):
            grown = _approximate(problem, solver, posterior.inference, start)
            assert isinstance(grown, FunctionPosterior)
            return grown
        K = _bordered(posterior.gram, problem, posterior.x, new)
        return _with_gram(problem, solver, posterior.inference, K, start)
    same_rows = problem.kernel.joint == posterior.kernel.joint
    added = problem.num_rows - len(posterior.alpha)
    if isinstance(solver, CG):
        if not same_rows:
            return gaussian_cg(problem, solver)
        guess = torch.cat(
            [posterior.alpha, posterior.alpha.new_zeros(added, posterior.alpha.shape[1])]
        )
        return gaussian_cg(problem, solver, guess)
    assert isinstance(solver, Cholesky)
    if not same_rows:  # new noise tells apart the outputs that shared one Gram matrix
        return gaussian_dense(problem, solver)
    cross, block = _new_blocks(problem, posterior.x, new)
    block = block + torch.diag(noise_rows(problem)[-added:])
    return from_factor(problem, solver, _old_factor(posterior).extend(cross, block))


@ordinary_tensors()
def extend_weights(
    posterior: WeightPosterior, data: Data, likelihood: Likelihood | None = None
) -> WeightPosterior:
    """Condition a weight-space posterior on more data."""
    new, problem = _grown(posterior, data, likelihood)
    if _expanded(problem):
        grown = _tempered(problem, posterior.solver)
        assert isinstance(grown, WeightPosterior)
        return grown
    if posterior.sites is not None:
        assert posterior.inference is not None
        start = _present_mode(posterior, new)
        grown = _approximate(problem, posterior.solver, posterior.inference, start)
        assert isinstance(grown, WeightPosterior)
        return grown
    added = num_rows(new)
    noise, t = problem.noise[-added:], problem.target[-added:]
    Phi = posterior.kernel.features(new).to(torch.float64)
    old = posterior.precision.L @ posterior.precision.L.mT
    A = old + precision(Phi, torch.diag_embed(noise.reciprocal())) - torch.eye(len(old)).to(old)
    factor = cholesky(A, what="I + ΦᵀΛΦ")
    b = old @ posterior.weights + torch.einsum("ncp,nc->p", Phi, t / noise)[:, None]
    weights = factor.solve(b)
    # log p(old, new) = log p(old) + log p(new | old), by the change of the quadratic and determinant
    quadratic = (t * t / noise).sum() + (posterior.weights * (old @ posterior.weights)).sum()
    quadratic = quadratic - (weights * b).sum()
    log_det = factor.log_det() - posterior.precision.log_det() + noise.log().sum()
    evidence = posterior.evidence + gaussian_evidence(quadratic, log_det, t.numel())
    return weight_posterior(problem, posterior.solver, weights, factor, evidence)


def _grown(
    posterior: FunctionPosterior | WeightPosterior, data: Data, likelihood: Likelihood | None
) -> tuple[Inputs, Problem]:
    """The new inputs, and the problem of old and new data together."""
    x, y = gather(data)
    for name, new, old in (("x", x, posterior.x), ("y", y, posterior.y)):
        if _layout(new) != _layout(old):
            raise InputError(
                f"new data must look like the old, but for the number of rows: {name} is "
                f"{describe(new)}, but was {describe(old)} before."
            )
    together = (join([posterior.x, x]), torch.cat([posterior.y, y]))
    joined = _joined_likelihood(posterior, y, likelihood)
    return x, make_problem(posterior.kernel, together, joined, posterior.mean)


def _expanded(problem: Problem) -> bool:
    """Whether the problem is that of a dual, whose likelihood is a quadratic at θ* and no other."""
    from net2gp.posteriors.dual import AroundZero

    if not isinstance(problem.mean, AroundZero):
        return False
    return problem.mean.temperature != 1.0 or not has_gaussian_noise(problem.likelihood)


def _tempered(problem: Problem, solver: Solver) -> FunctionPosterior | WeightPosterior:
    """The posterior of a dual, expanded at θ* at all points.

    Its mean is that of the linear model, not a mode of the likelihood itself; and a temperature divides the
    curvature of the expansion and leaves its slope, which no likelihood does that could be expanded anew.
    """
    from net2gp.posteriors.dual import AroundZero, make_dual

    mean, kernel = problem.mean, problem.kernel
    assert isinstance(mean, AroundZero)
    assert isinstance(kernel, TangentKernel)
    data, prior_var = (problem.x, problem.y), kernel.prior_var
    found = make_dual(
        mean.linearized, data, problem.likelihood, prior_var, temperature=mean.temperature
    )
    return found.condition(solver)


def _layout(x: Inputs) -> object:
    """What must not differ between old and new inputs: structure, shapes of rows, dtypes, devices."""
    names = list(x) if isinstance(x, Mapping) else type(x)
    return names, [(v.shape[1:], v.dtype, v.device) for v in tensors(x)]


def _joined_likelihood(
    posterior: FunctionPosterior | WeightPosterior, y: Tensor, likelihood: Likelihood | None
) -> Likelihood:
    if likelihood is None:
        return posterior.likelihood
    old = posterior.likelihood
    if not has_gaussian_noise(old) or not has_gaussian_noise(likelihood):
        raise InputError(
            "update(likelihood=...) is for Gaussian noise that differs between points."
        )
    shapes = [(num_rows(posterior.x), posterior.num_outputs), (y.shape[0], posterior.num_outputs)]
    parts = [
        part.noise_variance(torch.zeros(shape, dtype=torch.float64, device=y.device))
        for part, shape in zip((old, likelihood), shapes, strict=True)
    ]
    return old.with_noise(torch.cat(parts))


def _present_mode(posterior: FunctionPosterior | WeightPosterior, new: Inputs) -> Tensor:
    """f − m at old and new points, as the present posterior sees them."""
    return posterior.centered(join([posterior.x, new])).to(torch.float64)


def _new_blocks(problem: Problem, x: Inputs, new: Inputs) -> tuple[Tensor, Tensor]:
    """k(x, new) and k(new, new) in float64."""
    return problem.precise_kernel(x, new), problem.precise_kernel(new)


def _bordered(K: Tensor, problem: Problem, x: Inputs, new: Inputs) -> Tensor:
    cross, block = _new_blocks(problem, x, new)
    return torch.cat([torch.cat([K, cross], 1), torch.cat([cross.mT, block], 1)])


def _old_factor(posterior: FunctionPosterior) -> CholeskyFactor:
    if isinstance(posterior.factor, NoiseFactor):
        return posterior.factor.cholesky
    assert isinstance(posterior.factor, SpectralFactor)
    Q, values = posterior.factor.Q, posterior.factor.eigenvalues
    return cholesky((Q * values) @ Q.mT, what="k(x, x) + noise")
