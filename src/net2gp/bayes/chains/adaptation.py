"""What chains learn in their warmup: a step size by dual averaging, and a mass matrix in windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from net2gp.errors import ChainStuck

Array = NDArray[Any]

Density = Callable[[Array], tuple[Array, Array]]
"""Positions of all chains (K, P) → log density (K,) and gradient (K, P)."""

State = dict[str, Array]
"""All arrays of a run by name, which is what a checkpoint holds.

They are NumPy arrays, since the bookkeeping of a chain is many operations on few numbers, and each takes a
third of the time that it takes on tensors.
"""

SMALLEST_STEP = 1e-12
"""A step below it, in units of the posterior's own width, changes nothing in float64."""


@dataclass(frozen=True, eq=False)
class Metric:
    """Coordinates z in which the momentum has unit mass: θ = s z, or θ = L z.

    Args:
        root: Standard deviations s, (P,), or a Cholesky factor L of a covariance, (P, P).
    """

    root: Array

    def place(self, z: Array) -> Array:
        """Return θ for z, (K, P)."""
        return z * self.root if self.root.ndim == 1 else z @ self.root.T

    def locate(self, theta: Array) -> Array:
        """Return z for θ, (K, P)."""
        if self.root.ndim == 1:
            return theta / self.root
        return np.ascontiguousarray(solve_triangular(self.root, theta.T, lower=True).T)

    def density(self, density: Density) -> Density:
        """Return the log density as a function of z."""
        root = self.root

        def scaled(z: Array) -> tuple[Array, Array]:
            value, grad = density(z * root)
            return value, grad * root

        def rotated(z: Array) -> tuple[Array, Array]:
            value, grad = density(z @ root.T)
            return value, grad @ root

        return scaled if root.ndim == 1 else rotated


def windows(warmup: int) -> list[tuple[int, bool]]:
    """Divide the warmup: (number of draws, whether the mass matrix is learned from them).

    The first part only approaches the posterior, then come windows that double in length, and the last part
    settles the step size for the final mass matrix.

    Args:
        warmup: The number of draws of the warmup.

    Returns:
        The parts, in order.

    >>> windows(1000)
    [(75, False), (25, True), (50, True), (100, True), (200, True), (500, True), (50, False)]
    >>> windows(10)
    [(10, False)]

    Reference: Stan Development Team, Stan Reference Manual, section on the HMC algorithm parameters.
    """
    if warmup < 20:
        return [(warmup, False)] if warmup else []
    first, last, size = 75, 50, 25
    if first + last + size > warmup:
        first, last = int(0.15 * warmup), int(0.25 * warmup)
        size = warmup - first - last
    left, middle = warmup - first - last, []
    while left:
        size = left if left < 3 * size else size
        middle.append((size, True))
        left, size = left - size, 2 * size
    return [(first, False), *middle, (last, False)]


def start_averaging(state: State, step: Array) -> None:
    """Begin to adapt the step of each chain, (K,), from a first guess.

    Reference: Hoffman and Gelman, The No-U-Turn sampler, JMLR 2014, section 3.2.
    """
    state["step"], state["step.center"] = step.copy(), np.log(2 * step)
    for name in ("gap", "mean", "count"):
        state[f"step.{name}"] = np.zeros_like(step)


def average_step(state: State, ended: Array, acceptance: Array, target: float) -> None:
    """Update the steps of the chains `ended`, whose draws were accepted with these probabilities."""
    count = state["step.count"][ended] + 1
    rate = 1 / (count + 10)
    gap = (1 - rate) * state["step.gap"][ended] + rate * (target - acceptance)
    log_step = state["step.center"][ended] - np.sqrt(count) / 0.05 * gap
    weight = count**-0.75
    mean = weight * log_step + (1 - weight) * state["step.mean"][ended]
    state["step.count"][ended], state["step.gap"][ended] = count, gap
    state["step.mean"][ended], state["step"][ended] = mean, np.exp(log_step)


