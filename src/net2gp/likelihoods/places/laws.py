"""Laws of targets at places: laws of rows, in the shape of the places."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution

from net2gp.likelihoods.laws import gaussian_law


def by_place(law: Distribution, shape: torch.Size) -> Distribution:
    """A law of N·P rows as a law of N points with their places.

    Args:
        law: A law whose first batch axis counts rows.
        shape: (N, places), the shape that takes the place of this axis.

    Returns:
        The law in the new shape, of its own class where it is Gaussian or of labels.

    >>> by_place(Categorical(torch.ones(6, 2)), torch.Size([3, 2])).probs.shape
    torch.Size([3, 2, 2])
    """
    if isinstance(law, MultivariateNormal):
        covariance = law.covariance_matrix
        wide = covariance.reshape(*shape, *covariance.shape[1:])
        return gaussian_law(law.mean.reshape(*shape, -1), wide)
    if type(law) in (Categorical, Bernoulli):
        kind: Any = type(law)
        return kind(logits=law.logits.reshape(*shape, -1))  # type: ignore[attr-defined]
    return ByPlace(law, shape)


class ByPlace(Distribution):
    """A law of rows whose first axis is shown as points and places.

    Args:
        law: The law of N·P rows.
        shape: (N, places).
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, law: Distribution, shape: torch.Size) -> None:
        self.law, self.places = law, shape
        batch = torch.Size([*shape, *law.batch_shape[1:]])
        super().__init__(batch, law.event_shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        """The mean of each target."""
        return self._wide(self.law.mean)

    @property
    def variance(self) -> Tensor:
        """The variance of each target."""
        return self._wide(self.law.variance)

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(y) at each place."""
        lead = value.shape[: value.dim() - len(self.batch_shape) - len(self.event_shape)]
        rows = value.reshape(*lead, *self.law.batch_shape, *self.event_shape)
        return self.law.log_prob(rows).reshape(*lead, *self.batch_shape)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw y."""
        return self.law.sample(sample_shape).reshape(
            *sample_shape, *self.batch_shape, *self.event_shape
        )

    def entropy(self) -> Tensor:
        """The entropy of each place, if the law has one."""
        return self.law.entropy().reshape(self.batch_shape)

    def _wide(self, rows: Tensor) -> Tensor:
        return rows.reshape(*self.places, *rows.shape[1:])
