"""Red wine: prior precision δ and noise with two hidden layers, width with one, on twenty splits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp.explain import dual
from net2gp.training import AdamSettings, train_many
from net2gp.tuning import Fit, Selection, sweep

sys.path.append(str(Path(__file__).parent))
from toy import prior_offset, stored

DELTAS = tuple(float(v) for v in np.logspace(-1, 3.6, 30))
SIGMAS = tuple(float(v) for v in np.logspace(-1, 1, 30))
SEED, WIDTH, SIGMA = 77, 20, 0.64
TRAINING = AdamSettings(learning_rate=0.05, num_steps=1000, factor=0.8)


@dataclass(frozen=True, eq=False)
class Split:
    """Standardized rows for training and testing; `scale` takes standardized targets to grades."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    scale: float

    def losses(self, network: nn.Module) -> dict[str, float]:
        """Mean squared errors in grades."""
        with torch.no_grad():
            test, train = network(self.x_test) - self.y_test, network(self.x) - self.y
        squares = {"test loss": test.square().mean(), "train loss": train.square().mean()}
        return {name: float(value) * self.scale**2 for name, value in squares.items()}

    def to(self, kind: torch.dtype | str) -> Split:
        """The same on another device or in another dtype."""
        rows = {key: getattr(self, key).to(kind) for key in ("x", "y", "x_test", "y_test")}
        return replace(self, **rows)


@dataclass(frozen=True)
class Setting:
    """What a network is trained with."""

    delta: float
    sigma: float = SIGMA
    width: int = WIDTH
    num_hidden: int = 2


SWEEPS: dict[str, tuple[str, Callable[[float], Setting], AdamSettings]] = {
    "delta": ("δ", lambda value: Setting(delta=value), TRAINING),
    "sigma": ("σ", lambda value: Setting(delta=30.0, sigma=value), TRAINING),
    "width": ("width", lambda value: Setting(3.0, width=int(value), num_hidden=1), TRAINING),
}
"""By name of the stored archive: the axis, the setting of a value, and how it is trained."""


def splits(count: int) -> list[Split]:
    """The first of the twenty splits, in float64."""
    rows = stored("uci_wine_20splits_standardised")

    def read(index: int) -> Split:
        x, y, u, v = (
            torch.from_numpy(rows[f"s{index}_{key}"]) for key in ("xtr", "ytr", "xte", "yte")
        )
        return Split(x, y[:, None], u, v[:, None], float(rows[f"s{index}_yscale"]))

    return [read(index) for index in range(count)]


def network(width: int = WIDTH, num_hidden: int = 2) -> nn.Sequential:
    """The network, at the start of every training."""
    before = torch.get_default_dtype()
    # the stored results come from draws in float64, which are not those of float32
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(SEED)
        sizes = [11, *[width] * num_hidden]
        hidden = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
        return nn.Sequential(*hidden, nn.Linear(width, 1)).eval()
    finally:
        torch.set_default_dtype(before)


def train(
    cells: Sequence[tuple[Setting, Split]],
    training: AdamSettings = TRAINING,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[nn.Module]:
    """A trained network for each setting and split, those of one shape at once; in float64 again.

    Single precision is enough for the curves, and three times as fast.
    """
    found: dict[int, nn.Module] = {}
    for shape in sorted({(setting.width, setting.num_hidden) for setting, _ in cells}):
        chosen = [i for i, (one, _) in enumerate(cells) if (one.width, one.num_hidden) == shape]
        start = network(*shape).to(device, dtype)
        settings = [cells[index][0] for index in chosen]
        rows = {id(split): split.to(dtype).to(device) for _, split in cells}
        trained = train_many(
            [start] * len(chosen),
            [(rows[id(cells[i][1])].x, rows[id(cells[i][1])].y) for i in chosen],
            [n2g.Gaussian(noise_var=setting.sigma**2) for setting in settings],
            prior_var=[1 / setting.delta for setting in settings],
            offset=[prior_offset(start, setting.delta) for setting in settings],
            optimizer=training,
            at_once=16 if device == "cpu" else None,
        )
        found |= {index: one.double() for index, one in zip(chosen, trained, strict=True)}
    return [found[index] for index in range(len(cells))]


def fit(network: nn.Module, setting: Setting, split: Split) -> Fit:
    """The evidence of Laplace's linear model in float64, and the losses."""
    device = next(network.parameters()).device
    split = split.to(str(device))
    likelihood = n2g.Gaussian(noise_var=setting.sigma**2)
    posterior = dual(network, (split.x, split.y), likelihood, 1 / setting.delta)
    return Fit(posterior.log_marginal_likelihood(), split.losses(network))


def selection(
    name: str, rows: Sequence[Split], *, every: int = 1, device: str = "cpu"
) -> Selection:
    """One of the sweeps, over every or each so-manieth of the stored values."""
    axis, setting_of, training = SWEEPS[name]
    values = tuple(stored(f"dnn2gp_{name}_wine")["params"].tolist()[::every])
    cells = [(setting_of(value), split) for value in values for split in rows]
    networks = iter(train(cells, training, device=device))
    return sweep(
        lambda value, split: fit(next(networks), setting_of(value), split), values, rows, name=axis
    )
