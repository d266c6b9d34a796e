"""Layers that are called as functions, with a parameter of the network as their weight.

Subclasses that add an activation to a norm, attention with its own projections and hand-written blocks
call the functions behind the layers, and have the same gradients. Products and sums with a parameter, such
as layer scales and the positions of a transformer, count as layers of their own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from net2gp.linear.forward.evaluation import is_wrapped
from net2gp.linear.forward.layers import Part, Scale, Shift, Turned
from net2gp.linear.forward.recurrence import RECURRENT, embedding_bag
from net2gp.types import Params

Add = Callable[[nn.Module, dict[str, str], Tensor, Tensor, bool], Tensor]
"""Records a call: from a layer, the names of its parameters, its input and its output to a new output.

The last argument says whether the call is a part of what torch computes in one operation."""


class Functions(TorchFunctionMode):
    """A context in which `add` records functions whose weight or bias is one of `leaves`, or some rows of it.

    Recurrent layers and bags run as the steps that they consist of, and attention by torch's own function
    for it, whose linear maps are recorded. While `resting` is above zero nothing is recorded, since a layer
    with a rule of its own is running.
    """

    def __init__(self, leaves: Params, add: Add) -> None:
        super().__init__()
        self.names, self.add = {id(value): name for name, value in leaves.items()}, add
        self.leaves = leaves
        self.views: list[Tensor] = []
        self.resting = 0

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        if self.resting:
            return function(*arguments, **keywords)
        if function is F.multi_head_attention_forward:
            with _undispatched(), self:
                return function(*arguments, **keywords)
        if function in _STEPWISE and self._knows(arguments):
            out = _STEPWISE[function](self, *arguments, **keywords)
            if out is not None:
                return out
        out = function(*arguments, **keywords)
        if function in _ELEMENTWISE:
            return out if keywords else self._elementwise(_ELEMENTWISE[function], arguments, out)
        if function in _SHAPES:
            self._follow(arguments[0], out)
        return self._layer(function, arguments, keywords, out) if function in _LAYERS else out

    def rest(self, module: nn.Module, arguments: Any) -> None:
        """Record nothing until the layer that begins has run."""
        self.resting += 1

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute and record one of the linear maps that an operation consists of."""
        out = F.linear(x, weight, bias)
        return self._layer(F.linear, (x, weight, bias), {}, out, part=True)

    def embedding(self, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        """Compute and record the lookup that an operation begins with."""
        out = F.embedding(ids, weight, padding)
        return self._layer(F.embedding, (ids, weight, padding), {}, out, part=True)

    def _layer(
        self, function: Any, arguments: Any, keywords: Any, out: Tensor, *, part: bool = False
    ) -> Tensor:
        """Record a function that is a layer with some of the leaves as its parameters."""
        order, make = _LAYERS[function]
        given = {**_DEFAULTS, **dict(zip(order, arguments, strict=False)), **keywords}
        found = {suffix: self._source(given[suffix]) for suffix in ("weight", "bias")}
        sources = {suffix: source for suffix, source in found.items() if source is not None}
        layer = make(given, sources) if sources else None
        if layer is None or is_wrapped(given["input"]):
            return out
        names = {suffix: source.name for suffix, source in sources.items()}
        return self.add(layer.eval(), names, given["input"], out, part)

    def _knows(self, arguments: Any) -> bool:
        """Whether some of the tensors given, or given in lists, are leaves, and none is of torch.func."""
        values = [v for a in arguments for v in (a if isinstance(a, tuple | list) else (a,))]
        values = [value for value in values if isinstance(value, Tensor)]
        return not any(map(is_wrapped, values)) and any(id(value) in self.names for value in values)

    def _source(self, value: Any) -> Source | None:
        """Return which leaf a tensor is, or which rows of it, as it is or turned."""
        if not isinstance(value, Tensor):
            return None
        if id(value) in self.names:
            return Source(self.names[id(value)], 0, len(value) if value.dim() else 1)
        if not value._is_view() or not value.requires_grad or is_wrapped(value):
            return None
        place = value.untyped_storage().data_ptr()
        for name, leaf in self.leaves.items():
            if not is_wrapped(leaf) and leaf.untyped_storage().data_ptr() == place:
                for turned in (False, True) if leaf.dim() == 2 else (False,):
                    start = _first_row(value.mT if turned else value, leaf)
                    if start is not None:
                        return Source(name, start, len(leaf), turned)
        return None

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
                return self.add(kind(parameter.shape), {kind.suffix: name}, signal, out, False)
        return out


@dataclass(frozen=True)
class Source:
    """Where the values of a tensor are among the parameters.

    Args:
        name: The parameter.
        start: Its first row that the tensor has.
        rows: How many rows the parameter has.
        turned: Whether the tensor is the transpose.
    """

    name: str
    start: int
    rows: int
    turned: bool = False


def _first_row(value: Tensor, leaf: Tensor) -> int | None:
    """Return which row of a leaf a tensor starts with, or None if it does not consist of whole rows."""
    if value.dim() != leaf.dim() or value.shape[1:] != leaf.shape[1:] or not leaf.is_contiguous():
        return None
    start, rest = divmod(int(value.storage_offset() - leaf.storage_offset()), leaf.stride(0))
    inside = not rest and 0 <= start <= len(leaf) - len(value)
    return start if inside and value.is_contiguous() else None


@contextlib.contextmanager
def _undispatched() -> Iterator[None]:
    """Let torch's functions in Python run their own code in this thread, although a mode is active."""
    module: Any = F
    asks, own = module.has_torch_function, threading.get_ident()
    module.has_torch_function = lambda values: threading.get_ident() != own and asks(values)
    try:
        yield
    finally:
        module.has_torch_function = asks


Given = dict[str, Any]
"""The arguments of a function by name."""

Sources = dict[str, Source]
"""Which parameters are the function's weight and bias."""


def _batch_norm(given: Given, sources: Sources) -> nn.Module | None:
    if given["training"]:
        return None
    layer = nn.BatchNorm1d(1, eps=given["eps"] or 1e-5, affine=False)
    layer.running_mean, layer.running_var = given["running_mean"], given["running_var"]
    return layer


def _layer_norm(given: Given, sources: Sources) -> nn.Module | None:
    return nn.LayerNorm(given["normalized_shape"], given["eps"] or 1e-5, elementwise_affine=False)


def _group_norm(given: Given, sources: Sources) -> nn.Module | None:
    channels = given["input"].shape[1]
    return nn.GroupNorm(given["num_groups"], channels, given["eps"] or 1e-5, affine=False)


def _rms_norm(given: Given, sources: Sources) -> nn.Module | None:
    return nn.RMSNorm(given["normalized_shape"], given["eps"], elementwise_affine=False)


def _linear(given: Given, sources: Sources, *, flipped: bool = False) -> nn.Module | None:
    """Return the layer W x + b, of a weight (O, I), or (I, O) if `flipped`, or of some rows of it."""
    if given.keys() & {"alpha", "beta", "out"} or given["input"].dim() < 2:
        return None
    weight, rows = given["weight"], {}
    for suffix, source in sources.items():
        length = weight.shape[1] if source.turned else len(given[suffix])
        if (source.start, length) != (0, source.rows):
            rows[suffix] = source.start, source.rows
    turned = "weight" in sources and sources["weight"].turned != flipped
    if rows and (turned or flipped):
        return None
    return Part(rows) if rows else _WHOLE[turned]


def _matmul(given: Given, sources: Sources) -> nn.Module | None:
    return _linear(given, sources, flipped=True) if given["weight"].dim() == 2 else None


def _bilinear(given: Given, sources: Sources) -> nn.Module | None:
    one, other = given["input"], given["input2"]
    given["input"] = (one[..., :, None] * other[..., None, :]).flatten(-2)
    return _linear(given, sources)


def _embedding(given: Given, sources: Sources) -> nn.Module | None:
    if given.get("max_norm") is not None or "weight" not in sources:
        return None
    source, number = sources["weight"], len(given["weight"])
    if source.turned or (source.start, source.rows) != (0, number):
        return None
    return nn.Embedding(number, 1, given.get("padding_idx"), device="meta")


def _convolution(given: Given, sources: Sources) -> nn.Module | None:
    if any((s.start, s.rows) != (0, len(given[suffix])) for suffix, s in sources.items()):
        return None
    outputs, inputs, *kernel = given["weight"].shape
    groups, kind = given.get("groups", 1), (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(kernel) - 1]
    options = {key: given[key] for key in ("stride", "padding", "dilation") if key in given}
    shape = inputs * groups, outputs, tuple(kernel)
    return kind(*shape, groups=groups, bias=False, device="meta", **options)


_WHOLE = nn.Linear(1, 1, False, device="meta"), Turned()
"""The layers of whole weights, as they are and turned, made once since recurrent layers need many."""

_DEFAULTS: dict[str, Any] = {"weight": None, "bias": None, "eps": None, "training": False}
_SHAPED = ("input", "normalized_shape", "weight", "bias", "eps")
_CONVOLVED = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_LAYERS: dict[Any, tuple[tuple[str, ...], Callable[[Given, Sources], nn.Module | None]]] = {
    F.batch_norm: (
        ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
        _batch_norm,
    ),
    F.layer_norm: (_SHAPED, _layer_norm),
    F.group_norm: (("input", "num_groups", "weight", "bias", "eps"), _group_norm),
    F.rms_norm: (("input", "normalized_shape", "weight", "eps"), _rms_norm),
    F.linear: (("input", "weight", "bias"), _linear),
    F.bilinear: (("input", "input2", "weight", "bias"), _bilinear),
    F.embedding: (("input", "weight", "padding_idx", "max_norm"), _embedding),
    torch.addmm: (("bias", "input", "weight"), _matmul),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), (_CONVOLVED, _convolution)),
    **dict.fromkeys(
        (torch.matmul, Tensor.matmul, torch.mm, Tensor.mm), (("input", "weight"), _matmul)
    ),
}
"""The arguments of each function in order, and how to make the layer that does the same."""

_STEPWISE: dict[Any, Callable[..., Any]] = {
    **{
        function: lambda recorder, *given, steps=steps, **named: steps(
            recorder.linear, *given, **named
        )
        for function, steps in RECURRENT.items()
    },
    F.embedding_bag: lambda recorder, *given, **named: embedding_bag(
        recorder.embedding, *given, **named
    ),
}
"""What computes these functions step by step, given the context that records the steps."""

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
