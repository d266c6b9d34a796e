"""The regressions of `uci.py`: standardized tables, and one trained network for each split.

All splits are trained together as stacked networks, by full-batch Adam in float32 whose rate falls to zero,
on mean squared error plus weight decay. The decay is chosen for each split on a tenth of its training points;
the network is then trained anew on all of them. The rest is in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from net2gp import data

HIDDEN = 50
DECAYS = (1e-5, 1e-4, 1e-3, 1e-2)
"""Weights of ‖θ‖² beside the mean squared error of standardized targets."""

TRIAL_STEPS, STEPS, RATE = 500, 2500, 2e-2


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
    x, y = table.x.double(), table.y.double()[:, 0]
    test = table.test_mask[:count]
    xs, ys, scales = [], [], []
    for mask in test:
        std, mean = torch.std_mean(x[~mask], 0, correction=0)
        y_std, y_mean = torch.std_mean(y[~mask], correction=0)
        xs.append((x - mean) / torch.where(std > 0, std, 1.0))
        ys.append((y - y_mean) / y_std)
        scales.append(y_std)
    return Splits(torch.stack(xs), torch.stack(ys), test, torch.stack(scales))


def network(num_inputs: int) -> nn.Sequential:
    """One hidden layer, tanh, one output; float64."""
    module = nn.Sequential(nn.Linear(num_inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    return module.double().eval()


def train(tables: Splits, advance: Callable[[int], None]) -> tuple[dict[str, Tensor], Tensor]:
    """Stacked parameters (S, ...) of the trained networks in float64, and their decays (S,)."""
    torch.manual_seed(0)
    keep, x, y = ~tables.test, tables.x.float(), tables.y.float()
    held = keep & (torch.rand(keep.shape) < 0.1)
    errors = []
    for decay in DECAYS:
        every = torch.full((len(x),), decay)
        tried = descend(x, y, keep & ~held, every, TRIAL_STEPS, advance)
        with torch.no_grad():
            squares = (outputs(tried, x) - y).square()
        errors.append((held * squares).sum(1) / held.sum(1))
    chosen = torch.tensor(DECAYS)[torch.stack(errors).argmin(0)]
    params = descend(x, y, keep, chosen, STEPS, advance)
    return {name: p.double() for name, p in params.items()}, chosen


def outputs(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """The outputs of stacked networks at their own inputs: (S, N)."""
    bias = params["0.bias"][:, None]
    hidden = torch.baddbmm(bias, x, params["0.weight"].mT).tanh()
    return torch.baddbmm(params["2.bias"][:, None], hidden, params["2.weight"].mT)[..., 0]


def descend(
    x: Tensor,
    y: Tensor,
    keep: Tensor,
    decay: Tensor,
    steps: int,
    advance: Callable[[int], None],
) -> dict[str, Tensor]:
    """Adam on mean squared error plus decay ‖θ‖², for all networks at once."""
    states = [network(x.shape[-1]).float().state_dict() for _ in range(len(x))]
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
        error = (share * (outputs(params, x) - y).square()).sum(1)
        (error + decay * norms).sum().backward()
        optimizer.step()
        if step % 100 == 99:
            advance(100)
    return {name: p.detach() for name, p in params.items()}


def module_of(params: dict[str, Tensor], index: int) -> nn.Sequential:
    """The trained network of one split."""
    module = network(params["0.weight"].shape[-1])
    module.load_state_dict({name: p[index] for name, p in params.items()})
    return module
