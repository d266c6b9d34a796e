"""Gaussian sites in function and in weight space: the linear algebra that inference iterates on.

A site stands in for the likelihood of one point: exp(bᵀf − ½ fᵀΛf), where f is measured from the prior
mean. With f ~ N(0, K), K = ΦΦᵀ, the posterior mean is f = Kα = Φw, where

    α = (I + ΛK)⁻¹ b          (function space)
    w = (I + ΦᵀΛΦ)⁻¹ Φᵀb      (weight space)

Neither needs Λ⁻¹, so Λ may be singular, as softmax's diag(p) − ppᵀ is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from net2gp.errors import InputError, NotConverged, trying, warn
from net2gp.linalg import Cholesky, block_cg, block_matmul, cholesky, log_det_quadrature, psd_root
from net2gp.linalg.cg import Solution, transposed_root
from net2gp.linalg.large import FactorPlusIdentity, RoundedCholesky, refined_cg
from net2gp.linalg.low_rank import LowRankPlusIdentity
from net2gp.progress import progress
from net2gp.types import Inputs, Kernel

LowRank = LowRankPlusIdentity | FactorPlusIdentity
Approximation = LowRank | RoundedCholesky
"""A preconditioner with its log-determinant."""


@dataclass(frozen=True, eq=False)
class Sites:
    """One site exp(bᵀf − ½ fᵀΛf) per point.

    Args:
        natural: b: (N, C).
        curvature: Λ: (N, C, C), positive semi-definite except in `System.step`.
        root: An S with SSᵀ = Λ, (N, C, C), if one is known. Gradients flow through it; a root that has to be
            computed from Λ is a constant.
    """

    natural: Tensor
    curvature: Tensor
    root: Tensor | None = None


@dataclass(frozen=True, eq=False)
class State:
    """A Gaussian over f at the training points, as a system solved it.

    Args:
        f: The mean minus the prior mean: (N, C).
        dual: α (N·C, 1) in function space, or w (P, 1) in weight space.
        quadratic: fᵀK⁻¹f = αᵀKα = wᵀw.
        log_det: log|I + ΛK|.
        factor: What was factorized, for covariances; None after `System.step`.
    """

    f: Tensor
    dual: Tensor
    quadratic: Tensor
    log_det: Tensor
    factor: object


class System(Protocol):
    """A prior over f at the training points that sites can be combined with."""

    def solve(self, sites: Sites, near: Tensor | None = None) -> State:
        """The posterior under the sites; `near` is an f close to its mean, for iterative solvers."""

    def step(self, sites: Sites) -> State | None:
        """The stationary point under sites that may be indefinite, without a factor; None if unavailable."""

    def covariances(self, state: State) -> Tensor:
        """The posterior covariance of each training point: (N, C, C)."""

    def log_det(self, curvature: Tensor) -> Tensor:
        """log|I + ΛK|, differentiable in both."""

    def quadratic(self, f: Tensor, dual: Tensor) -> Tensor:
        """fᵀK⁻¹f, where `dual` is the α or w that gives f."""


@dataclass(frozen=True, eq=False)
class CurvatureFactor:
    """(K + Λ⁻¹)⁻¹ = S (I + SᵀKS)⁻¹ Sᵀ with Λ = SSᵀ, from a Cholesky factor of the inner matrix."""

    cholesky: Cholesky
    S: Tensor

    def solve(self, v: Tensor) -> Tensor:
        """(K + Λ⁻¹)⁻¹ v."""
        return block_matmul(self.S, self.cholesky.solve(block_matmul(self.S.mT, v)))

    def root(self, v: Tensor) -> Tensor:
        """R with RᵀR = vᵀ (K + Λ⁻¹)⁻¹ v."""
        return self.cholesky.half_solve(block_matmul(self.S.mT, v))

    def inner(self, v: Tensor) -> Tensor:
        """(I + SᵀKS) v."""
        return self.cholesky.L @ (self.cholesky.L.mT @ v)


@dataclass(frozen=True, eq=False)
class DenseSystem:
    """Function space with the Gram matrix K: (N·C, N·C) in memory."""

    K: Tensor

    def solve(self, sites: Sites, near: Tensor | None = None) -> State:
        """α = b − S (I + SᵀKS)⁻¹ Sᵀ K b (Rasmussen and Williams 2006, eq. 3.27)."""
        N, C = sites.natural.shape
        b = sites.natural.reshape(N * C, 1)
        factor = self.factorize(sites)
        alpha = b - factor.solve(self.K @ b)
        f = self.K @ alpha
        return State(f.reshape(N, C), alpha, (f * alpha).sum(), factor.cholesky.log_det(), factor)

    def step(self, sites: Sites) -> State:
        """α = (I + ΛK)⁻¹ b by LU."""
        N, C = sites.natural.shape
        inner = self._shifted(sites.curvature)
        alpha = torch.linalg.solve(inner, sites.natural.reshape(N * C, 1))
        f = self.K @ alpha
        return State(f.reshape(N, C), alpha, (f * alpha).sum(), inner.new_zeros(()), None)

    def factorize(self, sites: Sites) -> CurvatureFactor:
        """The Cholesky factor of I + SᵀKS, whose eigenvalues are at least one."""
        # A root has no derivative where Λ is singular, so gradients only flow through a root that is given.
        S = psd_root(sites.curvature.detach()) if sites.root is None else sites.root
        inner = block_matmul(S.mT, block_matmul(S.mT, self.K).mT)
        inner.diagonal().add_(1.0)
        return CurvatureFactor(cholesky(inner, what="I + SᵀKS"), S)

    def covariances(self, state: State) -> Tensor:
        """K_nn − K_n: (K + Λ⁻¹)⁻¹ K_:n for each point."""
        assert isinstance(state.factor, CurvatureFactor)
        N, C = state.f.shape
        R = state.factor.root(self.K).reshape(N * C, N, C)
        prior = self.K.reshape(N, C, N, C).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        return prior - torch.einsum("rnc,rnd->ncd", R, R)

    def log_det(self, curvature: Tensor) -> Tensor:
        """log|I + ΛK| by LU, which needs no root of Λ and so can be differentiated at a singular Λ."""
        return torch.linalg.slogdet(self._shifted(curvature)).logabsdet

    def _shifted(self, curvature: Tensor) -> Tensor:
        """I + ΛK."""
        inner = block_matmul(curvature, self.K)
        inner.diagonal().add_(1.0)
        return inner

    def quadratic(self, f: Tensor, dual: Tensor) -> Tensor:
        """fᵀα."""
        return (f.reshape(-1, 1) * dual).sum()


@dataclass(frozen=True, eq=False)
class FeatureSystem:
    """Weight space with the features Φ: (N, C, P) of the training points in memory."""

    features: Tensor

    def solve(self, sites: Sites, near: Tensor | None = None) -> State:
        """w = A⁻¹ Φᵀ b with A = I + ΦᵀΛΦ."""
        factor = self.factorize(sites.curvature)
        b = torch.einsum("ncp,nc->p", self.features, sites.natural)[:, None]
        w = factor.solve(b)
        f = (self.features @ w)[..., 0]
        return State(f, w, (w * w).sum(), factor.log_det(), factor)

    def step(self, sites: Sites) -> State:
        """w = (I + ΦᵀΛΦ)⁻¹ Φᵀ b by LU."""
        b = torch.einsum("ncp,nc->p", self.features, sites.natural)[:, None]
        w = torch.linalg.solve(precision(self.features, sites.curvature), b)
        f = (self.features @ w)[..., 0]
        return State(f, w, (w * w).sum(), w.new_zeros(()), None)

    def factorize(self, curvature: Tensor) -> Cholesky:
        """The Cholesky factor of I + ΦᵀΛΦ, the precision of the whitened weights."""
        return cholesky(precision(self.features, curvature), what="I + ΦᵀΛΦ")

    def covariances(self, state: State) -> Tensor:
        """Φ_n A⁻¹ Φ_nᵀ for each point."""
        assert isinstance(state.factor, Cholesky)
        N, C, P = self.features.shape
        R = state.factor.half_solve(self.features.reshape(N * C, P).mT).reshape(P, N, C)
        return torch.einsum("pnc,pnd->ncd", R, R)

    def log_det(self, curvature: Tensor) -> Tensor:
        """log|I + ΦᵀΛΦ| = log|I + ΛK|."""
        return self.factorize(curvature).log_det()

    def quadratic(self, f: Tensor, dual: Tensor) -> Tensor:
        """wᵀw."""
        return (dual * dual).sum()


def precision(features: Tensor, curvature: Tensor) -> Tensor:
    """I + Σ_n Φ_nᵀ Λ_n Φ_n: (P, P)."""
    P = features.shape[2]
    weighted = (curvature @ features).reshape(-1, P)
    A = features.reshape(-1, P).mT @ weighted
    return 0.5 * (A + A.mT) + torch.eye(P, dtype=A.dtype, device=A.device)


@dataclass(frozen=True, eq=False)
class GramProduct:
    """The map v ↦ k(X, X) v in the kernel's dtype, with a stored Gram matrix or without one."""

    kernel: Kernel
    x: Inputs
    gram: Tensor | None

    def __call__(self, v: Tensor) -> Tensor:
        """k(X, X) v."""
        if self.gram is not None:
            return self.gram @ v.to(self.gram.dtype)
        return self.kernel.matmul(self.x, self.x, v)


