"""Dropout as variational inference: mixtures of two Gaussians over the weights of each unit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from net2gp.bayes.model.model import Batch, Model, checked_data
from net2gp.bayes.model.prior import FlatPrior, NormalPrior
from net2gp.errors import InputError, check_count, check_generator, check_positive
from net2gp.inputs import describe, num_rows
from net2gp.linalg.chance import random_normal
from net2gp.linear.parameters import expand_prior
from net2gp.tags import savable
from net2gp.types import Params

REACH, STEPS = 12.0, 32
"""Quadrature runs this many deviations to both sides of a center, with this many nodes per deviation."""


class Estimate(NamedTuple):
    """An average over independent draws.

    Args:
        value: The average, a scalar.
        error: Its standard error, a scalar.
    """

    value: Tensor
    error: Tensor


@savable("bayes.DropoutMixture")
@dataclass(frozen=True, eq=False)
class DropoutMixture:
    """The law that dropout gives to the weights w of each unit: q(w) = (1 − p) N(w; m, σ²) + p N(w; 0, σ²).

    The weights of a unit are dropped together, and units are independent.

    Args:
        mean: The weights m of the units that are kept, of any shape.
        variance: The variance σ² of all weights, a positive number.
        drop: The probability p that a unit is dropped, less than 1.
        axis: The axis of `mean` that counts units: for the weight of a linear layer 0 for its output units
            (rows) and 1 for its input units (columns).

    Raises:
        InputError: If `mean` is no tensor with this axis, or a number is out of range.

    >>> q = DropoutMixture(torch.tensor([1.2], dtype=torch.float64), variance=0.25, drop=0.3)
    >>> round(float(q.divergence(1.0)), 9)
    0.454667439

    Reference: Gal and Ghahramani, Dropout as a Bayesian approximation, ICML 2016.
    """

    mean: Tensor = field(repr=False)
    variance: float
    drop: float
    axis: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.mean, Tensor) or not 0 <= self.axis < self.mean.dim():
            raise InputError(
                f"mean must be a tensor whose axis {self.axis} counts units, but is {describe(self.mean)}."
            )
        check_positive(self.variance, "variance", single=True)
        if not isinstance(self.drop, int | float) or not 0 <= self.drop < 1:
            raise InputError(
                f"drop must be at least 0 and less than 1, but is {self.drop!r}. Pass for example 0.1."
            )

    def sample(self, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw weights.

        Args:
            num_samples: The number of draws S.
            generator: Makes the draws repeatable. None uses torch's global random state.

        Returns:
            The weights: (S, *mean.shape).
        """
        check_count(num_samples, "num_samples")
        mean, device = self._units(self.mean), self.mean.device
        shape = (num_samples, *mean.shape)
        noise = random_normal(shape, generator=generator, device=device, dtype=mean.dtype)
        source = generator.device if generator is not None else device
        kept = torch.rand(shape[:-1], generator=generator, device=source).to(device) >= self.drop
        draws = kept[..., None] * mean + math.sqrt(self.variance) * noise
        first = self.mean.movedim(self.axis, 0).shape
        return draws.reshape(num_samples, *first).movedim(1, self.axis + 1)

    def log_prob(self, weights: Tensor) -> Tensor:
        """Compute log q(w) of all units together.

        Args:
            weights: Weights of the shape of `mean`, with any axes in front.

        Returns:
            The log density, with the axes in front.
        """
        lead = weights.shape[: weights.dim() - self.mean.dim()]
        units = self._units(weights.reshape(-1, *self.mean.shape), 1)
        kept = (units - self._units(self.mean)).square().sum(-1)
        gone = units.square().sum(-1)
        constant = 0.5 * units.shape[-1] * math.log(2 * math.pi * self.variance)
        both = self._mixed(kept, gone) - constant
        return both.sum(-1).reshape(lead)

    def _mixed(self, kept: Tensor, gone: Tensor) -> Tensor:
        """log[(1 − p) exp(−kept/2σ²) + p exp(−gone/2σ²)] for squared distances to both centers."""
        if self.drop == 0:
            return -0.5 * kept / self.variance
        return torch.logaddexp(
            math.log1p(-self.drop) - 0.5 * kept / self.variance,
            math.log(self.drop) - 0.5 * gone / self.variance,
        )

    def divergence(self, prior_var: float = 1.0) -> Tensor:
        """Compute KL(q ‖ N(0, prior_var)) by quadrature, to about 1e-10.

        The mixture of a unit differs from a Gaussian only along m, so the integral is over one number per
        unit; in the other directions the divergence is that of two Gaussians.

        Args:
            prior_var: The variance of the prior, the same for all weights.

        Returns:
            A scalar, differentiable in `mean`.
        """
        check_positive(prior_var, "prior_var", single=True)
        mean = self._units(self.mean).to(torch.float64)
        count, ratio = mean.shape[1], self.variance / prior_var
        length = torch.linalg.vector_norm(mean, dim=1)[:, None]
        across = 0.5 * (count - 1) * (ratio - 1 - math.log(ratio))
        standard = torch.linspace(
            -REACH, REACH, int(2 * REACH * STEPS) + 1, dtype=torch.float64, device=mean.device
        )
        weight = torch.exp(-0.5 * standard.square()) / math.sqrt(2 * math.pi) / STEPS
        along = torch.zeros_like(length[:, 0])
        for share, center in ((1 - self.drop, length), (self.drop, 0 * length)):
            place = center + math.sqrt(self.variance) * standard
            log_q = self._mixed((place - length).square(), place.square())
            log_ratio = log_q - 0.5 * math.log(ratio) + 0.5 * place.square() / prior_var
            along = along + share * (log_ratio * weight).sum(-1)
        return (along + across).sum().to(self.mean.dtype)

    def drawn_divergence(
        self,
        prior_var: float = 1.0,
        *,
        num_samples: int = 1000,
        generator: torch.Generator | None = None,
    ) -> Estimate:
        """Estimate KL(q ‖ N(0, prior_var)) as the average of log q(w) − log p(w) over draws from q.

        Args:
            prior_var: The variance of the prior, the same for all weights.
            num_samples: The number of draws.
            generator: Makes the draws repeatable. None uses torch's global random state.

        Returns:
            The average and its standard error.
        """
        check_positive(prior_var, "prior_var", single=True)
        draws = self.sample(num_samples, generator)
        squares = draws.square().flatten(1).sum(-1)
        constant = 0.5 * self.mean.numel() * math.log(2 * math.pi * prior_var)
        return _averaged(self.log_prob(draws) + 0.5 * squares / prior_var + constant)

    def _units(self, value: Tensor, lead: int = 0) -> Tensor:
        """Move the units to the front and flatten the weights of each: (…, units, weights)."""
        return value.movedim(self.axis + lead, lead).reshape(
            *value.shape[:lead], self.mean.shape[self.axis], -1
        )


