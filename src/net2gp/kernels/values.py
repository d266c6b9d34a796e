"""Kernels as values, copies of them with other fields, and the shapes of what they multiply."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from net2gp.errors import InputError
from net2gp.inputs import check_inputs, describe, num_rows
from net2gp.types import Inputs, Kernel


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


def rows_per_point(y: Inputs, v: Tensor) -> int:
    """The rows of `v` that belong to each point of `y`: 1, or C if C outputs are coupled.

    Raises:
        InputError: There are no points, or the rows of `v` are not equally many for each.
    """
    check_inputs(y, "y")
    count, rest = divmod(len(v), num_rows(y))
    if rest or not count:
        raise InputError(
            f"a kernel matrix with columns for {num_rows(y)} points multiplies v of shape "
            f"({num_rows(y)}, k), or ({num_rows(y)}·C, k) if C outputs are coupled, but v is {describe(v)}."
        )
    return count


def times(K: Tensor, v: Tensor) -> Tensor:
    """K @ v in the dtype of K, where a `v` of another height than K's width is refused."""
    if len(v) != K.shape[1]:
        raise wrong_height(K.shape[1], v)
    return K @ v.to(K.dtype)


def wrong_height(wanted: int, v: Tensor) -> InputError:
    """The error for a `v` that has another number of rows than the kernel matrix has columns."""
    return InputError(
        f"the kernel matrix has {wanted} columns, so v must have shape ({wanted}, k), but v is {describe(v)}."
    )
