"""Layers that are called as functions, with a parameter of the network as their weight.

Subclasses that add an activation to a norm, attention with its own projections and hand-written blocks
call the functions behind the layers, and have the same gradients. Products and sums with a parameter, such
as layer scales and the positions of a transformer, count as layers of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from net2gp.linear.forward.evaluation import is_wrapped
from net2gp.linear.forward.layers import Scale, Shift
from net2gp.types import Params

Add = Callable[[nn.Module, dict[str, str], Tensor, Tensor], Tensor]
"""Records a call: from a layer, the names of its parameters, its input and its output to a new output."""


class Functions(TorchFunctionMode):
    """A context in which `add` records functions whose weight or bias is one of `leaves` (by identity)."""

    def __init__(self, leaves: Params, add: Add) -> None:
        super().__init__()
        self.names, self.add = {id(value): name for name, value in leaves.items()}, add
        self.views: list[Tensor] = []

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        out = function(*arguments, **(keywords or {}))
        if function in _ELEMENTWISE:
            return out if keywords else self._elementwise(_ELEMENTWISE[function], arguments, out)
        if function in _SHAPES:
            self._follow(arguments[0], out)
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

    def _follow(self, value: Tensor, view: Tensor) -> None:
        """Remember a view of a parameter that has its entries in the same order under the same name."""
        name = self.names.get(id(value))
        if name is None or is_wrapped(view) or view.data_ptr() != value.data_ptr():
            return
        if view.numel() == value.numel() and view.is_contiguous():
            self.names[id(view)] = name
            # kept alive, so that no other tensor can get its id
            self.views.append(view)

    def _elementwise(self, kind: type[Scale | Shift], arguments: Any, out: Any) -> Any:
        """Record a product or a sum of a parameter and a signal, in either order."""
        for parameter, signal in (arguments, arguments[::-1]):
            name = self.names.get(id(parameter))
            if name is None or not isinstance(signal, Tensor) or is_wrapped(signal):
                continue
            # the first axis counts points, along which the parameter must not vary
            shared = [1] * (out.dim() - parameter.dim()) + [*parameter.shape]
            alike = signal.shape == out.shape and signal.dtype == parameter.dtype
            if alike and shared[:1] == [1]:
                return self.add(kind(parameter.shape), {kind.suffix: name}, signal, out)
        return out


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
"""The arguments of each function in order, and how to make the layer that does the same."""

_ELEMENTWISE: dict[Any, type[Scale | Shift]] = {
    **dict.fromkeys((torch.mul, torch.multiply, Tensor.mul, Tensor.multiply), Scale),
    **dict.fromkeys((Tensor.__mul__, Tensor.__rmul__), Scale),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), Shift),
}
_SHAPES = {torch.reshape, Tensor.reshape, Tensor.view, Tensor.__getitem__} | {
    torch.unsqueeze,
    Tensor.unsqueeze,
}
"""Functions that give the entries of a tensor, or some of them, another shape."""
