"""Moving a posterior to another device or dtype, field by field."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from net2gp.errors import InputError, check_device
from net2gp.inputs import map_inputs

T = TypeVar("T")


def move(value: T, device: torch.device | str | None, dtype: torch.dtype | None) -> T:
    """`value` with all tensors on `device`, and kernel, mean and data in `dtype`.

    Factors and dual vectors stay in float64, the dtype in which they were computed.
    """
    if isinstance(device, torch.dtype):
        raise InputError(f"the first argument is a device. Pass posterior.to(dtype={device}).")
    if dtype not in (None, torch.float32, torch.float64):
        raise InputError(f"dtype must be torch.float32 or torch.float64, but is {dtype}.")
    if device is not None:
        check_device(device)
    return _move(value, device, dtype)


def _move(value: Any, device: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, Tensor):
        return value.to(device=device)
    if isinstance(value, tuple):
        return tuple(_move(item, device, dtype) for item in value)
    if isinstance(value, dict):
        return {key: _move(item, device, dtype) for key, item in value.items()}
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changes = {f.name: _field(f.name, getattr(value, f.name), device, dtype) for f in fields(value)}
    return replace(value, **changes)


def _field(name: str, value: Any, device: Any, dtype: torch.dtype | None) -> Any:
    if name in ("kernel", "prior_mean", "linearized") and hasattr(value, "to"):
        if isinstance(value, nn.Module):  # its to() would move the user's own module
            value = deepcopy(value)
        return value.to(device, dtype)
    if name in ("x", "y"):
        return map_inputs(
            value, lambda v: v.to(device=device, dtype=dtype if v.is_floating_point() else None)
        )
    return _move(value, device, dtype)
