"""A small network for those who bring none: perceptrons that know the scales of their data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from net2gp.errors import check_positive

WIDTH = 32
"""Hidden units."""

MOST_STEPS = 300
"""Steps of L-BFGS, each with all data."""

Loss = Callable[[Tensor], Tensor]


class Perceptron(nn.Module):
    """f(x) = center + spread · W₂ tanh(W₁ (x − a)/b + c₁) + c₂, with the scales of inputs and outputs fixed.

    Args:
        x: Inputs (N, D), whose means a and standard deviations b are taken.
        center: The mean of the targets, (C,).
        spread: Their standard deviation, (C,).
        seed: The seed of the initial weights.
        weights: How often each input counts, (N,), or None for once.
    """

    def __init__(
        self, x: Tensor, center: Tensor, spread: Tensor, seed: int, weights: Tensor | None = None
    ) -> None:
        super().__init__()
        mean, deviation = moments(x, weights)
        self.a, self.b = nn.Buffer(mean), nn.Buffer(deviation)
        self.center, self.spread = nn.Buffer(center), nn.Buffer(spread)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            first, last = nn.Linear(x.shape[1], WIDTH), nn.Linear(WIDTH, len(center))
        self.body = nn.Sequential(first, nn.Tanh(), last).to(x)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Compute the outputs, (N, C)."""
        return self.center + self.spread * self.body((x - self.a) / self.b)


def moments(values: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of each column, which is 1 where all values agree.

    Args:
        values: (N, D).
        weights: How often each row counts, (N,), or None for once.

    Returns:
        Means and standard deviations, (D,) each.
    """
    shares = torch.ones_like(values[:, 0]) if weights is None else weights.to(values)
    shares = (shares / shares.sum())[:, None]
    mean = (shares * values).sum(0)
    deviation = (shares * (values - mean).square()).sum(0).sqrt()
    rounding = 10 * torch.finfo(values.dtype).eps * values.abs().amax(0)
    return mean, torch.where(deviation > rounding, deviation, 1.0)


def train(network: nn.Module, x: Tensor, loss: Loss, alpha: float) -> int:
    """Minimize loss(network(x)) + ½ alpha |θ|² by L-BFGS, in place.

    Args:
        network: The network.
        x: All inputs, (N, D).
        loss: A sum over the points, as a function of the outputs.
        alpha: The weight decay.

    Returns:
        The number of steps.

    Raises:
        InputError: If `alpha` is negative or not finite.
    """
    check_positive(alpha, "alpha", zero=True, single=True)
    params = list(network.parameters())

    def objective(point: np.ndarray) -> tuple[float, np.ndarray]:
        nn.utils.vector_to_parameters(torch.from_numpy(point), params)
        with torch.enable_grad():
            value = loss(network(x)) + 0.5 * alpha * sum(p.square().sum() for p in params)
            gradients = torch.autograd.grad(value, params)
        return float(value.detach()), torch.cat([g.reshape(-1) for g in gradients]).numpy()

    start = nn.utils.parameters_to_vector(params).detach().numpy()
    found = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": MOST_STEPS})
    nn.utils.vector_to_parameters(torch.from_numpy(found.x), params)
    return max(1, int(found.nit))


def distinct(rows: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the different rows in a fixed order, and how often each counts.

    A training is then the same for points in any order, and for repeated and weighted ones, to the last bit;
    otherwise it would make large differences of roundings.

    Args:
        rows: (N, D).
        weights: How often each row counts, (N,), or None for once.

    Returns:
        The places of the first of each kind, and the sums of their weights.

    >>> distinct(np.array([[1.0], [0.0], [1.0]]), None)
    (array([1, 0]), array([1., 2.]))
    """
    _, first, kind = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return first, np.bincount(kind.reshape(-1), weights=weights).astype(np.float64)
