"""Some rows of a regression: all outputs of some points, or a random choice of outputs at their places."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from net2gp.inputs import chunks, num_rows
from net2gp.likelihoods.traits import target_columns
from net2gp.linalg.chance import fixed_choice
from net2gp.linear import Linearized
from net2gp.linear.forward.places import FEW_OUTPUTS, AtPlaces, channels_of, num_places
from net2gp.posteriors.weights import Task
from net2gp.posteriors.weights.covariance import Covariance
from net2gp.types import Inputs

LEAST_OUTPUTS = 8
"""Outputs of a point that are chosen at least, where it has more than `FEW_OUTPUTS`."""

NUMBERS = 2**18
"""Places whose variances are computed together."""


@dataclass(frozen=True)
class PickOutputs:
    """Picks some of a network's outputs at places.

    Args:
        places: Brings the outputs in the order of places.
        index: The numbers of the chosen ones among a point's outputs, (q,).
    """

    places: AtPlaces
    index: Tensor = field(repr=False)

    def __call__(self, out: Any) -> Any:
        """The chosen outputs, (N, q)."""
        found = self.places(out)
        return (
            found.flatten(1)[:, self.index.to(found.device)] if isinstance(found, Tensor) else found
        )


@dataclass(frozen=True, eq=False)
class SomeRows:
    """Which outputs of a point count as rows.

    Args:
        index: Their numbers, (q,), or None for all.
        num_outputs: Their number q.
    """

    index: Tensor | None
    num_outputs: int

    @staticmethod
    def of(task: Task, limit: int) -> SomeRows:
        """All outputs, or a fixed random choice where a point has many: about `limit` rows in all."""
        count, total = task.sums.count, task.sums.num_outputs
        if channels_of(task.linearized) is None or total <= FEW_OUTPUTS:
            return SomeRows(None, total)
        size = min(total, max(LEAST_OUTPUTS, -(-limit // count)))
        return SomeRows(fixed_choice(total, size).to(task.device), size)

    def chosen(self, linearized: Linearized) -> Linearized:
        """The network with the chosen outputs alone."""
        if self.index is None:
            return linearized
        assert isinstance(linearized.output, AtPlaces)
        output = PickOutputs(linearized.output, self.index)
        return replace(linearized, output=output, plans=type(linearized.plans)())

    def values(self, task: Task) -> tuple[Tensor, Tensor]:
        """The chosen outputs of a task's points, and their targets: (n, q) each, in float64."""
        y = target_columns(task.likelihood, task.f, task.y).double()
        return (task.f, y) if self.index is None else (task.f[:, self.index], y[:, self.index])

    def variances(self, covariance: Covariance, linearized: Linearized, x: Inputs) -> Tensor:
        """The variances of the chosen outputs, (n, q)."""
        if not covariance.by_place:
            return covariance.variances(self.chosen(linearized), x).double()
        parts = []
        for part in chunks(x, max(1, NUMBERS // num_places(linearized, x))):
            every = covariance.variances(linearized, part).double().reshape(num_rows(part), -1)
            parts.append(every if self.index is None else every[:, self.index])
        return torch.cat(parts)
