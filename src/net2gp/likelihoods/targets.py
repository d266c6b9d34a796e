"""Checks of outputs f and targets y, and the one change of shape that is allowed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from net2gp.errors import InputError, NotLogits, check_dtype_and_device, check_finite, warn
from net2gp.inputs import describe

ONLY_LAPLACE = (
    "If each pixel, token or time has a target, pass the data to laplace, which knows targets at places; "
    "other methods have one row of targets for each point."
)
"""What to do with targets that have axes for places."""

IGNORED = -100
"""The label that the losses of torch and Hugging Face ignore by default."""


def shape_targets(f: Tensor, y: Tensor, num_targets: int | None = None) -> Tensor:
    """Return `y` as (N, D): a one-dimensional y becomes (N, 1) if D = 1, and no other shape is changed.

    Nothing is broadcast, since (N,) against (N, 1) would silently give (N, N).

    Args:
        f: Outputs, (N, C).
        y: Targets, (N, D), or (N,) if D = 1.
        num_targets: The number D of targets per point. None means the number of outputs, C.

    Returns:
        The targets, (N, D).

    Raises:
        InputError: If `y` has another shape.

    >>> import torch
    >>> shape_targets(torch.zeros(3, 1), torch.ones(3)).shape
    torch.Size([3, 1])
    """
    wanted = (f.shape[0], f.shape[1] if num_targets is None else num_targets)
    if y.dim() == 1 and wanted[1] == 1:
        y = y[:, None]
    if tuple(y.shape) != wanted:
        same = y.numel() == wanted[0] * wanted[1]
        hint = f"Pass y = y.reshape{wanted}." if same else "Pass one row per point."
        raise InputError(
            f"y must have shape {wanted} for outputs of shape {tuple(f.shape)}, "
            f"but has shape {tuple(y.shape)}. {ONLY_LAPLACE if y.dim() > 2 else hint}"
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
    """Raise unless `y` could be the targets of a regression on `f`. The shape is not checked."""
    check_targets(f, y)
    if not y.is_floating_point():
        raise InputError(
            f"y must be a floating tensor for a regression, but is {y.dtype}. "
            f"Convert it: y = y.to({f.dtype}), or use Categorical() if y holds classes."
        )
    largest = float(y.detach().abs().max()) if y.numel() else 0.0
    if largest > 0.01 * torch.finfo(f.dtype).max ** 0.5:
        raise InputError(
            f"y is as large as {largest:.3g}, whose square {f.dtype} cannot hold, so that no variance could "
            "be told. Scale the targets and train the network on these: y = y / y.std()."
        )


def check_counts(f: Tensor, y: Any) -> None:
    """Raise unless `y` holds counts 0, 1, 2, … in the shape of `f`, or (N,) with one output."""
    check_targets(f, y)
    shape_targets(f, y)
    wrong = (y < 0) | (y != y.round()) if y.is_floating_point() else y < 0
    if bool(wrong.any()):
        raise InputError(
            f"counts must be 0, 1, 2, …, but y holds {y[wrong].reshape(-1)[0].item():g}. Pass y = y.round() "
            "if it is rounding, or use Gaussian() for real numbers."
        )


def without_ignored(y: Tensor) -> str:
    """Say what to do about labels of -100, which torch's losses ignore. Without such labels it is empty."""
    if y.dim() != 1 or not bool((y == IGNORED).any()):
        return ""
    return (
        f"labels of {IGNORED} mark points to ignore, but every point counts here: y has "
        f"{int((y == IGNORED).sum())} of them. Drop these points: keep = y != {IGNORED}, and pass "
        "(x[keep], y[keep])."
    )


def warn_of_probabilities(f: Tensor, *, binary: bool) -> None:
    """Warn if outputs that should be logits are probabilities."""
    inside = bool((f >= 0).all()) and bool((f <= 1).all())
    if binary:
        looks = inside and len(f) >= 10 and float(f.min()) < 0.2 and float(f.max()) > 0.8
    else:
        looks = inside and bool(((f.sum(-1) - 1).abs() < 1e-4).all())
    if looks:
        ending, name = ("sigmoid", "Bernoulli()") if binary else ("softmax", "Categorical()")
        warn(
            f"the network's outputs look like probabilities, but {name} takes logits and would apply the "
            f"{ending} a second time. Pass the network without its {ending}, or pick the logits with "
            "linearize(network, output=...).",
            NotLogits,
        )
