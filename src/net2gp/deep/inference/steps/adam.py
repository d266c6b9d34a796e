"""Adam for the variables of a fit, with rates of their own for some of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from net2gp.deep.inference.stack import Stack

BETAS = (0.9, 0.99)
"""The decay rates."""

STATE = ("step", "exp_avg", "exp_avg_sq")
"""The names of what Adam keeps of each variable."""

FAST, FACTOR = ("kernel.", "log_scale", "log_factors", "log_weights"), 3.0
"""Variables of which there are few, so that gradients say more of each, and how much faster they move where
there is most to learn: from batches, and for sigma points."""


def adam(stack: Stack, rate: float, factor: float) -> torch.optim.Optimizer | None:
    """Make the optimizer of all variables of a fit. On a GPU its steps can be recorded.

    Args:
        stack: The layers.
        rate: The learning rate.
        factor: The factor of the rate for variables of which there are few.

    Returns:
        The optimizer, or None without variables.
    """
    if not stack.leaves:
        return None
    device = stack.precision.device
    groups: list[dict[str, Any]] = []
    for fast in (False, True):
        own = [value for name, value in stack.leaves.items() if _is_fast(name) == fast]
        place = torch.tensor(rate, dtype=torch.float64, device=device)
        lr = place if device.type == "cuda" else rate
        groups += [{"params": own, "factor": factor if fast else 1.0, "lr": lr}] if own else []
    return torch.optim.Adam(groups, betas=BETAS, capturable=device.type == "cuda")


def _is_fast(name: str) -> bool:
    return any(part in name for part in FAST)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Change the learning rate, where recorded steps see it too.

    Args:
        optimizer: What `adam` made.
        rate: The learning rate, before the factors of some variables.
    """
    for group in optimizer.param_groups:
        own = rate * group["factor"]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own
