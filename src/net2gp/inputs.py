"""Operations on the rows of inputs (a tensor, tuple or dict), and `gather`, which normalizes data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from net2gp.errors import InputError, NotAvailable, check_finite
from net2gp.types import Data, Inputs, Stream

LABELS = ("labels", "label")
"""The entries of a dict batch that hold the targets, as Hugging Face names them."""

DATASET_BATCH = 256
"""The number of items of a `Dataset` that are collated together."""

BY_NUMBER = """\
Objects go into the module, and their numbers are x:

    class ByNumber(nn.Module):
        def __init__(self, network, objects):
            super().__init__(); self.network, self.objects = network, objects
        def forward(self, number):
            return self.network(collate([self.objects[n] for n in number.tolist()]))

Pass ByNumber(network, objects).eval() and (torch.arange(len(y)), y), with your own collate."""
"""How to pass inputs that are no tensors (graphs, molecules, texts)."""


def tensors(x: Inputs) -> list[Tensor]:
    """Return the tensors of `x` in a fixed order."""
    if isinstance(x, Tensor):
        return [x]
    return list(x.values()) if isinstance(x, Mapping) else list(x)


def map_inputs(x: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """Apply `function` to each tensor of `x`."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, Mapping):
        return {name: function(value) for name, value in x.items()}
    return tuple(function(value) for value in x)


def copied(value: Tensor) -> Tensor:
    """The values of a tensor, to be kept: changing the data in place later leaves them as they are."""
    with torch.inference_mode(False):
        return value.detach().clone()


def num_rows(x: Inputs) -> int:
    """Count the points in `x`.

    >>> num_rows({"ids": torch.zeros(3, 7), "mask": torch.ones(3, 7)})
    3
    """
    return int(tensors(x)[0].shape[0])


def rows(x: Inputs, index: slice | Tensor) -> Inputs:
    """Select the points of `x` that `index` picks."""
    return map_inputs(x, lambda value: value[index])


