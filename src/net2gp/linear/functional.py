"""Layers that are called as functions, with a parameter of the network as their weight.

Subclasses that add an activation to a norm, attention with its own projections and hand-written blocks
call the functions behind the layers; the gradients are those of the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from net2gp.linear.evaluation import is_wrapped

Add = Callable[[nn.Module, dict[str, str], Tensor, Tensor], Tensor]
"""From a layer, the names of its parameters, its input and its output to the output to go on with."""


class Functions(TorchFunctionMode):
    """Within it, functions whose weight or bias is one of `names` (by identity) are recorded by `add`."""

    def __init__(self, names: dict[int, str], add: Add) -> None:
        super().__init__()
        self.names, self.add = names, add

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        out = function(*arguments, **(keywords or {}))
        if function not in _LAYERS:
            return out
        order, make = _LAYERS[function]
        given = {**_DEFAULTS, **dict(zip(order, arguments, strict=False)), **(keywords or {})}
        own = {
            suffix: self.names[id(given[suffix])]
            for suffix in ("weight", "bias")
            if id(given[suffix]) in self.names
        }
        layer = make(given) if own else None
        if layer is None or is_wrapped(given["input"]):
            return out
        return self.add(layer.eval(), own, given["input"], out)


def _batch_norm(given: dict[str, Any]) -> nn.Module | None:
    if given["training"]:
        return None
    layer = nn.BatchNorm1d(1, eps=given["eps"] or 1e-5, affine=False)
    layer.running_mean, layer.running_var = given["running_mean"], given["running_var"]
    return layer


def _layer_norm(given: dict[str, Any]) -> nn.Module | None:
    return nn.LayerNorm(given["normalized_shape"], given["eps"] or 1e-5, elementwise_affine=False)


def _group_norm(given: dict[str, Any]) -> nn.Module | None:
    channels = given["input"].shape[1]
    return nn.GroupNorm(given["num_groups"], channels, given["eps"] or 1e-5, affine=False)


def _rms_norm(given: dict[str, Any]) -> nn.Module | None:
    return nn.RMSNorm(given["normalized_shape"], given["eps"], elementwise_affine=False)


def _linear(given: dict[str, Any]) -> nn.Module | None:
    return nn.Linear(1, 1, bias=False, device="meta")


_DEFAULTS: dict[str, Any] = {"weight": None, "bias": None, "eps": None, "training": False}
_SHAPED = ("input", "normalized_shape", "weight", "bias", "eps")
_LAYERS: dict[Any, tuple[tuple[str, ...], Callable[[dict[str, Any]], nn.Module | None]]] = {
    F.batch_norm: (
        ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
        _batch_norm,
    ),
    F.layer_norm: (_SHAPED, _layer_norm),
    F.group_norm: (("input", "num_groups", "weight", "bias", "eps"), _group_norm),
    F.rms_norm: (("input", "normalized_shape", "weight", "eps"), _rms_norm),
    F.linear: (("input", "weight", "bias"), _linear),
}
"""For each function its arguments in order, and the layer that it is."""
