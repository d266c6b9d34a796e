"""What a structure is: how Laplace's approximation represents the covariance of a network's parameters.

A `Structure` is a value that a user chooses. Of a `Task`, a network with its data, it makes a `Curvature`:
H = Σ_n J_nᵀ Λ_n J_n in the form that the structure keeps. A curvature and a prior N(0, V) give the
determinant that the evidence needs, and Σ = (V⁻¹ + scale·H)⁻¹. `scale` is the inverse of the temperature, and
of a noise variance that H was found without. Everything is in float64, whatever the dtype of the network.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import describe
from net2gp.linear.curvatures.curvature import Fisher
from net2gp.linear.linearized import Linearized, PriorVar, expand_prior
from net2gp.posteriors.weights.covariance import Covariance
from net2gp.posteriors.weights.tasks.task import Task
from net2gp.types import Inputs, Params


@dataclass(frozen=True, eq=False)
class Solved:
    """What a curvature and a prior give.

    Args:
        covariance: Σ.
        evidence: Laplace's evidence, or None where it was not asked for.
        structure: The structure as it was used, where its options say more than what was asked for.
        trace: tr H, where solving found it.
    """

    covariance: Covariance
    evidence: Tensor | None
    structure: Structure | None = None
    trace: float | None = None


@dataclass(frozen=True, eq=False)
class Curvature:
    """H of a task in one structure.

    A kind is a frozen dataclass of what it keeps, which writes `log_det` and `covariance`; or `solved`, where
    one solve gives both.

    Args:
        task: The network with the points and parameters that H is of.
    """

    task: Task

    def log_det(self, prior: Params, scale: float | Tensor) -> Tensor:
        """log|I + scale·V^{1/2} H V^{1/2}|, differentiable in the prior and in `scale`.

        Args:
            prior: A variance for each parameter, as a scalar tensor or in the parameter's shape.
            scale: The factor of H.

        Returns:
            A scalar in float64.

        Raises:
            NotImplementedError: The kind has no `log_det`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no log_det.")

    def covariance(self, prior: Params, scale: float) -> Covariance:
        """Σ = (V⁻¹ + scale·H)⁻¹.

        Args:
            prior: A variance for each parameter, as a scalar tensor or in the parameter's shape.
            scale: The factor of H.

        Returns:
            Σ as predictions and samples need it.

        Raises:
            NotImplementedError: The kind has no `covariance`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no covariance.")

    def trace(self) -> float:
        """tr H, the slope of `log_det` at scale 0. It says how large a gradient may be by chance."""
        one = torch.ones((), dtype=torch.float64, device=self.task.device)
        with torch.enable_grad():
            scale = torch.zeros_like(one).requires_grad_()
            prior = dict.fromkeys(self.task.params, one)
            (slope,) = torch.autograd.grad(self.log_det(prior, scale), scale)
        return float(slope)

    def variances(self, prior: Params) -> Tensor:
        """V as a vector over all parameters.

        Args:
            prior: A variance for each parameter.

        Returns:
            (P,), in float64, in the order of `Linearized.flatten`.
        """
        return prior_vector(prior, self.task.params)

    def solved(self, prior_var: PriorVar, scale: float) -> Solved:
        """Σ and the evidence at a prior.

        Args:
            prior_var: A number, or variances by the names of parameters.
            scale: The factor of H, 1/(temperature · open noise variance).

        Returns:
            Both, and what else solving found.
        """
        task = self.task
        evidence = self.evidence(task.prior(prior_var), task.noise(scale), scale)
        return Solved(self.covariance(expand_prior(prior_var, task.params), scale), evidence)

    def evidence(
        self,
        prior: Params,
        noise_var: Tensor | None,
        scale: float | Tensor,
        log_det: Tensor | None = None,
    ) -> Tensor:
        """Laplace's evidence, log p(y | θ*) − ½ Σ θ*²/v − ½ log|I + scale·V^{1/2} H V^{1/2}|.

        Args:
            prior: The variance v of each parameter.
            noise_var: The noise variance where it is open, else None.
            scale: The factor of H, 1/(temperature · open noise variance).
            log_det: The logarithm of the determinant, if it is known; None means `log_det(prior, scale)`.

        Returns:
            A scalar, differentiable in the prior and in the noise.
        """
        fit = self.task.log_likelihood(noise_var) - 0.5 * self.task.distance(prior)
        return fit - 0.5 * (self.log_det(prior, scale) if log_det is None else log_det)

    def searched(self, *, per_layer: bool, literal: bool) -> Curvature:
        """The curvature whose evidence chooses what is open: this one, unless it costs or counts too little.

        Args:
            per_layer: Whether each layer has a prior variance of its own.
            literal: Whether this very evidence was asked for, with `Evidence()` or `Validation(data)`.

        Returns:
            A curvature whose `log_det` and `solved` can be asked for again and again.
        """
        return self

    def at_data(self, prior_var: PriorVar, scale: float, index: Tensor) -> Tensor | None:
        """The covariances of f at some of the data, if they are known without the network.

        Args:
            prior_var: The prior variance.
            scale: The factor of H.
            index: The numbers of the points, (n,).

        Returns:
            (n, C, C), or None.
        """
        return None


@dataclass(frozen=True)
class Traits:
    """What `laplace` has to know of a structure to choose prior, noise and link. The defaults fit most.

    Args:
        whole: Σ has all directions of all parameters. Then a regression takes prior and noise of the linear
            model as they are. Otherwise they are changed until the variances at the data are right.
        exact: The variances at the data are those of the Gauss–Newton matrix, so that the information of a
            point itself can be taken out of them.
        all_weights: All parameters vary, and `log_det` says how many of them the data determine. Then the
            prior variance of a classifier follows the certainty of the network.
        any_prior: `log_det` takes a prior variance for each layer.
        keeps_prior: Directions that are left out keep the prior, so that variances are never too small.
        one_layer: The parameters are those of one layer, which the structure chooses itself.
        solved_once: A solve costs so much that it is done once, at the end.
        passes: How often the data are read at most, for the bars of a stream.
    """

    whole: bool = False
    exact: bool = False
    all_weights: bool = True
    any_prior: bool = True
    keeps_prior: bool = False
    one_layer: bool = False
    solved_once: bool = False
    passes: int = 1


class Structure:
    """How the covariance of a network's parameters is represented.

    A kind is a frozen dataclass of its options below `@savable("project.Name")`, which writes `curvature`.
    `n2g.laplace(network, data, likelihood, structure=...)` takes it; CONTRIBUTING.md has a whole example.
    """

    def curvature(self, task: Task) -> Curvature:
        """H of a task, in the form that the structure keeps.

        Args:
            task: The network with its data, and the prior and temperature that were given.

        Returns:
            The curvature at this task.

        Raises:
            NotImplementedError: The kind has no `curvature`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no curvature.")

    def traits(self) -> Traits:
        """What the choice of prior, noise and link has to know."""
        return Traits()

    def chosen(self, linearized: Linearized, x: Inputs) -> Linearized:
        """The network with the parameters that the structure is of.

        Args:
            linearized: The network with the parameters that were chosen by `only`, or all.
            x: The inputs of the data.

        Returns:
            The same, unless the structure chooses parameters itself.
        """
        return linearized

    def settled(self, linearized: Linearized) -> Structure:
        """The structure with the options that depend on the size of the network filled in.

        Args:
            linearized: The network.

        Returns:
            The structure that the posterior will name.
        """
        return self


def prior_vector(prior: Params, params: Params) -> Tensor:
    """V as a vector over all parameters: (P,), in float64."""
    parts = [prior[name].double().expand(value.shape).reshape(-1) for name, value in params.items()]
    return torch.cat(parts)


def common_variance(prior: Params) -> Tensor | None:
    """The one variance that all parameters have, if it is one."""
    values = list(prior.values())
    first = values[0]
    if any(v.dim() for v in values) or not all(v is first or bool(v == first) for v in values):
        return None
    return first.double()


def check_fisher(structure: Structure, fisher: object) -> None:
    """Raise if an option is no Fisher matrix."""
    if not isinstance(fisher, Fisher):
        name = type(structure).__name__
        raise InputError(
            f"{name} takes a Fisher matrix, ExactFisher(), EmpiricalFisher() or "
            f"MonteCarloFisher(num_samples), but got {shown(fisher)}. Pass for example "
            f"{name}(ExactFisher()), or {name}()."
        )


def shown(value: object) -> str:
    """An option as an error shows it."""
    return repr(value) if isinstance(value, str | int | float) else describe(value)
