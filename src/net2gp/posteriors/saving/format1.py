"""Files of format 1, which had four classes of posteriors, read as `Posterior`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from net2gp.inputs import num_rows
from net2gp.linear.linearized import Linearized
from net2gp.posteriors.condition import ByConditioning
from net2gp.posteriors.conditioning.conditioned import Conditioned
from net2gp.posteriors.conditioning.solvers import CG
from net2gp.posteriors.conditioning.whitened import Whitened
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipe import Recipe
from net2gp.posteriors.recipes.around_network import ByLaplace, ByTraining, around_network
from net2gp.posteriors.recipes.class_codes import ByCodes, OneHotCodes
from net2gp.posteriors.recipes.dual import AroundZero, ByExpansion
from net2gp.posteriors.weights.function_space import ConditionedCovariance


@dataclass(frozen=True)
class _AroundZero:
    """The prior mean of a dual, which held the temperature in format 1."""

    linearized: Linearized
    temperature: float = 1.0


def _recipe(mean: Any, solver: Any, inference: Any) -> tuple[Any, Recipe]:
    """The prior mean, and how the posterior was found."""
    if not isinstance(mean, _AroundZero):
        return mean, ByConditioning(solver, inference)
    return AroundZero(mean.linearized), ByExpansion(mean.temperature, solver, inference)


def _function_posterior(
    *, mean: Any, likelihood: Any, x: Any, y: Tensor, evidence: Tensor, **fields: Any
) -> Posterior:
    solver, inference = fields.pop("solver"), fields.pop("inference")
    prior_mean, recipe = _recipe(mean, solver, inference)
    fields.pop("structure", None)
    noise = None
    if fields["sites"] is None:
        alpha = fields["alpha"]
        f = alpha.new_zeros(num_rows(x), fields["num_outputs"])
        variances = likelihood.noise_variance(f)
        noise = variances[:, : len(alpha) // num_rows(x)].reshape(-1)
    process = Conditioned(prior_mean=prior_mean, x=x, noise=noise, **fields)
    left_out = isinstance(solver, CG) and solver.num_probes == 0
    return Posterior(process, likelihood, x, y, None if left_out else evidence, recipe)


def _weight_posterior(
    *, mean: Any, likelihood: Any, x: Any, y: Tensor, evidence: Tensor, **fields: Any
) -> Posterior:
    prior_mean, recipe = _recipe(mean, fields.pop("solver"), fields.pop("inference"))
    process = Whitened(prior_mean=prior_mean, **fields)
    return Posterior(process, likelihood, x, y, evidence, recipe)


def _weight_gaussian(
    *,
    linearized: Linearized,
    covariance: Any,
    likelihood: Any,
    x: Any,
    y: Tensor,
    prior_var: Any,
    **fields: Any,
) -> Posterior:
    structure, temperature = fields["structure"], fields["temperature"]
    recipe = ByTraining(temperature) if structure is None else ByLaplace(temperature, structure)
    if isinstance(covariance, Posterior):
        covariance = _conditioned(covariance)
    data, evidence = (x, y), fields["evidence"]
    return around_network(
        linearized, covariance, prior_var, likelihood, data, evidence=evidence, recipe=recipe
    )


def _conditioned(process: Posterior) -> ConditionedCovariance:
    assert isinstance(process.process, Conditioned)
    return ConditionedCovariance(process.process)


def _class_posterior(
    process: Posterior, frequencies: Tensor, temperature: float, evidence: Tensor
) -> Posterior:
    x, codes = process.data
    noise_var = float(process.likelihood.noise_var)  # type: ignore[attr-defined]
    likelihood = OneHotCodes(noise_var, frequencies, temperature, num_rows(x))
    y = (codes.double() + frequencies).argmax(1)
    return Posterior(process.process, likelihood, x, y, evidence, ByCodes())


FORMAT_1: dict[str, Callable[..., Any]] = {
    "conditioned.Conditioned": _conditioned,
    "function_space.FunctionPosterior": _function_posterior,
    "weight_space.WeightPosterior": _weight_posterior,
    "weight_gaussian.WeightGaussian": _weight_gaussian,
    "codes.ClassPosterior": _class_posterior,
    "dual.AroundZero": _AroundZero,
}
"""The functions that replace classes of format 1, by tag; all other tags mean the same in both formats."""
