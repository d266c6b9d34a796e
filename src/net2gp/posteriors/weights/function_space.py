"""`FunctionSpace()`: the Gaussian process around the network, over all parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from net2gp.errors import InputError, check_count, check_positive
from net2gp.likelihoods.traits import is_classifier
from net2gp.linalg import block_matmul, psd_root, symmetric_eigen
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.linear.linearized import Linearized, PriorVar
from net2gp.memory import check_memory
from net2gp.posteriors.conditioning.conditioned import Conditioned
from net2gp.posteriors.conditioning.systems import DenseSystem, Sites
from net2gp.posteriors.weights.covariance import Covariance
from net2gp.posteriors.weights.diagonal import DiagonalCovariance
from net2gp.posteriors.weights.kron import factors
from net2gp.posteriors.weights.pivoted import Pivoted, row_system
from net2gp.posteriors.weights.structure import (
    Curvature,
    Solved,
    Structure,
    Traits,
    common_variance,
    prior_vector,
    shown,
)
from net2gp.posteriors.weights.tasks.task import Task
from net2gp.tags import savable
from net2gp.types import Inputs, Params

SPECTRUM_ROWS = 3000
"""Rows up to which the prior is tuned on the eigenvalues of the Gram matrix; beyond, on Kronecker factors."""

CLASSIFIER_TOL, EXACT_ROWS = 1e-2, 1000
"""What may be missed of a classifier's data, and the number of rows up to which nothing is."""

TRACE_POINTS, TRACE_PROBES = 200, 16
"""Points that the trace is estimated from, and outputs up to which it is exact at a point."""


@savable("structures.FunctionSpace")
@dataclass(frozen=True)
class FunctionSpace(Structure):
    """The Gaussian process itself, over all parameters: a system of N·C rows.

    f(x; θ*) + GP(0, k) is conditioned on the curvature Λ of the likelihood at the data, with k = J
    diag(prior_var) Jᵀ. It takes a Gram matrix of N·C rows and its Cholesky factor, (N·C)³/3 operations.

    A classifier is sure of most of its data, which then say little. With `tol` rows of the Gram matrix are
    left out as long as the precision that they would add is, in every direction of the parameters, at most
    about `tol` of what there is (a few Lanczos steps look for the direction). With n rows whose variance is
    above it and r pivots among them it takes n·r entries of the Gram matrix and 2nr² operations, a fraction
    of the time. Variances are right to about `tol` of themselves (digits, 64-256-256-10, 500 points: .1 %,
    .4 % at most), in the worst case to 2√tol.

    Args:
        num_points: Condition on a random subset of that many points of the data; None takes all points.
        seed: The seed of that choice.
        tol: What may be missed of the precision, as a share; with 0 all rows are kept. None means 0.01 for
            classifiers with more than 1000 rows, else 0; the `structure` of the posterior says which.

    Raises:
        InputError: `num_points` is not a whole number of at least 1, or `tol` is negative or no number.

    Reference: Immer, Korzepa, Bauer, Improving predictions of Bayesian neural nets via local linearization,
    AISTATS 2021.
    """

    num_points: int | None = None
    seed: int = 0
    tol: float | None = None

    def __post_init__(self) -> None:
        if self.num_points is not None:
            check_count(self.num_points, "num_points", example=500)
        if self.tol is not None:
            if isinstance(self.tol, bool) or not isinstance(self.tol, int | float):
                raise InputError(
                    f"tol must be a number, but is {shown(self.tol)}. Pass for example tol=0.001."
                )
            check_positive(self.tol, "tol", zero=True)

    def curvature(self, task: Task) -> RowCurvature:
        """Nothing is computed yet: a prior and a search say what is needed."""
        size, part = self.num_points, task
        if size is not None and size < task.sums.count:
            part = task.some(size, self.seed)
        part = part.whole(
            "FunctionSpace()",
            "structure=FunctionSpace(num_points=1000), which takes some of them, Kron(), LastLayer(), "
            "Diagonal(), LowRank() or Sampled()",
        )
        tol = self.tol
        if tol is None:
            many = is_classifier(part.likelihood) and part.f.numel() > EXACT_ROWS
            tol = CLASSIFIER_TOL if many else 0.0
        return RowCurvature(part, task, self, tol)

    def traits(self) -> Traits:
        """All of the covariance, exactly; one prior variance for all parameters while it is tuned."""
        return Traits(whole=True, exact=True, any_prior=False, passes=2)


