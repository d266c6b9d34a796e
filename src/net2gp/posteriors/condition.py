"""Condition a Gaussian process on data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from net2gp.inputs import ordinary_tensors
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.posteriors.conditioning.gaussian import Solved
from net2gp.posteriors.conditioning.problem import Problem, choose_solver, make_problem
from net2gp.posteriors.conditioning.solve import choose_inference, solve
from net2gp.posteriors.conditioning.solvers import Inference, Solver, WeightCholesky
from net2gp.posteriors.conditioning.whitened import Whitened
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipe import WITHOUT_PROBES, Recipe, solver_facts
from net2gp.posteriors.recipes.dual import Dual, make_dual
from net2gp.posteriors.recipes.extend import extend, grown
from net2gp.posteriors.recipes.weight_sums import extend_sums, solve_stream
from net2gp.types import Data, Kernel, Likelihood, Mean, Observed, Stream


def condition(
    kernel: Kernel,
    data: Data,
    likelihood: Observed,
    *,
    mean: Mean | None = None,
    solver: Solver | None = None,
    inference: Inference | None = None,
) -> Posterior[Observed]:
    """Return the posterior of f ~ GP(mean, kernel) given data that depend on f through a likelihood.

    With Gaussian noise the posterior is exact; for other likelihoods a Gaussian approximates it.
    Factorizations are in float64 for data of every dtype, and predictions have the dtype of the data. The
    evidence is differentiable in every variance and length scale that requires a gradient, except with CG.
    Cost: (N·C)³/3 for `Cholesky()`, N·C·P² + P³/3 for `WeightCholesky()` with P parameters.

    Args:
        kernel: The prior covariance, such as `RBF()`, `nngp(network)` or `linearize(network).kernel()`.
        data: (x, y) with N rows each, or a DataLoader that yields such pairs, which are joined in memory. A
            `data.Stream(loader)` is summed over in one pass, in weight space and under Gaussian noise; the
            posterior does not keep it.
        likelihood: How targets depend on f, such as `Gaussian(0.1)` or `Categorical()`.
        mean: The prior mean, a function from N points to (N, C), such as a linearized network. None is zero.
        solver: `Cholesky()` (function space), `WeightCholesky()` (weight space) or `CG()`. None takes the
            exact one with the smaller system, or CG if neither fits into memory.
        inference: How a Gaussian approximates the posterior if the noise is not Gaussian: `Laplace()`, which
            is also the meaning of None, or `Variational()`.

    Returns:
        The posterior, with its evidence.

    Raises:
        InputError: If the data do not suit the likelihood or the kernel, if a solver cannot handle the
            problem, or if `inference` is given for Gaussian noise.
        NotPositiveDefinite: If the Gram matrix plus noise cannot be factorized.

    >>> import torch
    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    >>> posterior = condition(RBF(), (x, torch.sin(x)), Gaussian(noise_var=1e-6))
    >>> posterior.marginal(torch.tensor([[0.5]], dtype=torch.float64)).mean
    tensor([[0.4622]], dtype=torch.float64)

    Reference: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, ch. 2 and 3.
    """
    with ordinary_tensors():
        if isinstance(data, Stream):
            solved = solve_stream(kernel, data, likelihood, mean, solver)
            return cast("Posterior[Observed]", summed(solved, likelihood))
        problem = make_problem(kernel, data, likelihood, mean)
        solver = choose_solver(problem, solver)
        inference = choose_inference(problem, solver, inference)
        found = conditioned(problem, solve(problem, solver, inference), solver, inference)
    return cast("Posterior[Observed]", found)


def summed(solved: Solved, likelihood: Likelihood) -> Posterior:
    """Wrap what sums over a stream gave into a posterior, which does not keep the data."""
    recipe = ByConditioning(WeightCholesky())
    return Posterior(solved.process, likelihood, None, None, solved.evidence, recipe)


def conditioned(
    problem: Problem, solved: Solved, solver: Solver, inference: Inference | None = None
) -> Posterior:
    """Wrap the solution of a problem into a posterior."""
    data, recipe = (problem.x, problem.y), ByConditioning(solver, inference)
    return Posterior(solved.process, problem.likelihood, *data, solved.evidence, recipe)


@dataclass(frozen=True)
class ByConditioning(Recipe):
    """The recipe of `condition`: a Gaussian process that can be conditioned on more data later."""

    solver: Solver
    inference: Inference | None = None

    @ordinary_tensors()
    def extend(self, posterior: Posterior, data: Data, likelihood: Likelihood | None) -> Posterior:
        """The posterior given more data as well, starting from the present factor or mode."""
        process = posterior.process
        if posterior.x is None and isinstance(process, Whitened) and process.sites is None:
            return summed(extend_sums(posterior, data, likelihood), posterior.likelihood)
        problem, new = grown(posterior, data, likelihood)
        solved = extend(posterior, problem, new, self.solver, self.inference)
        return conditioned(problem, solved, self.solver, self.inference)

    def dual(self, posterior: Posterior) -> Dual:
        """The dual of the network whose tangent kernel was conditioned."""
        kernel = posterior.process.kernel
        if not isinstance(kernel, TangentKernel):
            return super().dual(posterior)
        return make_dual(kernel.linearized, posterior.data, posterior.likelihood, kernel.prior_var)

    def facts(self, posterior: Posterior) -> dict[str, str]:
        """The solver, and the inference if it was needed."""
        return solver_facts(self.solver, self.inference)

    def without_evidence(self) -> str:
        """Say that the solver was asked to leave the evidence out."""
        return WITHOUT_PROBES
