"""Functions and networks drawn from a posterior."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from net2gp.errors import check_count
from net2gp.inputs import num_rows
from net2gp.linalg import symmetric_root
from net2gp.linalg.chance import random_normal
from net2gp.linear.forward.evaluation import evaluating
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.posteriors.conditioning.problem import check_points
from net2gp.types import FeatureKernel, Inputs, Mean


@dataclass(frozen=True)
class WeightSamples:
    """Predict with the average of the network itself, not its linearization, over draws of its parameters.

    Away from the mean the network is not linear, and draws from a wide posterior may be poor networks.
    Therefore the linearized prediction is the default.

    Args:
        num_samples: The number of draws.
        seed: The seed of the draws.

    Raises:
        InputError: If `num_samples` is not a positive integer.
    """

    num_samples: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self.num_samples, "num_samples", example=100)


@dataclass(frozen=True, eq=False)
class FunctionSamples:
    """S functions m(x) + Φ(x) w_s, each given by its weights, which can be evaluated at any points.

    Args:
        kernel: The kernel with features Φ.
        mean: The mean function m, or None for zero.
        num_outputs: The number of outputs C.
        weights: The weights w in units of the prior's standard deviations: (P, S).
    """

    kernel: FeatureKernel
    mean: Mean | None = field(repr=False)
    num_outputs: int
    weights: Tensor = field(repr=False)

    def __call__(self, x: Inputs) -> Tensor:
        """Return the values of the functions, at the cost of one forward-mode pass per function.

        Args:
            x: N points.

        Returns:
            The values: (S, N, C).
        """
        if not isinstance(self.kernel, TangentKernel):
            return self._values(x)
        with evaluating(self.kernel.linearized.network):
            return self._values(x)

    def _values(self, x: Inputs) -> Tensor:
        check_points(self.kernel, self.num_outputs, x)
        values = self.kernel.apply(x, self.weights)
        values = values.reshape(num_rows(x), self.num_outputs, -1).permute(2, 0, 1)
        return values if self.mean is None else self.mean(x) + values


def draw_from(
    law: MultivariateNormal, points: int, num_samples: int, generator: torch.Generator | None
) -> Tensor:
    """(S, N, C) draws from a joint law over N·C values, whose covariance may be singular."""
    covariance = law.covariance_matrix.to(torch.float64)
    shape = (len(covariance), num_samples)
    z = random_normal(shape, generator=generator, device=covariance.device)
    draws = law.mean[:, None].to(torch.float64) + symmetric_root(covariance) @ z
    return draws.T.reshape(num_samples, points, -1).to(law.mean.dtype)
