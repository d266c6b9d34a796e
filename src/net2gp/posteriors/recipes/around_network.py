"""A Gaussian over the parameters of a network, and the process that the linearized network makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from net2gp.inputs import follows, num_rows, ordinary_tensors, rows
from net2gp.linear.curvatures.kept_features import kept_outputs
from net2gp.linear.forward.evaluation import evaluating
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.linear.linearized import Linearized, PriorVar
from net2gp.posteriors.conditioning.process import contrast_by_blocks, evaluated
from net2gp.posteriors.conditioning.samples import FunctionSamples
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipe import Recipe
from net2gp.posteriors.recipes.dual import Dual, make_dual
from net2gp.posteriors.recipes.seen import Seen, Widening
from net2gp.posteriors.weights.covariance import Covariance, ScaledCovariance
from net2gp.show import number
from net2gp.streams import Passes
from net2gp.types import Inputs, Likelihood, Params, Stream


@dataclass(frozen=True, eq=False)
class AroundNetwork:
    """A process around a network: f(x) = f(x; θ*) + J(x)(θ − θ*) with θ ~ N(θ*, Σ).

    The mean is the network's own output, and the covariance is J Σ Jᵀ. The prior is N(0, prior_var). Training
    the network further does not change the process.

    Args:
        linearized: The network, linearized at θ*.
        covariance: The covariance Σ of the parameters, in one of the structures.
        prior_var: The prior variances, a number or a dict by parameter name.
        num_outputs: The number of outputs C.
        seen: The training inputs as `novelty` compares with them, or None.
        widening: The variance that predictions gain where inputs are novel, or None.

    References: Khan et al., Approximate inference turns deep networks into Gaussian processes, NeurIPS
    2019; Immer, Korzepa, Bauer, Improving predictions of Bayesian neural nets via local linearization,
    AISTATS 2021.
    """

    linearized: Linearized
    covariance: Covariance = field(repr=False)
    prior_var: PriorVar = field(repr=False)
    num_outputs: int
    seen: Seen | None = None
    widening: Widening | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The fields: what predictions have computed besides, and keep, are functions."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def kernel(self) -> TangentKernel:
        """J diag(prior_var) Jᵀ."""
        return self.linearized.kernel(self.prior_var)

    def facts(self) -> dict[str, str]:
        """The network, its prior variances and its number of parameters."""
        return {
            "_network": repr(self.linearized),
            "prior_var": number(self.prior_var),
            "P": f"{self.linearized.num_params}",
        }

    def check(self, x: Inputs) -> None:
        """Do nothing: the network itself raises an error for inputs that it cannot take."""

    @evaluated
    def mean(self, x: Inputs) -> Tensor:
        """f(x; θ*), one forward pass."""
        return self._outputs(x)

    @evaluated
    def moments(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean (N, C) and J_n Σ J_nᵀ for each point (N, C, C)."""
        blocks = self.covariance.blocks(self.linearized, x)
        return self._outputs(x), blocks

    @evaluated
    def diagonal(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and the variances, (N, C) each; some structures compute them faster than the blocks."""
        variances = self.covariance.variances(self.linearized, x)
        return self._outputs(x), variances

    @evaluated
    def contrast(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and Var[f_c − f_t] for the class t of the largest mean: (N, C) each."""
        if not hasattr(self.covariance, "differences"):
            return contrast_by_blocks(self, x)
        mean = self._outputs(x)
        return mean, self.covariance.differences(self.linearized, x, mean.argmax(-1))

    def _outputs(self, x: Inputs) -> Tensor:
        """f(x; θ*), without another pass where the outputs are known beside the last layer's features."""
        known = kept_outputs(self.linearized, x)
        return self.linearized(x) if known is None else known

    @evaluated
    def joint(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and J Σ Jᵀ over all points."""
        mean = self.linearized(x)
        return mean.reshape(-1), self.covariance.joint(self.linearized, x).to(mean.dtype)

    @evaluated
    def prior_variances(self, x: Inputs) -> Tensor:
        """The diagonal of J diag(prior_var) Jᵀ, summed over the parameters that are not fixed: (N, C)."""
        kernel, free = self.kernel, self.covariance.mask()
        if free is not None:
            masks = self.linearized.unflatten(free)
            kernel = self.linearized.kernel({n: v * masks[n] for n, v in kernel.prior_var.items()})
        return kernel.diag(x).reshape(num_rows(x), -1)

    @evaluated
    def novelty(self, x: Inputs) -> Tensor:
        """The share of the prior variance that the training inputs leave open, if they were noted: (N,)."""
        with torch.set_grad_enabled(follows(x)):
            return self._shares(x).to(self.linearized.example)

    @cached_property
    @ordinary_tensors()
    def _shares(self) -> Callable[[Inputs], Tensor]:
        assert self.seen is not None
        return self.seen.shares(self.linearized)

    def with_seen(self, seen: Seen) -> AroundNetwork:
        """The process that knows what was seen."""
        return replace(self, seen=seen)

    def excess(self, x: Inputs) -> Tensor:
        """By how much a point is more novel than all but few training inputs, relative to these: (N,)."""
        if self.seen is None:
            return self.linearized.example.new_zeros(num_rows(x))
        return (self.novelty(x) / self.seen.ordinary - 1).clamp(min=0)

    @evaluated
    def gained(self, x: Inputs) -> Tensor:
        """The variance that the outputs of predictions gain since a point is novel: (N, C)."""
        assert self.widening is not None
        with torch.set_grad_enabled(follows(x)):
            gained = self.widening.gained(self._wide_shares(x), self.prior_variances(x))
        return gained.to(self.linearized.example)

    @cached_property
    @ordinary_tensors()
    def _wide_shares(self) -> Callable[[Inputs], Tensor]:
        assert self.widening is not None
        return self.widening.seen.shares(self.linearized)

    def functions(self, num_samples: int, generator: torch.Generator | None) -> FunctionSamples:
        """The functions f(x; θ*) + J(x)(θ_s − θ*) for drawn parameters θ_s."""
        with evaluating(self.linearized.network):
            draws = self._draw(num_samples, generator)
        return FunctionSamples(self.linearized.kernel(), self.linearized, self.num_outputs, draws)

    @evaluated
    def draw_networks(
        self, x: Inputs, num_samples: int, generator: torch.Generator | None
    ) -> Tensor:
        """The outputs at `x` of the network itself at drawn parameters: (S, N, C)."""
        center = self.linearized.flatten(self.linearized.params)
        values = []
        draws = self._draw(num_samples, generator)
        with torch.set_grad_enabled(follows(x)):
            for column in draws.T:
                params = self.linearized.unflatten(center + column)
                values.append(self.linearized.evaluate(params, x))
        return torch.stack(values)

    @evaluated
    def draw_weights(self, num_samples: int, generator: torch.Generator | None) -> Params:
        """Draws of the chosen parameters, each with an axis of samples in front."""
        params = self.linearized.params
        draws = self.linearized.flatten(params)[:, None] + self._draw(num_samples, generator)
        pieces = draws.T.split([value.numel() for value in params.values()], 1)
        return {
            name: piece.reshape(num_samples, *value.shape)
            for (name, value), piece in zip(params.items(), pieces, strict=True)
        }

    def _draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        return self.covariance.draw(num_samples, generator).to(self.linearized.example)

    def scaled(self, factor: float) -> AroundNetwork:
        """The process with the covariances of the posterior and of the prior multiplied by `factor`."""
        prior_var: PriorVar
        if isinstance(self.prior_var, Mapping):
            prior_var = {name: factor * value for name, value in self.prior_var.items()}
        else:
            prior_var = factor * self.prior_var
        return replace(
            self,
            covariance=ScaledCovariance(self.covariance, factor),
            prior_var=prior_var,
            widening=None if self.widening is None else self.widening.scaled(factor),
        )


@dataclass(frozen=True)
class ByTraining(Recipe):
    """The recipe of optimizers that find a mean and a covariance: VOGN, VOGGN, OGGN, IVON and Swag."""

    temperature: float = 1.0

    def dual(self, posterior: Posterior) -> Dual:
        """The linear model at the mean, at the same temperature."""
        process = posterior.process
        assert isinstance(process, AroundNetwork)
        with evaluating(process.linearized.network):
            return make_dual(
                process.linearized,
                posterior.data,
                posterior.likelihood,
                process.prior_var,
                temperature=self.temperature,
            )

    def tempered(self, posterior: Posterior, factor: float) -> Posterior:
        """The posterior with a scaled covariance, and without an evidence."""
        recipe = replace(self, temperature=factor * self.temperature)
        process = posterior.process.scaled(factor)  # type: ignore[attr-defined]
        return replace(posterior, process=process, evidence=None, recipe=recipe)

    def facts(self, posterior: Posterior) -> dict[str, str]:
        """The temperature, if there is one."""
        return {} if self.temperature == 1.0 else {"temperature": number(self.temperature)}


@dataclass(frozen=True)
class ByLaplace(ByTraining):
    """The recipe of `laplace`: the structure of Σ, and the number that divided the curvature of the data."""

    structure: object = None

    def facts(self, posterior: Posterior) -> dict[str, str]:
        """The structure, and the temperature if there is one."""
        return {"structure": f"{self.structure}", **super().facts(posterior)}


def around_network(
    linearized: Linearized,
    covariance: Covariance,
    prior_var: PriorVar,
    likelihood: Likelihood,
    data: tuple[Inputs, Tensor] | Stream | None,
    *,
    num_outputs: int | None = None,
    evidence: Tensor | None = None,
    recipe: Recipe | None = None,
) -> Posterior:
    """The posterior N(θ*, Σ) over a network's parameters; without a recipe it counts as found by training.

    A stream is not kept: its first points say how many outputs there are, unless `num_outputs` does.
    """
    x, y = data if isinstance(data, tuple) else (None, None)
    if num_outputs is None:
        some = Passes(data, linearized.example).first()[0] if isinstance(data, Stream) else x
        assert some is not None
        with evaluating(linearized.network):
            num_outputs = linearized(rows(some, slice(0, 1))).shape[1]
    process = AroundNetwork(linearized, covariance, prior_var, num_outputs)
    return Posterior(process, likelihood, x, y, evidence, recipe or ByTraining())
