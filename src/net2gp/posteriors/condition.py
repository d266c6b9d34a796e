"""Condition a Gaussian process on data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from net2gp.inputs import ordinary_tensors
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.posteriors.conditioning.gaussian import Solved
from net2gp.posteriors.conditioning.problem import Problem, choose_solver, make_problem
from net2gp.posteriors.conditioning.solve import choose_inference, solve
from net2gp.posteriors.conditioning.solvers import Inference, Solver
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipe import WITHOUT_PROBES, Recipe, solver_facts
from net2gp.posteriors.recipes.dual import Dual, make_dual
from net2gp.posteriors.recipes.extend import extend, grown
from net2gp.types import Data, Kernel, Likelihood, Mean, Observed


def condition(
    kernel: Kernel,
    data: Data,
    likelihood: Observed,
    *,
    mean: Mean | None = None,
    solver: Solver | None = None,
    inference: Inference | None = None,
) -> Posterior[Observed]:
    """The posterior of f ~ GP(mean, kernel) given data seen through the likelihood.

    With Gaussian noise it is exact. Otherwise `inference` says how the posterior is approximated by a
    Gaussian: `Laplace()` (default) or `Variational()`. `solver` is `Cholesky()` (function space),
    `WeightCholesky()`, or `CG()`; left out, the smaller exact one is taken, and CG where neither fits into
    memory. Factorizations are in float64 whatever the data's dtype; predictions come in the data's.

    The evidence is differentiable in every variance and length scale that requires a gradient
    (not with CG).

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
        problem = make_problem(kernel, data, likelihood, mean)
        solver = choose_solver(problem, solver)
        inference = choose_inference(problem, solver, inference)
        found = conditioned(problem, solve(problem, solver, inference), solver, inference)
    return cast("Posterior[Observed]", found)


def conditioned(
    problem: Problem, solved: Solved, solver: Solver, inference: Inference | None = None
) -> Posterior:
    """The posterior of a problem that was solved."""
    data, recipe = (problem.x, problem.y), ByConditioning(solver, inference)
    return Posterior(solved.process, problem.likelihood, *data, solved.evidence, recipe)


@dataclass(frozen=True)
class ByConditioning(Recipe):
    """Of a Gaussian process that is conditioned on data, and on more later."""

    solver: Solver
    inference: Inference | None = None

    @ordinary_tensors()
    def extend(self, posterior: Posterior, data: Data, likelihood: Likelihood | None) -> Posterior:
        """From the present factor or mode."""
        problem, new = grown(posterior, data, likelihood)
        solved = extend(posterior, problem, new, self.solver, self.inference)
        return conditioned(problem, solved, self.solver, self.inference)

    def dual(self, posterior: Posterior) -> Dual:
        """Of the network whose tangent kernel was conditioned."""
        kernel = posterior.process.kernel
        if not isinstance(kernel, TangentKernel):
            return super().dual(posterior)
        return make_dual(kernel.linearized, posterior.data, posterior.likelihood, kernel.prior_var)

    def facts(self, posterior: Posterior) -> dict[str, str]:
        """The solver, and the inference if it was needed."""
        return solver_facts(self.solver, self.inference)

    def without_evidence(self) -> str:
        """That conjugate gradients were told so."""
        return WITHOUT_PROBES