@dataclass(frozen=True, eq=False)
class RowCurvature(Curvature):
    """Σ_n J_nᵀ Λ_n J_n by the rows of the data: by the pivots among them, or by all.

    `task` has the points that are conditioned on, and `whole` all points.
    """

    whole: Task
    structure: FunctionSpace
    tol: float

    @cached_property
    def Lam(self) -> Tensor:
        """Λ at the data, (N, C, C), in float64: of a sure class float32 keeps no digit of 1 − p."""
        return self.task.likelihood.curvature(self.task.f.double())

    @cached_property
    def gram(self) -> Tensor:
        """k(X, X) at the prior that was given, else at prior variance 1."""
        return self._kernel_matrix(1.0 if self.task.prior_var is None else self.task.prior_var)

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """The eigenvalues of SᵀKS = QΛQᵀ over all rows, and KSQ.

        Of all rows: one that says little may say much at a wider prior.
        """
        S = psd_root(self.Lam).to(self.gram)
        sides = block_matmul(S.mT, self.gram)
        values, Q = symmetric_eigen(block_matmul(S.mT, sides.mT))
        return values.clamp(min=0), sides.mT @ Q

    def log_det(self, prior: Params, scale: float | Tensor) -> Tensor:
        """log|I + scale·ΛK|, by the eigenvalues of the Gram matrix."""
        one = common_variance(prior) if self.task.prior_var is None else 1.0
        assert one is not None
        return torch.log1p(scale * one * self.spectrum[0]).sum()

    def trace(self) -> float:
        """tr Σ_n J_nᵀ Λ_n J_n over all points, from some of them."""
        return sampled_trace(self.whole)

    def searched(self, *, per_layer: bool, literal: bool) -> Curvature:
        """Kronecker factors of all points, where each prior would take a factorization of many rows."""
        few = self.task is self.whole and self.task.f.numel() <= SPECTRUM_ROWS
        if self.task.prior_var is not None or (few and not per_layer):
            return self
        return factors(self.whole)

    def at_data(self, prior_var: PriorVar, scale: float, index: Tensor) -> Tensor | None:
        """K − KS(I/scale + SᵀKS)⁻¹SᵀK: (n, C, C), if a search has found the spectrum."""
        if "spectrum" not in vars(self):
            return None
        one = 1.0 if self.task.prior_var is not None else prior_var
        assert isinstance(one, float)
        N, C = self.task.f.shape
        values, sides = self.spectrum
        sides = sides.reshape(N, C, -1)[index]
        blocks = self.gram.reshape(N, C, N, C)[index, :, index]
        return one * (blocks - (sides / (1 / (scale * one) + values)) @ sides.mT)

    def solved(self, prior_var: PriorVar, scale: float) -> Solved:
        """Σ and the evidence by the pivots, or by all rows where pivots are not asked for or no gain."""
        task, kernel = self.task, self.task.linearized.kernel(prior_var)
        Lam = self.Lam * scale
        found = self._by_pivots(kernel, prior_var, Lam) if self.tol > 0 else None
        used = self.structure if self.tol == 0 else replace(self.structure, tol=self.tol)
        if found is None:
            found = self._by_rows(kernel, self._gram_at(prior_var), Lam)
            used = self.structure if self.tol == 0 else replace(self.structure, tol=0.0)
        Sigma, log_det = found
        evidence = self.evidence(kernel.prior_var, task.noise(scale), scale, log_det)
        return Solved(Sigma, evidence, used)

    def _by_pivots(
        self, kernel: TangentKernel, prior_var: PriorVar, Lam: Tensor
    ) -> tuple[Covariance, Tensor] | None:
        """Σ and its determinant from the rows that say something; Σ is the prior's if none does."""
        S = psd_root(Lam, symmetric=False)
        known = isinstance(prior_var, float) and "gram" in vars(self)  # of the tuning
        gram = self._gram_at(prior_var) if known else None
        system = row_system(kernel, self.task.x, S, self.tol, gram)
        if system is None:
            return None
        if len(system.index):
            Sigma = Pivoted.of(kernel, self.task.x, S, system)
            return Sigma, Sigma.log_det() + system.rest()
        prior = prior_vector(kernel.prior_var, self.task.params)
        return DiagonalCovariance(prior), system.rest()

    def _by_rows(self, kernel: TangentKernel, K: Tensor, Lam: Tensor) -> tuple[Covariance, Tensor]:
        """Σ and its determinant from all rows."""
        f = self.task.f
        sites = Sites(torch.zeros_like(f), Lam)
        factor = DenseSystem(K).factorize(sites)
        process = Conditioned(
            kernel=kernel,
            prior_mean=None,
            x=self.task.x,
            num_outputs=f.shape[1],
            alpha=torch.zeros_like(f).reshape(-1, 1),
            factor=factor,
            sites=sites,
            gram=K,
        )
        return ConditionedCovariance(process), factor.cholesky.log_det()

    def _gram_at(self, prior_var: PriorVar) -> Tensor:
        """k(X, X) at what was chosen."""
        if self.task.prior_var is not None:
            return self.gram
        if isinstance(prior_var, float):
            return self.gram * prior_var
        return self._kernel_matrix(prior_var)

    def _kernel_matrix(self, prior_var: PriorVar) -> Tensor:
        """k(X, X) in float64."""
        count = self.task.f.numel()
        check_memory(
            4 * 8 * count**2,
            self.task.f.device,
            f"a Gram matrix of {count} × {count} and its factor",
            "structure=FunctionSpace(num_points=...), Kron() or LastLayer()",
        )
        return self.task.linearized.kernel(prior_var).precise()(self.task.x)


