"""A posterior solved in weight space: a Gaussian over the parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, cast

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from net2gp.inputs import check_batch, chunks
from net2gp.likelihoods.laws import gaussian_law
from net2gp.linalg import Cholesky
from net2gp.posteriors.problem import check_points, predictive, process_facts
from net2gp.posteriors.samples import FunctionSamples, check_count
from net2gp.posteriors.solvers import Inference, WeightCholesky
from net2gp.posteriors.systems import Sites
from net2gp.show import as_html, as_text
from net2gp.types import Data, FeatureKernel, Inputs, Likelihood, Mean, Outcome, Own

TEST_BYTES = 2**28
"""What the features of one chunk of test points may take."""


@dataclass(frozen=True, eq=False)
class WeightPosterior(Generic[Own]):
    """f(x) = m(x) + Φ(x) w with w | y ~ N(weights, A⁻¹), A = I + Φ(X)ᵀΛΦ(X).

    The same Gaussian process as in function space, by the matrix inversion lemma; predictions cost
    P² per test row, whatever N is. Weights are in units of the prior's standard deviations.

    Reference: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, section 2.1.
    """

    kernel: FeatureKernel
    mean: Mean | None = field(repr=False)
    likelihood: Own
    x: Inputs = field(repr=False)
    y: Tensor = field(repr=False)
    num_outputs: int
    weights: Tensor = field(repr=False)  # (P, 1)
    precision: Cholesky = field(repr=False)
    evidence: Tensor
    solver: WeightCholesky
    inference: Inference | None = None
    sites: Sites | None = field(default=None, repr=False)

    def _facts(self) -> dict[str, str]:
        return process_facts(self)

    __repr__, _repr_html_ = as_text, as_html

    def marginal(self, x: Inputs) -> MultivariateNormal:
        """f(x_n) for each point by itself: batch N, event C."""
        check_points(self.kernel, self.num_outputs, x, self.x)
        means, covariances = [], []
        for part in chunks(x, self._chunk_size()):
            Phi = self.kernel.features(part)
            N, C, P = Phi.shape
            R = self.precision.half_solve(Phi.reshape(N * C, P).mT).reshape(P, N, C)
            covariances.append(torch.einsum("pnc,pnd->ncd", R, R).to(Phi.dtype))
            means.append(self._mean(part, Phi))
        return gaussian_law(torch.cat(means), torch.cat(covariances))

    def joint(self, x: Inputs) -> MultivariateNormal:
        """f at all points together: event N·C, index n·C + c."""
        check_points(self.kernel, self.num_outputs, x, self.x)
        Phi = self.kernel.features(x)
        R = self.precision.half_solve(Phi.reshape(-1, Phi.shape[2]).mT)
        return gaussian_law(self._mean(x, Phi).reshape(-1), (R.mT @ R).to(Phi.dtype))

    def predict(
        self: WeightPosterior[Likelihood[Outcome]],
        x: Inputs,
        *,
        likelihood: Likelihood[Outcome] | None = None,
    ) -> Outcome:
        """y(x_n) for each point, f integrated out; `likelihood` replaces the one conditioned with."""
        return predictive(likelihood, self.likelihood).predict(self.marginal(x))

    def sample(
        self, x: Inputs, num_samples: int, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """(S, N, C) values at `x` of functions drawn from the posterior."""
        check_batch(x, self.x)
        return self.sample_functions(num_samples, generator=generator)(x)

    def sample_functions(
        self, num_samples: int, *, generator: torch.Generator | None = None
    ) -> FunctionSamples:
        """Functions drawn from the posterior, which can be evaluated anywhere: w = mean + L⁻ᵀz."""
        check_count(num_samples)
        device = self.weights.device if generator is None else generator.device
        z = torch.randn(
            len(self.weights), num_samples, generator=generator, dtype=torch.float64, device=device
        ).to(self.weights.device)
        spread = torch.linalg.solve_triangular(self.precision.L.mT, z, upper=True)
        return FunctionSamples(self.kernel, self.mean, self.num_outputs, self.weights + spread)

    def log_marginal_likelihood(self) -> Tensor:
        """log p(y): exact for Gaussian noise; Laplace's approximation, or the variational bound."""
        return self.evidence

    def update(self, data: Data, *, likelihood: Likelihood | None = None) -> WeightPosterior[Own]:
        """The posterior given more data too, without starting over.

        Gaussian noise: the new points' precision is added, O(M·P² + P³) whatever N was. Other
        likelihoods: Newton continues from the present mode.
        """
        from net2gp.posteriors.condition import extend_weights

        return cast("WeightPosterior[Own]", extend_weights(self, data, likelihood))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> WeightPosterior[Own]:
        """The same posterior on another device, or predicting in another dtype (solves stay float64)."""
        from net2gp.posteriors.move import move

        return move(self, device, dtype)

    def centered(self, x: Inputs) -> Tensor:
        """E f(x) − m(x): (N, C), one forward-mode pass."""
        return self.kernel.apply(x, self.weights).reshape(-1, self.num_outputs)

    def _mean(self, x: Inputs, features: Tensor) -> Tensor:
        centered = (features.to(torch.float64) @ self.weights)[..., 0].to(features.dtype)
        return centered if self.mean is None else self.mean(x) + centered

    def _chunk_size(self) -> int:
        return max(1, TEST_BYTES // (8 * self.num_outputs * len(self.weights)))
