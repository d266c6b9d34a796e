"""`Full()`: the whole precision, as a matrix."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from net2gp.linalg import cholesky
from net2gp.linear.curvatures.curvature import ExactFisher, Fisher, Source
from net2gp.linear.forward.factors import Direct, Factor, jacobian
from net2gp.memory import check_memory
from net2gp.posteriors.weights.covariance import Covariance, normal
from net2gp.posteriors.weights.structure import (
    Curvature,
    Structure,
    Traits,
    check_fisher,
    common_variance,
)
from net2gp.posteriors.weights.tasks.task import Task
from net2gp.tags import savable
from net2gp.types import Params


@savable("structures.Full")
@dataclass(frozen=True)
class Full(Structure):
    """The whole (P, P) precision of all parameters.

    It is exact. It takes N·C·P² + P³ operations, which is for up to some ten thousand parameters.

    Args:
        fisher: Which Fisher matrix the curvature is: `ExactFisher()` (the default), `EmpiricalFisher()` or
            `MonteCarloFisher(num_samples)`.

    Raises:
        InputError: `fisher` is none of these.
    """

    fisher: Fisher = field(default_factory=ExactFisher)

    def __post_init__(self) -> None:
        check_fisher(self, self.fisher)

    def curvature(self, task: Task) -> FullCurvature:
        """H by one matrix product per chunk of points. Cost N·K·P² operations, P² memory."""
        P = task.linearized.num_params
        check_memory(
            2 * 8 * P**2,
            task.linearized.example.device,
            f"the curvature of {P} parameters as a matrix",
            "structure=Kron(), Diagonal() or FunctionSpace(), or fewer parameters with only=",
        )
        return FullCurvature(task, Dense(gauss_newton(task.source(self.fisher))))

    def traits(self) -> Traits:
        """Exact with the exact Fisher matrix."""
        return Traits(whole=True, exact=isinstance(self.fisher, ExactFisher))


def gauss_newton(source: Source, index: Tensor | None = None) -> Tensor:
    """H between all parameters, or those with the numbers `index`, in the order of `Linearized.flatten`."""
    size = source.linearized.num_params if index is None else len(index)
    H = source.linearized.example.new_zeros(size, size, dtype=torch.float64)
    for found in source.gradients():
        parts = [jacobian(found[name]).flatten(0, 1) for name in source.linearized.params]
        G = torch.cat(parts, 1)
        G = (G if index is None else G[:, index]).double()
        H.addmm_(G.mT, G)
    return H


@dataclass(frozen=True, eq=False)
class Dense:
    """A curvature H (p, p) in float64, and what it gives with prior variances v (p,)."""

    H: Tensor

    @cached_property
    def eigenvalues(self) -> Tensor:
        """The eigenvalues of H, none of them negative."""
        return torch.linalg.eigvalsh(self.H).clamp(min=0)

    def log_det(self, prior: Params, v: Tensor, scale: float | Tensor) -> Tensor:
        """By eigenvalues where a search asks again and again, by one Cholesky factor where it does not."""
        one = common_variance(prior)
        searching = v.requires_grad or (isinstance(scale, Tensor) and scale.requires_grad)
        if one is not None and (searching or "eigenvalues" in vars(self)):
            return torch.log1p(scale * one * self.eigenvalues).sum()
        root = v.sqrt()
        inner = torch.eye(len(self.H)).to(self.H) + scale * (root[:, None] * self.H * root)
        return cholesky(inner, what="I + V^½HV^½").log_det()

    def factor(self, v: Tensor, scale: float) -> Tensor:
        """L with L Lᵀ = I + scale·V^{1/2} H V^{1/2}."""
        root = v.sqrt()
        inner = scale * (root[:, None] * self.H * root)
        inner.diagonal().add_(1.0)
        return cholesky(inner, what="I + V^½HV^½").L

    def root(self, v: Tensor, scale: float) -> Tensor:
        """R = V^{1/2} L⁻ᵀ: R Rᵀ = Σ."""
        identity = torch.eye(len(self.H)).to(self.H)
        L = self.factor(v, scale)
        return v.sqrt()[:, None] * torch.linalg.solve_triangular(L.mT, identity, upper=True)


@dataclass(frozen=True, eq=False)
class FullCurvature(Curvature):
    """H itself: (P, P) in float64."""

    dense: Dense

    def log_det(self, prior: Params, scale: float | Tensor) -> Tensor:
        """By eigenvalues within a search, else by a Cholesky factor."""
        return self.dense.log_det(prior, self.variances(prior), scale)

    def covariance(self, prior: Params, scale: float) -> FullCovariance:
        """By a Cholesky factor and its inverse."""
        return FullCovariance(self.dense.root(self.variances(prior), scale))

    def trace(self) -> float:
        """tr H."""
        return float(self.dense.H.trace())


@savable("covariances.FullCovariance")
@dataclass(frozen=True, eq=False)
class FullCovariance(Covariance):
    """Σ = root rootᵀ.

    Args:
        root: (P, P), V^{1/2} L⁻ᵀ in float64, in the order of `Linearized.flatten`.
    """

    root: Tensor

    def rooted(self, found: dict[str, Factor]) -> list[Factor]:
        """J root, as one dense factor."""
        J = torch.cat([jacobian(factor) for factor in found.values()], -1)
        return [Direct(J.double() @ self.root)]

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """root · z."""
        return self.root @ normal(self.root[0], num_samples, generator)
