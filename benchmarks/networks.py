"""The problems' networks as PyTorch modules, for the workers that use PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from problems import Problem


def network(problem: Problem, arrays: Mapping[str, np.ndarray]) -> nn.Sequential:
    """The module of `problem` with the given weights, in evaluation mode."""
    layers: list[nn.Module] = []
    flat = len(problem.input_shape) == 1
    for i, shape in enumerate(problem.shapes):
        if len(shape) == 4:
            layers += [nn.Conv2d(shape[1], shape[0], shape[2:]), nn.ReLU(), nn.AvgPool2d(2)]
        else:
            layers += [] if flat else [nn.Flatten()]
            layers += [nn.Linear(shape[1], shape[0])]
            layers += [nn.ReLU()] if i + 1 < len(problem.shapes) else []
            flat = True
    module = nn.Sequential(*layers).eval()
    weighted = [layer for layer in module if isinstance(layer, nn.Linear | nn.Conv2d)]
    with torch.no_grad():
        for i, layer in enumerate(weighted):
            layer.weight.copy_(torch.from_numpy(arrays[f"w{i}"]))
            layer.bias.copy_(torch.from_numpy(arrays[f"b{i}"]))
    return module
