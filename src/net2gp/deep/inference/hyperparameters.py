"""The positive numbers inside of a kernel, which training moves on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from net2gp.kernels import RBF
from net2gp.limits import LimitKernel
from net2gp.limits.limit_kernels import InfiniteWidth
from net2gp.limits.prior import Prior
from net2gp.types import Kernel, Params


def numbers_of(kernel: Kernel) -> Params:
    """Find the numbers of a kernel that can be trained.

    These are all fields that hold a positive floating-point number, or a vector of them: length scales,
    variances and periods, in sums, products and multiples as well, and the weight variances of a network at
    infinite width. Zeros stay zero, and whole numbers are settings.

    Args:
        kernel: The kernel.

    Returns:
        The numbers by their place in the kernel, in float64.

    >>> from net2gp.kernels import Linear
    >>> numbers_of(2.0 * RBF(0.5) + Linear())
    {'kernels.0.lengthscale': tensor(0.5000, dtype=torch.float64),
     'kernels.0.output_var': tensor(2., dtype=torch.float64),
     'kernels.1.weight_var': tensor(1., dtype=torch.float64)}
    """
    found: Params = {}
    _collect(kernel, "", found)
    return found


def with_numbers(kernel: Any, values: Mapping[str, Tensor]) -> Any:
    """Put other numbers into a kernel.

    Args:
        kernel: The kernel.
        values: Numbers by their place, as `numbers_of` gives them. They may require gradients.

    Returns:
        The same kernel with these numbers.

    >>> with_numbers(RBF(0.5), {"lengthscale": torch.tensor(2.0)}).lengthscale
    tensor(2.)
    """
    return _rebuilt(kernel, "", values)


def with_relevances(kernel: Any, num_columns: int) -> Any:
    """Give each column of the inputs a length scale of its own, wherever an RBF has a single one.

    Args:
        kernel: The kernel.
        num_columns: The number of columns.

    Returns:
        The same covariance, with more numbers that can be trained.

    >>> with_relevances(RBF(0.5), 2).lengthscale
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    if isinstance(kernel, RBF):
        scale = torch.as_tensor(kernel.lengthscale, dtype=torch.float64).reshape(-1)
        return replace(kernel, lengthscale=scale.expand(num_columns).clone())
    if _is_node(kernel) and not isinstance(kernel, LimitKernel | InfiniteWidth | Prior):
        parts = {}
        for name, value in _parts(kernel):
            if isinstance(value, tuple):
                parts[name] = tuple(with_relevances(item, num_columns) for item in value)
            elif isinstance(value, Kernel):
                parts[name] = with_relevances(value, num_columns)
        return replace(kernel, **parts)
    return kernel


def _is_node(value: Any) -> bool:
    """Whether numbers are looked for in a value: parameters of trained networks are none."""
    return is_dataclass(value) and isinstance(value, Kernel | InfiniteWidth | Prior)


def _parts(value: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(value, field.name)) for field in fields(value) if field.init]


def _collect(value: Any, place: str, found: Params) -> None:
    if _is_node(value):
        parts = _parts(value)
    elif isinstance(value, tuple):
        parts = [(f"{index}", item) for index, item in enumerate(value)]
    elif isinstance(value, Mapping):
        parts = list(value.items())
    else:
        if _is_positive(value):
            found[place] = torch.as_tensor(value, dtype=torch.float64).detach().clone()
        return
    for name, part in parts:
        _collect(part, f"{place}.{name}" if place else name, found)


def _is_positive(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() and value.dim() < 2 and bool((value > 0).all())
    return isinstance(value, float) and value > 0


def _rebuilt(value: Any, place: str, values: Mapping[str, Tensor]) -> Any:
    if place in values:
        return values[place]

    def below(name: object) -> str:
        return f"{place}.{name}" if place else f"{name}"

    if _is_node(value):
        inside = {name: _rebuilt(part, below(name), values) for name, part in _parts(value)}
        return replace(value, **{n: v for n, v in inside.items() if v is not getattr(value, n)})
    if isinstance(value, tuple):
        items = tuple(_rebuilt(item, below(index), values) for index, item in enumerate(value))
        return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if isinstance(value, Mapping) and any(key.startswith(f"{place}.") for key in values):
        return {name: _rebuilt(part, below(name), values) for name, part in value.items()}
    return value
