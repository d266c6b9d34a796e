"""A covariance known by draws from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.inputs import num_rows
from net2gp.linear.linearized import Linearized
from net2gp.posteriors.weights.rooted import normal
from net2gp.types import Inputs


@dataclass(frozen=True, eq=False)
class DrawnCovariance:
    """Σ = W Wᵀ / S with S independent draws of θ − θ* as the columns of W (P, S).

    An unbiased estimate of the covariance that they were drawn from: variances have a relative standard
    error of √(2/S). Predictions take S forward-mode passes, and never a Jacobian.
    """

    draws: Tensor

    def pushed(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J(x) W / √S: (N, C, S)."""
        count = self.draws.shape[1]
        root = self.draws.to(linearized.example.dtype) / count**0.5
        return linearized.kernel().apply(x, root).reshape(num_rows(x), -1, count)

    def blocks(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J_n Σ J_nᵀ for each point: (N, C, C)."""
        root = self.pushed(linearized, x)
        return root @ root.mT

    def variances(self, linearized: Linearized, x: Inputs) -> Tensor:
        """The diagonals of the blocks: (N, C)."""
        return self.pushed(linearized, x).square().sum(-1)

    def joint(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J Σ Jᵀ over all points: (N·C, N·C), in float64."""
        root = self.pushed(linearized, x).flatten(0, 1).double()
        return root @ root.mT

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """Draws of N(0, Σ), as random combinations W z / √S of the stored ones: (P, num_samples)."""
        count = self.draws.shape[1]
        return self.draws @ normal(self.draws[0], num_samples, generator) / count**0.5
