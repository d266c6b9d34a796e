"""Small posteriors and data for the tests of conformal promises."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import net2gp as n2g


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noisy(count: int, seed: int, outputs: int = 1) -> tuple[Tensor, Tensor]:
    """Heavy-tailed noise around curves, which no Gaussian posterior has right: (N, 1) and (N, D)."""
    draw = lambda *shape: torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)
    x = 2 * draw(count, 1)
    waves = torch.cat([torch.sin((d + 1) * x) for d in range(outputs)], 1)
    return x, waves + 0.2 * draw(count, outputs + 1)[:, 1:] ** 3


def regression(outputs: int = 1, count: int = 20, noise_var: float = 0.05) -> n2g.Posterior:
    return n2g.condition(n2g.RBF(), noisy(count, 0, outputs), n2g.Gaussian(noise_var))


def labeled(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three overlapping classes in the plane."""
    labels = torch.randint(0, 3, (count,), generator=seeded(seed))
    centers = torch.tensor([[0.0, 1.0], [1.0, -0.5], [-1.0, -0.5]], dtype=torch.float64)
    spread = torch.randn(count, 2, generator=seeded(seed + 1), dtype=torch.float64)
    return centers[labels] + spread, labels


def classification(count: int = 30) -> n2g.Posterior:
    network = perceptron(2, 3)
    return n2g.adapt(network, labeled(count, 5), n2g.Categorical(n2g.links.Probit()), prior_var=1.0)


def perceptron(inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)
    return nn.Sequential(*layers).double().eval()


def without(count: int, left_out: int) -> Tensor:
    """All indices but one."""
    index = torch.arange(count)
    return index[index != left_out]
