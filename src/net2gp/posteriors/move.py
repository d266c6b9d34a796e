"""Moving a posterior to another device or dtype, field by field."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from net2gp.errors import InputError, check_device
from net2gp.inputs import map_inputs
from net2gp.linear.precision import HALF
from net2gp.posteriors.conditioning.process import linearizations_of

T = TypeVar("T")


def move(value: T, device: torch.device | str | None, dtype: torch.dtype | None) -> T:
    """`value` with all tensors on `device`, and kernel, mean and data in `dtype`.

    Factors and dual vectors stay in float64, the dtype in which they were computed. They know the roundings
    of a network of half precision, whose variances would be differences of unlike numbers in another dtype.
    """
    if isinstance(device, torch.dtype):
        raise InputError(f"the first argument is a device. Pass posterior.to(dtype={device}).")
    if dtype not in (None, torch.float32, torch.float64):
        raise InputError(f"dtype must be torch.float32 or torch.float64, but is {dtype}.")
    half = [one.rounding for one in linearizations_of(value) if one.rounding in HALF]
    if dtype is not None and half:
        raise InputError(
            f"the posterior is of a network in {half[0]} and of its rounding errors, so that it has no other "
            f"dtype; its results are wider already. Find it anew for network.to({dtype})."
        )
    if device is not None:
        check_device(device)
    return _parts(value, device, dtype)


def _parts(value: Any, device: Any, dtype: torch.dtype | None) -> Any:
    """Move each field of a dataclass; fields named x and y are data, which follow the kernel's dtype."""

    def data(one: Tensor) -> Tensor:
        return one.to(device=device, dtype=dtype if one.is_floating_point() else None)

    changes = {}
    for name, part in ((f.name, getattr(value, f.name)) for f in fields(value)):
        whole = name in ("x", "y") and part is not None
        changes[name] = map_inputs(part, data) if whole else _move(part, device, dtype)
    return replace(value, **changes)


def _move(value: Any, device: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, Tensor):
        return value.to(device=device)
    if isinstance(value, tuple):
        return tuple(_move(item, device, dtype) for item in value)
    if isinstance(value, dict):
        return {key: _move(item, device, dtype) for key, item in value.items()}
    if isinstance(value, type):
        return value
    if hasattr(value, "to"):  # kernels, means and linearizations
        # the to() of a module would move the user's own
        return (deepcopy(value) if isinstance(value, nn.Module) else value).to(device, dtype)
    return _parts(value, device, dtype) if is_dataclass(value) else value