def dropout_elbo(
    mixtures: Mapping[str, DropoutMixture],
    model: Model,
    batch: Batch,
    *,
    num_samples: int = 100,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Estimate the bound E_q log p(y | θ) − KL(q ‖ p) ≤ log p(y) that training with dropout maximizes.

    The likelihood is averaged over draws of all weights. KL(q ‖ p) is by quadrature if the prior of each
    parameter is a Gaussian with one variance, and by the same draws otherwise. A batch of B of the model's
    N points counts N/B times.

    Args:
        mixtures: The law of each parameter of the model, by name.
        model: The network, prior and likelihood, with the temperature 1.
        batch: Inputs and targets.
        num_samples: The number of draws.
        generator: Makes the draws repeatable. None uses torch's global random state.

    Returns:
        The bound and its standard error.

    Raises:
        InputError: If a parameter has no mixture of its shape, or if the model has no prior or another
            temperature.

    >>> from torch import nn
    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.ones(1, 1)
    >>> model = Model.of(nn.Linear(1, 1, bias=False), Gaussian(noise_var=1.0))
    >>> bound = dropout_elbo({"weight": DropoutMixture(x, 0.1, 0.5)}, model, (x, x))
    >>> bool(bound.value < -1.5155)  # log N(1; 0, 2)
    True

    Reference: Gal and Ghahramani, Dropout as a Bayesian approximation, ICML 2016.
    """
    check_count(num_samples, "num_samples")
    check_generator(generator)
    if not isinstance(model, Model) or not isinstance(mixtures, Mapping):
        raise InputError(
            "dropout_elbo takes a dict of mixtures, a Model and a batch, but got "
            f"{describe(mixtures)} and {describe(model)}."
        )
    if not all(isinstance(one, DropoutMixture) for one in mixtures.values()):
        raise InputError(f"mixtures must be of DropoutMixture, but are {describe(mixtures)}.")
    batch = checked_data(model, batch)
    shapes = {name: tuple(value.shape) for name, value in model.params.items()}
    given = {name: tuple(one.mean.shape) for name, one in mixtures.items()}
    if shapes != given:
        raise InputError(
            f"there must be a mixture for each parameter, of its shape: {shapes}, but there are {given}."
        )
    if model.prior is None or isinstance(model.prior, FlatPrior) or model.temperature != 1:
        raise InputError(
            "the bound is for a model with a prior and the temperature 1. Pass Model.of(network, "
            "likelihood, prior=1.0)."
        )
    draws = {name: one.sample(num_samples, generator) for name, one in mixtures.items()}
    share = 1.0 if model.num_data is None else model.num_data / num_rows(batch[0])
    each: list[Params] = [{n: v[s] for n, v in draws.items()} for s in range(num_samples)]
    fitted = share * torch.stack([model.log_likelihood(one, batch) for one in each])
    exact = _exact_divergence(mixtures, model)
    if exact is not None:
        value, error = _averaged(fitted)
        return Estimate(value - exact, error)
    priors = torch.stack([model.log_prior(one) for one in each])
    own = torch.stack([one.log_prob(draws[name]) for name, one in mixtures.items()]).sum(0)
    return _averaged(fitted + priors - own)


def _exact_divergence(mixtures: Mapping[str, DropoutMixture], model: Model) -> Tensor | None:
    if not isinstance(model.prior, NormalPrior):
        return None
    wide = expand_prior(model.prior.variance, model.params)
    if any(value.dim() for value in wide.values()):
        return None
    parts = [one.divergence(float(wide[name])) for name, one in mixtures.items()]
    return torch.stack(parts).sum()


def _averaged(values: Tensor) -> Estimate:
    return Estimate(values.mean(), values.std() / math.sqrt(len(values)))
