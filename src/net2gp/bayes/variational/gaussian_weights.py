"""Independent Gaussians over the parameters of a network."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from net2gp.bayes.model.prior import NormalPrior, WeightPrior
from net2gp.errors import InputError, check_count, check_positive
from net2gp.inputs import describe
from net2gp.linalg.chance import random_normal
from net2gp.linear.parameters import expand_prior
from net2gp.tags import savable
from net2gp.types import Params


@savable("bayes.GaussianWeights")
@dataclass(frozen=True, eq=False)
class GaussianWeights:
    """The law q(θ) = N(μ, diag σ²) of the parameters of a network.

    Args:
        mean: The means μ, by the parameters' names.
        variance: The variances σ², with the same names and shapes.

    Raises:
        InputError: If the names or shapes differ, or if a variance is not positive.

    >>> q = GaussianWeights({"weight": torch.zeros(1, 2)}, {"weight": torch.full((1, 2), 0.25)})
    >>> q.divergence(NormalPrior(1.0))
    tensor(0.6363)

    Reference: Graves, Practical variational inference for neural networks, NeurIPS 2011.
    """

    mean: Params = field(repr=False)
    variance: Params = field(repr=False)

    def __post_init__(self) -> None:
        for name, part in (("mean", self.mean), ("variance", self.variance)):
            if not isinstance(part, dict) or not all(isinstance(v, Tensor) for v in part.values()):
                raise InputError(f"{name} must be tensors by name, but is {describe(part)}.")
        shapes = [
            {n: tuple(v.shape) for n, v in part.items()} for part in (self.mean, self.variance)
        ]
        if shapes[0] != shapes[1] or not shapes[0]:
            raise InputError(
                f"mean and variance must have the same names and shapes, but have {shapes[0]} and "
                f"{shapes[1]}. Pass a variance for each number of the mean."
            )
        for name, value in self.variance.items():
            check_positive(value, f"the variance of '{name}'")

    def sample(self, num_samples: int, generator: torch.Generator | None = None) -> Params:
        """Draw parameters μ + σε.

        Args:
            num_samples: The number of draws S.
            generator: Makes the draws repeatable. None uses torch's global random state.

        Returns:
            Parameters by name, each with an axis of length S in front. They are differentiable in μ and σ².
        """
        check_count(num_samples, "num_samples")
        return {
            name: mean
            + self.variance[name].sqrt()
            * random_normal(
                (num_samples, *mean.shape),
                generator=generator,
                device=mean.device,
                dtype=mean.dtype,
            )
            for name, mean in self.mean.items()
        }

    def log_prob(self, params: Params) -> Tensor:
        """Compute log q(θ).

        Args:
            params: Parameters by name.

        Returns:
            A scalar.
        """
        parts = [
            ((params[n] - m).square() / v + v.log() + math.log(2 * math.pi)).sum()
            for n, m, v in self._items()
        ]
        return -0.5 * torch.stack(parts).sum()

    def entropy(self) -> Tensor:
        """Compute −E_q log q(θ) = ½ Σ log 2πeσ².

        Returns:
            A scalar.
        """
        parts = [(v.log() + math.log(2 * math.pi * math.e)).sum() for v in self.variance.values()]
        return 0.5 * torch.stack(parts).sum()

    def expected_log_prior(
        self,
        prior: WeightPrior | None,
        *,
        num_samples: int = 1,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Compute E_q log p(θ): in closed form for `NormalPrior`, as an average over draws otherwise.

        Args:
            prior: The prior p(θ), or None for a flat one, for which the result is zero.
            num_samples: The number of draws, where there is no closed form.
            generator: Makes the draws repeatable. None uses torch's global random state.

        Returns:
            A scalar, without bias.
        """
        if prior is None:
            return next(iter(self.mean.values())).new_zeros(())
        if isinstance(prior, NormalPrior):
            wide = expand_prior(prior.variance, self.mean)
            parts = [
                ((m.square() + v) / wide[n] + wide[n].log() + math.log(2 * math.pi)).sum()
                for n, m, v in self._items()
            ]
            return -0.5 * torch.stack(parts).sum()
        draws = self.sample(num_samples, generator)
        each = [prior.log_prob({n: v[s] for n, v in draws.items()}) for s in range(num_samples)]
        return torch.stack(each).mean()

    def divergence(
        self,
        prior: WeightPrior | None,
        *,
        num_samples: int = 1,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Compute KL(q ‖ p) = −H(q) − E_q log p(θ); only the second term may need draws.

        Args:
            prior: The prior p(θ). None is the flat density 1, for which the result may be negative.
            num_samples: The number of draws, where there is no closed form.
            generator: Makes the draws repeatable. None uses torch's global random state.

        Returns:
            A scalar.
        """
        expected = self.expected_log_prior(prior, num_samples=num_samples, generator=generator)
        return -self.entropy() - expected

    def _items(self) -> list[tuple[str, Tensor, Tensor]]:
        return [(name, mean, self.variance[name]) for name, mean in self.mean.items()]

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> GaussianWeights:
        """Move the law.

        Args:
            device: The device; None keeps it.
            dtype: The dtype of floating-point tensors; None keeps it.

        Returns:
            The same law on another device or in another dtype.
        """
        moved = [
            {n: v.to(device=device, dtype=dtype) for n, v in part.items()}
            for part in (self.mean, self.variance)
        ]
        return GaussianWeights(*moved)
