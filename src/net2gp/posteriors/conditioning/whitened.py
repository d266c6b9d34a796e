"""A Gaussian process conditioned in weight space: a Gaussian over the parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from net2gp.inputs import chunks
from net2gp.linalg import Cholesky
from net2gp.linalg.chance import random_normal
from net2gp.posteriors.conditioning.problem import check_points, kernel_facts, kernel_variances
from net2gp.posteriors.conditioning.process import contrast_by_blocks, evaluated
from net2gp.posteriors.conditioning.samples import FunctionSamples
from net2gp.posteriors.conditioning.systems import Sites
from net2gp.types import FeatureKernel, Inputs, Mean

TEST_BYTES = 2**28
"""How much memory the features of one chunk of test points may take."""


@dataclass(frozen=True, eq=False)
class Whitened:
    """A process in weight space: f(x) = m(x) + Φ(x) w with w ~ N(weights, A⁻¹), A = I + Φ(X)ᵀΛΦ(X).

    By the matrix inversion lemma it is the same Gaussian process as in function space. Predictions cost P²
    per test row for every N. Weights are in units of the prior's standard deviations, so that their prior is
    N(0, I).

    Args:
        kernel: The kernel with features Φ.
        prior_mean: The prior mean m, or None for zero.
        num_outputs: The number of outputs C.
        weights: The posterior mean of w: (P, 1).
        precision: The Cholesky factor of A.
        sites: The Gaussian sites that stand in for the likelihood, or None for Gaussian noise.

    Reference: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, section 2.1.
    """

    kernel: FeatureKernel
    prior_mean: Mean | None = field(repr=False)
    num_outputs: int
    weights: Tensor = field(repr=False)  # (P, 1)
    precision: Cholesky = field(repr=False)
    sites: Sites | None = field(default=None, repr=False)

    def facts(self) -> dict[str, str]:
        """The kernel and its number of features."""
        return kernel_facts(self.kernel)

    @evaluated
    def check(self, x: Inputs) -> None:
        """Raise unless `x` are points of the kernel with as many outputs as the data."""
        check_points(self.kernel, self.num_outputs, x)

    @evaluated
    def centered(self, x: Inputs) -> Tensor:
        """E f(x) − m(x): (N, C), one forward-mode pass."""
        return self.kernel.apply(x, self.weights).reshape(-1, self.num_outputs)

    @evaluated
    def mean(self, x: Inputs) -> Tensor:
        """E f(x): (N, C), one forward-mode pass in addition to the prior mean."""
        centered = self.centered(x)
        return centered if self.prior_mean is None else self.prior_mean(x) + centered

    @evaluated
    def moments(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean (N, C) and the covariance of each point (N, C, C)."""
        means, covariances = [], []
        for part in chunks(x, self._chunk_size()):
            Phi = self.kernel.features(part)
            N, C, P = Phi.shape
            R = self.precision.half_solve(Phi.reshape(N * C, P).mT).reshape(P, N, C)
            covariances.append(torch.einsum("pnc,pnd->ncd", R, R).to(Phi.dtype))
            means.append(self._mean(part, Phi))
        return torch.cat(means), torch.cat(covariances)

    @evaluated
    def diagonal(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and the variances: (N, C) each."""
        mean, blocks = self.moments(x)
        return mean, blocks.diagonal(dim1=1, dim2=2)

    contrast = contrast_by_blocks

    @evaluated
    def joint(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and the covariance at all points together."""
        Phi = self.kernel.features(x)
        R = self.precision.half_solve(Phi.reshape(-1, Phi.shape[2]).mT)
        return self._mean(x, Phi).reshape(-1), (R.mT @ R).to(Phi.dtype)

    @evaluated
    def prior_variances(self, x: Inputs) -> Tensor:
        """The diagonal of k(x, x): (N, C)."""
        return kernel_variances(self.kernel, self.num_outputs, x)

    @evaluated
    def functions(self, num_samples: int, generator: torch.Generator | None) -> FunctionSamples:
        """Functions drawn from the process, which can be evaluated anywhere: w = mean + L⁻ᵀz."""
        shape, device = (len(self.weights), num_samples), self.weights.device
        z = random_normal(shape, generator=generator, device=device)
        spread = torch.linalg.solve_triangular(self.precision.L.mT, z, upper=True)
        return FunctionSamples(
            self.kernel, self.prior_mean, self.num_outputs, self.weights + spread
        )

    def _mean(self, x: Inputs, features: Tensor) -> Tensor:
        centered = (features.to(torch.float64) @ self.weights)[..., 0].to(features.dtype)
        return centered if self.prior_mean is None else self.prior_mean(x) + centered

    def _chunk_size(self) -> int:
        return max(1, TEST_BYTES // (8 * self.num_outputs * len(self.weights)))
