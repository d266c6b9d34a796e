"""A prior mean that is the same everywhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from net2gp.inputs import num_rows, tensors
from net2gp.tags import savable
from net2gp.types import Inputs


@savable("deep.ConstantMean")
@dataclass(frozen=True, eq=False)
class ConstantMean:
    """The same mean for all points.

    Args:
        value: The mean of each output, (C,).
    """

    value: Tensor = field(repr=False)

    def __call__(self, x: Inputs) -> Tensor:
        """The mean at N points, (N, C)."""
        first = tensors(x)[0]
        value = self.value.to(first) if first.is_floating_point() else self.value
        return value.expand(num_rows(x), -1)
