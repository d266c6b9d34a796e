"""Kernels as values: copies of them with other fields."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from net2gp.errors import InputError
from net2gp.types import Kernel


def is_kernel(value: Any) -> bool:
    """Whether a value is a kernel, and not a class of kernels."""
    return isinstance(value, Kernel) and not isinstance(value, type)


def changed(kernel: Any, changes: dict[str, Any]) -> Any:
    """The same kernel with other values of those fields that it has."""
    if not is_dataclass(kernel) or isinstance(kernel, type):
        raise InputError(
            f"a kernel is a value, but {type(kernel).__name__} is no dataclass. Put @dataclass(frozen=True) "
            "above it."
        )
    known = {field.name for field in fields(kernel) if field.init}
    return replace(kernel, **{name: value for name, value in changes.items() if name in known})


def moved(value: Any, device: Any, dtype: torch.dtype | None) -> Any:
    """A field with its tensors on another device or in another dtype."""
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype if value.is_floating_point() else None)
    if isinstance(value, tuple):
        return tuple(moved(item, device, dtype) for item in value)
    if isinstance(value, nn.Module):  # whose own to() would move the user's module
        return copy.deepcopy(value).to(device=device, dtype=dtype)
    return value.to(device, dtype) if is_kernel(value) else value
