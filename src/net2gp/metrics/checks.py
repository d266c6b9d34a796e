"""What every score requires of its input, with errors that say what to type instead."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Distribution

from net2gp.errors import InputError
from net2gp.inputs import describe


def shaped_like(mean: Tensor, value: Tensor, name: str, of: str = "mean") -> Tensor:
    """Return `value` in the shape of `mean`, where (N,) and (N, 1) stand for each other."""
    check_tensors(**{of: mean, name: value})
    if mean.shape == value.shape:
        return value
    shapes = [t.shape[:1] if t.dim() == 2 and t.shape[1] == 1 else t.shape for t in (mean, value)]
    if shapes[0] != shapes[1]:
        raise InputError(
            f"{of} and {name} must have the same shape, but have {tuple(mean.shape)} "
            f"and {tuple(value.shape)}. Pass (N,) or (N, C) of the same N points for both."
        )
    return value.reshape(mean.shape)


def checked_variance(mean: Tensor, var: Tensor, *, zero: bool) -> Tensor:
    """Return `var` in the shape of `mean` if it is positive. With `zero`, it may also be zero."""
    check_tensors(var=var)
    if not bool(((var >= 0) if zero else (var > 0)).all()):
        raise InputError(
            f"variances must be {'zero or ' if zero else ''}positive, but the smallest is "
            f"{var.min().item():g}. Pass the variance of y, e.g. posterior.predict(x).variance."
        )
    return shaped_like(mean, var, "variance")


def shaped_like_a_sample(samples: Tensor, y: Tensor) -> Tensor:
    """Return `y` in the shape of one of the samples."""
    check_tensors(samples=samples, y=y)
    if samples.dim() < 2 or not len(samples):
        raise InputError(
            "samples must be (S, N) or (S, N, C), draws of y with at least one in front, but have shape "
            f"{tuple(samples.shape)}. Pass e.g. posterior.predict(x).sample(torch.Size([100]))."
        )
    return shaped_like(samples[0], y, "y", "each sample")


def checked_levels(level: float | Tensor, like: Tensor) -> Tensor:
    """Return probabilities as a tensor with the dtype and device of `like`."""
    levels = torch.as_tensor(level, dtype=like.dtype, device=like.device)
    if not bool(((levels >= 0) & (levels <= 1)).all()):
        raise InputError(f"level must be between 0 and 1, but is {level}. Try level=0.95.")
    return levels


def checked_classes(probs: Tensor, y: Tensor, *, any_scores: bool = False) -> tuple[Tensor, Tensor]:
    """Return probabilities as (N, C ≥ 2) and labels as (N,) integers.

    With `any_scores`, C ≥ 2 columns need not be probabilities.
    """
    check_tensors(probs=probs, y=y)
    if probs.dim() == 1:
        probs = probs[:, None]
    if probs.dim() == 2 and probs.shape[1] == 1:
        any_scores = False
        probs = torch.cat([1 - probs, probs], 1)
        y = y.reshape(-1) if y.dim() == 2 and y.shape[1] == 1 else y
    if probs.dim() != 2 or tuple(y.shape) != (probs.shape[0],):
        raise InputError(
            f"probs must be (N, C) and y (N,), but they are {tuple(probs.shape)} and "
            f"{tuple(y.shape)}. Score several labels one at a time: probs[:, c], y[:, c]."
        )
    y = y.long()
    if y.numel() == 0 or int(y.min()) < 0 or int(y.max()) >= probs.shape[1]:
        raise InputError(
            f"y must hold labels in 0..{probs.shape[1] - 1}, at least one, but holds "
            f"{sorted(set(y.tolist()))[:10]}. Pass class numbers, not one-hot rows: y.argmax(-1)."
        )
    if not any_scores:
        _check_probabilities(probs)
    return probs, y


def _check_probabilities(probs: Tensor) -> None:
    if not bool(((probs >= 0) & (probs <= 1 + 1e-6)).all()):
        wrong = probs[~((probs >= 0) & (probs <= 1 + 1e-6))][0]
        raise InputError(
            f"probs must be between 0 and 1, but one is {wrong.item():g}. "
            "For logits pass logits.softmax(-1), or logits.sigmoid() for one output."
        )
    off = float((probs.sum(-1) - 1).abs().max())
    if off > 1e-2:
        raise InputError(
            f"the probs of a point must add up to 1, but are off by {off:g}. "
            "Divide them: probs / probs.sum(-1, keepdim=True)."
        )


def check_tensors(**values: Tensor) -> None:
    """Raise unless all values are tensors."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            law = isinstance(value, Distribution)
            fix = f"Pass law.{name}" if law else f"Convert it: {name} = torch.as_tensor({name})"
            raise InputError(f"{name} must be a tensor, but is {describe(value)}. {fix}.")


def check_numbers(**values: Tensor) -> None:
    """Raise unless all values are tensors without NaN."""
    check_tensors(**values)
    for name, value in values.items():
        count = int(value.isnan().sum())
        if count:
            raise InputError(
                f"{name} must hold numbers, but {count} of {value.numel()} are NaN. "
                f"Find them with {name}.isnan(): the prediction has diverged there."
            )
