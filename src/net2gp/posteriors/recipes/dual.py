"""The linear model and the Gaussian process behind the Gaussian approximation of a network."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import gather, num_rows, ordinary_tensors
from net2gp.likelihoods.traits import has_gaussian_noise, inverse_curvature
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.linear.linearized import Linearized, PriorVar
from net2gp.memory import available_memory, check_memory
from net2gp.posteriors.conditioning.checks import check_class_axis, check_prior_var
from net2gp.posteriors.conditioning.gaussian import (
    Solved,
    assemble,
    estimated,
    feature_system,
    site_cache,
    whitened,
)
from net2gp.posteriors.conditioning.matrix_free import matrix_free_system
from net2gp.posteriors.conditioning.problem import Problem, choose_solver, make_problem
from net2gp.posteriors.conditioning.solve import solve
from net2gp.posteriors.conditioning.solvers import (
    ADASAP,
    CG,
    Centers,
    Cholesky,
    Inference,
    Laplace,
    Solver,
    WeightCholesky,
)
from net2gp.posteriors.conditioning.systems import (
    CurvatureFactor,
    DenseSystem,
    IterativeFactor,
    Sites,
    State,
)
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipe import WITHOUT_PROBES, Recipe, solver_facts
from net2gp.posteriors.recipes.extend import extend, grown
from net2gp.show import number
from net2gp.types import Data, Inputs, Likelihood


@dataclass(frozen=True, eq=False)
class AroundZero:
    """The prior mean m(x) = f(x; θ*) − J(x)θ* of a linearized network whose parameters are N(0, prior_var).

    Args:
        linearized: The network, linearized at θ*.

    >>> network = torch.nn.Linear(2, 1).eval()
    >>> from net2gp.linear.linearized import linearize
    >>> AroundZero(linearize(network))(torch.ones(1, 2)).abs() < 1e-6  # linear: nothing is left
    tensor([[True]])
    """

    linearized: Linearized

    def __call__(self, x: Inputs) -> Tensor:
        """m(x): (N, C), by one forward pass and one forward-mode pass."""
        return self.linearized(x) - linear_part(self.linearized, x)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> AroundZero:
        """The same mean with its tensors on another device or in another dtype."""
        return AroundZero(self.linearized.to(device, dtype))


def linear_part(linearized: Linearized, x: Inputs) -> Tensor:
    """J(x)θ*: (N, C)."""
    theta = linearized.flatten(linearized.params)[:, None]
    return linearized.kernel().apply(x, theta).reshape(num_rows(x), -1)


@dataclass(frozen=True, eq=False)
class Dual:
    """A network at θ* as the posterior of a linear model with Gaussian noise on transformed data.

    To second order in the outputs (first order in the parameters), log p(y | x, θ) is the log density of

        ỹ = J θ + ε,   ε ~ N(0, Λ⁻¹),   θ ~ N(0, prior_var),   ỹ = J θ* + Λ⁻¹ r

    with r = ∇_f log p(y | f) and Λ the likelihood's curvature at f = f(x; θ*). This is a linear model with
    features J, whose posterior N(m, S) has S⁻¹ = diag(1/prior_var) + JᵀΛJ and m = S Jᵀb, b = ΛJθ* + r.
    At a stationary point of log p(y | θ) + log N(θ | 0, prior_var), m = θ* and S is Laplace's covariance. The
    same posterior is Gaussian process regression of ỹ with the tangent kernel J diag(prior_var) Jᵀ.
    Everything is computed from b and Λ, so Λ may be singular, as it is for softmax. The temperature divides Λ
    and nothing else: the posterior becomes wider, and m = θ* at the same stationary points.

    The linear model and the Gaussian process are posteriors of the linearized network
    f(x; θ*) + J(x)(θ − θ*). Their prior mean is `AroundZero`, and `posterior.centered` is what the data add
    to it. Their `update` keeps the temperature and expands new points at the same θ*.

    Args:
        linearized: The network, linearized at θ*.
        likelihood: How targets depend on the outputs.
        prior_var: The prior variances, a number or a dict by parameter name.
        x: The N training points.
        y: Their targets.
        f: The outputs f(x; θ*): (N, C), float64 as all that follow.
        linear_part: J θ*: (N, C).
        residual: r: (N, C).
        curvature: Λ, divided by the temperature: (N, C, C).
        temperature: The number that divides Λ.

    Reference: Khan et al., Approximate inference turns deep networks into Gaussian processes, NeurIPS 2019.
    """

    linearized: Linearized
    likelihood: Likelihood
    prior_var: PriorVar = field(repr=False)
    x: Inputs = field(repr=False)
    y: Tensor = field(repr=False)
    f: Tensor = field(repr=False)
    linear_part: Tensor = field(repr=False)
    residual: Tensor = field(repr=False)
    curvature: Tensor = field(repr=False)
    temperature: float = 1.0

    @property
    def natural(self) -> Tensor:
        """b = ΛJθ* + r = Λỹ: (N, C), which is finite even if the targets ỹ are not."""
        return (self.curvature @ self.linear_part[..., None])[..., 0] + self.residual

    @property
    def noise(self) -> Tensor:
        """The noise covariance Λ⁻¹: (N, C, C). For softmax it is the pseudo-inverse, zero along (1, …, 1)."""
        curvature = self.curvature * self.temperature
        return inverse_curvature(self.likelihood, self.f, curvature) * self.temperature

    @property
    def targets(self) -> Tensor:
        """The transformed targets ỹ = Jθ* + Λ⁻¹r: (N, C).

        Softmax does not depend on the direction (1, …, 1) of f; in that direction ỹ is Jθ*, with infinite
        noise that `noise` shows as zero. The targets grow like 1/p(y) where the network is certain and wrong.
        """
        return self.linear_part + (self.noise @ self.residual[..., None])[..., 0]

    @property
    def kernel(self) -> TangentKernel:
        """J diag(prior_var) Jᵀ: the tangent kernel."""
        return self.linearized.kernel(self.prior_var)

    def features(self) -> Tensor:
        """Return the Jacobian J. The posteriors compute it only if P is small.

        Returns:
            J at the training points: (N, C, P).
        """
        return self.linearized.jacobian(self.x)

    @ordinary_tensors()
    def condition(self, solver: Solver | None = None) -> Posterior:
        """Return the linear model or the Gaussian process, whichever has the smaller system to solve.

        Args:
            solver: `WeightCholesky()` for the linear model, `Cholesky()` or `CG()` for the Gaussian process.
                None chooses by size.

        Returns:
            The posterior, with its evidence.

        Raises:
            TooLarge: If the system of the given solver does not fit into memory.
            InputError: If the solver is for Gaussian noise and the noise is not.
        """
        data, mean = (self.x, self.y), AroundZero(self.linearized)
        problem = make_problem(self.kernel, data, self.likelihood, mean)
        solver = choose_solver(problem, solver)
        exact = has_gaussian_noise(self.likelihood) and self.temperature == 1.0
        if exact:
            solved = solve(problem, solver, None)
        elif isinstance(solver, WeightCholesky):
            solved = self._weights(problem)
        elif isinstance(solver, ADASAP | Centers):
            raise InputError(
                f"{type(solver).__name__}() is for Gaussian noise. Pass solver=CG() or WeightCholesky()."
            )
        else:
            solved = self._function(problem, solver)
        inference = None if exact else Laplace()
        return expanded(problem, solved, ByExpansion(self.temperature, solver, inference))

    def linear_model(self) -> Posterior:
        """Return the posterior N(m, S) over the parameters, at the cost of N·C·P² + P³/3.

        Returns:
            The posterior in weight space; its `process.weights` are m/√prior_var.
        """
        return self.condition(WeightCholesky())

    def gaussian_process(self, solver: Cholesky | CG | None = None) -> Posterior:
        """Return the same posterior in function space: mean k(x, X)(K + Λ⁻¹)⁻¹ỹ in addition to `AroundZero`.

        Args:
            solver: `Cholesky()`, which costs (N·C)³/3, or `CG()`, which never stores the Gram matrix. None
                takes `Cholesky()` if the matrix fits into memory.

        Returns:
            The posterior in function space.

        Raises:
            InputError: If the solver is `WeightCholesky()`.
        """
        if isinstance(solver, WeightCholesky):
            raise InputError(
                "gaussian_process is solved in function space, but solver is WeightCholesky(). "
                "Pass solver=Cholesky() or CG(), or call linear_model()."
            )
        if solver is None:
            fits = 4 * 8 * self.f.numel() ** 2 < available_memory(self.f.device) / 2
            solver = Cholesky() if fits else CG()
        return self.condition(solver)

    def log_marginal_likelihood(self) -> Tensor:
        """Return log ∫ p(y | θ) N(θ | 0, prior_var) dθ, with log p(y | θ) to second order at θ*.

        It is Σ_n [log p(y_n | f_n) − r_nᵀg_n − ½ g_nᵀΛ_ng_n] + ½ bᵀJm − ½ log|I + ΛK| for g = Jθ*. For
        Gaussian noise this equals log N(ỹ | 0, K + Λ⁻¹). Otherwise, for an invertible Λ, it is this density
        plus Σ_n [log p(y_n | f_n) + ½ r_nᵀΛ_n⁻¹r_n + ½ log|2πΛ_n⁻¹|], which turns a density of ỹ into one of
        y. At a stationary point it is Laplace's log p(y | θ*) − ½ Σ θ*²/prior_var − ½ log|I + ΛK|.

        Returns:
            The evidence, a scalar. If only `CG()` fits into memory, log|I + ΛK| is an estimate.
        """
        return self.condition().log_marginal_likelihood()

    def _evidence(self, state: State, log_det: Tensor) -> Tensor:
        r, g, b = self.residual, self.linear_part, self.natural
        # r·g + ½ gᵀΛg = ½ (r + b)·g
        constant = self.likelihood.log_prob(self.f, self.y).sum() - 0.5 * ((r + b) * g).sum()
        return constant + 0.5 * (b * state.f).sum() - 0.5 * log_det

    def _weights(self, problem: Problem) -> Solved:
        sites = Sites(self.natural, self.curvature)
        state = feature_system(problem).solve(sites)
        evidence = self._evidence(state, state.log_det)
        return whitened(problem, state.dual, state.factor, evidence, sites)

    def _function(self, problem: Problem, solver: Cholesky | CG) -> Solved:
        sites, gram = Sites(self.natural, self.curvature), None
        if isinstance(solver, CG):
            free = matrix_free_system(problem, solver)
            state = free.solve(sites, near=self.linear_part)
            assert isinstance(state.factor, IterativeFactor)
            log_det = free.estimate_log_det(state.factor)
        else:
            gram = _gram(problem)
            state = DenseSystem(gram).solve(sites)
            log_det = state.log_det
        factor = state.factor
        assert isinstance(factor, CurvatureFactor | IterativeFactor)
        cache = site_cache(problem, solver, factor, state.f.reshape(-1, 1))
        evidence = estimated(solver, self._evidence(state, log_det))
        return assemble(problem, state.dual, factor, evidence, cache, sites, gram)


@dataclass(frozen=True)
class ByExpansion(Recipe):
    """The recipe of a dual, which expands the likelihood at θ* for all points, old and new.

    The mean of the posterior is the mean of the linear model, not a mode of the likelihood itself. The
    temperature rescales the curvature but not the gradient of the expansion, so it cannot be expressed as a
    likelihood and expanded again. With Gaussian noise at temperature 1 the expansion is the likelihood:
    `inference` is None then, and more data are taken in exactly.
    """

    temperature: float
    solver: Solver
    inference: Inference | None

    @ordinary_tensors()
    def extend(self, posterior: Posterior, data: Data, likelihood: Likelihood | None) -> Posterior:
        """The dual of all data at the same θ* and temperature."""
        problem, new = grown(posterior, data, likelihood)
        if self.inference is None:
            return expanded(problem, extend(posterior, problem, new, self.solver, None), self)
        joined = replace(posterior, likelihood=problem.likelihood, x=problem.x, y=problem.y)
        return self.dual(joined).condition(self.solver)

    def dual(self, posterior: Posterior) -> Dual:
        """The dual at the same temperature."""
        kernel = posterior.process.kernel
        assert isinstance(kernel, TangentKernel)
        return make_dual(
            kernel.linearized,
            posterior.data,
            posterior.likelihood,
            kernel.prior_var,
            temperature=self.temperature,
        )

    def facts(self, posterior: Posterior) -> dict[str, str]:
        """The solver, and the temperature if there is one."""
        tempered = {} if self.temperature == 1.0 else {"temperature": number(self.temperature)}
        return {**solver_facts(self.solver, self.inference), **tempered}

    def without_evidence(self) -> str:
        """Say that the solver was asked to leave the evidence out."""
        return WITHOUT_PROBES


def expanded(problem: Problem, solved: Solved, recipe: ByExpansion) -> Posterior:
    """Wrap the solution of a dual into a posterior."""
    data = (problem.x, problem.y)
    return Posterior(solved.process, problem.likelihood, *data, solved.evidence, recipe)


def make_dual(
    linearized: Linearized,
    data: Data,
    likelihood: Likelihood,
    prior_var: PriorVar,
    *,
    temperature: float = 1.0,
) -> Dual:
    """The dual of a linearized network: two passes over the data, without any solve."""
    check_prior_var(prior_var, zero=True)
    x, y = gather(data)
    check_class_axis(linearized, x, likelihood)
    problem = make_problem(linearized.kernel(prior_var), (x, y), likelihood, AroundZero(linearized))
    with torch.no_grad():
        linear = linear_part(linearized, problem.x).to(torch.float64)
        f = linearized(problem.x).to(torch.float64)
        residual = likelihood.residual(f, problem.y)
        curvature = likelihood.curvature(f) / temperature
    x, y, own = problem.x, problem.y, (f, linear, residual, curvature)
    return Dual(linearized, likelihood, prior_var, x, y, *own, temperature)


def _gram(problem: Problem) -> Tensor:
    rows = problem.num_rows
    check_memory(
        3 * 8 * rows**2,
        problem.offset.device,
        f"a {rows} × {rows} Gram matrix and its factor",
        "pass solver=CG(), or fewer points",
    )
    return problem.gram()
