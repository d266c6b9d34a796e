"""Gaussians with a random variance for each weight, for each layer, or for the whole network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from net2gp.bayes.model.mixing import HalfCauchy, Mixing
from net2gp.bayes.model.prior import divided, positive_variances, sum_of_logs, variances_of
from net2gp.errors import InputError
from net2gp.inputs import describe
from net2gp.linalg.chance import random_normal
from net2gp.linear.parameters import PriorVar
from net2gp.tags import savable
from net2gp.types import Params

Per = Literal["weight", "layer", "network"]
"""Which weights share a variance."""

PER = ("weight", "layer", "network")


@savable("bayes.ScaleMixture")
@dataclass(frozen=True)
class ScaleMixture:
    """Parameters θ_i = √(c_i v) ε_i with ε ~ N(0, 1) and a random variance v.

    With `per="weight"` every entry has a v of its own, and entries are independent with heavy tails. With
    `per="layer"` all parameters of a module share one v, so that whole layers are small or large
    together. With `per="network"` there is one v in all; at infinite width f is then not a Gaussian
    process, but one with a random scale. The log density has v integrated out, in closed form where there
    is one, else by quadrature in log v.

    Args:
        mixing: The law of v: `InverseGamma`, `Exponential`, `Gamma`, `HalfCauchy`, or your own `Mixing`.
        per: Which weights share a variance: "weight", "layer" or "network".
        variance: c, one factor for all parameters, or a dict by name pattern; the last match counts.
            `fan_in_variances` gives one.

    Raises:
        InputError: If `mixing` is no law of a variance, or `per` is another word.

    >>> from net2gp.bayes import InverseGamma
    >>> prior = ScaleMixture(InverseGamma(2.5, 2.5))
    >>> prior.log_prob({"weight": torch.ones(1)}).exp()
    tensor(0.2197)

    Reference: Andrews and Mallows, Scale mixtures of normal distributions, 1974.
    """

    mixing: Mixing
    per: Per = "weight"
    variance: PriorVar = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.mixing, Mixing):
            raise InputError(
                f"mixing must be the law of a variance, but is {describe(self.mixing)}. Pass for example "
                "ScaleMixture(InverseGamma(2.0, 2.0))."
            )
        if not isinstance(self.per, str) or self.per not in PER:
            raise InputError(
                f"per must be 'weight', 'layer' or 'network', but is {self.per!r}. Pass for example "
                "per='layer'."
            )

    def check(self, params: Params) -> None:
        """Raise unless every parameter has a positive factor."""
        positive_variances(self.variance, params)

    def log_prob(self, params: Params) -> Tensor:
        """The sum of the log densities of the groups of weights that share a variance."""
        values = {name: value.double() for name, value in params.items()}
        factors = variances_of(self.variance, values)
        if self.per == "weight":
            scaled = [(v / factors[n] ** 0.5).reshape(-1) for n, v in values.items()]
            parts = [self.mixing.log_prob(torch.cat(scaled)).sum()]
        else:
            parts = []
            for names in self._groups(params):
                squares = [divided(values[n].square(), factors[n]) for n in names]
                count = sum(values[n].numel() for n in names)
                parts.append(self.mixing.log_marginal(torch.stack(squares).sum(), count))
        logs = sum(sum_of_logs(factors[name], value) for name, value in values.items())
        return (torch.stack(parts).sum() - 0.5 * logs).to(next(iter(params.values())).dtype)

    def sample(
        self, params: Params, num_samples: int, generator: torch.Generator | None = None
    ) -> Params:
        """Draws √(c v) ε."""
        factors, drawn = variances_of(self.variance, params), {}
        for names in self._groups(params):
            shared = self.mixing.sample((num_samples,), generator, params[names[0]].device)
            for name in names:
                value = params[name]
                shape = (num_samples, *value.shape)
                if self.per == "weight":
                    mixed = self.mixing.sample(shape, generator, value.device)
                else:
                    mixed = shared.reshape(-1, *[1] * value.dim())
                normal = random_normal(shape, generator=generator, device=value.device)
                drawn[name] = factors[name] ** 0.5 * (mixed.sqrt() * normal).to(value.dtype)
        return {name: drawn[name] for name in params}

    def _groups(self, params: Params) -> Iterator[list[str]]:
        """The names of the parameters that belong together."""
        groups: dict[str, list[str]] = {}
        for name in params:
            groups.setdefault("" if self.per == "network" else name.rpartition(".")[0], []).append(
                name
            )
        yield from groups.values()


@savable("bayes.Horseshoe")
@dataclass(frozen=True)
class Horseshoe:
    """Parameters N(0, c λ²) with half-Cauchy scales λ: a spike at zero and tails that fall as θ^{−2}.

    Small parameters are pulled to zero, and large ones are left as they are. It is
    ScaleMixture(HalfCauchy(), per, variance). The density of a single weight is infinite at zero, so that the
    maximum of a posterior says nothing, and chains that follow gradients need small steps and long warmups;
    start them with start="network", since draws from the prior may be very large.

    Args:
        variance: c = τ², the square of the global scale, one for all parameters, or a dict by name pattern;
            the last match counts.
        per: Which weights share a scale λ: "weight", "layer" or "network".

    Raises:
        InputError: If `per` is another word.

    >>> Horseshoe().log_prob({"weight": torch.ones(1)}).exp()
    tensor(0.1172)

    References: Carvalho, Polson and Scott, The horseshoe estimator for sparse signals, Biometrika 2010;
    Ghosh, Yao and Doshi-Velez, Structured variational learning of Bayesian neural networks with horseshoe
    priors, ICML 2018.
    """

    variance: PriorVar = 1.0
    per: Per = "weight"

    def __post_init__(self) -> None:
        self.mixture()

    def mixture(self) -> ScaleMixture:
        """The same prior as a scale mixture."""
        return ScaleMixture(HalfCauchy(), self.per, self.variance)

    def check(self, params: Params) -> None:
        """Raise unless every parameter has a positive factor."""
        self.mixture().check(params)

    def log_prob(self, params: Params) -> Tensor:
        """The log density with the scales integrated out."""
        return self.mixture().log_prob(params)

    def sample(
        self, params: Params, num_samples: int, generator: torch.Generator | None = None
    ) -> Params:
        """Draws √c λ ε."""
        return self.mixture().sample(params, num_samples, generator)
