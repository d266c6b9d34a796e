"""Passes through a network for products with its Jacobian, under a memory budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.func import vmap

from net2gp.errors import InputError, available_memory
from net2gp.inputs import chunks, describe, num_rows, rows, tensors
from net2gp.linear.evaluation import pullback, pushforward, without_vmap_warnings
from net2gp.linear.linearized import Linearized
from net2gp.types import Inputs, Params

FEWEST_POINTS = 16
"""Points of a pass, as far as the memory allows, before columns are taken one after the other."""


def points_at_once(num_points: int, num_columns: int, capacity: int) -> int:
    """How many points a pass takes: all columns share the network's own activations at these."""
    return max(1, min(num_points, capacity, max(FEWEST_POINTS, capacity // max(1, num_columns))))


def column_products(linearized: Linearized, x: Inputs, v: Tensor, capacity: int) -> Tensor:
    """J(x) v for the columns of v (P, k): (N·C, k), at most `capacity` points times columns at a time."""
    check_height(v, linearized.num_params, "v", "parameters")
    size = points_at_once(num_rows(x), v.shape[1], capacity)
    parts = []
    for part in chunks(x, size):
        push = partial(_push_flat, linearized, part)
        columns = _each(push, v.mT.contiguous(), max(1, capacity // size))
        parts.append(columns.permute(1, 2, 0).flatten(0, 1))
    return torch.cat(parts)


def column_pullbacks(linearized: Linearized, x: Inputs, u: Tensor, capacity: int) -> Tensor:
    """J(x)ᵀ u for the columns of u (N·C, k): (P, k), at most `capacity` points times columns at a time."""
    size = points_at_once(num_rows(x), u.shape[-1], capacity)
    width = u.shape[0] // num_rows(x)
    total = u.new_zeros(u.shape[-1], linearized.num_params)
    start = 0
    for part in chunks(x, size):
        stop = start + num_rows(part) * width
        out, pull = pullback(partial(_evaluate, linearized, part), linearized.params)
        check_height(u, num_rows(x) * out.shape[1], "u", "outputs of the given points")
        pull_flat = partial(_pull_flat, linearized, pull, out)
        total += _each(pull_flat, u[start:stop].mT.contiguous(), max(1, capacity // size))
        start = stop
    return total.mT


def _evaluate(linearized: Linearized, x: Inputs, params: Params) -> Tensor:
    return linearized.evaluate(params, x)


def _push_flat(linearized: Linearized, x: Inputs, column: Tensor) -> Tensor:
    tangent = linearized.unflatten(column)
    return pushforward(partial(_evaluate, linearized, x), linearized.params, tangent)


def _pull_flat(
    linearized: Linearized, pull: Callable[[Tensor], Params], out: Tensor, column: Tensor
) -> Tensor:
    return linearized.flatten(pull(column.reshape(out.shape).to(out.dtype)))


def check_height(value: Tensor, height: int, name: str, meaning: str) -> None:
    """Raise unless `value` is a matrix with `height` rows."""
    if value.dim() != 2 or value.shape[0] != height:
        raise InputError(
            f"{name} must have shape ({height}, k), a row for each of the {meaning}, but is "
            f"{describe(value)}."
        )


def _each(function: Callable[[Tensor], Tensor], columns: Tensor, at_once: int) -> Tensor:
    """`function` of each row of `columns`, vectorized where the network's operations allow it."""
    if len(columns) > 1 and at_once > 1:
        with (
            contextlib.suppress(RuntimeError, NotImplementedError, ValueError),
            without_vmap_warnings(),
        ):
            return vmap(function, chunk_size=at_once)(columns)
    return torch.stack([function(column) for column in columns])


def memory_budget(device: torch.device) -> int:
    """Bytes for one pass: 1 GiB, or a quarter of what is free on a device that needs large passes."""
    return 2**30 if device.type == "cpu" else available_memory(device) // 4


def capacity(linearized: Linearized, x: Inputs, memory_budget: int) -> int:
    """How many points times columns fit into the memory budget in one forward-mode or backward pass.

    Measured on one point: the bytes that autograd keeps for it.
    """
    linearized.check(x)
    total = 0

    def count(saved: Tensor) -> Tensor:
        nonlocal total
        total += saved.numel() * saved.element_size()
        return saved

    leaves = {name: value.detach().requires_grad_() for name, value in linearized.params.items()}
    own = sum(value.numel() * value.element_size() for value in leaves.values())
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved):
        linearized.evaluate(leaves, rows(x, slice(0, 1)))
    return max(1, memory_budget // (4 * max(total - own, 1)))


def check_device(x: Inputs, linearized: Linearized) -> None:
    """Raise unless `x` has the device and the floating dtype of the network."""
    like = linearized.example
    for value in tensors(x):
        if value.device != like.device:
            raise InputError(
                f"x is on {value.device}, but the network is on {like.device}. "
                f"Move it: x = x.to('{like.device}')."
            )
        if value.is_floating_point() and value.dtype != like.dtype:
            raise InputError(
                f"x is {value.dtype}, but the network is {like.dtype}. Convert it: x = x.to({like.dtype})."
            )
