"""Laplace's approximation in function space: the Gaussian process around the network."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from net2gp.errors import NetworkError, check_memory
from net2gp.inputs import num_rows, rows
from net2gp.likelihoods.traits import has_open_link, is_classifier, of_points
from net2gp.linalg import block_matmul, psd_root, symmetric_eigen
from net2gp.linear.curvatures.curvature import (
    DiagonalCurvature,
    KronCurvature,
    Source,
    diagonal_curvature,
    kron_curvature,
)
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.linear.linearized import PriorVar, expand_prior
from net2gp.methods.laplace_approximation.choosing import tuned
from net2gp.methods.laplace_approximation.matching import Build, match_link, some_points
from net2gp.methods.laplace_approximation.regression import is_regression
from net2gp.methods.laplace_approximation.tuning import (
    Evidence,
    LogDet,
    Matched,
    Task,
    Tuned,
    Tuning,
)
from net2gp.posteriors.conditioning.conditioned import Conditioned
from net2gp.posteriors.conditioning.systems import DenseSystem, Sites
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.around_network import ByLaplace, around_network
from net2gp.posteriors.weights.conditioned_covariance import ConditionedCovariance
from net2gp.posteriors.weights.covariances import Covariance, DiagonalCovariance
from net2gp.posteriors.weights.pivoted import Pivoted, RowSystem, row_system
from net2gp.posteriors.weights.precision import common_variance, covariance, log_det, prior_vector
from net2gp.posteriors.weights.structures import FunctionSpace
from net2gp.types import Params

SPECTRUM_ROWS = 3000
"""Rows up to which the prior is tuned on the eigenvalues of the Gram matrix; beyond, on Kronecker factors."""

CLASSIFIER_TOL, EXACT_ROWS = 1e-2, 1000
"""What may be missed of a classifier's data, and the number of rows up to which nothing is."""


def function_space(
    task: Task, prior_var: PriorVar | None, tuning: Tuning | None, temperature: float
) -> Posterior:
    """f(x; θ*) + GP(0, k) conditioned on Λ at the data, with k = J diag(prior_var) Jᵀ.

    Cost: a Gram matrix of N·C rows and its Cholesky factor, (N·C)³/3 operations; with a `tol`, of n rows
    whose variance is above it and r pivots among them, n·r entries of the Gram matrix and 2nr² operations.
    Reference: Immer, Korzepa, Bauer, Improving predictions of Bayesian neural nets via local linearization,
    AISTATS 2021.
    """
    structure = task.structure
    assert isinstance(structure, FunctionSpace)
    part = _subset(task, structure)
    process = _Process(part, _tolerance(structure, part), prior_var, temperature)

    build = process.posterior

    if isinstance(tuning, Matched | None) and is_regression(task):
        return build(tuned(task, no_determinant, build, prior_var, tuning, temperature))
    if prior_var is None and not (
        part is task and part.f.numel() <= SPECTRUM_ROWS and not _per_layer(tuning)
    ):
        # on all the data, and without a factorization of all rows for each prior variance
        found = tuned(task, *by_factors(task), prior_var, tuning, temperature)
        return with_own_link(build(found), part, tuning)
    if prior_var is None or part.open_noise:
        chosen = prior_var, tuning, temperature
        return build(tuned(part, process.determinant, build, *chosen, process.at_data))
    return build(tuned(part, no_determinant, build, prior_var, tuning, temperature))


def _tolerance(structure: FunctionSpace, part: Task) -> float:
    if structure.tol is not None:
        return structure.tol
    classifier = is_classifier(part.likelihood)
    return CLASSIFIER_TOL if classifier and part.f.numel() > EXACT_ROWS else 0.0


