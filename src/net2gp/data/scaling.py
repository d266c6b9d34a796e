"""Standardization of inputs and targets, and the way back to their own units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from net2gp.errors import InputError


@dataclass(frozen=True)
class Scaling:
    """Means and standard deviations of inputs, per column or channel, and of targets; None leaves them.

    A network that was trained on (x − x_mean) / x_std and (y − y_mean) / y_std gives a posterior in these
    units. With the scaling, `report.uncertainty_report` and `explorer.write_explorer` show the units before.

    Args:
        x_mean: The mean of each column (or channel) of the inputs.
        x_std: Its standard deviation.
        y_mean: The mean of each target.
        y_std: Its standard deviation.

    >>> scaling = Scaling(x_mean=(1.0,), x_std=(2.0,), y_mean=(10.0,), y_std=(3.0,))
    >>> scaling.inputs(np.array([[5.0]])), scaling.inputs_back(torch.tensor([[2.0]]))
    (array([[2.]]), tensor([[5.]]))
    >>> scaling.back(torch.tensor([[-1.0]])), scaling.width(torch.tensor([[1.0]]))
    (tensor([[7.]], dtype=torch.float64), tensor([3.]))
    """

    x_mean: Sequence[float] | None = None
    x_std: Sequence[float] | None = None
    y_mean: Sequence[float] | None = None
    y_std: Sequence[float] | None = None

    @classmethod
    def of(cls, x: np.ndarray | None = None, y: np.ndarray | None = None) -> Scaling:
        """Return the one of these data: standard deviations are those of the points, as in scikit-learn.

        A column without variance keeps its width.

        Args:
            x: Inputs (N, D), or None to leave inputs as they are.
            y: Targets (N, C) of a regression, or None.

        Returns:
            The scaling.

        Raises:
            InputError: If the squares of a column overflow.

        >>> Scaling.of(np.array([[1.0], [3.0]])).x_std
        [1.0]
        """
        found = {
            name: (_means(v), _deviations(v)) for name, v in (("x", x), ("y", y)) if v is not None
        }
        pairs = {f"{name}_mean": pair[0] for name, pair in found.items()}
        return cls(**pairs, **{f"{name}_std": pair[1] for name, pair in found.items()})

    def inputs(self, x: np.ndarray) -> np.ndarray:
        """Standardize inputs: columns of a table, or channels of images.

        Args:
            x: Inputs, (N, D, …).

        Returns:
            The standardized inputs, in the dtype of `x`.

        Raises:
            InputError: If the second axis of `x` is of another length.
        """
        if self.x_mean is None or self.x_std is None:
            return x
        if x.ndim < 2 or x.shape[1] != len(self.x_mean):
            raise InputError(
                f"the inputs have shape {x.shape}, but {len(self.x_mean)} means and standard deviations are "
                "known for their second axis. Pass inputs with as many columns or channels."
            )
        shape = (-1, *[1] * (x.ndim - 2))
        mean, std = (np.asarray(v).reshape(shape) for v in (self.x_mean, self.x_std))
        return ((x - mean) / std).astype(x.dtype)

    def inputs_back(self, x: Tensor) -> Tensor:
        """Return inputs in their own units.

        Args:
            x: Standardized inputs, (N, D, …).

        Returns:
            x · x_std + x_mean.
        """
        if self.x_mean is None or self.x_std is None:
            return x
        shape = (-1, *[1] * (x.dim() - 2))
        mean, std = (
            torch.tensor(v, dtype=torch.float64).to(x).reshape(shape)
            for v in (self.x_mean, self.x_std)
        )
        return x * std + mean

    def targets(self, y: np.ndarray) -> np.ndarray:
        """Standardize targets of a regression.

        Args:
            y: Targets, (N, C).

        Returns:
            (y − y_mean) / y_std.
        """
        if self.y_mean is None or self.y_std is None:
            return y
        return (y - np.asarray(self.y_mean)) / np.asarray(self.y_std)

    def back(self, mean: Tensor) -> Tensor:
        """Return targets in their own units.

        Args:
            mean: Standardized targets, or means or quantiles of them, (…, C).

        Returns:
            mean · y_std + y_mean, in float64 if there is a scaling.
        """
        if self.y_mean is None:
            return mean
        wide = mean.double()
        return wide * self.width(wide) + torch.tensor(self.y_mean, dtype=torch.float64).to(wide)

    def width(self, like: Tensor) -> Tensor:
        """Return what a standard deviation of standardized targets is multiplied with.

        Args:
            like: A tensor with the dtype and device of the result.

        Returns:
            y_std, (C,), or one.
        """
        return torch.tensor(1.0 if self.y_std is None else self.y_std, dtype=torch.float64).to(like)

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers by name, for a file.

        Returns:
            The arguments of the scaling.
        """
        return asdict(self)


def _means(values: np.ndarray) -> list[float]:
    return [float(v) for v in values.astype(np.float64).mean(0)]


def _deviations(values: np.ndarray) -> list[float]:
    with np.errstate(over="ignore", invalid="ignore"):
        found = values.astype(np.float64).std(0)
    if not np.isfinite(found).all():
        raise InputError(
            f"column {int(np.isfinite(found).argmin())} has numbers up to "
            f"{float(np.abs(values[:, np.isfinite(found).argmin()]).max()):.2g}, whose variance overflows. "
            "Drop these rows, or divide the column by a constant."
        )
    return [float(v) or 1.0 for v in found]
