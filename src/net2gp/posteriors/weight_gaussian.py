"""A Gaussian over a network's parameters, seen through the network linearized at its mean."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Concatenate, Generic, ParamSpec, TypeVar, cast

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor, nn
from torch.distributions import Distribution

from net2gp.errors import InputError, check_count, check_positive
from net2gp.inputs import check_batch, chunks, describe, follows, num_rows
from net2gp.likelihoods.laws import Contrasts, Variances, gaussian_law
from net2gp.likelihoods.links import Contrast
from net2gp.likelihoods.mixtures import mixture
from net2gp.likelihoods.traits import needs
from net2gp.linear.forward.evaluation import LOCK
from net2gp.linear.linearized import Linearized, PriorVar
from net2gp.posteriors.conditioned import as_covariance
from net2gp.posteriors.covariances import Covariance, ScaledCovariance
from net2gp.posteriors.dual import Dual, make_dual
from net2gp.posteriors.function_space import FunctionPosterior
from net2gp.posteriors.last_layer import LastLayerKron
from net2gp.posteriors.problem import predictive
from net2gp.show import as_html, as_text, likelihood_name, number
from net2gp.types import Inputs, Likelihood, Outcome, Own, Params

BLOCK_NUMBERS = 2**25
"""Numbers of the covariances of one chunk of points."""


@dataclass(frozen=True)
class WeightSamples:
    """Average the network itself, not its linearization, over draws of its parameters.

    Away from the mean the network is not linear, and draws from a wide posterior may be poor networks:
    the linearized prediction is the default.
    """

    num_samples: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self.num_samples, "num_samples", example=100)


@contextlib.contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Within it the network is in eval mode, as it was linearized, even while it is being trained further."""
    with LOCK:
        active = [module for module in network.modules() if module.training]
        for module in active:
            module.training = False
        try:
            yield
        finally:
            for module in active:
                module.training = True


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Owner = TypeVar("Owner", bound="WeightGaussian")
Method = Callable[Concatenate[Owner, Arguments], Result]


