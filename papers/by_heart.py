"""A small classifier that has learned some digits by heart, so that it is too sure of others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from net2gp import data

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class ByHeart:
    """The classifier, in eval mode, and images of the digits that it knows and of those that it does not.

    Args:
        network: What `small` makes, trained on 300 images until it knows them.
        train: These images and their labels.
        held_out: 400 others.
        test: All others.
        strangers: Turned test images, and noise.
    """

    network: nn.Module
    train: Pair
    held_out: Pair
    test: Pair
    strangers: dict[str, Tensor]


def small() -> nn.Sequential:
    """Two convolutions and a linear layer for digits (N, 1, 8, 8)."""
    layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(64, 10))


def digits_by_heart(device: torch.device | str = "cpu") -> ByHeart:
    """Train the classifier: some seconds."""
    parts = [data.digits(which) for which in ("train", "test")]
    x, y = (torch.cat([part[i] for part in parts]).to(device) for i in (0, 1))
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(x), generator=generator).to(device)
    train, held_out, test = ((x[some], y[some]) for some in order.tensor_split([300, 700]))
    noise = torch.rand(test[0].shape, generator=generator).to(device)
    torch.manual_seed(0)
    network = small().to(device)
    optimizer = torch.optim.Adam(network.parameters(), 5e-3)
    for _ in range(300):
        optimizer.zero_grad()
        cross_entropy(network(train[0]), train[1]).backward()
        optimizer.step()
    strangers = {"turned": test[0].rot90(1, (2, 3)), "noise": noise}
    return ByHeart(network.eval().requires_grad_(False), train, held_out, test, strangers)
