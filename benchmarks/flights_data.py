"""Three million flights as numbers: eight columns, and the delay in minutes.

The file is flights3m.npz of the folder that NET2GP_DATA names (US Bureau of Transportation Statistics, by
the package vega-datasets): minutes since 2001-01-01, a Monday, distances, and the places of 229 airports.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

DAY = 24 * 60


@dataclass(frozen=True, eq=False)
class Flights:
    """Standardized flights: training rows in random order, and held-out ones.

    Args:
        x: Columns of training flights, (N, 8), float32.
        y: Their delays, (N, 1), centered and in units of their standard deviation.
        x_test: Columns of held-out flights.
        y_test: Their delays in the same units.
        unit: The standard deviation of the training delays, in minutes.
    """

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    unit: float

    def scored(self, mean: Tensor, variance: Tensor, seconds: dict[str, float]) -> dict[str, Any]:
        """RMSE in minutes and NLL in nats of delays in minutes, of Gaussian predictions."""
        y = self.y_test.reshape(-1).double().to(mean)
        square = (y - mean).square()
        nll = 0.5 * (square / variance + variance.log()).mean() + 0.5 * np.log(2 * np.pi)
        return {
            "rmse": float(square.mean().sqrt()) * self.unit,
            "nll": float(nll) + float(np.log(self.unit)),
            "seconds": seconds,
            "device": torch.cuda.get_device_name() if mean.is_cuda else "CPU",
        }


def read(folder: Path | None, num_train: int, num_test: int, device: torch.device | str) -> Flights:
    """Read some flights, a fixed random choice.

    Args:
        folder: Where flights3m.npz is; None takes NET2GP_DATA.
        num_train: Training flights.
        num_test: Held-out flights.
        device: Where tensors are.
    """
    path = Path(folder or os.environ["NET2GP_DATA"]) / "flights3m.npz"
    with np.load(path, allow_pickle=False) as file:
        values = {name: file[name] for name in file.files}
    minute = values["minute"].astype(np.float64)
    places = [values[name].astype(np.float64) for name in ("latitude", "longitude")]
    ends = [values[name].astype(np.int64) for name in ("origin", "destination")]
    day = minute // DAY
    columns = np.stack(
        [minute % DAY, day % 7, day, values["distance"].astype(np.float64)]
        + [place[end] for end in ends for place in places],
        1,
    )
    order = np.random.default_rng(0).permutation(len(minute))[: num_train + num_test]
    x, y = columns[order], values["delay"].astype(np.float64)[order, None]
    train = slice(num_test, None)
    x = (x - x[train].mean(0)) / x[train].std(0)
    middle, unit = y[train].mean(), float(y[train].std())
    y = (y - middle) / unit
    tensors = [torch.from_numpy(v).float().to(device) for v in (x, y)]
    return Flights(
        tensors[0][train], tensors[1][train], tensors[0][:num_test], tensors[1][:num_test], unit
    )
