"""The step function, on which deep Gaussian processes are judged first."""

from __future__ import annotations

import pytest
import torch

from net2gp import Gaussian
from net2gp.deep import fit

GRID = torch.linspace(-2, 2, 401, dtype=torch.float64)[:, None]


def step(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Forty points with their targets, and targets of the grid."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(z: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(len(z), 1, generator=generator, dtype=torch.float64)
        return (z > 0).double() + 0.05 * noise

    x = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]
    return x, noisy(x), noisy(GRID)


@pytest.mark.slow
def test_two_layers_fit_a_step_by_default():
    """Means over seeds 10 to 19, which no default was chosen on: −1.391, overshoot 0.037, move 0.861."""
    scores = []
    for seed in range(10, 20):
        x, y, held_out = step(seed)
        posterior = fit(2, (x, y), Gaussian())
        mean = posterior.mean(GRID)[:, 0]
        first = posterior.process.layers[0]
        inner = first.project(GRID).mean(first.center)[:, 0]
        near = inner[GRID[:, 0].abs() <= 0.2]
        scores.append(
            [
                -float(posterior.predict(GRID).log_prob(held_out).mean()),
                max(float(mean.max()) - 1, -float(mean.min())),
                float((near.max() - near.min()) / (inner.max() - inner.min())),
            ]
        )
    loss, overshoot, move = torch.tensor(scores).mean(0).tolist()
    assert loss <= -1.31
    assert overshoot <= 0.05
    assert move >= 0.8
