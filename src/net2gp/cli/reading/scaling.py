"""Standardization of inputs and targets, kept with a posterior."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from net2gp.errors import InputError

KINDS = ("none", "features", "target", "both")


@dataclass(frozen=True)
class Scaling:
    """Means and standard deviations of inputs, per column or channel, and of targets; None leaves them.

    >>> Scaling((1.0,), (2.0,)).inputs(np.array([[5.0]], dtype=np.float32))
    array([[2.]], dtype=float32)
    """

    x_mean: Sequence[float] | None = None
    x_std: Sequence[float] | None = None
    y_mean: Sequence[float] | None = None
    y_std: Sequence[float] | None = None

    @classmethod
    def of(cls, kind: str, x: np.ndarray, y: np.ndarray | None) -> Scaling:
        """Return the one of these data: standard deviations are those of the points, as in scikit-learn.

        Args:
            kind: "none", "features", "target" or "both".
            x: Inputs (N, D).
            y: Targets (N, C) of a regression, or None.
        """
        found: dict[str, list[float] | None] = {}
        if kind in ("features", "both"):
            if x.ndim != 2:
                raise InputError(
                    f"--standardize {kind} is for tables, but the inputs have shape {x.shape}. Pass "
                    "--image-mean and --image-std with a number per channel."
                )
            found |= {"x_mean": _means(x), "x_std": _deviations(x)}
        if kind in ("target", "both") and y is not None:
            found |= {"y_mean": _means(y), "y_std": _deviations(y)}
        return cls(**found)

    def inputs(self, x: np.ndarray) -> np.ndarray:
        """Standardize inputs: columns of a table, or channels of images."""
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

    def targets(self, y: np.ndarray) -> np.ndarray:
        """Standardize targets of a regression (N, C)."""
        if self.y_mean is None or self.y_std is None:
            return y
        return (y - np.asarray(self.y_mean)) / np.asarray(self.y_std)

    def back(self, mean: Tensor) -> Tensor:
        """Targets in their own units, from standardized ones (…, C)."""
        if self.y_mean is None:
            return mean
        return mean * self.width(mean) + torch.as_tensor(self.y_mean).to(mean)

    def width(self, like: Tensor) -> Tensor:
        """What a standard deviation of standardized targets is multiplied with: (C,), or one."""
        return torch.as_tensor(1.0 if self.y_std is None else self.y_std).to(like)

    def as_dict(self) -> dict[str, Any]:
        """The numbers by name, for a file."""
        return asdict(self)


def _means(values: np.ndarray) -> list[float]:
    return [float(v) for v in values.astype(np.float64).mean(0)]


def _deviations(values: np.ndarray) -> list[float]:
    found = values.astype(np.float64).std(0)
    return [float(v) or 1.0 for v in found]
