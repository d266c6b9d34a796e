"""What a prior of the parameters of a network is, and the Gaussian and the flat one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from net2gp.bayes.model.fan_in import fan_in_variances
from net2gp.errors import InputError, NotAvailable, check_positive
from net2gp.inputs import describe
from net2gp.limits.prior import Variances
from net2gp.linalg.chance import random_normal
from net2gp.linear.linearized import Linearized
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

    @classmethod
    def by_fan_in(
        cls,
        network: nn.Module | Linearized,
        weight_var: Variances = 1.0,
        bias_var: Variances = 1.0,
    ) -> NormalPrior:
        """Weights N(0, weight_var / fan_in) and biases N(0, bias_var): the prior of `nngp` at finite width.

        Args:
            network: The network, whose layers say how many terms each of their outputs sums.
            weight_var: σ_w² for all layers, or a mapping from names of layers, as in `nngp`.
            bias_var: σ_b², likewise.

        Returns:
            The prior, with one variance per parameter of the network.

        Raises:
            InputError: If a parameter is no weight or bias of a layer, or a variance is missing.

        >>> NormalPrior.by_fan_in(nn.Linear(4, 1), weight_var=2.0, bias_var=0.1)
        NormalPrior(variance={'weight': 0.5, 'bias': 0.1})

        Reference: Neal, Bayesian Learning for Neural Networks, 1996, ch. 2.
        """
        return cls(fan_in_variances(network, weight_var, bias_var))

    def check(self, params: Params) -> None:
        """Raise unless every parameter has a positive variance."""
        positive_variances(self.variance, params)

    def log_prob(self, params: Params) -> Tensor:
        """Σ −½ θ²/v − ½ log 2πv."""
        parts = []
        for name, variance in variances_of(self.variance, params).items():
            value = params[name]
            squares = divided(value.square(), variance)
            logs = sum_of_logs(variance, value) + value.numel() * math.log(2 * math.pi)
            parts.append(-0.5 * (squares + logs))
        return torch.stack(parts).sum()

    def sample(
        self, params: Params, num_samples: int, generator: torch.Generator | None = None
    ) -> Params:
        """Draws √v ε."""
        return {
            name: variance**0.5
            * random_normal(
                (num_samples, *params[name].shape),
                generator=generator,
                device=params[name].device,
            ).to(params[name].dtype)
            for name, variance in variances_of(self.variance, params).items()
        }


@savable("bayes.FlatPrior")
@dataclass(frozen=True)
class FlatPrior:
    """The density 1 everywhere, for parameters without weight decay. It is no law, and cannot be drawn from.

    >>> FlatPrior().log_prob({"bias": torch.ones(3)})
    tensor(0.)
    """

    def check(self, params: Params) -> None:
        """Do nothing: every parameter can have it."""

    def log_prob(self, params: Params) -> Tensor:
        """Zero, with a gradient of zero for every parameter."""
        return torch.stack([0 * value.sum() for value in params.values()]).sum()

    def sample(
        self, params: Params, num_samples: int, generator: torch.Generator | None = None
    ) -> Params:
        """Refuse: there is no flat law on all numbers.

        Args:
            params: Parameters by name.
            num_samples: The number of draws.
            generator: It would make the draws repeatable.

        Returns:
            Nothing.

        Raises:
            NotAvailable: Always.
        """
        raise NotAvailable(
            f"a flat prior cannot be drawn from, and {', '.join(params)} has one. Pass a proper prior, for "
            "example prior=1.0."
        )


def as_prior(prior: WeightPrior | float | None, name: str = "prior") -> WeightPrior:
    """Read what a method takes as `prior`.

    Args:
        prior: A prior, the variance of independent Gaussians, or None for a flat prior.
        name: Its name in the messages.

    Returns:
        The prior.

    Raises:
        InputError: If it is none of these.
    """
    if prior is None:
        return FlatPrior()
    if isinstance(prior, int | float) and not isinstance(prior, bool):
        check_positive(prior, name, zero=True)
        return NormalPrior(float(prior))
    if not isinstance(prior, WeightPrior) or isinstance(prior, type):
        raise InputError(
            f"{name} must be a prior of parameters, a variance or None, but is {describe(prior)}. Pass for "
            "example prior=1.0."
        )
    return prior


def variances_of(variance: PriorVar, params: Params) -> dict[str, float | Tensor]:
    """Find the variance of each parameter, as a number where a number was given.

    Chains need it at every step, so numbers stay off the device, and patterns that match nothing are left to
    `expand_prior`, by which priors check themselves once.

    Args:
        variance: One variance, or variances by name pattern; the last match counts.
        params: Parameters by name.

    Returns:
        A number, a scalar tensor or a tensor of the parameter's shape, by name.

    Raises:
        InputError: If a parameter has no variance, or one that is no variance.
    """
    patterns = variance if isinstance(variance, Mapping) else {"*": variance}
    found: dict[str, float | Tensor] = {}
    for name, value in params.items():
        chosen = [pattern for pattern in patterns if fnmatchcase(name, pattern)][-1:]
        one = patterns[chosen[0]] if chosen else None
        if isinstance(one, int | float) and 0 <= one < math.inf:
            found[name] = float(one)
        else:
            given = {} if one is None else {name: one}
            found[name] = expand_prior(given, {name: value}, "variance")[name]
    return found


def sum_of_logs(variance: float | Tensor, value: Tensor) -> float | Tensor:
    """Sum the logarithms of the variances of all entries of a parameter."""
    if not isinstance(variance, Tensor):
        return value.numel() * (math.log(variance) if variance else -math.inf)
    return variance.log().sum() if variance.dim() else value.numel() * variance.log()


def divided(terms: Tensor, variance: float | Tensor) -> Tensor:
    """Divide terms by their variances and add them up."""
    if isinstance(variance, Tensor) and variance.dim():
        return (terms / variance).sum()
    return terms.sum() / variance


def positive_variances(variance: PriorVar, params: Params, argument: str = "variance") -> Params:
    """Expand variances by name pattern, and raise unless all of them are positive.

    Args:
        variance: One variance, or variances by name pattern; the last match counts.
        params: Parameters by name.
        argument: The name of the variance in the messages.

    Returns:
        A scalar tensor or a tensor of the parameter's shape, by name.

    Raises:
        InputError: If a parameter has no variance, or one that is not positive.
    """
    found = expand_prior(variance, params, argument)
    for name, value in found.items():
        if not bool((value > 0).all()):
            raise InputError(
                f"the prior variance of '{name}' is zero, which leaves no density. Give it a positive one, "
                f"or keep the parameter as it is with only=['*', '!{name}']."
            )
    return found
