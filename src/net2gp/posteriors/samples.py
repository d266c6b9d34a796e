"""Functions drawn from a posterior."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import num_rows
from net2gp.linalg import symmetric_root
from net2gp.posteriors.problem import check_points
from net2gp.types import FeatureKernel, Inputs, Mean


@dataclass(frozen=True, eq=False)
class FunctionSamples:
    """S functions m(x) + Φ(x) w_s, each given by its weights: evaluate them anywhere, in any order.

    `weights` is (P, S), in units of the prior's standard deviations.
    """

    kernel: FeatureKernel
    mean: Mean | None = field(repr=False)
    num_outputs: int
    weights: Tensor = field(repr=False)

    def __call__(self, x: Inputs) -> Tensor:
        """The functions' values at `x`: (S, N, C), one forward-mode pass each."""
        check_points(self.kernel, self.num_outputs, x)
        values = self.kernel.apply(x, self.weights)
        values = values.reshape(num_rows(x), self.num_outputs, -1).permute(2, 0, 1)
        return values if self.mean is None else self.mean(x) + values


def check_count(num_samples: int) -> None:
    """Raise unless `num_samples` is a positive whole number."""
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
        raise InputError(f"num_samples must be a positive whole number, but is {num_samples!r}.")


def draw_from(
    law: MultivariateNormal, points: int, num_samples: int, generator: torch.Generator | None
) -> Tensor:
    """(S, N, C) draws from a joint law over N·C values, degenerate ones too."""
    check_count(num_samples)
    covariance = law.covariance_matrix.to(torch.float64)
    device = covariance.device if generator is None else generator.device
    z = torch.randn(
        len(covariance), num_samples, generator=generator, dtype=torch.float64, device=device
    ).to(covariance.device)
    draws = law.mean[:, None].to(torch.float64) + symmetric_root(covariance) @ z
    return draws.T.reshape(num_samples, points, -1).to(law.mean.dtype)
