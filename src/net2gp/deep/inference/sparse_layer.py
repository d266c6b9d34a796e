"""Layers of a deep Gaussian process as a user writes them, and their mean functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from net2gp.errors import InputError, check_count
from net2gp.inputs import describe
from net2gp.tags import savable
from net2gp.types import Kernel


@dataclass(frozen=True, eq=False)
class SparseLayer:
    """One layer: independent Gaussian processes of one kernel, around a mean function.

    Args:
        kernel: The covariance of each output. Its positive numbers are where training starts.
        width: The number of outputs. None means as many as the layer has inputs, at most 30. The last layer
            has the outputs that the likelihood needs.
        mean: "linear" adds the inputs themselves if there are as many outputs, their first principal
            components if there are fewer outputs, and the inputs beside zeros if there are more. "constant"
            adds the mean of the targets, which only the last layer has, and "zero" nothing. None means
            "linear" for inner layers and "constant" for the last. Without a linear mean, deep compositions
            forget their inputs.
        num_inducing: The number of inducing points of this layer. None means the number in the settings.

    Raises:
        InputError: If a field is of the wrong kind.

    >>> from net2gp.kernels import RBF
    >>> SparseLayer(RBF(0.5), width=2).width
    2

    References: Duvenaud, Rippel, Adams & Ghahramani, "Avoiding pathologies in very deep networks", 2014;
    Salimbeni & Deisenroth, "Doubly stochastic variational inference for deep Gaussian processes", 2017.
    """

    kernel: Kernel
    width: int | None = None
    mean: Literal["linear", "constant", "zero"] | None = None
    num_inducing: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, Kernel) or isinstance(self.kernel, type):
            raise InputError(
                f"a layer needs a kernel, such as n2g.RBF() or n2g.nngp(network), but got "
                f"{describe(self.kernel)}."
            )
        for name in ("width", "num_inducing"):
            if getattr(self, name) is not None:
                check_count(getattr(self, name), name)
        if self.mean not in (None, "linear", "constant", "zero"):
            raise InputError(
                f'mean must be "linear", "constant", "zero" or None, but is {self.mean!r}.'
            )


@savable("deep.AffineMean")
@dataclass(frozen=True, eq=False)
class AffineMean:
    """The mean function x W + b of a layer, or a part of it.

    Args:
        weight: W, of shape (D, C), or None for zero.
        offset: b, of shape (C,), or None for zero.
    """

    weight: Tensor | None = field(default=None, repr=False)
    offset: Tensor | None = field(default=None, repr=False)

    def __call__(self, x: Tensor) -> Tensor | float:
        """Return the mean at each of N points, (N, C), or a number for all of them."""
        value: Tensor | float = 0.0
        if self.weight is not None:
            value = x.flatten(1) @ self.weight
        return value if self.offset is None else value + self.offset


def linear_weight(x: Tensor, width: int) -> Tensor:
    """Compute the weight of a linear mean function from its inputs.

    Args:
        x: Inputs of the layer, (N, D).
        width: The number of outputs C.

    Returns:
        The identity for C = D, the first C principal directions for C < D, and the identity beside zeros for
        C > D: (D, C).

    >>> linear_weight(torch.zeros(3, 1), 2)
    tensor([[1., 0.]])
    """
    flat = x.detach().flatten(1)
    columns = flat.shape[1]
    if width >= columns:
        return torch.eye(columns, width).to(flat)
    return principal_directions(flat, width)


def principal_directions(x: Tensor, count: int) -> Tensor:
    """Compute the first principal directions of points, with signs fixed: (D, count)."""
    centered = x - x.mean(0)
    directions = torch.linalg.svd(centered, full_matrices=False).Vh[:count]
    # Each direction points to the side of its largest entry, so that results do not depend on LAPACK.
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    found = (directions * largest.sign()).mT
    missing = count - found.shape[1]
    return found if missing <= 0 else torch.cat([found, found.new_zeros(len(found), missing)], 1)
