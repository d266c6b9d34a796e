"""The regressions of `regression.py`: tables, and networks that were trained in four ways.

Inputs and targets are standardized by the training rows. Every network has two hidden layers of 64 ReLU
units and is trained by Adam in batches, with a rate that falls to zero: plainly, until it has nearly learned
its rows by heart; with weight decay; with early stopping on a fifth of the rows; or with BatchNorm and
Dropout. All rows, also those that stopped the training, are then the data of the posterior.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from net2gp import data
from regression_module import network

KINDS = ("plain", "weight decay", "early stopping", "BatchNorm+Dropout")
UCI = (
    "bostonHousing",
    "concrete",
    "energy",
    "yacht",
    "wine-quality-red",
    "power-plant",
    "naval-propulsion-plant",
    "protein-tertiary-structure",
)
CALIFORNIA = {f"California {count}": count for count in (100, 300, 1000, 5000)}
TABLES = ("diabetes", "Friedman", *CALIFORNIA, *UCI)
TRAIN_ROWS, TEST_ROWS = {"power-plant": 5000}, 1000
"""The most rows of a UCI table that are used; 1000 for training where nothing is said."""

BATCH, STEPS = 64, 1500


@dataclass(frozen=True, eq=False)
class Rows:
    """Standardized rows in float32: x (N, D), y (N, 1), and others to be tested on."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def load(name: str, seed: int) -> Rows:
    """The rows of a table under one split; the splits of UCI tables are the customary ones."""
    random = np.random.default_rng(seed)
    if name in UCI:
        table = data.uci(name)
        mask = table.test_mask[seed].numpy()
        x, y = table.x.double(), table.y.double()
        train, test = (random.permutation(np.flatnonzero(m)) for m in (~mask, mask))
        return standardized(x, y, train[: TRAIN_ROWS.get(name, 1000)], test[:TEST_ROWS])
    if name in CALIFORNIA:
        x, y = data.california_housing()
        order, count = random.permutation(len(x)), CALIFORNIA[name]
        test = order[count : count + TEST_ROWS]
        return standardized(x.double(), y.double(), order[:count], test)
    x, y = builtin(name, seed)
    order, count = random.permutation(len(x)), 331 if name == "diabetes" else 750
    return standardized(x, y, order[:count], order[count : count + TEST_ROWS])


def builtin(name: str, seed: int) -> tuple[Tensor, Tensor]:
    """What comes with scikit-learn: patients, or a function of Friedman with noise of variance 1."""
    from sklearn.datasets import load_diabetes, make_friedman1

    if name == "diabetes":
        x, y = load_diabetes(return_X_y=True)
    else:
        x, y = make_friedman1(1750, noise=1.0, random_state=seed)
    return torch.as_tensor(x), torch.as_tensor(y)[:, None]


def standardized(x: Tensor, y: Tensor, train: np.ndarray, test: np.ndarray) -> Rows:
    chosen, other = torch.as_tensor(train), torch.as_tensor(test)
    std, mean = torch.std_mean(x[chosen], 0, correction=0)
    x = ((x - mean) / torch.where(std > 0, std, 1.0)).clamp(-10, 10).float()
    y_std, y_mean = torch.std_mean(y[chosen], correction=0)
    y = ((y - y_mean) / y_std).float()
    return Rows(x[chosen], y[chosen], x[other], y[other])


def few(name: str, count: int, seed: int) -> Rows:
    """The first `count` training rows of a table, standardized as all of them."""
    rows = load(name, seed)
    return replace(rows, x=rows.x[:count], y=rows.y[:count])


def train(kind: str, rows: Rows, seed: int) -> nn.Sequential:
    """A network in eval mode, as such a training leaves it."""
    torch.manual_seed(seed)
    module = network(kind, rows.x.shape[1])
    count = len(rows.x)
    held = (
        torch.randperm(count)[: count // 5] if kind == "early stopping" else torch.empty(0).long()
    )
    keep = torch.ones(count, dtype=torch.bool)
    keep[held] = False
    x, y = rows.x[keep], rows.y[keep]
    decay = 0.03 if kind == "weight decay" else 0.0
    optimizer = torch.optim.Adam(module.parameters(), lr=5e-3, weight_decay=decay, foreach=True)
    best, kept = math.inf, module.state_dict()
    batches: list[Tensor] = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 5e-3 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        if not batches:
            batches = [b for b in torch.randperm(len(x)).split(BATCH) if len(b) > 1 or len(x) == 1]
        index = batches.pop()
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x[index]), y[index]).backward()
        optimizer.step()
        if len(held) and step % 10 == 9:
            with torch.no_grad():
                error = float(nn.functional.mse_loss(module(rows.x[held]), rows.y[held]))
            if error < best:
                best, kept = error, deepcopy(module.state_dict())
    if len(held):
        module.load_state_dict(kept)
    return module.eval()
