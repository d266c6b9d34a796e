"""Isokinetic dynamics: a particle of unit speed whose direction follows the gradient, and its integrators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Density = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Log densities (C,) and their gradients (C, P) at positions (C, P)."""

MINIMAL_NORM = 0.1931833275037836
"""The part λ of a step that the first and the last kick take, for which the error of order three is least."""

INTEGRATORS = {
    "minimal_norm": ((MINIMAL_NORM, 1 - 2 * MINIMAL_NORM, MINIMAL_NORM), (0.5, 0.5)),
    "leapfrog": ((0.5, 0.5), (1.0,)),
}
"""The parts of a step that kicks and drifts take, in turn."""


class Particle(NamedTuple):
    """Where chains are, and which way they go.

    Args:
        position: The parameters: (C, P).
        direction: Unit vectors u: (C, P).
        value: The log densities: (C,).
        slope: Their gradients: (C, P).
    """

    position: Tensor
    direction: Tensor
    value: Tensor
    slope: Tensor


def kick(direction: Tensor, force: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Turn directions towards forces: the exact solution of u̇ = (I − uuᵀ) g/(P − 1) at constant g.

    With e = g/‖g‖, c = e·u and δ = size·‖g‖/(P − 1) the solution is

        u ← (u + e (sinh δ + c (cosh δ − 1))) / (cosh δ + c sinh δ),

    and (P − 1) log(cosh δ + c sinh δ) is the work of the force along the way, which the potential loses if
    position and direction move together.

    Args:
        direction: Unit vectors u: (C, P).
        force: The gradients g of the log density: (C, P).
        size: How long the force acts: (C, 1).

    Returns:
        The new directions (C, P), and the work (C,).

    >>> u, work = kick(torch.tensor([[0.6, 0.8]]), torch.tensor([[3.0, 0.0]]), torch.tensor([[0.5]]))
    >>> u.norm(), work
    (tensor(1.0000), tensor([1.2892]))
    """
    free = force.shape[1] - 1
    strength = force.norm(dim=1, keepdim=True)
    toward = force / strength.clamp_min(torch.finfo(force.dtype).tiny)
    along = torch.linalg.vecdot(toward, direction)[:, None]
    turn = size * strength / free
    # all terms are multiplied by 2 exp(−δ), which stays finite for large δ
    decay = (-turn).exp()
    pull = (1 - decay) * (1 + decay + along * (1 - decay))
    turned = 2 * decay * direction + toward * pull
    work = free * (turn + torch.log1p(0.5 * (1 - along) * torch.expm1(-2 * turn)))
    return turned / turned.norm(dim=1, keepdim=True), work[:, 0]


@dataclass(frozen=True, eq=False)
class Integrator:
    """One step of isokinetic dynamics, θ̇ = S u and u̇ = (I − uuᵀ) S g/(P − 1) with a diagonal scale S.

    Kicks and drifts follow each other. Both integrators are reversible, so that the energy error of a step
    is of third order in its size. A step costs a gradient per drift.

    Args:
        density: Computes log densities and gradients.
        kind: "minimal_norm", with two drifts, or "leapfrog", with one.
    """

    density: Density
    kind: str = "minimal_norm"

    def __call__(
        self, particle: Particle, size: Tensor, scale: Tensor | None = None
    ) -> tuple[Particle, Tensor]:
        """Move all chains by one step.

        Args:
            particle: Positions and directions.
            size: The step size ε: (C, 1).
            scale: The scales S of the parameters, (C, P), or None for 1.

        Returns:
            The particle after the step, and the change of its energy, which is zero for exact dynamics: (C,).
        """
        kicks, drifts = INTEGRATORS[self.kind]
        position, direction, value, slope = particle
        gained = torch.zeros_like(value)
        for index, part in enumerate(kicks):
            force = slope if scale is None else slope * scale
            direction, work = kick(direction, force, part * size)
            gained = gained + work
            if index < len(drifts):
                move = direction if scale is None else direction * scale
                position = torch.addcmul(position, move, drifts[index] * size)
                value, slope = self.density(position)
        return Particle(position, direction, value, slope), gained - (value - particle.value)


def refresh(direction: Tensor, size: Tensor, length: Tensor, noise: Tensor) -> Tensor:
    """Partly forget directions: u ← (u + νz)/‖u + νz‖ with ν = √((exp(2ε/L) − 1)/P).

    Args:
        direction: Unit vectors u: (C, P).
        size: The step size ε: (C, 1).
        length: The length L over which a direction is forgotten: (C, 1).
        noise: Standard normal numbers z: (C, P).

    Returns:
        New unit vectors: (C, P).
    """
    amount = (torch.expm1(2 * size / length) / direction.shape[1]).sqrt()
    moved = torch.addcmul(direction, noise, amount)
    return moved / moved.norm(dim=1, keepdim=True)


def correlation_length(series: Tensor) -> Tensor:
    """The number of steps per independent draw, 1 + 2 Σ_k ρ_k, averaged over coordinates.

    The sum ends before the first pair of autocorrelations with a negative sum.

    Args:
        series: T values of K coordinates of C chains: (T, C, K).

    Returns:
        The lengths, at least 1: (C,).

    >>> noise = torch.randn(4000, 2, 3, generator=torch.Generator().manual_seed(0))
    >>> correlation_length(noise).round()
    tensor([1., 1.])
    """
    count = len(series)
    centered = series - series.mean(0)
    spectrum = torch.fft.rfft(centered, n=2 * count, dim=0)
    power = torch.fft.irfft(spectrum.abs().square(), n=2 * count, dim=0)[:count]
    correlation = power / power[0].clamp_min(torch.finfo(series.dtype).tiny)
    pairs = correlation[: count // 2 * 2].unflatten(0, (-1, 2)).sum(1)
    positive = (pairs > 0).to(pairs.dtype).cumprod(0)
    total = 2 * (pairs * positive).sum(0) - 1
    return total.clamp_min(1).mean(-1)
