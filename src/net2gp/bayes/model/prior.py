"""What a prior of the parameters of a network is, and the Gaussian one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from net2gp.linalg.chance import random_normal
from net2gp.linear.parameters import PriorVar, expand_prior
from net2gp.tags import savable
from net2gp.types import Params


@runtime_checkable
class WeightPrior(Protocol):
    """A law of all parameters of a network together.

    Priors are frozen dataclasses with a `@savable` tag, so that posteriors with them can be saved.
    """

    def check(self, params: Params) -> None:
        """Raise unless the prior covers these parameters.

        Args:
            params: Parameters by name.

        Raises:
            InputError: If a parameter has no law, or a law has no parameter.
        """

    def log_prob(self, params: Params) -> Tensor:
        """Compute the log density; it can be differentiated and vectorized by torch.func.

        Args:
            params: Parameters by name.

        Returns:
            log p(θ), a scalar.
        """

    def sample(
        self, params: Params, num_samples: int, generator: torch.Generator | None = None
    ) -> Params:
        """Draw parameters.

        Args:
            params: Parameters by name, for their shapes, dtype and device.
            num_samples: The number of draws S.
            generator: Makes the draws repeatable. None uses torch's global random state.

        Returns:
            Parameters by name, each with an axis of length S in front.
        """


@savable("bayes.NormalPrior")
@dataclass(frozen=True)
class NormalPrior:
    """Independent Gaussians N(0, v) for all parameters, with a variance for each pattern of names.

    Args:
        variance: One variance for all parameters, or a dict of variances by name pattern; the last pattern
            that matches a parameter counts. {"*": 1.0, "*.bias": 0.1} gives biases their own.

    >>> prior = NormalPrior({"*": 1.0, "*.bias": 0.25})
    >>> prior.log_prob({"0.weight": torch.zeros(1, 1), "0.bias": torch.zeros(1)})
    tensor(-1.1447)

    Reference: MacKay, A practical Bayesian framework for backpropagation networks, Neural Computation 1992.
    """

    variance: PriorVar = 1.0

    def check(self, params: Params) -> None:
        """Raise unless every parameter has a variance."""
        expand_prior(self.variance, params)

    def log_prob(self, params: Params) -> Tensor:
        """Σ −½ θ²/v − ½ log 2πv."""
        parts = []
        for name, variance in expand_prior(self.variance, params).items():
            value = params[name]
            squares = (value.square() / variance).sum()
            logs = (variance.log() + math.log(2 * math.pi)).expand(value.shape).sum()
            parts.append(-0.5 * (squares + logs))
        return torch.stack(parts).sum()

    def sample(
        self, params: Params, num_samples: int, generator: torch.Generator | None = None
    ) -> Params:
        """Draws √v ε."""
        return {
            name: variance.sqrt()
            * random_normal(
                (num_samples, *params[name].shape),
                generator=generator,
                device=params[name].device,
            ).to(params[name].dtype)
            for name, variance in expand_prior(self.variance, params).items()
        }
