"""Calls of networks with other parameters, which leave the networks as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


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
