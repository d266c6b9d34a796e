"""A single step of microcanonical chains, for loops with gradients of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from net2gp.bayes.chains.langevin.isokinetic import Integrator, Particle, refresh


def microcanonical_step(
    gradient: Callable[[Tensor], Tensor],
    state: tuple[Tensor, Tensor, Tensor],
    step_size: Tensor,
    length: Tensor,
    noise: Tensor,
    *,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Move chains by a leapfrog step of isokinetic dynamics, and partly forget their directions.

    Args:
        gradient: Computes the gradients of the log joint at positions, (C, P) to (C, P).
        state: Positions θ, directions u of length one, and the gradients at θ, each (C, P).
        step_size: How far a chain moves, in units of `scale`: (C, 1).
        length: The distance over which a direction is forgotten: (C, 1).
        noise: Standard normal numbers, (C, P).
        scale: The scales of the parameters, (C, P), or None for 1.

    Returns:
        The next state. Gradients of minibatches are taken as if they were exact.

    >>> one = torch.ones(1, 1)
    >>> state = torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]), torch.zeros(1, 2)
    >>> microcanonical_step(torch.neg, state, one, 1e9 * one, torch.zeros(1, 2))[0]
    tensor([[1., 0.]])

    Reference: Robnik and Seljak, Fluctuation without dissipation: microcanonical Langevin Monte Carlo, 2023.
    """
    position, direction, slope = state
    silent = torch.zeros(len(position), dtype=position.dtype, device=position.device)
    integrator = Integrator(lambda moved: (silent, gradient(moved)), "leapfrog")
    after, _ = integrator(Particle(position, direction, silent, slope), step_size, scale)
    return after.position, refresh(after.direction, step_size, length, noise), after.slope
