"""The regressions of `uci.py` and `uci_gaps.py`: standardized tables, and one trained network for each split.

All splits are trained together as stacked networks, by full-batch Adam in float32 whose rate falls to zero,
on mean squared error, or on the density of a noise that is an output too, plus weight decay. The decay is
chosen for each split on a tenth of its training points; the network is then trained anew on all of them. The
rest is in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from net2gp import data
from net2gp.likelihoods import SoftplusScale

HIDDEN = 50
DECAYS = (1e-5, 1e-4, 1e-3, 1e-2)
"""Weights of ‖θ‖² beside the mean squared error of standardized targets."""

TRIAL_STEPS, STEPS, RATE = 500, 2500, 2e-2


@dataclass(frozen=True)
class Loss:
    """What networks are trained on: a function of outputs (S, N, C) and targets (S, N), with its decays."""

    num_outputs: int
    decays: tuple[float, ...]
    value: Callable[[Tensor, Tensor], Tensor]


def squares(out: Tensor, y: Tensor) -> Tensor:
    """Squared errors."""
    return (out[..., 0] - y).square()


def densities(out: Tensor, y: Tensor) -> Tensor:
    """−log p(y) without a constant, for a mean and a raw scale."""
    log_std = SoftplusScale().log_std(out[..., 1])
    return 0.5 * ((out[..., 0] - y) * (-log_std).exp()).square() + log_std


SQUARES = Loss(1, DECAYS, squares)
DENSITIES = Loss(2, (1e-4, 1e-3, 1e-2, 1e-1), densities)


@dataclass(frozen=True, eq=False)
class Splits:
    """A table under its first S splits: x (S, N, D), y (S, N) standardized by training points alone."""

    x: Tensor
    y: Tensor
    test: Tensor
    scale: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def train_pair(self, index: int) -> tuple[Tensor, Tensor]:
        """x (n, D) and y (n, 1) of the training points."""
        chosen = ~self.test[index]
        return self.x[index, chosen], self.y[index, chosen][:, None]

    def test_pair(self, index: int) -> tuple[Tensor, Tensor]:
        """x (m, D) and y (m, 1) of the test points."""
        chosen = self.test[index]
        return self.x[index, chosen], self.y[index, chosen][:, None]


def splits(name: str, count: int) -> Splits:
    """The first `count` customary splits of a table; `scale` takes errors back to the table's units."""
    table = data.uci(name)
    return standardized(table.x.double(), table.y.double()[:, 0], table.test_mask[:count])


def gaps(name: str, most: int) -> tuple[Splits, list[int]]:
    """A split for each input that varies, and how many values this input has.

    Rows are sorted by the input, equal ones in the order of the file, and the middle third is tested on. Of a
    larger table `most` rows are used, a fixed random choice.
    """
    table = data.uci(name)
    x, y = table.x.double(), table.y.double()[:, 0]
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(x), generator=generator)[:most].sort().values
    x, y = x[chosen], y[chosen]
    counts = {i: len(column.unique()) for i, column in enumerate(x.T)}
    varying = [i for i, count in counts.items() if count > 1]
    middle = x[:, varying].argsort(dim=0, stable=True)[len(x) // 3 : len(x) - len(x) // 3].T
    test = torch.zeros(len(varying), len(x), dtype=torch.bool).scatter(1, middle, True)
    return standardized(x, y, test), [counts[i] for i in varying]


def standardized(x: Tensor, y: Tensor, test: Tensor) -> Splits:
    """The table (N, D) and its targets (N,) for each mask (S, N) of test points, in units of the others."""
    xs, ys, scales = [], [], []
    for mask in test:
        std, mean = torch.std_mean(x[~mask], 0, correction=0)
        y_std, y_mean = torch.std_mean(y[~mask], correction=0)
        xs.append((x - mean) / torch.where(std > 0, std, 1.0))
        ys.append((y - y_mean) / y_std)
        scales.append(y_std)
    return Splits(torch.stack(xs), torch.stack(ys), test, torch.stack(scales))


def network(num_inputs: int, num_outputs: int = 1) -> nn.Sequential:
    """One hidden layer, tanh; float64."""
    module = nn.Sequential(nn.Linear(num_inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, num_outputs))
    return module.double().eval()


def train(
    tables: Splits, advance: Callable[[int], None], *, loss: Loss = SQUARES, seed: int = 0
) -> tuple[dict[str, Tensor], Tensor]:
    """Stacked parameters (S, ...) of the trained networks in float64, and their decays (S,)."""
    torch.manual_seed(seed)
    keep, x, y = ~tables.test, tables.x.float(), tables.y.float()
    held = keep & (torch.rand(keep.shape) < 0.1)
    errors = []
    for decay in loss.decays:
        every = torch.full((len(x),), decay)
        tried = descend(loss, x, y, keep & ~held, every, TRIAL_STEPS, advance)
        with torch.no_grad():
            values = loss.value(outputs(tried, x), y)
        errors.append((held * values).sum(1) / held.sum(1))
    chosen = torch.tensor(loss.decays)[torch.stack(errors).argmin(0)]
    params = descend(loss, x, y, keep, chosen, STEPS, advance)
    return {name: p.double() for name, p in params.items()}, chosen


def outputs(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """The outputs of stacked networks at their own inputs: (S, N, C)."""
    bias = params["0.bias"][:, None]
    hidden = torch.baddbmm(bias, x, params["0.weight"].mT).tanh()
    return torch.baddbmm(params["2.bias"][:, None], hidden, params["2.weight"].mT)


def descend(
    loss: Loss,
    x: Tensor,
    y: Tensor,
    keep: Tensor,
    decay: Tensor,
    steps: int,
    advance: Callable[[int], None],
) -> dict[str, Tensor]:
    """Adam on the mean loss plus decay ‖θ‖², for all networks at once."""
    states = [network(x.shape[-1], loss.num_outputs).float().state_dict() for _ in range(len(x))]
    params = {
        name: torch.stack([state[name] for state in states]).requires_grad_() for name in states[0]
    }
    optimizer = torch.optim.Adam(params.values(), lr=RATE)
    share = keep / keep.sum(1, keepdim=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        norms = sum(p.square().flatten(1).sum(1) for p in params.values())
        error = (share * loss.value(outputs(params, x), y)).sum(1)
        (error + decay * norms).sum().backward()
        optimizer.step()
        if step % 100 == 99:
            advance(100)
    return {name: p.detach() for name, p in params.items()}


def module_of(params: dict[str, Tensor], index: int) -> nn.Sequential:
    """The trained network of one split."""
    module = network(params["0.weight"].shape[-1], params["2.weight"].shape[-2])
    module.load_state_dict({name: p[index] for name, p in params.items()})
    return module
