"""Calls of networks with other parameters, and errors that mean that torch cannot vectorize them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from net2gp.errors import Net2GPError
from net2gp.inputs import tensors
from net2gp.types import Inputs

REFUSALS = (
    *("vmap", "functorch", "torch.func", "batching rule", "batchedtensor", "aten::", "vectorized"),
    *("doesn't have storage", "match the broadcast shape", "does not require grad"),
    *("cannot resize variables", "detach views in-place"),
)
"""Words of the messages with which torch refuses a transform: most name it, and some only its effects."""


def functional_call(
    network: nn.Module,
    values: Mapping[str, Tensor],
    arguments: tuple[Any, ...] = (),
    keywords: Mapping[str, Any] | None = None,
) -> Any:
    """Call a network with other parameters and buffers in place of its own.

    `torch.func.functional_call` puts tied values into all their places by name. A module that a network has
    under two names is one place, but torch fills it twice, and puts back the new values as if they were the
    old ones. Here each place is filled once.

    Args:
        network: The network, which is left as it is.
        values: Parameters and buffers by name; those that are missing stay.
        arguments: The arguments of its forward.
        keywords: The keyword arguments.

    Returns:
        What the network returns.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> network = nn.Sequential(layer, layer)
    >>> functional_call(network, {"0.weight": torch.full((1, 1), 3.0)}, (torch.ones(1, 1),))
    tensor([[9.]])
    >>> type(layer.weight).__name__
    'Parameter'
    """
    places: dict[int, list[str]] = {}
    for prefix, module in network.named_modules():
        own = (prefix, False, False)  # of this module alone, and under each of its names
        for name, value in (*module.named_parameters(*own), *module.named_buffers(*own)):
            places.setdefault(id(value), []).append(name)
    spread = dict(values)
    for names in places.values():
        given = next((name for name in names if name in values), None)
        if given is not None and len(names) > 1:
            spread |= {name: values[given] for name in names if name not in values}
    named = None if keywords is None else dict(keywords)
    return torch.func.functional_call(network, spread, arguments, named, tie_weights=False)


def picked(out: Any, output: Callable[[Any], Any] | None = None) -> Any:
    """Pick the tensor of outputs from what a network returns.

    Args:
        out: What the network returns.
        output: Picks the tensor; None takes the entry `logits` of a dict, of a named tuple or of an object
            with fields, as Hugging Face models return, or else the only tensor that there is.

    Returns:
        The tensor, or `out` itself where none of its tensors is the obvious one.

    >>> picked({"logits": torch.ones(2), "loss": torch.zeros(2)})
    tensor([1., 1.])
    """
    if output is not None:
        return output(out)
    found = {name: v for name, v in entries(out).items() if isinstance(v, Tensor)}
    if "logits" in found:
        return found["logits"]
    return next(iter(found.values())) if len(found) == 1 else out


def entries(out: Any) -> dict[str, Any]:
    """Return the parts of what a network returns, by what one types behind `out` to get them.

    >>> list(entries((1, 2))), list(entries({"a": 1}))
    (['[0]', '[1]'], ['a'])
    """
    if isinstance(out, Mapping):
        return dict(out)
    if is_dataclass(out) and not isinstance(out, type):
        return {field.name: getattr(out, field.name) for field in fields(out)}
    if isinstance(out, tuple | list):
        names = getattr(out, "_fields", [f"[{index}]" for index in range(len(out))])
        return dict(zip(names, out, strict=True))
    return {}


def called(
    network: Callable[..., Any], x: Inputs, output: Callable[[Any], Any] | None = None
) -> Any:
    """Call a network with inputs, a tuple as *x and a dict as **x, and flatten its outputs to (N, C).

    Args:
        network: The network.
        x: N points.
        output: Picks the tensor of outputs from what the network returns.

    Returns:
        The outputs.

    >>> called(lambda a, b: (a + b, None), (torch.ones(2), torch.ones(2)), lambda out: out[0])
    tensor([[2.],
            [2.]])
    """
    out = network(**x) if isinstance(x, Mapping) else network(*tensors(x))
    out = picked(out, output)
    return out.reshape(out.shape[0], -1) if isinstance(out, Tensor) else out


def called_with(
    network: nn.Module,
    values: Mapping[str, Tensor],
    x: Inputs,
    output: Callable[[Any], Any] | None = None,
) -> Tensor:
    """The outputs (N, C) of a network with other parameters and buffers: `called` by `functional_call`.

    Args:
        network: The network, which is left as it is.
        values: Parameters and buffers by name; those that are missing stay.
        x: N points.
        output: Picks the tensor of outputs from what the network returns.

    Returns:
        The outputs.
    """
    return called(lambda *a, **k: functional_call(network, values, a, k), x, output)


def lacks_vmap(error: Exception) -> bool:
    """Say whether an error means that torch cannot vectorize a function, so that a loop may still run it.

    An error of another kind belongs to the function itself, to memory or to the device, and must not be
    hidden. Where a message leaves it open, the loop fails in the same way and its error comes out.

    Args:
        error: What was raised under `torch.func.vmap`.

    Returns:
        True for the messages of torch about its transforms.

    >>> try:
    ...     torch.func.vmap(lambda value: value.item())(torch.ones(2))
    ... except RuntimeError as error:
    ...     lacks_vmap(error)
    True
    >>> lacks_vmap(RuntimeError("CUDA out of memory")), lacks_vmap(ValueError("my own"))
    (False, False)
    """
    kinds = isinstance(error, RuntimeError | NotImplementedError)
    if not kinds or isinstance(error, Net2GPError | torch.OutOfMemoryError):
        return False
    return any(word in str(error).lower() for word in REFUSALS)