@dataclass(frozen=True, eq=False)
class _Process:
    """The Gaussian process of a task, at any prior: by its pivots, or by all rows."""

    part: Task
    tol: float
    prior_var: PriorVar | None
    temperature: float = 1.0
    systems: dict[Any, RowSystem | None] = field(default_factory=dict)

    @property
    def structure(self) -> FunctionSpace:
        """What was asked for."""
        assert isinstance(self.part.structure, FunctionSpace)
        return self.part.structure

    @cached_property
    def curvature(self) -> Tensor:
        """Λ at the data, (N, C, C), in float64: of a sure class float32 keeps no digit of 1 − p."""
        return self.part.likelihood.curvature(self.part.f.double())

    @cached_property
    def gram(self) -> Tensor:
        """k(X, X) at the prior that was given, else at prior variance 1."""
        return _gram(self.part, 1.0 if self.prior_var is None else self.prior_var)

    def posterior(self, found: Tuned) -> Posterior:
        """The posterior at what was chosen, around the network's own mean."""
        kernel = self.part.linearized.kernel(found.prior_var)
        curvature = self.curvature * found.scale
        if self.tol > 0:
            S = psd_root(curvature, symmetric=False)
            system = self._rows(kernel, S, found)
            if system is not None:
                structure = replace(self.structure, tol=self.tol)
                part = replace(self.part, structure=structure)
                return self._weights(part, found, *_by_pivots(part, found, kernel, S, system))
        gram = self._gram_at(found.prior_var)
        structure = replace(self.structure, tol=0.0) if self.tol > 0 else self.structure
        part = replace(self.part, structure=structure)
        return self._weights(part, found, *_by_rows(part, found, gram, curvature))

    def _weights(
        self, part: Task, found: Tuned, covariance: Covariance, evidence: Tensor
    ) -> Posterior:
        """The Gaussian around the network's own mean."""
        return around_network(
            part.linearized,
            covariance,
            found.prior_var,
            found.likelihood,
            (part.x, part.y),
            evidence=evidence,
            recipe=ByLaplace(self.temperature, part.structure),
        )

    def _gram_at(self, prior_var: PriorVar) -> Tensor:
        """k(X, X) at what was chosen."""
        if self.prior_var is not None:
            return self.gram
        if isinstance(prior_var, float):
            return self.gram * prior_var
        return _gram(self.part, prior_var)

    def _rows(self, kernel: TangentKernel, S: Tensor, found: Tuned) -> RowSystem | None:
        """The rows at what was chosen, kept: a link is matched at a posterior that is then built again."""
        key, x, prior_var = (found.prior_var, found.scale), self.part.x, found.prior_var
        if not isinstance(prior_var, float):
            return row_system(kernel, x, S, self.tol)
        if key not in self.systems:
            self.systems.clear()
            gram = self._gram_at(prior_var) if "gram" in self.__dict__ else None  # of the tuning
            self.systems[key] = row_system(kernel, x, S, self.tol, gram)
        return self.systems[key]

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """The eigenvalues of SᵀKS = QΛQᵀ over all rows, and KSQ.

        Of all rows: one that tells little may tell much at a wider prior.
        """
        S = psd_root(self.curvature).to(self.gram)
        sides = block_matmul(S.mT, self.gram)
        values, Q = symmetric_eigen(block_matmul(S.mT, sides.mT))
        return values.clamp(min=0), sides.mT @ Q

    def determinant(self, prior: Params, scale: Tensor) -> Tensor:
        """log|I + scale·ΛK|."""
        one = common_variance(prior) if self.prior_var is None else 1.0
        assert one is not None
        return torch.log1p(scale * one * self.spectrum[0]).sum()

    def at_data(self, found: Tuned, index: Tensor) -> Tensor:
        """The posterior covariance at some of the data, K − KS(I/scale + SᵀKS)⁻¹SᵀK: (n, C, C)."""
        one = 1.0 if self.prior_var is not None else found.prior_var
        assert isinstance(one, float)
        N, C = self.part.f.shape
        values, sides = self.spectrum
        sides = sides.reshape(N, C, -1)[index]
        blocks = self.gram.reshape(N, C, N, C)[index, :, index]
        return one * (blocks - (sides / (1 / (found.scale * one) + values)) @ sides.mT)


def with_own_link(posterior: Posterior, part: Task, tuning: Tuning | None) -> Posterior:
    """The link matched again, with the exact covariance at the points that it was conditioned on."""
    if not (isinstance(tuning, Matched | None) and has_open_link(part.likelihood)):
        return posterior
    return match_link(posterior, some_points(part.x, (tuning or Matched()).count(part.f.shape[1])))


