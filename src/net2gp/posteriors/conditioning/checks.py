"""Checks of the prior and the network for Laplace's approximation and its dual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from net2gp.calling import picked
from net2gp.errors import InputError
from net2gp.inputs import describe, rows
from net2gp.likelihoods.traits import has_one_class
from net2gp.linear.linearized import Linearized
from net2gp.types import Inputs, Likelihood


def check_prior_var(prior_var: Any, *, zero: bool = False) -> None:
    """Raise unless `prior_var` is a positive number or tensor, or a dict of these; `zero` also allows zeros.

    >>> check_prior_var("1")
    Traceback (most recent call last):
    ...
    net2gp.errors.InputError: prior_var must be a number, a tensor, or a dict of these by parameter name, ...
    """
    named = prior_var if isinstance(prior_var, Mapping) else {None: prior_var}
    for name, value in named.items():
        where = "prior_var" if name is None else f"prior_var['{name}']"
        if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
            raise InputError(
                "prior_var must be a number, a tensor, or a dict of these by parameter name, but "
                f"{where} is {describe(value)}. Pass for example prior_var=1.0."
            )
        values = torch.as_tensor(value).detach()
        good = values.isfinite() & ((values >= 0) if zero else (values > 0))
        if not bool(good.all()):
            wrong = values[~good].reshape(-1)[0].item()
            fix = "" if zero else " To keep parameters as they are, leave them out with only=."
            raise InputError(
                f"{where} must be {'zero or ' * zero}positive and finite, but is {wrong:g}.{fix}"
            )


def check_class_axis(linearized: Linearized, x: Inputs, likelihood: Likelihood) -> None:
    """Raise if the network gives several axes of logits and the likelihood expects one axis of classes."""
    if not has_one_class(likelihood):
        return
    shapes: list[tuple[int, ...]] = []

    def seen(out: Any) -> Any:
        found = picked(out, linearized.output)
        if isinstance(found, Tensor):
            shapes.append(tuple(found.shape[1:]))
        return found

    replace(linearized, output=seen)(rows(x, slice(0, 1)))
    if shapes and sum(size > 1 for size in shapes[0]) > 1:
        shape = ", ".join(["N", *map(str, shapes[0])])
        raise InputError(
            f"{type(likelihood).__name__}() is of one label a point, from logits (N, C), but the network "
            f"gives ({shape}). "
            "If all are logits of one label, pass linearize(network, output=lambda out: out.flatten(1)); "
            "for one place of an image, output=lambda out: out[:, :, 0, 0]."
        )


def remedy(network: nn.Module) -> str:
    """Advice on how to reach a stationary point of the loss that a network has in eval mode."""
    kinds = {type(module).__name__ for module in network.modules() if _differs_in_training(module)}
    if not kinds:
        return "Train it further on these data."
    return (
        f"It has {' and '.join(sorted(kinds))}: training minimizes another loss than the network has in "
        "eval mode, however long it is. A few more epochs with network.eval() called before them, in which "
        "gradients flow all the same, lead to the minimum of the loss in eval mode."
    )


def _differs_in_training(module: nn.Module) -> bool:
    dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    return dropout or isinstance(module, nn.modules.batchnorm._BatchNorm)
