"""Single steps of Langevin chains over rows of parameters, for loops with gradients of their own."""

from __future__ import annotations

from torch import Tensor


def sgld_step(
    position: Tensor,
    slope: Tensor,
    step_size: Tensor,
    noise: Tensor | None,
    *,
    noise_var: Tensor | None = None,
) -> None:
    """Move chains by θ ← θ + (ε/2) ∇ log p̂(θ) + √ε ξ, in place.

    Args:
        position: The parameters θ of C chains: (C, P).
        slope: Gradients of the log joint, of all data or estimated on minibatches: (C, P).
        step_size: The step sizes ε, (C, 1), or (C, P) for one per parameter.
        noise: Standard normal numbers ξ, (C, P), or None for a step of gradient ascent.
        noise_var: The variance of the noise, if it is not ε.

    >>> import torch
    >>> position = torch.zeros(1, 2)
    >>> sgld_step(position, torch.ones(1, 2), torch.full((1, 1), 0.5), None)
    >>> position
    tensor([[0.2500, 0.2500]])
    """
    position.addcmul_(slope, step_size, value=0.5)
    if noise is not None:
        position.addcmul_(noise, (step_size if noise_var is None else noise_var).sqrt())


def sghmc_step(
    position: Tensor,
    momentum: Tensor,
    slope: Tensor,
    step_size: Tensor,
    kept: float,
    noise: Tensor | None,
    *,
    noise_var: Tensor | None = None,
) -> None:
    """Kick, drift for half a step, refresh the momentum and drift for the other half, in place.

        v ← v + h ∇ log p̂(θ),   θ ← θ + (h/2) v,   v ← a v + √(1 − a²) ξ,   θ ← θ + (h/2) v

    Args:
        position: The parameters θ of C chains: (C, P).
        momentum: Their momenta v, of unit variance: (C, P).
        slope: Gradients of the log joint, of all data or estimated on minibatches: (C, P).
        step_size: The step sizes h, (C, 1), or (C, P) for one per parameter. h² is SGD's learning rate for
            the negative log joint.
        kept: The share a of the momentum that stays.
        noise: Standard normal numbers ξ, (C, P), or None for a step of gradient ascent with momentum.
        noise_var: The variance of the noise, if it is not 1 − a².

    >>> import torch
    >>> position, momentum = torch.zeros(1, 2), torch.zeros(1, 2)
    >>> sghmc_step(position, momentum, torch.ones(1, 2), torch.full((1, 1), 0.5), 0.9, None)
    >>> position
    tensor([[0.2375, 0.2375]])
    """
    momentum.addcmul_(slope, step_size)
    position.addcmul_(momentum, step_size, value=0.5)
    momentum.mul_(kept)
    if noise is not None:
        if noise_var is None:
            momentum.add_(noise, alpha=(1 - kept**2) ** 0.5)
        else:
            momentum.addcmul_(noise, noise_var.sqrt())
    position.addcmul_(momentum, step_size, value=0.5)
