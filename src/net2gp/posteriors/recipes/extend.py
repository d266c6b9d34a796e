"""Take more data into a Gaussian process without starting over."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import describe, gather, join, num_rows, tensors
from net2gp.likelihoods.traits import has_gaussian_noise
from net2gp.linalg import Cholesky as CholeskyFactor
from net2gp.linalg import cholesky
from net2gp.posteriors.conditioning.conditioned import (
    Conditioned,
    Factor,
    NoiseFactor,
    SpectralFactor,
)
from net2gp.posteriors.conditioning.gaussian import (
    Solved,
    from_factor,
    gaussian_cg,
    gaussian_dense,
    noise_rows,
)
from net2gp.posteriors.conditioning.problem import Problem, make_problem
from net2gp.posteriors.conditioning.sketching.centers import gaussian_centers
from net2gp.posteriors.conditioning.sketching.sketched import gaussian_sketched
from net2gp.posteriors.conditioning.solve import approximate, with_gram
from net2gp.posteriors.conditioning.solvers import (
    ADASAP,
    CG,
    Centers,
    Cholesky,
    Inference,
    Solver,
    WeightCholesky,
)
from net2gp.posteriors.conditioning.whitened import Whitened
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.weight_sums import WeightSums
from net2gp.types import Data, Inputs, Likelihood


def grown(
    posterior: Posterior, data: Data, likelihood: Likelihood | None
) -> tuple[Problem, Inputs]:
    """The problem of old and new data together, and the new inputs."""
    x, y = gather(data)
    old_x, old_y = posterior.data
    for name, new, old in (("x", x, old_x), ("y", y, old_y)):
        if _layout(new) != _layout(old):
            raise InputError(
                f"new data must look like the old, but for the number of rows: {name} is "
                f"{describe(new)}, but was {describe(old)} before."
            )
    together = (join([old_x, x]), torch.cat([old_y, y]))
    joined = _joined_likelihood(posterior, y, likelihood)
    process = posterior.process
    assert isinstance(process, Conditioned | Whitened)
    return make_problem(process.kernel, together, joined, process.prior_mean), x


def extend(
    posterior: Posterior,
    problem: Problem,
    new: Inputs,
    solver: Solver,
    inference: Inference | None,
) -> Solved:
    """The process given old and new data, starting from what the posterior has solved already."""
    process = posterior.process
    assert isinstance(process, Conditioned | Whitened)
    if inference is not None:
        start = process.centered(join([posterior.data[0], new])).to(torch.float64)
        if not isinstance(process, Conditioned) or process.gram is None:
            return approximate(problem, solver, inference, start)
        if not isinstance(solver, Cholesky):
            return approximate(problem, solver, inference, start)
        K = _bordered(process.gram, problem, process.x, new)
        return with_gram(problem, solver, inference, K, start)
    if isinstance(process, Whitened):
        assert posterior.evidence is not None
        old = num_rows(posterior.data[0])
        return WeightSums.of(process, posterior.evidence).plus(problem, old).solved(problem)
    same_rows = problem.rows_per_point == process.rows_per_point
    if isinstance(solver, Centers):
        return gaussian_centers(problem, solver)
    if isinstance(solver, ADASAP):
        return gaussian_sketched(problem, solver, _guess(process, problem) if same_rows else None)
    if isinstance(solver, CG) or (isinstance(solver, Cholesky) and solver.dtype != torch.float64):
        return gaussian_cg(problem, solver, _guess(process, problem) if same_rows else None)
    assert not isinstance(solver, WeightCholesky)
    if not same_rows:  # the outputs shared one Gram matrix, but the new noise differs between them
        return gaussian_dense(problem, solver)
    cross, block = _new_blocks(problem, process.x, new)
    block = block + torch.diag(noise_rows(problem)[len(process.alpha) :])
    return from_factor(problem, solver, _cholesky(process.factor).extend(cross, block))


def _guess(process: Conditioned, problem: Problem) -> Tensor:
    """A first guess of α: its values for the old data, and zeros for the new."""
    alpha = process.alpha
    added = problem.num_rows - len(alpha)
    return torch.cat([alpha, alpha.new_zeros(added, alpha.shape[1])])


def _layout(x: Inputs) -> object:
    """What must be equal in old and new inputs: structure, shapes of rows, dtypes and devices."""
    names = list(x) if isinstance(x, Mapping) else type(x)
    return names, [(v.shape[1:], v.dtype, v.device) for v in tensors(x)]


def _joined_likelihood(
    posterior: Posterior, y: Tensor, likelihood: Likelihood | None
) -> Likelihood:
    old: Likelihood = posterior.likelihood
    if likelihood is None:
        return old
    if not has_gaussian_noise(old) or not has_gaussian_noise(likelihood):
        raise InputError(
            "update(likelihood=...) is for Gaussian noise that differs between points."
        )
    shapes = [(num_rows(v), posterior.num_outputs) for v in (posterior.data[0], y)]
    parts = [
        part.noise_variance(torch.zeros(shape, dtype=torch.float64, device=y.device))
        for part, shape in zip((old, likelihood), shapes, strict=True)
    ]
    return old.with_noise(torch.cat(parts))


def _new_blocks(problem: Problem, x: Inputs, new: Inputs) -> tuple[Tensor, Tensor]:
    """k(x, new) and k(new, new) in float64."""
    return problem.precise_kernel(x, new), problem.precise_kernel(new)


def _bordered(K: Tensor, problem: Problem, x: Inputs, new: Inputs) -> Tensor:
    cross, block = _new_blocks(problem, x, new)
    return torch.cat([torch.cat([K, cross], 1), torch.cat([cross.mT, block], 1)])


def _cholesky(factor: Factor) -> CholeskyFactor:
    """A Cholesky factor of K + D, computed if the posterior came from an eigendecomposition."""
    if isinstance(factor, NoiseFactor):
        return factor.cholesky
    assert isinstance(factor, SpectralFactor)
    return cholesky((factor.Q * factor.eigenvalues) @ factor.Q.mT, what="k(x, x) + noise")
