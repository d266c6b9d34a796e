"""Hyper-parameters of a kernel by their evidence and a prior, in few evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from net2gp.errors import InputError, NotPositiveDefinite, trying
from net2gp.posteriors.posterior import Posterior

FAILED = 1e10
"""The value of the objective where a posterior cannot be built, so that the search turns back."""


@dataclass(frozen=True)
class LogNormal:
    """A prior of positive numbers: log v ~ N(log(median), spread²) for each of them by itself.

    Args:
        median: The median.
        spread: The standard deviation of the logarithm.
        count: How many numbers there are; None is one scalar.
        lower: The least value that the search may reach.
    """

    median: float
    spread: float
    count: int | None = None
    lower: float = 0.0

    @property
    def shape(self) -> torch.Size:
        """The shape of the numbers."""
        return torch.Size([] if self.count is None else [self.count])

    def log_density(self, logs: Tensor) -> Tensor:
        """Compute the log density of logarithms, up to a constant.

        Args:
            logs: The logarithms of the numbers.

        Returns:
            The sum over all of them, a scalar.
        """
        return -0.5 * ((logs - math.log(self.median)) / self.spread).square().sum()

    def bounds(self) -> list[tuple[float, float]]:
        """Where the logarithms are searched: five standard deviations to both sides."""
        middle, width = math.log(self.median), 5 * self.spread
        low = max(middle - width, math.log(self.lower) if self.lower else -math.inf)
        return [(low, middle + width)] * self.shape.numel()


def most_probable(
    builder: Callable[..., Posterior],
    priors: Mapping[str, LogNormal],
    *,
    start: Mapping[str, Tensor] | None = None,
    max_iterations: int = 50,
) -> tuple[dict[str, Tensor], float]:
    """Return the hyper-parameters that maximize log p(y | θ) + log p(log θ), and that maximum.

    L-BFGS over the logarithms within the bounds of the priors, from the medians or from `start`. Each
    evaluation builds one posterior and differentiates its evidence.

    Args:
        builder: A function from the keywords to a posterior.
        priors: The priors, by keyword.
        start: Where the search starts, by keyword, for those that do not start at their medians.
        max_iterations: The most iterations.

    Returns:
        The numbers by keyword, without gradients, and the maximum.

    Raises:
        InputError: If no posterior could be built; the error is that of the first one, if it has one.
    """
    sizes = [prior.shape.numel() for prior in priors.values()]
    bounds = [pair for prior in priors.values() for pair in prior.bounds()]
    low, high = np.array(bounds).T

    def arguments(logs: Tensor) -> dict[str, Tensor]:
        pieces = logs.exp().split(sizes)
        named = zip(priors.items(), pieces, strict=True)
        return {name: piece.reshape(prior.shape) for (name, prior), piece in named}

    def objective(point: np.ndarray) -> tuple[float, np.ndarray]:
        logs = torch.from_numpy(point.copy()).requires_grad_()
        pieces = zip(priors.values(), logs.split(sizes), strict=True)
        density = sum(prior.log_density(piece) for prior, piece in pieces)
        try:
            with trying():
                value = -(builder(**arguments(logs)).log_marginal_likelihood() + density)
            (gradient,) = torch.autograd.grad(value, logs)
        except (NotPositiveDefinite, InputError):
            return FAILED, np.zeros_like(point)
        if not bool(torch.isfinite(value)) or not bool(torch.isfinite(gradient).all()):
            return FAILED, np.zeros_like(point)
        return float(value.detach()), gradient.numpy()

    given = dict(start or {})
    medians = {name: torch.tensor(prior.median) for name, prior in priors.items()}
    first = [
        given.get(name, medians[name]).double().log().expand(prior.shape).reshape(-1)
        for name, prior in priors.items()
    ]
    options = {"maxiter": max_iterations, "ftol": 1e-8, "gtol": 1e-4}
    with torch.inference_mode(False), torch.enable_grad():
        begin = torch.cat(first).numpy().clip(low, high)
        found = minimize(
            objective, begin, jac=True, method="L-BFGS-B", bounds=bounds, options=options
        )
    if found.fun >= FAILED:
        builder(
            **arguments(torch.from_numpy(begin))
        )  # says what is wrong with the data, if they are
        raise InputError(
            "the evidence could not be computed anywhere near the medians of the priors. Look for repeated "
            "points with different targets, and for targets that are not finite."
        )
    return arguments(torch.from_numpy(found.x)), -float(found.fun)
