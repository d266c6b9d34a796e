"""The search for the largest bound: settings, and quasi-Newton steps that never lose ground."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from net2gp.errors import InputError, check_count, check_positive
from net2gp.types import Params

FURTHEST = 14.0
"""How far the logarithm of a positive number may go from its start, in either direction."""

LEAST_NOISE = 9.0
"""How far the logarithm of a noise variance may fall below its start."""


@dataclass(frozen=True)
class LatentSearch:
    """Settings of `deep.latent_variables`.

    Args:
        num_steps: The largest number of quasi-Newton steps for each layer that is added.
        num_inducing: The number of inducing points per layer. None means 30, or the number of rows if it is
            smaller.
        tolerance: The search ends when a step raises the bound by less than this share of it.
        seed: The seed of the inducing points at the start.

    Raises:
        InputError: If a setting is out of range.

    >>> LatentSearch(num_steps=100).num_inducing
    """

    num_steps: int = 500
    num_inducing: int | None = None
    tolerance: float = 1e-8
    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self.num_steps, "num_steps")
        if self.num_inducing is not None:
            check_count(self.num_inducing, "num_inducing")
        check_positive(self.tolerance, "tolerance", single=True)


def climb(
    bound: Callable[[Params], Tensor],
    start: Params,
    num_steps: int,
    tolerance: float,
    watch: Callable[[float], None],
) -> Params:
    """Climb a bound from a start by limited-memory quasi-Newton steps (L-BFGS-B).

    Args:
        bound: The bound as a function of the variables.
        start: The variables at the start; names with "log" in them are logarithms.
        num_steps: The largest number of steps.
        tolerance: The relative gain at which the search ends.
        watch: Is called after every step with the largest bound so far.

    Returns:
        The variables with the largest bound that was seen.

    Raises:
        InputError: If the bound is not a number at the start.
    """
    names = list(start)
    sizes = [start[name].numel() for name in names]
    best, best_value = start, -np.inf

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal best, best_value
        parts = torch.from_numpy(flat.copy()).split(sizes)
        leaves = {
            name: part.reshape(start[name].shape).to(start[name].device).requires_grad_()
            for name, part in zip(names, parts, strict=True)
        }
        try:
            found = bound(leaves)
            value_now = float(found.detach())
        except (InputError, RuntimeError):  # a matrix is singular, since the step was far too long
            return _REFUSED, np.zeros_like(flat)
        if not math.isfinite(value_now):
            return _REFUSED, np.zeros_like(flat)
        gradient = torch.autograd.grad(found, list(leaves.values()))
        if value_now > best_value:
            best_value = value_now
            best = {name: leaf.detach() for name, leaf in leaves.items()}
        return -value_now, -torch.cat([g.flatten() for g in gradient]).cpu().numpy()

    first = torch.cat([start[name].detach().flatten().cpu() for name in names]).numpy()
    if value(first)[0] == _REFUSED:
        raise InputError(
            "the bound is not a number at the start. Scale inputs and data to variance 1, or pass fewer "
            "inducing points."
        )
    limits = [limit for name in names for limit in _limits(name, start[name])]
    minimize(
        value,
        first,
        jac=True,
        method="L-BFGS-B",
        bounds=limits,
        callback=lambda flat: watch(best_value),
        options={"maxiter": num_steps, "maxfun": 2 * num_steps, "maxcor": 20, "ftol": tolerance},
    )
    return best


_REFUSED = 1e100


def _limits(name: str, start: Tensor) -> list[tuple[float | None, float | None]]:
    if "log" not in name:
        return [(None, None)] * start.numel()
    below = LEAST_NOISE if name.endswith("log_noise") else FURTHEST
    return [(v - below, v + FURTHEST) for v in start.flatten().tolist()]