def sampled_trace(task: Task) -> float:
    """tr Σ_n J_nᵀ Λ_n J_n, from some of the points.

    With many outputs as E‖Σ_n J_nᵀ S_n z_n‖², SSᵀ = Λ, of standard normal z (Hutchinson 1990): a backward
    pass for each of a few z in place of one for each output.
    """
    some, outputs = task.some(TRACE_POINTS), task.sums.num_outputs
    part, Lam = some.x, some.likelihood.curvature(some.f)
    if outputs <= TRACE_PROBES:
        total = float((task.linearized.kernel().blocks(part).double() * Lam).sum())
    else:
        generator = torch.Generator().manual_seed(0)
        z = torch.randn(len(Lam), outputs, TRACE_PROBES, generator=generator)
        seeds = (psd_root(Lam) @ z.to(Lam.device).double()).flatten(0, 1)
        pulled = task.linearized.kernel().adjoint(part, seeds)
        total = float(pulled.double().square().sum()) / TRACE_PROBES
    return total * task.sums.count / len(Lam)


@savable("covariances.ConditionedCovariance")
@dataclass(frozen=True, eq=False)
class ConditionedCovariance(Covariance):
    """Σ = V − VJᵀ(JVJᵀ + Λ⁻¹)⁻¹JV, with J and Λ of the training points: all of it, without (P, P) numbers.

    `process` is the Gaussian process with the tangent kernel, conditioned on sites that leave its mean at
    zero: its covariance is J Σ Jᵀ, and the weights of its draws are draws of θ − θ*.

    Reference: Immer, Korzepa, Bauer, Improving predictions of Bayesian neural nets via local linearization,
    AISTATS 2021.
    """

    process: Conditioned

    def blocks(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J_n Σ J_nᵀ for each point: (N, C, C)."""
        return self.process.moments(x)[1]

    def variances(self, linearized: Linearized, x: Inputs) -> Tensor:
        """The diagonals of the blocks: (N, C)."""
        return self.process.diagonal(x)[1]

    def joint(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J Σ Jᵀ over all points: (N·C, N·C)."""
        return self.process.joint(x)[1]

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """By Matheron's rule: (P, S)."""
        kernel = self.process.kernel
        assert isinstance(kernel, TangentKernel)
        weights = self.process.functions(num_samples, generator).weights
        return prior_vector(kernel.prior_var, kernel.linearized.params).sqrt()[:, None] * weights
