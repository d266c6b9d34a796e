"""A Gaussian process conditioned in function space: through the Gram matrix of the training points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from net2gp.errors import NotAvailable
from net2gp.inputs import chunks, num_rows
from net2gp.kernels.base import BaseKernel, Kept, dtype_of
from net2gp.linalg import Cholesky, block_matmul, kron_identity
from net2gp.linalg.chance import random_normal
from net2gp.posteriors.conditioning.large.pathwise import PathwiseVariances
from net2gp.posteriors.conditioning.problem import check_points, kernel_facts, kernel_variances
from net2gp.posteriors.conditioning.process import contrast_by_blocks, evaluated
from net2gp.posteriors.conditioning.samples import FunctionSamples
from net2gp.posteriors.conditioning.systems import CurvatureFactor, IterativeFactor, Sites
from net2gp.types import FeatureKernel, Inputs, Kernel, Mean

TEST_BYTES = 2**28
"""How much memory the cross-covariances of one chunk of test points may take."""


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
    """(scale·QΛQᵀ + noise·I)⁻¹ from an eigendecomposition, which is the same for every scale and noise."""

    Q: Tensor
    eigenvalues: Tensor  # of the whole matrix, scale and noise included

    def solve(self, v: Tensor) -> Tensor:
        """(K + noise)⁻¹ v."""
        return self.Q @ ((self.Q.mT @ v) / self.eigenvalues[:, None])

    def root(self, v: Tensor) -> Tensor:
        """R with RᵀR = vᵀ (K + noise)⁻¹ v."""
        return (self.Q.mT @ v) / self.eigenvalues.sqrt()[:, None]


@dataclass(frozen=True)
class Refusal:
    """In place of (K + Λ⁻¹)⁻¹ where a solver keeps nothing to multiply with it.

    Args:
        reason: Why, and what to use instead.
    """

    reason: str

    def solve(self, v: Tensor, prior: Tensor | None = None) -> Tensor:
        """Raise, and say why."""
        raise NotAvailable(f"{self.reason}.")


@dataclass(frozen=True, eq=False)
class Conditioned:
    """A process with mean m(x) + k(x, X) α and covariance k(x, x') − k(x, X)(K + Λ⁻¹)⁻¹ k(X, x').

    Everything that a prediction needs is a field, so a second prediction solves nothing. If the kernel treats
    outputs as independent copies, rows are points and columns are outputs;
    otherwise there is one column, and output c of point n is row n·C + c. Covariances are differences of
    nearly equal numbers, so they come from the kernel in float64; means and results have the dtype of the
    kernel.

    Args:
        kernel: The prior covariance.
        prior_mean: The prior mean m, or None for zero.
        x: The training points X.
        num_outputs: The number of outputs C.
        alpha: The dual vector α: (rows, columns).
        factor: The inverse of K + Λ⁻¹, for variances and samples.
        noise: The variance of Gaussian noise of each row, whose inverse is Λ; None if there are sites.
        sites: The Gaussian sites that stand in for the likelihood and hold Λ; None for Gaussian noise.
        gram: The Gram matrix K, if it was kept so that `update` can extend it.
        weights: Φ(X)ᵀα for kernels with features: the mean is one forward-mode pass with it, for every N.
        cache: The low-rank root R of `Lanczos`: Φ(X)ᵀR (P, t) for kernels with features, else R itself.
        draws: The drawn functions of `Pathwise`, from which variances are estimated.
    """

    kernel: Kernel
    prior_mean: Mean | None = field(repr=False)
    x: Inputs = field(repr=False)
    num_outputs: int
    alpha: Tensor = field(repr=False)
    factor: Factor = field(repr=False)
    noise: Tensor | None = field(default=None, repr=False)
    sites: Sites | None = field(default=None, repr=False)
    gram: Tensor | None = field(default=None, repr=False)
    weights: Tensor | None = field(default=None, repr=False)
    cache: Tensor | None = field(default=None, repr=False)
    draws: PathwiseVariances | None = field(default=None, repr=False)

    @property
    def rows_per_point(self) -> int:
        """How many rows belong to a training point: C, or 1 if the outputs share them."""
        return self.num_outputs // self.alpha.shape[1]

    def facts(self) -> dict[str, str]:
        """The kernel and its number of features."""
        return kernel_facts(self.kernel)

    @evaluated
    def check(self, x: Inputs) -> None:
        """Raise unless `x` are points of the kernel with as many outputs as the data."""
        check_points(self.kernel, self.num_outputs, x)

    @evaluated
    def centered(self, x: Inputs) -> Tensor:
        """E f(x) − m(x): (N, C), without variances and therefore without a solve."""
        if self.weights is not None:
            return self._centered(x, None)
        return torch.cat([self._centered(part, None) for part in chunks(x, self._chunk_size())])

    @evaluated
    def mean(self, x: Inputs) -> Tensor:
        """E f(x): one forward-mode pass for a kernel with features, else k(x, X)."""
        centered = self.centered(x)
        return centered if self.prior_mean is None else self.prior_mean(x) + centered

    @evaluated
    def moments(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean (N, C) and the covariance of each point (N, C, C).

        Cost for a kernel with features and a `Lanczos` cache: 1 + rank forward-mode passes; else k(x, X)
        and one triangular solve per test row.
        """
        means, covariances = [], []
        for part in chunks(x, self._chunk_size()):
            cross, prior = self._with_prior(part)
            means.append(self._mean(part, cross))
            covariances.append(self._blocks(part, cross, prior))
        return torch.cat(means), torch.cat(covariances)

    @evaluated
    def diagonal(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and the variances: (N, C) each."""
        mean, blocks = self.moments(x)
        return mean, blocks.diagonal(dim1=1, dim2=2).to(mean.dtype)

    contrast = contrast_by_blocks

    @evaluated
    def joint(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and the covariance at all points together."""
        cross = self._cross(x)
        mean = self._mean(x, cross)
        if self.draws is not None:
            count = num_rows(x) * self.rows_per_point
            covariance = self.draws.covariance(self._precise_kernel, x, cross, count)[0]
        else:
            prior = self._precise_kernel(x)
            own = prior.detach().diagonal()
            covariance = prior - self._explained(x, cross, own, lambda a, b: a.mT @ b)
        if self.rows_per_point < self.num_outputs:
            covariance = kron_identity(covariance, self.num_outputs)
        covariance = (0.5 * (covariance + covariance.mT)).to(mean.dtype)
        return mean.reshape(-1), covariance

    @evaluated
    def prior_variances(self, x: Inputs) -> Tensor:
        """The diagonal of k(x, x): (N, C)."""
        return kernel_variances(self.kernel, self.num_outputs, x)

    @evaluated
    def functions(self, num_samples: int, generator: torch.Generator | None) -> FunctionSamples:
        """Functions drawn from the process by Matheron's rule, which can be evaluated at any points.

        A prior draw Φw₀ is corrected by its error at the data:
        w = w₀ + Φ(X)ᵀ(K + Λ⁻¹)⁻¹(ỹ − Φ(X)w₀ − ε).

        Reference: Wilson et al., Pathwise conditioning of Gaussian processes, JMLR 2021.
        """
        kernel = self._features()
        device = self.alpha.device
        draw = lambda rows: random_normal((rows, num_samples), generator=generator, device=device)
        precise = self._precise_kernel
        assert isinstance(precise, FeatureKernel)
        w0 = draw(kernel.num_features)
        missed = self._correction(precise.apply(self.x, w0), draw(len(self.alpha)))
        weights = w0 + precise.adjoint(self.x, missed)
        return FunctionSamples(kernel, self.prior_mean, self.num_outputs, weights)

    @cached_property
    def _precise_kernel(self) -> Kernel:
        return self.kernel.precise()

    @cached_property
    def _kept(self) -> Kept | None:
        """What the kernel keeps of the training points, if that is small enough."""
        kernel = self._precise_kernel
        return kernel.keep(self.x) if isinstance(kernel, BaseKernel) else None

    @property
    def _spared(self) -> bool:
        """Whether no prediction needs k(X, x), as with a kernel with features and a cache."""
        cached = self.cache is not None or self.draws is not None
        return isinstance(self.kernel, FeatureKernel) and cached

    def _with_prior(self, x: Inputs) -> tuple[Tensor | None, Tensor]:
        """k(X, x), or None as in `_cross`, and k(x_n, x_n) for each point, both in float64."""
        if self._spared or self._kept is None:
            return self._cross(x), self._precise_kernel.blocks(x)
        return self._kept(x)

    def _cross(self, x: Inputs) -> Tensor | None:
        """k(X, x) in float64, or None if a cache in feature space makes it unnecessary."""
        return None if self._spared else self._precise_kernel(self.x, x)

    def _centered(self, x: Inputs, cross: Tensor | None) -> Tensor:
        if cross is None and self.weights is not None and isinstance(self.kernel, FeatureKernel):
            product = self.kernel.apply(x, self.weights)
        else:
            cross = self._cross(x) if cross is None else cross
            assert cross is not None
            product = (cross.mT @ self.alpha).to(self._dtype(x))
        return product.reshape(num_rows(x), self.num_outputs)

    def _dtype(self, x: Inputs) -> torch.dtype:
        return dtype_of(self.kernel, x)

    def _mean(self, x: Inputs, cross: Tensor | None) -> Tensor:
        centered = self._centered(x, cross)
        return centered if self.prior_mean is None else self.prior_mean(x) + centered

    def _blocks(self, x: Inputs, cross: Tensor | None, prior: Tensor) -> Tensor:
        """The covariance of the outputs at each point: (N, C, C), float64."""
        C = prior.shape[-1]

        def inner(a: Tensor, b: Tensor) -> Tensor:
            points = (a.shape[0], num_rows(x), C)
            return torch.einsum("rnc,rnd->ncd", a.reshape(points), b.reshape(points))

        if self.draws is not None:
            blocks = self.draws.covariance(self._precise_kernel, x, cross, C)
        else:
            own = prior.detach().diagonal(dim1=1, dim2=2).reshape(-1)
            blocks = prior - self._explained(x, cross, own, inner)
        # Rounding leaves the difference slightly asymmetric, and may leave tiny variances negative.
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
        """inner(R, R) for R with RᵀR = k(x, X)(K + Λ⁻¹)⁻¹k(X, x), the variance that the data explain.

        `prior` are the prior variances of the rows of x, from which an iterative solve knows its accuracy.
        """
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
        assert isinstance(self.factor, IterativeFactor | Refusal)
        return inner(cross, self.factor.solve(cross, prior))

    def _correction(self, prior_draw: Tensor, noise: Tensor) -> Tensor:
        """(K + Λ⁻¹)⁻¹(ỹ − f₀ − ε) for prior draws f₀ and standard normal `noise`, both (rows, S)."""
        if self.sites is not None:
            return self._site_correction(self.sites, prior_draw, noise)
        assert self.noise is not None
        # (K + Λ⁻¹)⁻¹ỹ is α, so only the draw and its noise are left to solve for
        return self.alpha - self.factor.solve(prior_draw + self.noise.sqrt()[:, None] * noise)

    def _site_correction(self, sites: Sites, prior_draw: Tensor, noise: Tensor) -> Tensor:
        """`_correction` for a Λ that may be singular: (I + ΛK)⁻¹(b − Λf₀ − Sε) with SSᵀ = Λ."""
        assert isinstance(self.factor, CurvatureFactor | IterativeFactor)
        b = sites.natural.reshape(-1, 1) - block_matmul(sites.curvature, prior_draw)
        b = b - block_matmul(self.factor.S, noise)
        if self.gram is not None:
            product = self.gram @ b
        else:
            product = self.kernel.matmul(self.x, self.x, b).to(torch.float64)
        return b - self.factor.solve(product)

    def _features(self) -> FeatureKernel:
        if not isinstance(self.kernel, FeatureKernel):
            raise NotAvailable(
                "sample_functions needs a kernel with features, such as linearize(network).kernel(), but the "
                f"kernel is {type(self.kernel).__name__}. Use posterior.sample(x, num_samples) at fixed "
                "points."
            )
        return self.kernel

    def _chunk_size(self) -> int:
        return max(1, TEST_BYTES // (8 * len(self.alpha) * self.rows_per_point))
