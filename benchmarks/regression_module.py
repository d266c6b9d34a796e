"""The networks of `regression.py`, in torch alone: the worker of another library builds them, too."""

from __future__ import annotations

from torch import nn

WIDTH = 64


def network(kind: str, num_inputs: int) -> nn.Sequential:
    """Two hidden layers of ReLU units, untrained."""
    layers: list[nn.Module] = []
    for inputs in (num_inputs, WIDTH):
        layers.append(nn.Linear(inputs, WIDTH))
        if kind == "BatchNorm+Dropout":
            layers.append(nn.BatchNorm1d(WIDTH))
        layers.append(nn.ReLU())
        if kind == "BatchNorm+Dropout":
            layers.append(nn.Dropout(0.2))
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))
