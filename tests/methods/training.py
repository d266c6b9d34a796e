"""What the tests of optimizers that learn a posterior share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

DOUBLE = torch.float64


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=DOUBLE)


def small_network(outputs: int = 1, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs)
        return nn.Sequential(*layers).double().eval()


def flat_mean(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in optimizer.param_groups[0]["params"]])