def no_determinant(prior: Params, scale: Tensor) -> Tensor:
    """Where the posterior that is built has an evidence of its own."""
    return torch.zeros_like(scale)


def _subset(task: Task, structure: FunctionSpace) -> Task:
    """The task on a fixed random choice of its points, or on all."""
    count, size = num_rows(task.x), structure.num_points
    if size is None or size >= count:
        return task
    generator = torch.Generator().manual_seed(structure.seed)
    chosen = torch.randperm(count, generator=generator)[:size].sort().values.to(task.f.device)
    likelihood = of_points(task.likelihood, chosen)
    return replace(
        task, x=rows(task.x, chosen), y=task.y[chosen], f=task.f[chosen], likelihood=likelihood
    )


def _gram(part: Task, prior_var: PriorVar) -> Tensor:
    """k(X, X) in float64."""
    count = part.f.numel()
    check_memory(
        4 * 8 * count**2,
        part.f.device,
        f"a Gram matrix of {count} × {count} and its factor",
        "structure=FunctionSpace(num_points=...), Kron() or LastLayer()",
    )
    return part.linearized.kernel(prior_var).precise()(part.x)


def _per_layer(tuning: Tuning | None) -> bool:
    return isinstance(tuning, Evidence) and tuning.per_layer


def by_factors(task: Task) -> tuple[LogDet, Build]:
    """Determinant and posterior of the Kronecker factors of all the data, or of the diagonal without them."""
    source = Source(task.linearized, task.x, task.y, task.likelihood)
    found: KronCurvature | DiagonalCurvature
    try:
        found = kron_curvature(source)
    except NetworkError:
        found = diagonal_curvature(source)

    def build(one: Tuned) -> Posterior:
        prior = expand_prior(one.prior_var, task.params)
        Sigma = covariance(found, prior, task.params, one.scale)
        return around_network(
            task.linearized,
            Sigma,
            one.prior_var,
            one.likelihood,
            (task.x, task.y),
            evidence=one.evidence,
            recipe=ByLaplace(),
        )

    return lambda prior, scale: log_det(found, prior, task.params, scale), build


def _by_pivots(
    part: Task, found: Tuned, kernel: TangentKernel, S: Tensor, system: RowSystem
) -> tuple[Covariance, Tensor]:
    """Σ and the evidence from the rows that tell something; Σ is the prior's if none does."""
    Sigma: Covariance
    if len(system.index):
        Sigma = Pivoted.of(kernel, part.x, S, system)
        log_det = Sigma.log_det() + system.rest()
    else:
        Sigma = DiagonalCovariance(prior_vector(kernel.prior_var, part.params).double())
        log_det = system.rest()
    return Sigma, _evidence(part, found, kernel, log_det)


def _by_rows(part: Task, found: Tuned, K: Tensor, curvature: Tensor) -> tuple[Covariance, Tensor]:
    """Σ and the evidence from all rows."""
    kernel = part.linearized.kernel(found.prior_var)
    sites = Sites(torch.zeros_like(part.f), curvature)
    factor = DenseSystem(K).factorize(sites)
    evidence = _evidence(part, found, kernel, factor.cholesky.log_det())
    process = Conditioned(
        kernel=kernel,
        prior_mean=None,
        x=part.x,
        num_outputs=part.f.shape[1],
        alpha=torch.zeros_like(part.f).reshape(-1, 1),
        factor=factor,
        sites=sites,
        gram=K,
    )
    return ConditionedCovariance(process), evidence


def _evidence(part: Task, found: Tuned, kernel: TangentKernel, log_det: Tensor) -> Tensor:
    """Laplace's evidence on the points that are used."""
    noise = None
    if part.open_noise:
        noise = torch.as_tensor(found.likelihood.noise_var, dtype=torch.float64)  # type: ignore[attr-defined]
    distance = sum(
        float((value.double().square() / kernel.prior_var[name].double()).sum())
        for name, value in part.params.items()
    )
    return part.log_likelihood(noise) - 0.5 * distance - 0.5 * log_det
