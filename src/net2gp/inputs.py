"""Rows of inputs (tensor, tuple or dict) and the one helper that normalizes data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from net2gp.errors import InputError, check_finite
from net2gp.types import Data, Inputs


def tensors(x: Inputs) -> list[Tensor]:
    """The tensors that make up `x`, in a fixed order."""
    if isinstance(x, Tensor):
        return [x]
    return list(x.values()) if isinstance(x, dict) else list(x)


def map_inputs(x: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """`x` with `function` applied to each of its tensors."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, dict):
        return {name: function(value) for name, value in x.items()}
    return tuple(function(value) for value in x)


def num_rows(x: Inputs) -> int:
    """The number of points in `x`.

    >>> num_rows({"ids": torch.zeros(3, 7), "mask": torch.ones(3, 7)})
    3
    """
    return int(tensors(x)[0].shape[0])


def rows(x: Inputs, index: slice | Tensor) -> Inputs:
    """The points of `x` that `index` picks."""
    return map_inputs(x, lambda value: value[index])


def join(parts: list[Inputs]) -> Inputs:
    """The points of all `parts`, in order."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(cast(list[Tensor], parts))
    if isinstance(first, dict):
        return {name: torch.cat([cast(dict, part)[name] for part in parts]) for name in first}
    return tuple(torch.cat(values) for values in zip(*cast(list[tuple], parts), strict=True))


def chunks(x: Inputs, size: int) -> Iterator[Inputs]:
    """`x` in pieces of at most `size` points."""
    for start in range(0, num_rows(x), size):
        yield rows(x, slice(start, start + size))


def follows(x: Inputs | None) -> bool:
    """Whether results are to be differentiable in `x`: autograd records, and a tensor of it asks for it."""
    if not torch.is_grad_enabled() or not isinstance(x, Tensor | tuple | dict):
        return False
    return any(isinstance(value, Tensor) and value.requires_grad for value in tensors(x))


def check_inputs(x: Any, name: str = "x") -> None:
    """Raise unless `x` is a tensor, or a tuple or dict of tensors with equally many rows, all finite."""
    if not isinstance(x, Tensor | tuple | dict) or not all(
        isinstance(v, Tensor) for v in tensors(x)
    ):
        raise InputError(
            f"{name} must be a tensor, or a tuple or dict of tensors, but is {describe(x)}. "
            f"Convert it, e.g. {name} = torch.as_tensor({name})."
        )
    values = tensors(x)
    if not values or any(value.dim() == 0 for value in values):
        raise InputError(f"{name} must have a first axis that counts points, but is {describe(x)}.")
    if len({value.shape[0] for value in values}) > 1:
        raise InputError(
            f"the tensors in {name} must have equally many rows, but have "
            f"{[value.shape[0] for value in values]}."
        )
    if values[0].shape[0] == 0:
        raise InputError(f"{name} is empty: at least one point is needed.")
    for value in values:
        check_finite(value, name)


def check_batch(x: Any, known: Inputs) -> None:
    """Raise if `x` is a single point, without the first axis that `known`, some points, has.

    >>> check_batch(torch.zeros(2), torch.zeros(5, 2))
    Traceback (most recent call last):
    ...
    net2gp.errors.InputError: x is one point, ... Pass x[:1] in place of x[0], or add the axis: x[None].
    """
    if not isinstance(x, Tensor | tuple | dict) or len(tensors(x)) != len(tensors(known)):
        return
    pairs = zip(tensors(x), tensors(known), strict=True)
    if all(isinstance(one, Tensor) and one.shape == some.shape[1:] for one, some in pairs):
        raise InputError(
            f"x is one point, {describe(x)}, without the first axis, which counts points. Pass x[:1] in "
            "place of x[0], or add the axis: x[None]."
        )


def describe(x: Any) -> str:
    """A short account of what `x` is, for error messages."""
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)} and {x.dtype}"
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of [{', '.join(describe(value) for value in x)}]"
    if isinstance(x, dict):
        return "a dict of {" + ", ".join(f"{k}: {describe(v)}" for k, v in x.items()) + "}"
    return f"of type {type(x).__name__}"


def gather(data: Data) -> tuple[Inputs, Tensor]:
    """Inputs and targets of `data` as one pair, checked.

    A loader is read once, and its first batch once more: a loader that shuffles or augments between
    passes is refused, since kernels, residuals and caches would then speak of different points.

    >>> x, y = gather((torch.zeros(4, 2), torch.ones(4, 1)))
    >>> x.shape, y.shape
    (torch.Size([4, 2]), torch.Size([4, 1]))
    """
    pairs = [data] if isinstance(data, tuple | list) else list(_loader_pairs(data))
    if not pairs:
        raise InputError("data is empty: the loader gave no batch.")
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(
                f"data must be a pair (x, y) or a loader of such pairs, but has {describe(pair)}. "
                "Pass (x, y), with x a tensor, tuple or dict of tensors and y a tensor."
            )
        _check_pair(pair[0], pair[1])
    if not isinstance(data, tuple | list):
        _check_same_shapes(pairs)
        _check_same_order(pairs[0], next(iter(_loader_pairs(data))))
    return join([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def _loader_pairs(data: Any) -> Iterator[Any]:
    if not isinstance(data, DataLoader) and not hasattr(data, "__iter__"):
        raise InputError(f"data must be a pair (x, y) or a DataLoader, but is {describe(data)}.")
    if iter(data) is data:
        raise InputError(
            f"data can be read only once, since it is an iterator ({describe(data)}). "
            "Pass the DataLoader itself, or a pair (x, y)."
        )
    for batch in data:
        yield _as_tuples(batch)


def _as_tuples(batch: Any) -> Any:
    # the default collate function turns every tuple into a list
    return tuple(map(_as_tuples, batch)) if isinstance(batch, list) else batch


def _check_pair(x: Any, y: Any) -> None:
    check_inputs(x)
    if not isinstance(y, Tensor):
        raise InputError(f"y must be a tensor, but is {describe(y)}. Use torch.as_tensor(y).")
    if y.dim() == 0 or y.shape[0] != num_rows(x):
        count = y.shape[0] if y.dim() else 0
        raise InputError(
            f"x has {num_rows(x)} rows and y has {count}: they must have equally many."
        )
    check_finite(y, "y")


def _check_same_shapes(pairs: list[Any]) -> None:
    shapes = {str([tuple(v.shape[1:]) for v in (*tensors(x), y)]) for x, y in pairs}
    if len(shapes) > 1:
        raise InputError(
            f"the rows of all batches must have the same shapes, but have {', '.join(sorted(shapes))}. "
            "Pad or crop them in the loader."
        )


def _check_same_order(first: Any, again: Any) -> None:
    pairs = zip([*tensors(first[0]), first[1]], [*tensors(again[0]), again[1]], strict=True)
    if not all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs):
        raise InputError(
            "the loader gives other batches on a second pass: it shuffles, or augments at random. "
            "Pass a DataLoader with shuffle=False and without random transforms, or a pair (x, y)."
        )