def join(parts: list[Inputs]) -> Inputs:
    """Concatenate the points of all `parts` in order."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(cast(list[Tensor], parts))
    if isinstance(first, Mapping):
        return {name: torch.cat([cast(Mapping, part)[name] for part in parts]) for name in first}
    return tuple(torch.cat(values) for values in zip(*cast(list[tuple], parts), strict=True))


def same_inputs(a: Inputs, b: Inputs) -> bool:
    """Whether `a` and `b` hold the same points."""
    pairs = list(zip(tensors(a), tensors(b), strict=False))
    return len(tensors(a)) == len(tensors(b)) and all(
        u is v or (u.shape == v.shape and u.dtype == v.dtype and torch.equal(u, v))
        for u, v in pairs
    )


def chunks(x: Inputs, size: int) -> Iterator[Inputs]:
    """Divide `x` into pieces of at most `size` points."""
    for start in range(0, num_rows(x), size):
        yield rows(x, slice(start, start + size))


def follows(x: Inputs | None) -> bool:
    """Whether results should be differentiable in `x`: autograd is on, and a tensor requires a gradient."""
    if not torch.is_grad_enabled() or not isinstance(x, Tensor | tuple | dict):
        return False
    return any(isinstance(value, Tensor) and value.requires_grad for value in tensors(x))


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Create ordinary tensors inside, even if the caller is in inference mode.

    Inference tensors could not be used in a later computation with gradients.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def check_inputs(x: Any, name: str = "x") -> None:
    """Raise unless `x` is a finite tensor, or a tuple or dict of finite tensors with the same number of rows.

    Args:
        x: The inputs.
        name: Their name in the message.

    Raises:
        InputError: If they are something else, empty, nested or sparse.
    """
    check_tensors(x, name)
    values = tensors(x)
    for value in values:
        _check_dense(value, name)
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


def check_tensors(x: Any, name: str = "x") -> None:
    """Raise `InputError` unless `x` is a tensor, or a tuple or dict of tensors."""
    if not isinstance(x, Tensor | tuple | Mapping) or not all(
        isinstance(v, Tensor) for v in tensors(x)
    ):
        raise InputError(
            f"{name} must be a tensor, or a tuple or dict of tensors, but is {describe(x)}. "
            f"{_advice(x, name)}"
        )


def check_batch(x: Any, known: Inputs) -> None:
    """Raise if `x` is a single point without the first axis.

    Args:
        x: The inputs.
        known: Some points of the right shape.

    Raises:
        InputError: If `x` has the shape of one of them.

    >>> check_batch(torch.zeros(2), torch.zeros(5, 2))
    Traceback (most recent call last):
    ...
    net2gp.errors.InputError: x is one point, ... Pass x[:1] in place of x[0], or add the axis: x[None].
    """
    if not isinstance(x, Tensor | tuple | Mapping) or len(tensors(x)) != len(tensors(known)):
        return
    pairs = zip(tensors(x), tensors(known), strict=True)
    if all(isinstance(one, Tensor) and one.shape == some.shape[1:] for one, some in pairs):
        raise InputError(
            f"x is one point, {describe(x)}, without the first axis, which counts points. Pass x[:1] in "
            "place of x[0], or add the axis: x[None]."
        )


def _check_dense(value: Tensor, name: str) -> None:
    if value.is_nested:
        raise InputError(
            f"{name} is a nested tensor, whose rows have different sizes. Pad them: "
            f"{name} = {name}.to_padded_tensor(0.0), with a mask as a second input."
        )
    if value.layout != torch.strided:
        raise InputError(f"{name} is a sparse tensor. Pass {name} = {name}.to_dense().")


def _advice(x: Any, name: str) -> str:
    """Say what to type instead of an `x` that is no tensor."""
    if isinstance(x, np.ndarray):
        return f"Convert it: {name} = torch.as_tensor({name}, dtype=torch.float32)."
    if hasattr(x, "to_numpy"):
        return f"Convert it: {name} = torch.tensor({name}.to_numpy(), dtype=torch.float32)."
    if isinstance(x, list) and x and all(isinstance(v, Tensor) for v in x):
        return (
            f"Pass {name} = torch.stack({name}) if it holds the points, or tuple({name}) if it holds the "
            "arguments of the network."
        )
    return BY_NUMBER if _holds_objects(x) else f"Convert it, e.g. {name} = torch.as_tensor({name})."


def _holds_objects(x: Any) -> bool:
    """Whether some part of `x` is neither a tensor nor a number."""
    if isinstance(x, tuple | list | Mapping):
        return any(_holds_objects(part) for part in (x.values() if isinstance(x, Mapping) else x))
    return not isinstance(x, Tensor | int | float | np.ndarray | np.generic | None)


def describe(x: Any) -> str:
    """Describe `x` in an error message, as a noun that fits after "is" and after "got".

    >>> describe(3), describe(torch.zeros(2))
    ('an object of type int', 'a tensor of shape (2,) and torch.float32')
    """
    if x is None:
        return "None"
    if isinstance(x, Tensor):
        return f"a tensor of shape {_shape(x)} and {x.dtype}"
    if isinstance(x, tuple | list):
        shown = [describe(value) for value in x[:4]] + ["…"] * (len(x) > 4)
        return f"a {type(x).__name__} of [{', '.join(shown)}]"
    if isinstance(x, Mapping):
        kind = type(x).__name__
        return f"a {kind} of {{{', '.join(f'{k}: {describe(v)}' for k, v in x.items())}}}"
    return f"an object of type {type(x).__name__}"


def check_made(value: Any, name: str) -> None:
    """Raise if `value` is a class, which was passed without brackets.

    Args:
        value: Any value.
        name: Its name in the message.

    Raises:
        InputError: If it is a class.

    >>> check_made(DataLoader, "data")
    Traceback (most recent call last):
    ...
    net2gp.errors.InputError: data is the class DataLoader. Write DataLoader(dataset).
    """
    if isinstance(value, type):
        given = inspect.signature(value).parameters.values()
        needed = ", ".join(one.name for one in given if one.default is one.empty)
        raise InputError(f"{name} is the class {value.__name__}. Write {value.__name__}({needed}).")


def _shape(x: Tensor) -> str:
    # A nested tensor has no shape.
    return "of several sizes" if x.is_nested else str(tuple(x.shape))


def gather(data: Data, like: Tensor | None = None) -> tuple[Inputs, Tensor]:
    """Collect the inputs and targets of `data` as one checked pair.

    A loader is read once, and its first batch a second time. A loader that shuffles or augments between
    passes is refused, since kernels, residuals and caches would otherwise refer to different points.

    Args:
        data: A pair (x, y), a loader of pairs, or a map-style `Dataset` of pairs. A dict with an entry
            "labels" (or "label") is a pair too: this entry is y, and all others are x. Tensors stay as they
            are. NumPy arrays become tensors: integers keep their dtype, and floating arrays take the dtype
            and device of `like`.
        like: A parameter of the network. None means torch's default dtype.

    Returns:
        All inputs and all targets.

    Raises:
        InputError: If the data have another form, are empty, not finite, or differ between two passes.

    >>> x, y = gather((torch.zeros(4, 2), torch.ones(4, 1)))
    >>> x.shape, y.shape
    (torch.Size([4, 2]), torch.Size([4, 1]))
    """
    if isinstance(data, Stream):
        raise NotAvailable(
            "this needs all points together, but data is a Stream, which is read batch by batch. Pass the "
            "loader itself, which is joined in memory, or a pair (x, y) of some points; or sum over batches: "
            "laplace(network, Stream(loader), likelihood, structure=Kron()), LastLayer() or Sampled()."
        )
    single = isinstance(data, tuple | list | Mapping)
    data = with_batches(data)
    batches = [data] if single else list(batches_of(data))
    if not batches:
        raise InputError("data is empty: the loader gave no batch.")
    pairs = [pair(batch, like) for batch in batches]
    if not single:
        check_same_shapes(pairs)
        _check_same_order(pairs[0], pair(next(iter(batches_of(data))), like))
    return join([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def with_batches(data: Any) -> Any:
    """A `Dataset` as a loader, and anything else as it is."""
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset | DataLoader):
        return DataLoader(data, DATASET_BATCH)
    return data


def batches_of(data: Any) -> Iterator[Any]:
    """Yield the batches of a loader; an iterator, which can be read only once, is refused."""
    check_made(data, "data")
    if isinstance(data, Tensor | str | bytes) or not (
        isinstance(data, DataLoader) or hasattr(data, "__iter__")
    ):
        raise InputError(
            f"data must be a pair (x, y), a Dataset or a DataLoader, but is {describe(data)}."
        )
    # A generator would be exhausted by the first pass, and the check of the order needs a second one.
    if iter(data) is data:
        raise InputError(
            f"data can be read only once, since it is an iterator ({describe(data)}). "
            "Pass the DataLoader itself, or a pair (x, y)."
        )
    for batch in data:
        yield _as_tuples(batch)


def _as_tuples(batch: Any) -> Any:
    # The default collate function of torch turns every tuple into a list.
    return tuple(map(_as_tuples, batch)) if isinstance(batch, list) else batch


def pair(batch: Any, like: Tensor | None, *, empty: bool = False) -> tuple[Inputs, Tensor]:
    """Return inputs and targets of one batch after checks; `empty` allows it to have no rows."""
    if isinstance(batch, Mapping):
        found = [name for name in LABELS if name in batch]
        if found:
            inputs = {name: value for name, value in batch.items() if name != found[0]}
            batch = (inputs, batch[found[0]])
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise InputError(
            f"data must be a pair (x, y) or a loader of such pairs, but has {describe(batch)}. "
            f"{_pair_advice(batch)}"
        )
    x, y = batch
    if isinstance(x, tuple | Mapping):
        names = list(x) if isinstance(x, Mapping) else range(len(x))
        converted = [_as_tensor(value, "x", like) for value in tensors(x)]
        x = dict(zip(names, converted, strict=True)) if isinstance(x, Mapping) else tuple(converted)
    x, y = _as_tensor(x, "x", like), _as_tensor(y, "y", _of_targets(like))
    if not (empty and isinstance(y, Tensor) and y.dim() and len(y) == 0):
        _check_pair(x, y)
    return x, y


def _of_targets(like: Tensor | None) -> Tensor | None:
    """Return what floating targets are like: float32 if the network has half precision."""
    whole = like is None or like.dtype not in (torch.float16, torch.bfloat16)
    return like if like is None or whole else like.new_empty(0, dtype=torch.float32)


def _pair_advice(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return 'A dict must have its targets under "labels": {**inputs, "labels": y}, or pass (inputs, y).'
    if isinstance(batch, tuple | list | Tensor):
        return (
            "Pass (x, y), with x a tensor, tuple or dict of tensors and y a tensor; for a list of items "
            "(x_n, y_n), DataLoader(items, batch_size=100)."
        )
    return BY_NUMBER


def _as_tensor(value: Any, name: str, like: Tensor | None) -> Any:
    """Convert a NumPy array to a tensor, and return anything else as it is."""
    if not isinstance(value, np.ndarray):
        return value
    try:
        found = torch.tensor(value)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{name} is an array of {value.dtype}, which is no number ({error}). Encode it first, or pass a "
            "tensor."
        ) from None
    dtype = torch.get_default_dtype() if like is None else like.dtype
    device = None if like is None else like.device
    return found.to(device, dtype if found.is_floating_point() else None)


def _check_pair(x: Any, y: Any) -> None:
    check_inputs(x)
    if not isinstance(y, Tensor):
        raise InputError(f"y must be a tensor, but is {describe(y)}. Use torch.as_tensor(y).")
    _check_dense(y, "y")
    if y.dim() == 0 or y.shape[0] != num_rows(x):
        count = y.shape[0] if y.dim() else 0
        raise InputError(
            f"x has {num_rows(x)} rows and y has {count}: they must have equally many."
        )
    check_finite(y, "y")


def check_same_shapes(pairs: list[Any]) -> None:
    """Raise unless all pairs (x, y) have the same entries, in any order, with rows of the same shapes."""
    shape: Any = lambda value: tuple(value.shape[1:])
    shapes = [(map_inputs(x, shape), shape(y)) for x, y in pairs]
    other = next((one for one in shapes if one != shapes[0]), None)
    if other is not None:
        raise InputError(
            "the rows of all batches must have the same shapes, but one batch has "
            f"{shapes[0]} and another {other}. Pad or crop them in the loader."
        )


def _check_same_order(first: Any, again: Any) -> None:
    pairs = zip([*tensors(first[0]), first[1]], [*tensors(again[0]), again[1]], strict=True)
    if not all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs):
        raise InputError(
            "the loader gives other batches on a second pass: it shuffles, or augments at random. "
            "Pass a DataLoader with shuffle=False and without random transforms, or a pair (x, y). "
            "Sums over whatever comes are taken of data.Stream(loader)."
        )