def _evaluated(method: Method[Owner, Arguments, Result]) -> Method[Owner, Arguments, Result]:
    @wraps(method)
    def wrapped(self: Owner, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        with evaluating(self.linearized.network):
            return method(self, *arguments, **keywords)

    return wrapped


@dataclass(frozen=True, eq=False)
class WeightGaussian(Generic[Own]):
    """f(x) = f(x; θ*) + J(x)(θ − θ*) with θ ~ N(θ*, Σ).

    The mean is the network's own output, the covariance J Σ Jᵀ. `evidence` is None where the method has
    none; `x` and `y` are the data that it was found with, `structure` says how Σ is represented, and
    `temperature` what their curvature was divided by. A Σ that only function space can hold is given as
    the Gaussian process N(0, J Σ Jᵀ). Training the network further changes nothing here.

    References: Khan et al., Approximate inference turns deep networks into Gaussian processes, NeurIPS
    2019; Immer, Korzepa, Bauer, Improving predictions of Bayesian neural nets via local linearization,
    AISTATS 2021.
    """

    linearized: Linearized
    likelihood: Own
    covariance: Covariance | FunctionPosterior = field(repr=False)
    x: Inputs = field(repr=False)
    y: Tensor = field(repr=False)
    prior_var: PriorVar = field(repr=False)
    evidence: Tensor | None = None
    structure: object = None
    temperature: float = 1.0

    def _facts(self) -> dict[str, str]:
        return {
            "_network": repr(self.linearized),
            "structure": type(self.structure).__name__
            if self.structure is None
            else f"{self.structure}",
            "likelihood": likelihood_name(self.likelihood),
            "prior_var": number(self.prior_var),
            "N": f"{num_rows(self.x)}",
            "C": f"{self.num_outputs}",
            "P": f"{self.linearized.num_params}",
            **({} if self.temperature == 1.0 else {"temperature": number(self.temperature)}),
            "log_evidence": "none" if self.evidence is None else number(self.evidence),
        }

    __repr__, _repr_html_ = as_text, as_html

    @property
    def _sigma(self) -> Covariance:
        return as_covariance(self.covariance)

    @property
    @_evaluated
    def num_outputs(self) -> int:
        """C."""
        return self.linearized(next(iter(chunks(self.x, 1)))).shape[1]

    @_evaluated
    @_evaluated
    def marginal(self, x: Inputs) -> MultivariateNormal:
        """f(x_n) for each point by itself: batch N, event C."""
        check_batch(x, self.x)
        return gaussian_law(self.linearized(x), self._sigma.blocks(self.linearized, x))

    @_evaluated
    def joint(self, x: Inputs) -> MultivariateNormal:
        """f at all points together: event N·C, index n·C + c."""
        check_batch(x, self.x)
        mean = self.linearized(x)
        covariance = self._sigma.joint(self.linearized, x)
        return gaussian_law(mean.reshape(-1), covariance.to(mean.dtype))

    def predict(
        self: WeightGaussian[Likelihood[Outcome]],
        x: Inputs,
        *,
        likelihood: Likelihood[Outcome] | None = None,
        how: WeightSamples | None = None,
    ) -> Outcome:
        """y(x_n) for each point, f integrated out; `how` averages networks instead of linearizing.

        With a `Probit()` or `Contrast()` link the (N, C, C) covariances of f are not kept.
        """
        check_batch(x, self.x)
        chosen = predictive(likelihood, self.likelihood)
        with evaluating(self.linearized.network):
            return cast(Outcome, self._predicted(x, chosen, how))

    def _predicted(self, x: Inputs, chosen: Likelihood, how: WeightSamples | None) -> Distribution:
        if how is not None:
            if not isinstance(how, WeightSamples):
                raise InputError(f"how must be WeightSamples(100) or None, but is {describe(how)}.")
            generator = torch.Generator().manual_seed(how.seed)
            return mixture(
                chosen, self.sample(x, how.num_samples, generator=generator, linear=False)
            )
        needed = needs(chosen)
        if needed == "variances":
            variances = self._sigma.variances(self.linearized, x)
            return chosen.predict(Variances(self.linearized(x), variances))
        if needed == "contrasts":
            mean = self.linearized(x)
            return chosen.predict(Contrasts(mean, self._contrast(x, mean)))
        return chosen.predict(self.marginal(x))

    @_evaluated
    def contrast(self, x: Inputs) -> Tensor:
        """Var[f_c − f_t] for the class t of the largest mean, at each point: (N, C)."""
        check_batch(x, self.x)
        return self._contrast(x, self.linearized(x))

    def _contrast(self, x: Inputs, mean: Tensor) -> Tensor:
        if isinstance(self.covariance, LastLayerKron):
            return self.covariance.differences(self.linearized, x, mean.argmax(-1))
        size = max(1, BLOCK_NUMBERS // mean.shape[1] ** 2)
        parts = [
            Contrast.variances(own, self._sigma.blocks(self.linearized, part))
            for part, own in zip(chunks(x, size), mean.split(size), strict=True)
        ]
        return torch.cat(parts)

    @_evaluated
    def sample(
        self,
        x: Inputs,
        num_samples: int,
        *,
        generator: torch.Generator | None = None,
        linear: bool = True,
    ) -> Tensor:
        """(S, N, C) values at `x` of functions drawn from the posterior; of networks, if not `linear`."""
        check_count(num_samples, "num_samples")
        check_batch(x, self.x)
        like = self.linearized.example
        draws = self._sigma.draw(num_samples, generator).to(like)
        if linear:
            moved = self.linearized.kernel().apply(x, draws)
            return self.linearized(x) + moved.reshape(num_rows(x), -1, num_samples).movedim(2, 0)
        center = self.linearized.flatten(self.linearized.params)
        values = []
        with torch.set_grad_enabled(follows(x)):
            for column in draws.T:
                params = self.linearized.unflatten(center + column)
                values.append(self.linearized.evaluate(params, x))
        return torch.stack(values)

    @_evaluated
    def sample_weights(
        self, num_samples: int, *, generator: torch.Generator | None = None
    ) -> Params:
        """Draws of the chosen parameters, each with an axis of samples in front."""
        check_count(num_samples, "num_samples")
        like = self.linearized.example
        center = self.linearized.flatten(self.linearized.params)
        draws = center[:, None] + self._sigma.draw(num_samples, generator).to(like)
        params = self.linearized.params
        pieces = draws.T.split([value.numel() for value in params.values()], 1)
        return {
            name: piece.reshape(num_samples, *value.shape)
            for (name, value), piece in zip(params.items(), pieces, strict=True)
        }

    def tempered(self, factor: float) -> WeightGaussian[Own]:
        """The posterior with `factor` times the covariance, at no cost.

        It is that of prior variance factor·prior_var at temperature factor·temperature: the data and the
        prior are trusted less, or more, in equal parts. One number to choose on held-out data where a new
        prior variance would ask for a new solve. It has no evidence; and of a link that was matched to the
        old covariance only the old scale is kept.
        """
        check_positive(factor, "factor")
        factor = float(factor)
        prior_var: PriorVar
        if isinstance(self.prior_var, Mapping):
            prior_var = {name: factor * value for name, value in self.prior_var.items()}
        else:
            prior_var = factor * self.prior_var
        return replace(
            self,
            covariance=ScaledCovariance(self._sigma, factor),
            prior_var=prior_var,
            evidence=None,
            temperature=factor * self.temperature,
        )

    def log_marginal_likelihood(self) -> Tensor:
        """log p(y), as the method that found the posterior approximates it."""
        if self.evidence is None:
            raise InputError(
                "this posterior was found by a method without an evidence, drawn by Sampled(num_probes=0), "
                "or tempered. Call dual() for that of the linear model at its mean, or use "
                "laplace(network, data, likelihood) without these."
            )
        return self.evidence

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> WeightGaussian[Own]:
        """The same posterior on another device, or predicting in another dtype."""
        from net2gp.posteriors.move import move

        return move(self, device, dtype)

    @_evaluated
    def dual(self) -> Dual:
        """The linear model and the Gaussian process that the network at θ* stands for, exact in Σ."""
        data = (self.x, self.y)
        return make_dual(
            self.linearized, data, self.likelihood, self.prior_var, temperature=self.temperature
        )
