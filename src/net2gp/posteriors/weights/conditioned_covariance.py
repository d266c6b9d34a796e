"""The covariance of parameters that the data determine through a Gaussian process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.linear.linearized import Linearized
from net2gp.posteriors.conditioning.conditioned import Conditioned
from net2gp.posteriors.weights.precision import prior_vector
from net2gp.types import Inputs


@dataclass(frozen=True, eq=False)
class ConditionedCovariance:
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
