"""The variances of one shape of network, found by gradient so that its limit is near a given covariance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from scipy.optimize import OptimizeResult, minimize
from torch import Tensor

from net2gp.bayes.matching.architectures import Shape
from net2gp.kernels.periodic import circle
from net2gp.limits.kernels import infinite_width
from net2gp.limits.limit_kernels import InfiniteWidth
from net2gp.limits.prior import prior_of

SMALLEST, LARGEST = math.log(1e-8), math.log(1e6)
"""The logarithms between which variances are searched."""

STARTS = (0.1, 1.0, 10.0, 100.0)
"""Variances of the first layer's outputs from which the search may start; the best two are taken."""

FAILED = 1e25
"""The value of the objective where it is no number, so that the search turns back."""

Objective = Callable[[Tensor, Tensor], Tensor]
"""From a covariance matrix (N, N) and a variance of noise to a number that should be small."""


@dataclass(frozen=True, eq=False)
class Fit:
    """Variances of one shape.

    Args:
        shape: The shape, with the period that was found.
        weight_vars: The variances of the layers' weights times their fan-in, first layer first.
        bias_vars: The variances of the layers' biases.
        trend_var: The variance of the trend's weights times their fan-in, or None without a trend.
        noise_var: The variance of the noise, or None if the target is a covariance.
        loss: The value of the objective.
    """

    shape: Shape
    weight_vars: tuple[float, ...]
    bias_vars: tuple[float, ...]
    trend_var: float | None
    noise_var: float | None
    loss: float


@dataclass(frozen=True, eq=False)
class Search:
    """What is minimized for one shape, as a function of logarithms.

    Args:
        shape: The shape of the network.
        x: Points, (N, D), float64.
        objective: What should be small.
        noise_var: The variance of the noise; None if there is none, or if it is searched for.
        open_noise: Whether the variance of the noise is searched for.
        limit: The body of the network at infinite width.
    """

    shape: Shape
    x: Tensor = field(repr=False)
    objective: Objective
    noise_var: float | None
    open_noise: bool
    limit: InfiniteWidth

    @staticmethod
    def of(
        shape: Shape, x: Tensor, objective: Objective, noise_var: float | None, open_noise: bool
    ) -> Search:
        """The search for a shape, whose network is traced once."""
        features = x.shape[1] * (1 if shape.period is None else 2)
        body = shape.body(features, width=8, num_outputs=1)
        return Search(shape, x, objective, noise_var, open_noise, infinite_width(body))

    @property
    def num_layers(self) -> int:
        """The number of linear layers of the body."""
        return self.shape.depth + 1

    def parts(self, logs: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
        """Variances of weights, biases and trend, period, and noise, from their logarithms."""
        values, count = logs.exp(), self.num_layers
        weights, biases, rest = values[:count], values[count : 2 * count], values[2 * count :]
        trend = rest[0] if self.shape.trend else None
        period = None if self.shape.period is None else rest[int(self.shape.trend)]
        noise = rest[-1] if self.open_noise else logs.new_tensor(self.noise_var or 0.0)
        return weights, biases, trend, period, noise

    def covariance(self, logs: Tensor) -> Tensor:
        """The covariance of f(x) at infinite width: (N, N)."""
        weights, biases, trend, period, _ = self.parts(logs)
        names = list(self.limit.prior.weight_vars)
        prior = prior_of(
            names,
            dict(zip(names, weights, strict=True)),
            dict(zip(names, biases, strict=True)),
            "ntk",
        )
        features = self.x if period is None else circle(self.x, period)
        found = replace(self.limit, prior=prior).nngp(features)
        if trend is None:
            return found
        return found + trend * (self.x @ self.x.mT) / self.x.shape[1]

    def loss(self, logs: Tensor) -> Tensor:
        """The objective."""
        return self.objective(self.covariance(logs), self.parts(logs)[-1])

    def with_gradient(self, logs: np.ndarray) -> tuple[float, np.ndarray]:
        """The objective and its gradient, for scipy."""
        at = torch.tensor(logs, dtype=torch.float64, requires_grad=True)
        value = self.loss(at)
        (slope,) = torch.autograd.grad(value, at)
        if not math.isfinite(value.item()) or not bool(slope.isfinite().all()):
            return FAILED, np.zeros_like(logs)
        return value.item(), slope.numpy()

    def starts(self, variance: float) -> Iterator[np.ndarray]:
        """Logarithms to start from, scaled so that f has about the given variance.

        Args:
            variance: The average variance of f that is wanted.

        Yields:
            One start for each variance of the first layer.
        """
        period = self.shape.period
        features = self.x if period is None else circle(self.x, period)
        size = float(features.square().mean()) or 1.0
        count = self.num_layers
        for first in STARTS if self.shape.depth else (1.0,):
            weights = torch.full((count,), 1.5, dtype=torch.float64)
            weights[0] = first / size
            rest = [0.1 * variance] if self.shape.trend else []
            rest += [] if period is None else [period]
            rest += [0.1 * variance] if self.open_noise else []
            biases = torch.full((count,), 0.1, dtype=torch.float64)
            biases[-1] = 0.01 * variance
            logs = torch.cat([weights, biases, weights.new_tensor(rest)]).log()
            found = float(self.covariance(logs).diagonal().mean())
            logs[count - 1] += math.log(max(variance / found, 1e-6))
            yield logs.numpy()

    def bounds(self, start: np.ndarray) -> list[tuple[float, float]]:
        """The interval of each logarithm; a period stays near where it started."""
        found = [(SMALLEST, LARGEST)] * len(start)
        if self.shape.period is not None:
            place = 2 * self.num_layers + int(self.shape.trend)
            found[place] = (start[place] - math.log(1.5), start[place] + math.log(1.5))
        return found

    def minimize(self, variance: float, max_iterations: int, enough: float) -> Fit:
        """Run L-BFGS from the two best starts.

        Args:
            variance: The average variance of f that is wanted, for the starts.
            max_iterations: The most iterations from each start.
            enough: A value of the objective at which the second start is left out.

        Returns:
            The best variances.
        """
        ranked = sorted(self.starts(variance), key=lambda at: float(self.loss(torch.tensor(at))))
        runs: list[OptimizeResult] = []
        for start in ranked[:2]:
            if not runs or runs[0].fun > enough:
                runs.append(self._descend(start, max_iterations))
        best = min(runs, key=lambda run: run.fun)
        weights, biases, trend, period, noise = self.parts(torch.tensor(best.x))
        shape = self.shape if period is None else replace(self.shape, period=float(period))
        return Fit(
            shape,
            tuple(weights.tolist()),
            tuple(biases.tolist()),
            None if trend is None else float(trend),
            float(noise) if self.open_noise or self.noise_var is not None else None,
            float(best.fun),
        )

    def _descend(self, start: np.ndarray, max_iterations: int) -> OptimizeResult:
        return minimize(
            self.with_gradient,
            np.clip(start, SMALLEST, LARGEST),
            jac=True,
            method="L-BFGS-B",
            bounds=self.bounds(start),
            options={"maxiter": max_iterations, "maxcor": 20, "ftol": 1e-10, "gtol": 1e-7},
        )
