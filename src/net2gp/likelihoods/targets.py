"""Checks of outputs f and targets y, and the one change of shape that is allowed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from net2gp.errors import InputError, check_dtype_and_device, check_finite
from net2gp.inputs import describe


def shape_targets(f: Tensor, y: Tensor, num_targets: int | None = None) -> Tensor:
    """`y` as (N, D): a one-dimensional y becomes (N, 1) if D = 1, and no other shape is changed.

    D is the number of outputs, f.shape[1], unless `num_targets` says otherwise. Nothing is
    broadcast: (N,) against (N, 1) would silently make (N, N).

    >>> import torch
    >>> shape_targets(torch.zeros(3, 1), torch.ones(3)).shape
    torch.Size([3, 1])
    """
    wanted = (f.shape[0], f.shape[1] if num_targets is None else num_targets)
    if y.dim() == 1 and wanted[1] == 1:
        y = y[:, None]
    if tuple(y.shape) != wanted:
        hint = f"y = y.reshape{wanted}" if y.numel() == wanted[0] * wanted[1] else "one row a point"
        raise InputError(
            f"y must have shape {wanted} for outputs of shape {tuple(f.shape)}, "
            f"but has shape {tuple(y.shape)}. Pass {hint}."
        )
    return y


def check_outputs(f: Any) -> None:
    """Raise unless `f` is a floating (N, C) tensor."""
    if not isinstance(f, Tensor) or f.dim() != 2 or not f.is_floating_point():
        raise InputError(
            "the network's outputs must be a floating tensor of shape (N, C), but are "
            f"{describe(f)}. End the network with nn.Flatten(1), or index the output that is meant."
        )


def check_targets(f: Tensor, y: Any) -> None:
    """Raise unless `y` is a finite tensor on the device (and, if floating, of the dtype) of `f`."""
    check_outputs(f)
    if not isinstance(y, Tensor):
        raise InputError(f"y must be a tensor, but is {describe(y)}. Use torch.as_tensor(y).")
    check_dtype_and_device(y, "y", f, "the network's output")
    check_finite(y, "y")


def check_real_targets(f: Tensor, y: Any) -> None:
    """Raise unless `y` could be the targets of a regression on `f`, but for its shape."""
    check_targets(f, y)
    if not y.is_floating_point():
        raise InputError(
            f"y must be a floating tensor for a regression, but is {y.dtype}. "
            f"Convert it: y = y.to({f.dtype}), or use Categorical() if y holds classes."
        )
