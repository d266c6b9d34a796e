"""`Subnetwork(num_weights)`: the whole precision of some parameters, all others fixed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from net2gp.errors import check_count
from net2gp.linear.curvatures.curvature import diagonal_curvature
from net2gp.linear.forward.factors import Direct, Factor, jacobian
from net2gp.linear.linearized import expand_prior
from net2gp.posteriors.weights.covariance import Covariance, normal, num_entries
from net2gp.posteriors.weights.full import Dense, gauss_newton
from net2gp.posteriors.weights.structure import Curvature, Structure, Traits, prior_vector
from net2gp.posteriors.weights.tasks.task import Task
from net2gp.tags import savable
from net2gp.types import Params


@savable("structures.Subnetwork")
@dataclass(frozen=True)
class Subnetwork(Structure):
    """The whole precision of the parameters that are least known; all others are fixed.

    The least known are those with the largest variance under `Diagonal()`, among those that the data depend
    on. To choose parameters by name, pass `only=` to `laplace` instead.

    Args:
        num_weights: How many parameters vary.

    Raises:
        InputError: `num_weights` is not a whole number of at least 1.

    Reference: Daxberger et al., Bayesian deep learning via subnetwork inference, ICML 2021.
    """

    num_weights: int

    def __post_init__(self) -> None:
        check_count(self.num_weights, "num_weights", example=1000)

    def curvature(self, task: Task) -> SubsetCurvature:
        """H of the parameters with the largest variance v/(1 + v·h): N·K·k² operations.

        Their order is the same for any common v. Parameters without curvature, such as the weights of inputs
        that are always zero, are the least known of all and matter at none of the data: they come last.
        """
        source = task.source()
        prior = expand_prior(1.0 if task.prior_var is None else task.prior_var, task.params)
        v = prior_vector(prior, task.params)
        h = diagonal_curvature(source) / task.temperature
        variance = torch.where(h > 0, v / (1 + v * h), 0.0)
        count = min(self.num_weights, task.linearized.num_params)
        index = torch.topk(variance, count).indices.sort().values
        return SubsetCurvature(replace(task, free=index), index, Dense(gauss_newton(source, index)))

    def traits(self) -> Traits:
        """Of some weights."""
        return Traits(all_weights=False, passes=2)


@dataclass(frozen=True, eq=False)
class SubsetCurvature(Curvature):
    """H between the parameters `index` (k,) alone: (k, k) in float64."""

    index: Tensor
    dense: Dense

    def log_det(self, prior: Params, scale: float | Tensor) -> Tensor:
        """By eigenvalues within a search, else by a Cholesky factor."""
        return self.dense.log_det(prior, self.variances(prior)[self.index], scale)

    def covariance(self, prior: Params, scale: float) -> SubsetCovariance:
        """By a Cholesky factor and its inverse."""
        v = self.variances(prior)
        return SubsetCovariance(self.index, self.dense.root(v[self.index], scale), len(v))

    def trace(self) -> float:
        """tr H of the parameters that vary."""
        return float(self.dense.H.trace())


@savable("covariances.SubsetCovariance")
@dataclass(frozen=True, eq=False)
class SubsetCovariance(Covariance):
    """Σ = root rootᵀ over the parameters `index` (k,), all others known: root (k, k)."""

    index: Tensor
    root: Tensor
    num_params: int

    def rooted(self, found: dict[str, Factor]) -> list[Factor]:
        """The chosen columns of J, times root."""
        parts, start = [], 0
        for factor in found.values():
            size = num_entries(factor)
            mine = self.index[(self.index >= start) & (self.index < start + size)] - start
            if len(mine):
                parts.append(jacobian(factor)[..., mine])
            start += size
        J = torch.cat(parts, -1)
        return [Direct(J.double() @ self.root)]

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """root · z at the chosen parameters, zero at the others."""
        values = self.root.new_zeros(self.num_params, num_samples)
        values[self.index] = self.root @ normal(self.root[0], num_samples, generator)
        return values

    def mask(self) -> Tensor:
        """1 for parameters that vary and 0 for those that are fixed: (P,)."""
        free = torch.zeros(self.num_params).to(self.root)
        free[self.index] = 1.0
        return free
