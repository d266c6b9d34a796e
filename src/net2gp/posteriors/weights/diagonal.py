"""`Diagonal()`: independent parameters; and a diagonal with a few directions more, as SWAG has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from net2gp.linear.curvatures.curvature import ExactFisher, Fisher, diagonal_curvature
from net2gp.linear.forward.factors import Direct, Factor, jacobian, scaled
from net2gp.posteriors.weights.covariance import (
    Covariance,
    entry_shape,
    example,
    normal,
    num_entries,
)
from net2gp.posteriors.weights.structure import Curvature, Structure, check_fisher
from net2gp.posteriors.weights.tasks.task import Task
from net2gp.tags import savable
from net2gp.types import Params


@savable("structures.Diagonal")
@dataclass(frozen=True)
class Diagonal(Structure):
    """The diagonal of the precision: parameters are independent, P numbers. Too sure away from the data.

    Args:
        fisher: Which Fisher matrix the curvature is: `ExactFisher()` (the default), `EmpiricalFisher()` or
            `MonteCarloFisher(num_samples)`.

    Raises:
        InputError: `fisher` is none of these.
    """

    fisher: Fisher = field(default_factory=ExactFisher)

    def __post_init__(self) -> None:
        check_fisher(self, self.fisher)

    def curvature(self, task: Task) -> DiagonalCurvature:
        """The diagonal of H, by as many backward passes as the Fisher matrix takes."""
        return DiagonalCurvature(task, diagonal_curvature(task.source(self.fisher)))


@dataclass(frozen=True, eq=False)
class DiagonalCurvature(Curvature):
    """The diagonal of H: (P,) in float64."""

    diagonal: Tensor

    def log_det(self, prior: Params, scale: float | Tensor) -> Tensor:
        """Σ log(1 + scale·v·h)."""
        return torch.log1p(scale * self.variances(prior) * self.diagonal).sum()

    def covariance(self, prior: Params, scale: float) -> DiagonalCovariance:
        """v / (1 + scale·v·h)."""
        v = self.variances(prior)
        return DiagonalCovariance(v / (1 + scale * v * self.diagonal))


@savable("covariances.DiagonalCovariance")
@dataclass(frozen=True, eq=False)
class DiagonalCovariance(Covariance):
    """Σ = diag(variance): independent parameters.

    Args:
        variance: The variances of the parameters, (P,), in the order of `Linearized.flatten`.

    >>> covariance = DiagonalCovariance(torch.tensor([1.0, 4.0]))
    >>> covariance.draw(3, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3])
    """

    variance: Tensor

    def rooted(self, found: dict[str, Factor]) -> list[Factor]:
        """Each gradient times its parameter's standard deviation."""
        return [
            scaled(factor, v) for factor, v in zip(found.values(), self._split(found), strict=True)
        ]

    def _split(self, found: dict[str, Factor]) -> Iterator[Tensor]:
        start = 0
        for factor in found.values():
            size = num_entries(factor)
            v = self.variance[start : start + size]
            yield v.to(example(factor)).reshape(entry_shape(factor))
            start += size

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """√variance · z."""
        return self.variance.sqrt()[:, None] * normal(self.variance, num_samples, generator)


@savable("covariances.LowRankPlusDiagonal")
@dataclass(frozen=True, eq=False)
class LowRankPlusDiagonal(Covariance):
    """Σ = diag(diagonal) + factor factorᵀ, with factor (P, k)."""

    diagonal: Tensor
    factor: Tensor

    def rooted(self, found: dict[str, Factor]) -> list[Factor]:
        """The diagonal's factors, and the products with the k columns."""
        products: Tensor | None = None
        start = 0
        for one in found.values():
            size = num_entries(one)
            part = jacobian(one) @ self.factor[start : start + size].to(example(one))
            products = part if products is None else products + part
            start += size
        assert products is not None
        return [*DiagonalCovariance(self.diagonal).rooted(found), Direct(products)]

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """√diagonal · z + factor · z'."""
        one = self.diagonal.sqrt()[:, None] * normal(self.diagonal, num_samples, generator)
        return one + self.factor @ normal(self.factor[0], num_samples, generator)
