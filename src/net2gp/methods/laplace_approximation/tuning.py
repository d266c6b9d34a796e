"""The prior variance and the noise of Laplace's approximation, where they are left open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from net2gp.errors import InputError
from net2gp.likelihoods import shape_targets
from net2gp.likelihoods.traits import has_gaussian_noise
from net2gp.linear import Linearized
from net2gp.linear.linearized import PriorVar, expand_prior
from net2gp.posteriors.weights.structures import Structure
from net2gp.progress import progress
from net2gp.types import Data, Inputs, Likelihood, Params

GRID = tuple(float(v) for v in np.logspace(-6, 4, 21))
"""Prior variances that a validation set chooses from."""


@dataclass(frozen=True)
class Evidence:
    """Maximize Laplace's marginal likelihood over the prior variance (and the noise), by L-BFGS.

    One prior variance for all parameters, or with `per_layer` one for each layer.

    Reference: MacKay, Bayesian interpolation, 1992; Immer et al., Scalable marginal likelihood estimation
    for model selection in deep learning, ICML 2021.
    """

    per_layer: bool = False


@dataclass(frozen=True, eq=False)
class Validation:
    """The prior variance of `grid` with the largest log p(y | x) on data that were held out.

    An open noise of `Gaussian()` is chosen with it: for each prior variance the noise with the largest
    log p(y | x), at most the squared error of the held-out data, by some ten posteriors each.
    """

    data: Data = field(repr=False)
    grid: Sequence[float] = GRID


@dataclass(frozen=True)
class Matched:
    """The default: on the training data, predictions are as sure as the network has reason to be.

    **Gaussian noise.** Prior and noise have the largest evidence of the linear model
    y = f(x; θ*) + J(x)(θ − θ*) + ε with θ ~ N(0, prior_var) *at its own mode*, log N(y − f + Jθ* | 0,
    prior_var·JJᵀ + noise_var·I). Laplace's evidence takes the mode to be θ*, which is not one after early
    stopping, dropout or many steps, and makes up for it by noise. The mean of the posterior stays
    the network's. So an open noise is only possible if the average variance of the predictions at the
    training rows, noise_var·(1 + γ/N) with γ effective parameters, is no less than the squared error that
    the network makes there. It is at most the variance of y. Among a few points log-normal priors, a
    factor of 100 wide, decide: of the noise around 1 % of the variance of y, of the prior variance around
    the mean of θ*². Structures that are not exact take the noise of the exact one, and the prior variance
    at which they are as unsure of the data, on average, as it is of a row that was left out,
    noise_var·γ/(N − γ); what they fall short of counts as noise. Up to 1500 rows are used, or all, if the
    parameters are fewer. Of several noises, one a point or output, `Evidence()` is used.

    **Classes.** The evidence at θ* pairs the logits where training stopped with a variance that belongs to
    larger ones, so that predictions come out too unsure everywhere. Here the link scales the mean by α, the
    number with the smallest KL(network ‖ prediction) on `num_points` training inputs; and the prior variance
    is the one whose evidence is largest at the scaled parameters: prior_var = α²‖θ*‖²/γ with γ effective
    parameters (for a `LastLayer` that of the evidence at θ*).
    Exact structures compare each point without its own information, unless there are 50 points or fewer.

    For likelihoods with a link of their own it is `Evidence()`.
    """

    num_points: int | None = None
    """Left out, 500, or for many classes as many as have 20,000 logits, but at least 20."""

    def __post_init__(self) -> None:
        if self.num_points is not None and self.num_points < 1:
            raise InputError(f"num_points must be at least 1, but is {self.num_points}.")

    def count(self, num_outputs: int) -> int:
        """How many points are compared."""
        return self.num_points or max(20, min(500, 20_000 // num_outputs))


Tuning = Evidence | Validation | Matched


@dataclass(frozen=True, eq=False)
class Task:
    """A network with checked data and what it gives there; `likelihood` has noise 1 where it is open."""

    linearized: Linearized
    x: Inputs
    y: Tensor
    likelihood: Likelihood
    structure: Structure
    f: Tensor  # (N, C) in float64
    open_noise: bool
    free: Tensor | None = None  # the parameters that are not known, where not all are

    @property
    def params(self) -> Params:
        """θ*."""
        return self.linearized.params

    def log_likelihood(self, noise_var: Tensor | None) -> Tensor:
        """log p(y | f(x; θ*)), at another noise if one is given."""
        if noise_var is None:
            return self.likelihood.log_prob(self.f, self.y).sum()
        squares = (shape_targets(self.f, self.y).double() - self.f).square().sum()
        count = self.f.numel()
        return -0.5 * (squares / noise_var + count * (2 * torch.pi * noise_var).log())


@dataclass(frozen=True, eq=False)
class Tuned:
    """What was chosen: the prior, the likelihood with its noise, the factor of H, the evidence."""

    prior_var: PriorVar
    likelihood: Likelihood
    scale: float
    evidence: Tensor


class LogDet(Protocol):
    """log|I + scale·V^{1/2} H V^{1/2}| of a prior by parameter names, differentiable in both."""

    def __call__(self, prior: Params, scale: Tensor) -> Tensor:
        """At a prior and a factor of the curvature."""


@dataclass(frozen=True, eq=False)
class Search:
    """The evidence as a function of the logarithms of what is open."""

    task: Task
    log_det: LogDet
    prior_var: PriorVar | None
    temperature: float
    tuning: Tuning

    @property
    def groups(self) -> list[str]:
        """What has a prior variance of its own: patterns of parameter names."""
        if self.prior_var is not None:
            return []
        if isinstance(self.tuning, Evidence) and self.tuning.per_layer:
            return list(dict.fromkeys(_layer(name) for name in self.task.params))
        return ["*"]

    def start(self) -> np.ndarray:
        """Priors as wide as the parameters are, and the noise of the residuals."""
        theta = self.task.linearized.flatten(self.task.params).double()
        logs = [float(theta.square().mean().clamp(min=1e-12).log())] * len(self.groups)
        if self.task.open_noise:
            residual = shape_targets(self.task.f, self.task.y).double() - self.task.f
            logs.append(float(residual.square().mean().clamp(min=1e-12).log()))
        return np.array(logs)

    def prior(self, logs: Tensor) -> Params:
        """The prior variance of each parameter."""
        if self.prior_var is not None:
            return expand_prior(self.prior_var, self.task.params)
        values = dict(zip(self.groups, logs.exp(), strict=False))
        if "*" in values:
            return dict.fromkeys(self.task.params, values["*"])
        return {name: values[_layer(name)] for name in self.task.params}

    def evidence(self, logs: Tensor) -> Tensor:
        """log p(y | θ*) − ½ Σ θ*²/v − ½ log|I + scale·V^{1/2}HV^{1/2}|."""
        prior = self.prior(logs)
        noise = logs[-1].exp() if self.task.open_noise else None
        scale = torch.ones((), dtype=torch.float64, device=logs.device) / self.temperature
        scale = scale if noise is None else scale / noise
        fit = self.task.log_likelihood(noise)
        return fit - 0.5 * self._distance(prior) - 0.5 * self.log_det(prior, scale)

    def _distance(self, prior: Params) -> Tensor:
        """Σ θ*²/v over the parameters that are not known."""
        parts = [
            (value.double().square() / prior[name].double()).reshape(-1)
            for name, value in self.task.params.items()
        ]
        each = torch.cat(parts)
        return each.sum() if self.task.free is None else each[self.task.free].sum()

    def maximize(self) -> np.ndarray:
        """The logarithms of the largest evidence."""
        start = self.start()
        if not len(start):
            return start
        device = self.task.f.device
        with progress("evidence", None) as advance:

            def objective(logs: np.ndarray) -> tuple[float, np.ndarray]:
                with torch.enable_grad():
                    point = torch.tensor(logs, device=device).requires_grad_()
                    value = self.evidence(point)
                    (gradient,) = torch.autograd.grad(value, point)
                advance(note=f"log evidence {float(value.detach()):.3f}")
                return -float(value.detach()), -gradient.cpu().numpy()

            bounds = [(value - 30, value + 30) for value in start]
            found = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds)
        return np.asarray(found.x)

    def effective_parameters(self, prior_var: float, scale: float) -> float:
        """γ = d log|I + V^{1/2}HV^{1/2}| / d log prior_var: the directions that the data determine."""
        with torch.enable_grad():
            log = torch.tensor(np.log(prior_var), device=self.task.f.device).requires_grad_()
            prior = dict.fromkeys(self.task.params, log.exp())
            value = self.log_det(prior, torch.tensor(scale, device=self.task.f.device))
            (gradient,) = torch.autograd.grad(value, log)
        return float(gradient)

    def at(self, logs: np.ndarray) -> Tuned:
        """What these logarithms mean."""
        point = torch.tensor(logs, dtype=torch.float64, device=self.task.f.device)
        with torch.no_grad():
            evidence = self.evidence(point)
        noise = float(np.exp(logs[-1])) if self.task.open_noise else None
        likelihood = self.task.likelihood
        if noise is not None and has_gaussian_noise(likelihood):
            likelihood = likelihood.with_noise(noise)
        scale = 1.0 / self.temperature if noise is None else 1.0 / (self.temperature * noise)
        if self.prior_var is not None:
            return Tuned(self.prior_var, likelihood, scale, evidence)
        values = [float(v) for v in np.exp(logs[: len(self.groups)])]
        if self.groups == ["*"]:
            return Tuned(values[0], likelihood, scale, evidence)
        named = {name: float(v) for name, v in self.prior(point).items()}
        return Tuned(named, likelihood, scale, evidence)


def _layer(name: str) -> str:
    """The layer of a parameter: its name without what follows the last dot."""
    return name.rpartition(".")[0]