@dataclass(frozen=True, eq=False)
class IterativeFactor:
    """(K + Λ⁻¹)⁻¹ = S (I + SᵀKS)⁻¹ Sᵀ by conjugate gradients on products with K."""

    matmul: GramProduct
    S: Tensor
    preconditioner: Approximation | None
    tol: float
    max_iterations: int

    def inner(self, v: Tensor) -> Tensor:
        """(I + SᵀKS) v in the dtype of the kernel, from which the solver knows its rounding error."""
        product = self.matmul(block_matmul(self.S, v))
        return (v + block_matmul(self.S.mT, product.to(self.S.dtype))).to(product.dtype)

    def inner_solve(self, v: Tensor, start: Tensor | None = None) -> Tensor:
        """(I + SᵀKS)⁻¹ v."""
        return self._iterate(v, start, self.tol).x

    def _iterate(self, v: Tensor, start: Tensor | None, tol: float) -> Solution:
        with progress("conjugate gradients", self.max_iterations) as advance:
            rounded = isinstance(self.preconditioner, RoundedCholesky)
            run: Any = refined_cg if rounded else block_cg
            return run(
                self.inner,
                v,
                preconditioner=self.preconditioner,
                x0=start,
                tol=tol,
                max_iterations=self.max_iterations,
                on_step=lambda _, residual: advance(note=f"residual {residual:.1e}"),
            )

    def solve(self, v: Tensor, prior: Tensor | None = None) -> Tensor:
        """(K + Λ⁻¹)⁻¹ v, differentiable in v; each derivative takes one more solve.

        If the prior variances `prior` (k,) of the k columns are given, the solve continues until each
        variance prior − vᵀ(K + Λ⁻¹)⁻¹v is accurate to the relative error `SHARE`.
        """
        if torch.is_grad_enabled() and v.requires_grad:
            return _Solve.apply(v, self, prior)
        return self.solved(v, prior)[0]

    def solved(self, v: Tensor, prior: Tensor | None) -> tuple[Tensor, float]:
        """`solve`, and the tolerance that it needed.

        With b = Sᵀv, iterations that start at zero make bᵀx too small by rᵀ(I + SᵀKS)⁻¹r ≤ rᵀr, where r is
        the residual. So rᵀr bounds the error of a variance, and shows which residual would be small enough.
        """
        b, tol = block_matmul(self.S.mT, v), self.tol
        if prior is None:
            return block_matmul(self.S, self._iterate(b, None, tol).x), tol
        for attempt in range(ATTEMPTS):
            # A residual above the tolerance does not matter here: `_warn_wide` judges the variances.
            with trying():
                solution = self._iterate(b, None, tol)
            left = (prior - (b * solution.x).sum(0)).clamp(min=0.0)
            missed = (solution.relative_residuals * torch.linalg.vector_norm(b, dim=0)).square()
            allowed = torch.maximum(SHARE * left, ROUNDING * prior)
            worst = float((missed / allowed.clamp(min=1e-300)).max())
            if worst <= 1.0:
                break
            if attempt == ATTEMPTS - 1 or not solution.converged:
                _warn_wide(left, missed, solution)
                break
            # The error of a variance is quadratic in the residual; the factor of a half is a margin.
            tol = max(0.5 * tol * worst**-0.5, SMALLEST_TOL)
        return block_matmul(self.S, solution.x), tol


