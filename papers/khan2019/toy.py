"""The toy regression: networks at many prior precisions δ, by Laplace.

Inputs are pairs (x, 1) of three clusters of x, the middle one of few and noisy points; y = sin x + noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp.data import data_folder
from net2gp.explain import dual
from net2gp.training import AdamSettings, Trained, train_many
from net2gp.tuning import EVIDENCE, Selection

DELTAS = tuple(float(v) for v in np.logspace(-2, 2, 21))
TRAINING = AdamSettings(learning_rate=0.5, num_steps=10_000, factor=0.99)
NOISE = n2g.Gaussian(noise_var=1.0)
SEED, WIDTH = 77, 20
"""The seed of every network's start, and its width."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Training points x (N, 2), y (N, 1) and test points, in float64."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """The pair (x, y)."""
        return self.x, self.y

    def losses(self, network: nn.Module) -> dict[str, float]:
        """Mean squared errors."""
        with torch.no_grad():
            train, test = network(self.x) - self.y, network(self.x_test) - self.y_test
        return {
            "train loss": float(train.square().mean()),
            "test loss": float(test.square().mean()),
        }


@cache
def stored(name: str) -> dict[str, np.ndarray]:
    """An archive of the folder `reference` beside the data."""
    with np.load(data_folder().parent / "reference" / f"{name}.npz", allow_pickle=False) as archive:
        return dict(archive)


def problems(count: int, name: str = "dnn2gp_toy_delta_original") -> list[Problem]:
    """The first data sets that the stored results were found on."""
    keys = ("x_train", "y_train", "x_test", "y_test")
    columns = [torch.from_numpy(stored(name)[f"data_{key}"][:count]) for key in keys]
    return [Problem(x, y[:, None], u, v[:, None]) for x, y, u, v in zip(*columns, strict=True)]


def generate(
    seed: int, *, low_var: float = 0.01, high_var: float = 1.0, share: float = 0.1
) -> Problem:
    """New data of the same kind: 100 points for training and 2000 for testing.

    A point is in [−1, 1] with probability `share`, where the noise has variance `high_var`, and else in
    [−3.5, −1.5] or [1.5, 3.5], where it is `low_var`.
    """
    generator = torch.Generator().manual_seed(seed)
    kind = {"generator": generator, "dtype": torch.float64}
    place, where, noise = (
        torch.rand(2100, **kind),
        torch.rand(2100, **kind),
        torch.randn(2100, **kind),
    )
    middle = where < share
    side = torch.where(where < share + (1 - share) / 2, -1.0, 1.0)
    x = torch.where(middle, 2 * place - 1, side * (1.5 + 2 * place))
    y = x.sin() + torch.where(middle, high_var, low_var) ** 0.5 * noise
    inputs, y = torch.stack([x, torch.ones_like(x)], 1), y[:, None]
    return Problem(inputs[:100], y[:100], inputs[100:], y[100:])


def network(width: int = WIDTH, seed: int = SEED) -> nn.Sequential:
    """The network, at the start of every training, in float64."""
    before = torch.get_default_dtype()
    # the stored results come from draws in float64, which are not those of float32
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)).eval()
    finally:
        torch.set_default_dtype(before)


def prior_offset(one: nn.Module, delta: float) -> float:
    """P log(2π/δ) / 2, of the density of the prior N(0, I/δ).

    The stored networks were trained on the whole negative log joint density. Its minimum does not depend
    on this, but their learning rate falls where the loss stands still to 1e-4 of its value, and with it
    that of wide networks falls long before they are at a mode.
    """
    return 0.5 * sum(p.numel() for p in one.parameters()) * math.log(2 * math.pi / delta)


@dataclass(frozen=True, eq=False)
class Grid:
    """Networks trained on every data set at every δ, all at once; index v·D + d."""

    deltas: tuple[float, ...]
    problems: list[Problem]
    trained: Trained

    def at(self, delta: int, problem: int) -> nn.Module:
        """One of the networks."""
        return self.trained[delta * len(self.problems) + problem].cpu()

    def selection(self) -> Selection:
        """Evidence and losses of all of them."""
        return tabulate(
            "δ", self.deltas, self.problems, self.deltas, [n.cpu() for n in self.trained]
        )


def train_grid(
    deltas: Sequence[float],
    problems: Sequence[Problem],
    training: AdamSettings = TRAINING,
    device: str = "cpu",
) -> Grid:
    """A network for every δ and data set."""
    cells = [(delta, problem) for delta in deltas for problem in problems]
    trained = train_many(
        [network().to(device)] * len(cells),
        [(problem.x.to(device), problem.y.to(device)) for _, problem in cells],
        NOISE,
        prior_var=[1 / delta for delta, _ in cells],
        offset=[prior_offset(network(), delta) for delta, _ in cells],
        optimizer=training,
        at_once=70 if device == "cpu" else None,
    )
    return Grid(tuple(deltas), list(problems), trained)


def evidence(network: nn.Module, problem: Problem, delta: float) -> float:
    """log N(ỹ | 0, JJᵀ/δ + I) with ỹ = Jθ* + y − f, of Laplace's linear model."""
    return float(dual(network, problem.data, NOISE, 1 / delta).log_marginal_likelihood())


def tabulate(
    name: str,
    values: Sequence[float],
    problems: Sequence[Problem],
    deltas: Sequence[float],
    networks: Sequence[nn.Module],
) -> Selection:
    """The table of networks trained on each data set for each value, at one δ a value."""
    scores: dict[str, list[float]] = {EVIDENCE: [], "test loss": [], "train loss": []}
    cells = [(delta, problem) for delta in deltas for problem in problems]
    for (delta, problem), one in zip(cells, networks, strict=True):
        scores[EVIDENCE].append(evidence(one, problem, delta))
        for key, loss in problem.losses(one).items():
            scores[key].append(loss)
    shape = (len(values), len(problems))
    columns = {
        key: torch.tensor(v, dtype=torch.float64).reshape(shape) for key, v in scores.items()
    }
    return Selection(name, tuple(values), columns)