def settle_step(state: State) -> None:
    """Take the averaged steps as the final ones."""
    counted = state["step.count"] > 0
    state["step"] = np.where(counted, np.exp(state["step.mean"]), state["step"])


def start_moments(state: State, dense: bool) -> None:
    """Begin to collect the mean and the scatter of the draws of a window, by Welford's recursion."""
    theta = state["theta"]
    size = theta.shape[1]
    state["window.mean"] = np.zeros_like(theta)
    state["window.scatter"] = np.zeros((size, size)) if dense else np.zeros_like(theta)
    state["window.count"] = np.zeros(len(theta))


def add_moments(state: State, ended: Array, theta: Array, dense: bool) -> None:
    """Take in one draw of each of the chains `ended`."""
    count = state["window.count"][ended] + 1
    before = theta - state["window.mean"][ended]
    mean = state["window.mean"][ended] + before / count[:, None]
    state["window.count"][ended], state["window.mean"][ended] = count, mean
    if dense:
        state["window.scatter"] += before.T @ (theta - mean)
    else:
        state["window.scatter"][ended] += before * (theta - mean)


def learned_metric(state: State, present: Metric) -> Metric:
    """Turn the scatter of a window into a metric.

    The scatter within the chains is pooled, and drawn a little towards a thousandth of the present variance,
    which keeps directions that have not moved yet.
    """
    count = float((state["window.count"] - 1).clip(min=0).sum())
    if count < 1:
        return present
    weight, scatter = count / (count + 5), state["window.scatter"]
    if present.root.ndim == 1:
        floor = 1e-3 * present.root**2
        return Metric(np.sqrt(weight * scatter.sum(0) / count + (1 - weight) * floor))
    covariance = 0.5 * weight * (scatter + scatter.T) / count
    floor = 1e-3 * (1 - weight) * (present.root**2).sum(1)
    return Metric(np.linalg.cholesky(covariance + np.diag(floor)))


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Array:
    """Draw standard normal numbers in float64."""
    return torch.randn(shape, dtype=torch.float64, generator=generator).numpy()


def uniform(count: int, generator: torch.Generator) -> Array:
    """Draw numbers between 0 and 1 in float64, (count,)."""
    return torch.rand(count, dtype=torch.float64, generator=generator).numpy()


def leapfrog(z: Array, g: Array, p: Array, step: Array, density: Density) -> Array:
    """Make one step of each chain in place and return the log densities, (K,)."""
    half = 0.5 * step
    p += half * g
    z += step * p
    value, grad = density(z)
    g[...] = grad
    p += half * grad
    return value


def reasonable_step(density: Density, z: Array, generator: torch.Generator, start: Array) -> Array:
    """Double or halve the step of each chain until one leapfrog step is accepted about four times in five.

    Args:
        density: The log density of z.
        z: Positions, (K, P).
        generator: Draws the momentum.
        start: The first guesses, (K,).

    Returns:
        The steps, (K,).

    Raises:
        ChainStuck: If no step that changes the position is small enough.
    """
    value, grad = density(z)
    momentum = normal(z.shape, generator)
    energy = value - 0.5 * np.vecdot(momentum, momentum)
    step, sign = start.copy(), np.zeros_like(start)
    for _ in range(100):
        at, p, g = z.copy(), momentum.copy(), grad.copy()
        gain = leapfrog(at, g, p, step[:, None], density) - 0.5 * np.vecdot(p, p) - energy
        wish = np.where(np.nan_to_num(gain, nan=-np.inf) > -0.22, 1.0, -1.0)
        # a chain that has crossed its threshold keeps the step
        sign = np.where(sign == 0, wish, np.where(wish == sign, sign, 2.0))
        moving = np.abs(sign) == 1
        step = np.where(moving, step * 2.0**sign, step)
        if not moving.any() or step.max() > 1e6:
            break
    if step.min() < SMALLEST_STEP:
        raise ChainStuck(
            f"no step size moves chain {step.argmin()}: the log joint is not smooth or not finite around its "
            "start. Check the data and the likelihood (a noise variance that is far too small?), or start "
            'elsewhere with start="network".'
        )
    return step