SHARE, ROUNDING = 0.01, 1e-12
"""The relative error that a variance may have, and the error as a share of the prior variance that rounding
makes unavoidable."""

ATTEMPTS, SMALLEST_TOL = 4, 1e-14
"""How many tolerances a solve for variances tries, and the smallest relative residual that it asks for."""


def _warn_wide(left: Tensor, missed: Tensor, solution: Solution) -> None:
    share = float(torch.where(missed < left, missed / (left - missed), torch.inf).max())
    if share > 10 * SHARE:
        much = f"up to {share:.0%}" if share < 10 else "far"
        residual = float(solution.relative_residuals.max())
        warn(
            f"the variances of these points may be {much} too wide: conjugate gradients stopped at a "
            f"relative residual of {residual:.1e}. Pass CG(store_gram=True) for products in float64, more "
            "max_iterations, a preconditioner of a higher rank, or solver=Cholesky().",
            NotConverged,
        )


class _Solve(torch.autograd.Function):
    """The map v ↦ A⁻¹v of an `IterativeFactor`. Its matrix is symmetric, so the adjoint is the map itself."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, factor: IterativeFactor, prior: Tensor | None) -> Tensor:
        result, tol = factor.solved(v, prior)
        ctx.factor = replace(factor, tol=tol)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.factor.solve(grads[0]), None, None


@dataclass(frozen=True, eq=False)
class MatrixFreeSystem:
    """Function space through products with K alone; the log-determinant is an estimate.

    Args:
        matmul: The product with the Gram matrix.
        precondition: A function from S to a preconditioner of I + SᵀKS, or to None.
        tol: The relative residual of each solve.
        max_iterations: The most iterations of each solve.
        num_probes: The number of probes of the log-determinant, or 0 for none.
        seed: The seed of the probes.
        num_steps: The most Lanczos steps from a probe.
    """

    matmul: GramProduct
    precondition: Callable[[Tensor], Approximation | None]
    tol: float
    max_iterations: int
    num_probes: int
    seed: int
    num_steps: int = 64

    def factor(self, curvature: Tensor) -> IterativeFactor:
        """The inverse of K + Λ⁻¹ as an operator."""
        S = psd_root(curvature)
        return IterativeFactor(self.matmul, S, self.precondition(S), self.tol, self.max_iterations)

    def solve(self, sites: Sites, near: Tensor | None = None) -> State:
        """As in `DenseSystem`, with conjugate gradients as the solver.

        α = b − Sz, where z = (I + SᵀKS)⁻¹SᵀKb = Sᵀf. If an f nearby is known, only a correction of z is left
        to solve for, and the error of the solve is relative to that correction.
        """
        N, C = sites.natural.shape
        b = sites.natural.reshape(N * C, 1)
        factor = self.factor(sites.curvature)
        right = block_matmul(factor.S.mT, self.matmul(b).to(b.dtype))
        if near is None:
            z = factor.inner_solve(right)
        else:
            z = block_matmul(factor.S.mT, near.reshape(N * C, 1))
            z = z + factor.inner_solve(right - factor.inner(z).to(z.dtype))
        alpha = b - block_matmul(factor.S, z)
        f = self.matmul(alpha).to(b.dtype)
        nothing = torch.zeros((), dtype=f.dtype, device=f.device)
        return State(f.reshape(N, C), alpha, (f * alpha).sum(), nothing, factor)

    def step(self, sites: Sites) -> None:
        """None, since conjugate gradients cannot solve an indefinite system."""

    def estimate_log_det(self, factor: IterativeFactor) -> Tensor:
        """log|I + SᵀKS| by stochastic Lanczos quadrature.

        With a preconditioner M, M⁻¹ = RᵀR, it is log|M| + log|R (I + SᵀKS) Rᵀ|: the better M is, the less
        remains to be estimated. It is NaN without probes.
        """
        if self.num_probes == 0:
            return factor.S.new_full((), float("nan"))
        M = factor.preconditioner
        matmul = factor.inner
        if M is not None:
            half = transposed_root(M)
            matmul = lambda v: M.inverse_sqrt(factor.inner(half(v)).to(v.dtype))
        rows = factor.S.shape[0] * factor.S.shape[1]
        estimate, _ = log_det_quadrature(
            matmul,
            rows,
            num_probes=self.num_probes,
            rank=min(self.num_steps, rows),
            generator=torch.Generator(device=factor.S.device).manual_seed(self.seed),
            dtype=torch.float64,
            device=factor.S.device,
        )
        return estimate if M is None else estimate + M.log_det()

    def covariances(self, state: State) -> Tensor:
        """Raise, since every training point would need its own solve."""
        raise InputError(
            "Variational() needs the covariance of every training point, which CG() does not give. "
            "Pass solver=Cholesky() or WeightCholesky(), or inference=Laplace()."
        )

    def log_det(self, curvature: Tensor) -> Tensor:
        """log|I + ΛK|, estimated."""
        return self.estimate_log_det(self.factor(curvature))

    def quadratic(self, f: Tensor, dual: Tensor) -> Tensor:
        """fᵀα."""
        return (f.reshape(-1, 1) * dual).sum()
