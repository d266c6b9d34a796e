"""From drawn weights back to a module."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from net2gp.errors import InputError
from net2gp.inputs import describe
from net2gp.types import Params


def module_with(network: nn.Module, weights: Params, index: int | None = None) -> nn.Module:
    """Copy a network, with drawn weights in the place of its own.

    This closes the circle network → posterior → drawn weights → network: the copy computes the drawn
    function, and is an ordinary module that can be saved, exported and trained. Parameters and buffers that
    `weights` does not name are as in the network. Cost: a copy of the network.

    Args:
        network: The network that gives the code, which does not change.
        weights: Values by name: one draw, or S draws with an axis in front, as `posterior.sample_weights(S)`
            gives them.
        index: Which of the S draws is meant, or None if `weights` is one draw.

    Returns:
        The copy, in the mode of the network.

    Raises:
        InputError: If a name is not in the network, a shape does not fit, or there is no such draw.

    >>> network = nn.Linear(2, 1)
    >>> draws = {"weight": torch.ones(3, 1, 2), "bias": torch.zeros(3, 1)}
    >>> module_with(network, draws, 2)(torch.ones(1, 2))
    tensor([[2.]], grad_fn=<AddmmBackward0>)
    """
    if not isinstance(network, nn.Module):
        raise InputError(
            f"module_with needs the network, an nn.Module that gives the code, but got {describe(network)}."
        )
    if not isinstance(weights, Mapping) or not weights:
        raise InputError(
            "weights are values by name, as posterior.sample_weights(1) gives them, but are "
            f"{describe(weights)}."
        )
    if index is not None and (isinstance(index, bool) or not isinstance(index, int)):
        raise InputError(f"index must be the number of a draw or None, but is {describe(index)}.")
    copied = copy.deepcopy(network)
    # a tensor that several modules share has several names here, as draws may name any of them
    known: dict[str, Tensor] = dict(copied.named_parameters(remove_duplicate=False))
    known |= dict(copied.named_buffers(remove_duplicate=False))
    for name, value in weights.items():
        if name not in known:
            raise InputError(
                f"weights has '{name}', which the network does not have. It has: "
                f"{', '.join(list(known)[:6])}."
            )
        if not isinstance(value, Tensor):
            raise InputError(f"weights must be tensors, but '{name}' is {describe(value)}.")
        with torch.no_grad():
            known[name].copy_(_one(name, value, known[name], index))
    return copied


def _one(name: str, value: Tensor, own: Tensor, index: int | None) -> Tensor:
    if index is None:
        if value.shape == own.shape:
            return value
        hint = " Say which of the draws you mean: module_with(network, weights, 0)."
        stacked = value.shape[1:] == own.shape
        raise InputError(
            f"'{name}' has shape {tuple(own.shape)} in the network and {tuple(value.shape)} in the weights."
            f"{hint if stacked else ''}"
        )
    if value.dim() == 0 or value.shape[1:] != own.shape:
        raise InputError(
            f"with index={index}, '{name}' should have shape (S, {', '.join(map(str, own.shape))}), but has "
            f"{tuple(value.shape)}. Leave index out for one draw."
        )
    if not -len(value) <= index < len(value):
        raise InputError(f"there are {len(value)} draws, but index is {index}.")
    return value[index]
