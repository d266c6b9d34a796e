"""The evidence of a task as a function of what is open, and the posterior at what was chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from net2gp.errors import trying
from net2gp.likelihoods.traits import has_gaussian_noise, of_any_points, rows_per_point
from net2gp.linalg.chance import fixed_choice
from net2gp.linear.linearized import PriorVar, expand_prior
from net2gp.methods.laplace_approximation.tuning import Evidence, Matched, Tuning
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.around_network import AroundNetwork, ByLaplace, around_network
from net2gp.posteriors.recipes.places import AroundPlaces, ByLaplaceAtPlaces
from net2gp.posteriors.weights import Curvature, Kron, Structure, Task
from net2gp.posteriors.weights.structure import Solved
from net2gp.progress import progress
from net2gp.types import Likelihood, Params


@dataclass(frozen=True, eq=False)
class Tuned:
    """What was chosen.

    Args:
        prior_var: The prior variance, one for all parameters or by their names.
        likelihood: The likelihood with its noise and its link.
        scale: The factor of the curvature, 1/(temperature · open noise).
        solved: Σ and the evidence there, if they were needed to choose.
        narrowed: By how much the prior variance is smaller than that of the whole linear model, since the
            structure needs it.
    """

    prior_var: PriorVar
    likelihood: Likelihood
    scale: float
    solved: Solved | None = None
    narrowed: float = 1.0


@dataclass(frozen=True, eq=False)
class Search:
    """A task, its curvature in a structure, and how what is open is chosen.

    The evidence is a function of the logarithms of what is open: prior variances first, then the noise.
    """

    task: Task
    curvature: Curvature
    structure: Structure
    tuning: Tuning

    @cached_property
    def linking(self) -> tuple[Tensor, Task]:
        """The numbers of the points at which a link is matched, and the task at these points."""
        assert isinstance(self.tuning, Matched)
        sums = self.task.sums
        index = fixed_choice(sums.count, self.tuning.count(sums.num_outputs)).to(self.task.device)
        return index, self.task.at(index)

    def stand_in(self) -> Search:
        """The search on the curvature whose evidence chooses what is open, this one or Kronecker factors."""
        by = self.curvature
        if self.task.prior_var is None or self.task.open_noise:
            literal = not isinstance(self.tuning, Matched)
            by = by.searched(per_layer=self.per_layer, literal=literal)
        structure = self.structure if by is self.curvature else Kron()
        return Search(by.task, by, structure, self.tuning)

    def solve(self, found: Tuned) -> Tuned:
        """What was chosen, with Σ and the evidence there."""
        if found.solved is not None:
            return found
        return replace(found, solved=self.curvature.solved(found.prior_var, found.scale))

    def posterior(self, found: Tuned) -> Posterior:
        """The posterior at what was chosen, around the network's own mean."""
        task, solved = self.curvature.task, self.solve(found).solved
        assert solved is not None
        at_places = rows_per_point(task.likelihood) is not None
        recipe = ByLaplaceAtPlaces if at_places else ByLaplace
        posterior = around_network(
            task.linearized,
            solved.covariance,
            found.prior_var,
            of_any_points(found.likelihood),
            task.kept,
            num_outputs=task.sums.num_outputs,
            evidence=solved.evidence,
            recipe=recipe(task.temperature, solved.structure or self.structure),
        )
        if not at_places:
            return posterior
        assert isinstance(posterior.process, AroundNetwork)
        return replace(posterior, process=AroundPlaces(posterior.process))

    @property
    def per_layer(self) -> bool:
        """Whether each layer has a prior variance of its own."""
        return isinstance(self.tuning, Evidence) and self.tuning.per_layer

    @property
    def groups(self) -> list[str]:
        """What has a prior variance of its own: patterns of parameter names."""
        if self.task.prior_var is not None:
            return []
        if self.per_layer:
            return list(dict.fromkeys(_layer(name) for name in self.task.params))
        return ["*"]

    def start(self) -> np.ndarray:
        """Priors as wide as the parameters are, and the noise of the residuals."""
        theta = self.task.linearized.flatten(self.task.params).double()
        logs = [float(theta.square().mean().clamp(min=1e-12).log())] * len(self.groups)
        if self.task.open_noise:
            logs.append(float(np.log(max(self.task.sums.error, 1e-12))))
        return np.array(logs)

    def prior(self, logs: Tensor) -> Params:
        """The prior variance of each parameter."""
        if self.task.prior_var is not None:
            return expand_prior(self.task.prior_var, self.task.params)
        values = dict(zip(self.groups, logs.exp(), strict=False))
        if "*" in values:
            return dict.fromkeys(self.task.params, values["*"])
        return {name: values[_layer(name)] for name in self.task.params}

    def evidence(self, logs: Tensor) -> Tensor:
        """Laplace's evidence, differentiable in the logarithms."""
        prior = self.prior(logs)
        noise = logs[-1].exp() if self.task.open_noise else None
        scale = torch.ones((), dtype=torch.float64, device=logs.device) / self.task.temperature
        scale = scale if noise is None else scale / noise
        return self.curvature.evidence(prior, noise, scale)

    def maximize(self) -> np.ndarray:
        """The logarithms of the largest evidence."""
        start = self.start()
        if not len(start):
            return start
        device = self.task.device
        with progress("evidence", None) as advance, trying():

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
            log = torch.tensor(np.log(prior_var), device=self.task.device).requires_grad_()
            prior = dict.fromkeys(self.task.params, log.exp())
            value = self.curvature.log_det(prior, torch.tensor(scale, device=log.device))
            (gradient,) = torch.autograd.grad(value, log)
        return float(gradient)

    def at(self, logs: np.ndarray) -> Tuned:
        """What these logarithms mean."""
        task, likelihood = self.task, self.task.likelihood
        noise = float(np.exp(logs[-1])) if task.open_noise else None
        if noise is not None and has_gaussian_noise(likelihood):
            likelihood = likelihood.with_noise(noise)
        scale = 1.0 / task.temperature if noise is None else 1.0 / (task.temperature * noise)
        if task.prior_var is not None:
            return Tuned(task.prior_var, likelihood, scale)
        values = [float(v) for v in np.exp(logs[: len(self.groups)])]
        if self.groups == ["*"]:
            return Tuned(values[0], likelihood, scale)
        named = {name: float(v) for name, v in self.prior(torch.tensor(logs)).items()}
        return Tuned(named, likelihood, scale)


def _layer(name: str) -> str:
    """The layer of a parameter: its name without what follows the last dot."""
    return name.rpartition(".")[0]
