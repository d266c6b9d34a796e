"""What chains learn in their warmup: a step size by dual averaging, and a mass matrix in windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import ChainStuck

Density = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Positions of all chains (K, P) → log density (K,) and gradient (K, P)."""

State = dict[str, Tensor]
"""All tensors of a run by name, which is what a checkpoint holds."""

SMALLEST_STEP = 1e-12
"""A step below it, in units of the posterior's own width, changes nothing in float64."""


@dataclass(frozen=True, eq=False)
class Metric:
    """Coordinates z in which the momentum has unit mass: θ = s z, or θ = L z.

    Args:
        root: Standard deviations s, (P,), or a Cholesky factor L of a covariance, (P, P).
    """

    root: Tensor

    def place(self, z: Tensor) -> Tensor:
        """Return θ for z, (K, P)."""
        return z * self.root if self.root.dim() == 1 else z @ self.root.mT

    def locate(self, theta: Tensor) -> Tensor:
        """Return z for θ, (K, P)."""
        if self.root.dim() == 1:
            return theta / self.root
        return torch.linalg.solve_triangular(self.root, theta.mT, upper=False).mT.contiguous()

    def density(self, density: Density) -> Density:
        """Return the log density as a function of z."""
        root = self.root

        def scaled(z: Tensor) -> tuple[Tensor, Tensor]:
            value, grad = density(z * root)
            return value, grad.mul_(root)

        def rotated(z: Tensor) -> tuple[Tensor, Tensor]:
            value, grad = density(z @ root.mT)
            return value, grad @ root

        return scaled if root.dim() == 1 else rotated


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
        first, last = int(0.15 * warmup), int(0.1 * warmup)
        size = warmup - first - last
    left, middle = warmup - first - last, []
    while left:
        size = left if left < 3 * size else size
        middle.append((size, True))
        left, size = left - size, 2 * size
    return [(first, False), *middle, (last, False)]


def start_averaging(state: State, step: Tensor) -> None:
    """Begin to adapt the step of each chain, (K,), from a first guess.

    Reference: Hoffman and Gelman, The No-U-Turn sampler, JMLR 2014, section 3.2.
    """
    zeros = torch.zeros_like(step)
    state |= {
        "step": step.clone(),
        "step.center": (10 * step).log(),
        "step.gap": zeros,
        "step.mean": zeros.clone(),
        "step.count": zeros.clone(),
    }


def average_step(state: State, ended: Tensor, acceptance: Tensor, target: float) -> None:
    """Update the steps of the chains `ended`, whose draws were accepted with these probabilities."""
    count = state["step.count"][ended] + 1
    rate = 1 / (count + 10)
    gap = (1 - rate) * state["step.gap"][ended] + rate * (target - acceptance)
    log_step = state["step.center"][ended] - count.sqrt() / 0.05 * gap
    weight = count**-0.75
    mean = weight * log_step + (1 - weight) * state["step.mean"][ended]
    state["step.count"][ended], state["step.gap"][ended] = count, gap
    state["step.mean"][ended], state["step"][ended] = mean, log_step.exp()


def settle_step(state: State) -> None:
    """Take the averaged steps as the final ones."""
    counted = state["step.count"] > 0
    state["step"] = torch.where(counted, state["step.mean"].exp(), state["step"])


def start_moments(state: State, dense: bool) -> None:
    """Begin to collect the mean and the scatter of the draws of a window, by Welford's recursion."""
    theta = state["theta"]
    size = theta.shape[1]
    state["window.mean"] = torch.zeros_like(theta)
    state["window.scatter"] = theta.new_zeros(size, size) if dense else torch.zeros_like(theta)
    state["window.count"] = theta.new_zeros(len(theta))


def add_moments(state: State, ended: Tensor, theta: Tensor, dense: bool) -> None:
    """Take in one draw of each of the chains `ended`."""
    count = state["window.count"][ended] + 1
    before = theta - state["window.mean"][ended]
    mean = state["window.mean"][ended] + before / count[:, None]
    state["window.count"][ended], state["window.mean"][ended] = count, mean
    if dense:
        state["window.scatter"] += before.mT @ (theta - mean)
    else:
        state["window.scatter"][ended] += before * (theta - mean)


def learned_metric(state: State, present: Metric) -> Metric:
    """Turn the scatter of a window into a metric.

    The scatter within the chains is pooled, and drawn a little towards a thousandth of the present variance,
    which keeps directions that have not moved yet.
    """
    count = float((state["window.count"] - 1).clamp(min=0).sum())
    if count < 1:
        return present
    weight, scatter = count / (count + 5), state["window.scatter"]
    if present.root.dim() == 1:
        variance = scatter.sum(0) / count
        floor = 1e-3 * present.root.square()
        return Metric((weight * variance + (1 - weight) * floor).sqrt())
    covariance = scatter / count
    covariance = 0.5 * weight * (covariance + covariance.mT)
    floor = 1e-3 * (1 - weight) * present.root.square().sum(1)
    return Metric(torch.linalg.cholesky(covariance + torch.diag(floor)))


def leapfrog(z: Tensor, g: Tensor, p: Tensor, step: Tensor, density: Density) -> Tensor:
    """Make one step of each chain in place and return the log densities, (K,)."""
    p.addcmul_(step, g, value=0.5)
    z.addcmul_(step, p)
    value, grad = density(z)
    g.copy_(grad)
    p.addcmul_(step, g, value=0.5)
    return value


def reasonable_step(
    density: Density, z: Tensor, generator: torch.Generator, start: Tensor
) -> Tensor:
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
    momentum = torch.randn(z.shape, dtype=z.dtype, device=generator.device, generator=generator)
    momentum = momentum.to(z.device)
    energy = value - 0.5 * momentum.square().sum(1)
    step, sign = start.clone(), torch.zeros_like(start)
    for _ in range(100):
        at, p, g = z.clone(), momentum.clone(), grad.clone()
        gain = leapfrog(at, g, p, step[:, None], density) - 0.5 * p.square().sum(1) - energy
        wish = torch.where(gain.nan_to_num(nan=-torch.inf) > -0.22, 1.0, -1.0).to(step)
        sign = torch.where(sign == 0, wish, torch.where(wish == sign, sign, 2.0))
        moving = sign.abs() == 1
        # a chain that has crossed its threshold keeps the step
        step = torch.where(moving, step * 2.0**sign, step)
        if not bool(moving.any()) or float(step.max()) > 1e6:
            break
    if float(step.min()) < SMALLEST_STEP:
        raise ChainStuck(
            "no step size moves chain "
            f"{int(step.argmin())}: the log joint is not smooth or not finite around its start. Check "
            "the data and the likelihood (a noise variance that is far too small?), or start elsewhere with "
            'start="network".'
        )
    return step
