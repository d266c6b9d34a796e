"""Priors of independent parameters with sparser or heavier laws than the Gaussian."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.bayes.model.mixing import Exponential, InverseGamma
from net2gp.bayes.model.prior import divided, positive_variances, sum_of_logs, variances_of
from net2gp.errors import check_positive
from net2gp.linalg.chance import random_normal
from net2gp.linear.parameters import PriorVar
from net2gp.tags import savable
from net2gp.types import Params


@savable("bayes.LaplacePrior")
@dataclass(frozen=True)
class LaplacePrior:
    """Independent Laplace laws with the density e^{−|θ|/b}/(2b), where the variance is 2b².

    The log density has a kink at zero, so that many parameters of a maximum a posteriori estimate are
    exactly zero: it is the penalty Σ |θ|/b of the lasso.

    Args:
        variance: 2b², one for all parameters, or a dict by name pattern; the last match counts.

    >>> LaplacePrior(2.0).log_prob({"weight": torch.ones(1)}).exp()
    tensor(0.1839)

    Reference: Williams, Bayesian regularization and pruning using a Laplace prior, Neural Computation 1995.
    """

    variance: PriorVar = 1.0

    def check(self, params: Params) -> None:
        """Raise unless every parameter has a positive variance."""
        positive_variances(self.variance, params)

    def log_prob(self, params: Params) -> Tensor:
        """Σ −|θ|/b − log 2b."""
        parts = []
        for name, variance in variances_of(self.variance, params).items():
            value = params[name]
            logs = 0.5 * (sum_of_logs(variance, value) + value.numel() * math.log(2.0))
            parts.append(-divided(value.abs(), (0.5 * variance) ** 0.5) - logs)
        return torch.stack(parts).sum()

    def sample(
        self, params: Params, num_samples: int, generator: torch.Generator | None = None
    ) -> Params:
        """Gaussians whose variances have an exponential law with the mean 2b²."""
        drawn = {}
        for name, variance in variances_of(self.variance, params).items():
            value = params[name]
            shape = (num_samples, *value.shape)
            mixed = Exponential(1.0).sample(shape, generator, value.device)
            normal = random_normal(shape, generator=generator, device=value.device)
            drawn[name] = variance**0.5 * (mixed.sqrt() * normal).to(value.dtype)
        return drawn


@savable("bayes.StudentTPrior")
@dataclass(frozen=True)
class StudentTPrior:
    """Independent Student laws s·t_ν: the tails of θ fall as |θ|^{−ν−1}.

    The variance is s² ν/(ν − 2) for ν > 2 and infinite below. With ν = 1 it is Cauchy's law, for which wide
    networks do not become Gaussian processes.

    Args:
        scale_var: s², one for all parameters, or a dict by name pattern; the last match counts.
        degrees_of_freedom: ν > 0.

    Raises:
        InputError: If ν is not positive.

    >>> StudentTPrior(1.0, degrees_of_freedom=5.0).log_prob({"weight": torch.ones(1)}).exp()
    tensor(0.2197)

    Reference: Fortuin et al., Bayesian neural network priors revisited, ICLR 2022.
    """

    scale_var: PriorVar = 1.0
    degrees_of_freedom: float = 4.0

    def __post_init__(self) -> None:
        check_positive(self.degrees_of_freedom, "degrees_of_freedom", single=True)

    def check(self, params: Params) -> None:
        """Raise unless every parameter has a positive scale."""
        positive_variances(self.scale_var, params, "scale_var")

    def log_prob(self, params: Params) -> Tensor:
        """Σ const − ½ (ν + 1) log(1 + θ²/(ν s²))."""
        half, parts = 0.5 * self.degrees_of_freedom, []
        constant = math.lgamma(half + 0.5) - math.lgamma(half) - 0.5 * math.log(2 * math.pi * half)
        for name, scale_var in variances_of(self.scale_var, params).items():
            value = params[name]
            logs = (value.square() / (2 * half * scale_var)).log1p().sum()
            total = value.numel() * constant - 0.5 * sum_of_logs(scale_var, value)
            parts.append(total - (half + 0.5) * logs)
        return torch.stack(parts).sum()

    def sample(
        self, params: Params, num_samples: int, generator: torch.Generator | None = None
    ) -> Params:
        """Gaussians whose variances have an inverse-gamma law."""
        half, drawn = 0.5 * self.degrees_of_freedom, {}
        for name, scale_var in variances_of(self.scale_var, params).items():
            value = params[name]
            shape = (num_samples, *value.shape)
            mixed = InverseGamma(half, half).sample(shape, generator, value.device)
            normal = random_normal(shape, generator=generator, device=value.device)
            drawn[name] = scale_var**0.5 * (mixed.sqrt() * normal).to(value.dtype)
        return drawn
