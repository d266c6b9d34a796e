"""A posterior solved in function space: through the Gram matrix of the training points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Protocol, cast

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import check_batch, chunks, num_rows, rows
from net2gp.likelihoods.laws import gaussian_law
from net2gp.linalg import Cholesky, block_matmul, kron_identity
from net2gp.linear.jacobians.tangent import Kept, TangentKernel
from net2gp.posteriors.problem import check_points, predictive, prior_mean, process_facts
from net2gp.posteriors.samples import FunctionSamples, check_count, draw_from
from net2gp.posteriors.solvers import CG, Inference, Solver
from net2gp.posteriors.systems import CurvatureFactor, IterativeFactor, Sites
from net2gp.show import as_html, as_text
from net2gp.types import Data, FeatureKernel, Inputs, Kernel, Likelihood, Mean, Outcome, Own

if TYPE_CHECKING:
    from net2gp.posteriors.dual import Dual

TEST_BYTES = 2**28
"""What the cross-covariances of one chunk of test points may take."""


class Factor(Protocol):
    """The inverse of K + Λ⁻¹, as an operator."""

    def solve(self, v: Tensor) -> Tensor:
        """(K + Λ⁻¹)⁻¹ v."""


@dataclass(frozen=True, eq=False)
class NoiseFactor:
    """(K + D)⁻¹ from a Cholesky factor of K + D, for Gaussian noise with covariance D."""

    cholesky: Cholesky

    def solve(self, v: Tensor) -> Tensor:
        """(K + D)⁻¹ v."""
        return self.cholesky.solve(v)

    def root(self, v: Tensor) -> Tensor:
        """R with RᵀR = vᵀ (K + D)⁻¹ v."""
        return self.cholesky.half_solve(v)


@dataclass(frozen=True, eq=False)
class SpectralFactor:
    """(scale·QΛQᵀ + noise·I)⁻¹ from an eigendecomposition that serves every scale and noise."""

    Q: Tensor
    eigenvalues: Tensor  # of the whole matrix, scale and noise included

    def solve(self, v: Tensor) -> Tensor:
        """(K + noise)⁻¹ v."""
        return self.Q @ ((self.Q.mT @ v) / self.eigenvalues[:, None])

    def root(self, v: Tensor) -> Tensor:
        """R with RᵀR = vᵀ (K + noise)⁻¹ v."""
        return (self.Q.mT @ v) / self.eigenvalues.sqrt()[:, None]


@dataclass(frozen=True, eq=False)
class FunctionPosterior(Generic[Own]):
    """f | y with mean m(x) + k(x, X) α and covariance k(x, x') − k(x, X)(K + Λ⁻¹)⁻¹ k(X, x').

    Everything that a prediction needs is a field, so a second prediction solves nothing:
    `alpha` (rows, columns), `factor` for variances and samples, and for kernels with features
    `weights` = Φ(X)ᵀα, with which the mean at a test point is one forward-mode pass, whatever N is.
    `cache` holds the low-rank root of `Lanczos`: Φ(X)ᵀR (P, t), or R itself for other kernels.

    With a kernel of independent outputs (`kernel.joint` false) rows are points and columns outputs;
    else there is one column and rows run n·C + c.

    Covariances are differences of nearly equal numbers, so they come from the kernel in float64; means
    and results are in the dtype of the kernel.
    """

    kernel: Kernel
    mean: Mean | None = field(repr=False)
    likelihood: Own
    x: Inputs = field(repr=False)
    y: Tensor = field(repr=False)
    num_outputs: int
    alpha: Tensor = field(repr=False)
    factor: Factor = field(repr=False)
    evidence: Tensor
    solver: Solver
    inference: Inference | None = None
    sites: Sites | None = field(default=None, repr=False)
    gram: Tensor | None = field(default=None, repr=False)
    weights: Tensor | None = field(default=None, repr=False)
    cache: Tensor | None = field(default=None, repr=False)
    structure: object = None

    def _facts(self) -> dict[str, str]:
        return process_facts(self)

    __repr__, _repr_html_ = as_text, as_html

    @property
    def prior_var(self) -> Any:
        """The prior variances of a network's parameters by name, for its tangent kernel."""
        return self._tangent("prior_var").prior_var

    def dual(self) -> Dual:
        """The linear model and the Gaussian process that the network at θ* stands for."""
        from net2gp.posteriors.dual import make_dual

        kernel = self._tangent("dual")
        data = (self.x, self.y)
        return make_dual(kernel.linearized, data, self.likelihood, kernel.prior_var)

    def _tangent(self, what: str) -> Any:
        if not hasattr(self.kernel, "linearized"):
            raise InputError(
                f"{what} is of a network's tangent kernel, but the kernel is "
                f"{type(self.kernel).__name__}."
            )
        return self.kernel

    def marginal(self, x: Inputs) -> MultivariateNormal:
        """f(x_n) for each point by itself: batch N, event C.

        Cost for a kernel with features and a `Lanczos` cache: 1 + rank forward-mode passes; else k(x, X)
        and one triangular solve per test row.
        """
        check_points(self.kernel, self.num_outputs, x, self.x)
        means, covariances = [], []
        for part in chunks(x, self._chunk_size()):
            cross, prior = self._with_prior(part)
            means.append(self._mean(part, cross))
            covariances.append(self._blocks(part, cross, prior).to(means[-1].dtype))
        return gaussian_law(torch.cat(means), torch.cat(covariances))

    def joint(self, x: Inputs) -> MultivariateNormal:
        """f at all points together: event N·C, index n·C + c."""
        check_points(self.kernel, self.num_outputs, x, self.x)
        cross = self._cross(x)
        mean = self._mean(x, cross)
        prior = self._precise_kernel(x)
        own = prior.detach().diagonal()
        covariance = prior - self._explained(x, cross, own, lambda a, b: a.mT @ b)
        if not self.kernel.joint:
            covariance = kron_identity(covariance, self.num_outputs)
        covariance = (0.5 * (covariance + covariance.mT)).to(mean.dtype)
        return gaussian_law(mean.reshape(-1), covariance)

    def predict(
        self: FunctionPosterior[Likelihood[Outcome]],
        x: Inputs,
        *,
        likelihood: Likelihood[Outcome] | None = None,
    ) -> Outcome:
        """y(x_n) for each point, f integrated out; `likelihood` replaces the one conditioned with."""
        return predictive(likelihood, self.likelihood).predict(self.marginal(x))

    def sample(
        self, x: Inputs, num_samples: int, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """(S, N, C) values at `x` of functions drawn from the posterior.

        Pathwise for kernels with features; otherwise from the joint law at `x`.
        """
        check_batch(x, self.x)
        if isinstance(self.kernel, FeatureKernel):
            check_points(self.kernel, self.num_outputs, x, self.x)
            return self.sample_functions(num_samples, generator=generator)(x)
        return draw_from(self.joint(x), num_rows(x), num_samples, generator)

    def sample_functions(
        self, num_samples: int, *, generator: torch.Generator | None = None
    ) -> FunctionSamples:
        """Functions drawn from the posterior, which can be evaluated anywhere (Matheron's rule).

        A prior draw Φw₀ is corrected by what it misses of the data:
        w = w₀ + Φ(X)ᵀ(K + Λ⁻¹)⁻¹(ỹ − Φ(X)w₀ − ε).

        Reference: Wilson et al., Pathwise conditioning of Gaussian processes, JMLR 2021.
        """
        check_count(num_samples)
        kernel = self._features("sample_functions")
        draw = lambda rows: torch.randn(
            rows,
            num_samples,
            generator=generator,
            dtype=torch.float64,
            device=self.alpha.device if generator is None else generator.device,
        ).to(self.alpha.device)
        precise, x = self._precise_kernel, self.x
        assert isinstance(precise, FeatureKernel)
        w0 = draw(kernel.num_features)
        missed = self._correction(precise.apply(x, w0), draw(len(self.alpha)))
        weights = w0 + precise.adjoint(x, missed)
        return FunctionSamples(kernel, self.mean, self.num_outputs, weights)

    def log_marginal_likelihood(self) -> Tensor:
        """log p(y): exact for Gaussian noise; Laplace's approximation, or the variational bound."""
        if isinstance(self.solver, CG) and self.solver.num_probes == 0:
            raise InputError(
                "CG(num_probes=0) leaves the evidence out. Pass solver=CG(num_probes=16) to estimate it."
            )
        return self.evidence

    def update(self, data: Data, *, likelihood: Likelihood | None = None) -> FunctionPosterior[Own]:
        """The posterior given more data too, without starting over.

        Gaussian noise with Cholesky: the factor grows by the new rows, O(N²M) instead of O((N+M)³).
        Other likelihoods: Newton continues from the present mode; conjugate gradients from the
        present solution.
        """
        from net2gp.posteriors.condition import extend

        return cast("FunctionPosterior[Own]", extend(self, data, likelihood))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> FunctionPosterior[Own]:
        """The same posterior on another device, or predicting in another dtype (solves stay float64)."""
        from net2gp.posteriors.move import move

        return move(self, device, dtype)

    def centered(self, x: Inputs) -> Tensor:
        """E f(x) − m(x): (N, C); without variances, and so without a solve."""
        return self._centered(x, None)

    @cached_property
    def _precise_kernel(self) -> Kernel:
        return self.kernel.precise()

    @cached_property
    def _kept(self) -> Kept | None:
        """The training points' side of a tangent kernel, where it is small enough to be held."""
        kernel = self._precise_kernel
        return kernel.keep(self.x) if isinstance(kernel, TangentKernel) else None

    def _with_prior(self, x: Inputs) -> tuple[Tensor | None, Tensor]:
        """k(X, x), or nothing as in `_cross`, and k(x_n, x_n) for each point, both in float64."""
        spared = isinstance(self.kernel, FeatureKernel) and self.cache is not None
        if spared or self._kept is None:
            return self._cross(x), self._precise_kernel.blocks(x)
        return self._kept(x)

    def _cross(self, x: Inputs) -> Tensor | None:
        """k(X, x) in float64; nothing where the features spare it."""
        if isinstance(self.kernel, FeatureKernel) and self.cache is not None:
            return None
        return self._precise_kernel(self.x, x)

    def _centered(self, x: Inputs, cross: Tensor | None) -> Tensor:
        if cross is None and self.weights is not None and isinstance(self.kernel, FeatureKernel):
            product = self.kernel.apply(x, self.weights)
        else:
            cross = self._cross(x) if cross is None else cross
            assert cross is not None
            product = (cross.mT @ self.alpha).to(self._dtype(x))
        return product.reshape(num_rows(x), self.num_outputs)

    def _dtype(self, x: Inputs) -> torch.dtype:
        if isinstance(self.kernel, TangentKernel):
            return self.kernel.dtype
        return self.kernel.diag(rows(x, slice(0, 1))).dtype

    def _mean(self, x: Inputs, cross: Tensor | None) -> Tensor:
        centered = self._centered(x, cross)
        return centered if self.mean is None else self.mean(x) + centered

    def _blocks(self, x: Inputs, cross: Tensor | None, prior: Tensor) -> Tensor:
        """Covariance of each point: (N, C, C), float64."""
        C = prior.shape[-1]

        def inner(a: Tensor, b: Tensor) -> Tensor:
            points = (a.shape[0], num_rows(x), C)
            return torch.einsum("rnc,rnd->ncd", a.reshape(points), b.reshape(points))

        own = prior.detach().diagonal(dim1=1, dim2=2).reshape(-1)
        blocks = prior - self._explained(x, cross, own, inner)
        blocks = 0.5 * (blocks + blocks.mT)
        variances = blocks.diagonal(dim1=1, dim2=2)
        blocks = blocks + torch.diag_embed(variances.clamp(min=0.0) - variances)
        if self.num_outputs != C:
            blocks = blocks * torch.eye(self.num_outputs).to(blocks)
        return blocks

    def _explained(
        self,
        x: Inputs,
        cross: Tensor | None,
        prior: Tensor,
        inner: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """inner(R, R) for R with RᵀR = k(x, X)(K + Λ⁻¹)⁻¹k(X, x), of rows with these prior variances."""
        if cross is None:
            assert self.cache is not None
            assert isinstance(self._precise_kernel, FeatureKernel)
            R = self._precise_kernel.apply(x, self.cache).mT
            return inner(R, R)
        if self.cache is not None:
            R = self.cache.mT @ cross
            return inner(R, R)
        if isinstance(self.factor, NoiseFactor | CurvatureFactor | SpectralFactor):
            R = self.factor.root(cross)
            return inner(R, R)
        assert isinstance(self.factor, IterativeFactor)
        return inner(cross, self.factor.solve(cross, prior))

    def _correction(self, prior_draw: Tensor, noise: Tensor) -> Tensor:
        """(K + Λ⁻¹)⁻¹(ỹ − f₀ − ε) for prior draws f₀ and standard normal `noise`, both (rows, S)."""
        f = self.y.new_zeros(num_rows(self.x), self.num_outputs, dtype=torch.float64)
        if self.sites is None:
            deviation = self.likelihood.noise_variance(f).sqrt().reshape(-1, 1)  # type: ignore[attr-defined]
            target = self.y.reshape(-1, 1).to(torch.float64) - prior_mean(
                self.mean, self.x, f
            ).reshape(-1, 1)
            return self.factor.solve(target - prior_draw - deviation * noise)
        return self._site_correction(prior_draw, noise)

    def _site_correction(self, prior_draw: Tensor, noise: Tensor) -> Tensor:
        """As `_correction` with possibly singular Λ: (I + ΛK)⁻¹(b − Λf₀ − Sε), SSᵀ = Λ."""
        assert self.sites is not None
        assert isinstance(self.factor, CurvatureFactor | IterativeFactor)
        b = self.sites.natural.reshape(-1, 1) - block_matmul(self.sites.curvature, prior_draw)
        b = b - block_matmul(self.factor.S, noise)
        if self.gram is not None:
            product = self.gram @ b
        else:
            product = self.kernel.matmul(self.x, self.x, b).to(torch.float64)
        return b - self.factor.solve(product)

    def _features(self, what: str) -> FeatureKernel:
        if not isinstance(self.kernel, FeatureKernel):
            raise InputError(
                f"{what} needs a kernel with features, such as linearize(network).kernel(), but the kernel "
                f"is {type(self.kernel).__name__}. Use posterior.sample(x, num_samples) at fixed points."
            )
        return self.kernel

    def _chunk_size(self) -> int:
        outputs = self.num_outputs if self.kernel.joint else 1
        return max(1, TEST_BYTES // (8 * len(self.alpha) * outputs))

    def replace(self, **changes: object) -> FunctionPosterior[Own]:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]
