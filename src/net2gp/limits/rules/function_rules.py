"""Rules for functions and tensor methods in a module's forward: shapes, splits, concatenations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from net2gp.limits.duals.activations import activation_of
from net2gp.limits.duals.torch_functions import from_function
from net2gp.limits.graph.function_registry import FUNCTIONS, function_rule, name_of, run
from net2gp.limits.graph.probing import (
    POINTS,
    channel_operation,
    is_pointwise,
    linear_factor,
    position_operation,
)
from net2gp.limits.graph.trace import BATCH
from net2gp.limits.graph.translate import (
    Data,
    Logits,
    Parameter,
    Signal,
    Translation,
    activated,
    mapped,
    parameter_signal,
    permuted,
    plain,
    reshaped,
    sliced,
)
from net2gp.limits.modules.pointwise import Pointwise
from net2gp.limits.rules.arithmetic import expanded, product_of, total
from net2gp.limits.rules.composition import composed_call
from net2gp.limits.rules.layer_rules import HINTS, dropped, rule
from net2gp.limits.signals.layout import Layout, LayoutError
from net2gp.limits.signals.positions import PositionMap

_STAIRS = {
    "round",
    "floor",
    "ceil",
    "trunc",
    "fix",
    "frac",
    "remainder",
    "fmod",
    "mod",
    "floordiv",
    "floor_divide",
}


def translate_call(translation: Translation, node: fx.Node) -> Any:
    """Return the value of a function's result.

    The ways are tried in order of how much they know: functions of one signal, rules by name, known
    activations, and last of all probing, which runs the function and sees what it does.
    """
    args, kwargs = positional(translation.value(node.args), translation.value(node.kwargs))
    name = name_of(node.target)
    composed = composed_call(node, args, kwargs)
    if composed is not None:
        return composed
    if name in FUNCTIONS:
        found = FUNCTIONS[name](translation, node, args, kwargs)
        if found is not None:
            return found
    result = translation.found[node.name]
    if name in _STAIRS:
        raise translation.refuse(
            f"the function {name}", node, "It has a jump at every step, and no gradient. "
        )
    if not isinstance(result, Tensor) or not result.is_floating_point():
        raise translation.refuse(f"the function {name}", node)
    signals = [number for number, value in enumerate(args) if isinstance(value, Signal)]
    if len(signals) != 1 or any(isinstance(value, Data) for value in args):
        raise translation.refuse(f"the function {name}", node)
    place = signals[0]

    def apply(t: Tensor) -> Any:
        constants = tuple(
            c.to(t) if isinstance(c, Tensor) and c.is_floating_point() else c for c in args
        )
        return run(node.target, (*constants[:place], t, *constants[place + 1 :]), kwargs)

    layer = from_function(node.target, args, kwargs) if place == 0 else None
    if layer is not None:
        return activated(args[place], activation_of(layer), translation, node)
    found = channel_operation(args[place], apply, translation, node)
    if found is not None:
        return found
    if is_pointwise(apply, (POINTS, *args[place].layout.shape)):
        factor = linear_factor(apply)
        if factor is not None:
            return args[place].scaled(factor)
        return activated(args[place], activation_of(Pointwise(apply)), translation, node)
    found = position_operation(args[place], apply, translation, node)
    if found is None:
        raise translation.refuse(f"the function {name}", node, _reason(name))
    return found


def _reason(name: str) -> str:
    """Return why a function has no rule: the hint for the layer of that name."""
    layer = name.replace("_", "")
    if name in ("amax", "max"):
        layer = "maxpool"
    return next((text for start, text in HINTS.items() if start.lower() in layer), "")


def positional(args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Move arguments that were passed by name to the places where rules expect them."""
    named = dict(kwargs)
    if not args:
        first = next((name for name in ("input", "tensors", "self") if name in named), None)
        args = () if first is None else (named.pop(first),)
    if "axis" in named:
        named["dim"] = named.pop("axis")
    if "other" in named and len(args) == 1:
        args = (*args, named.pop("other"))
    return args, named


@function_rule("flatten", "view", "reshape", "unsqueeze", "squeeze", "unflatten")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    if isinstance(args[0], Parameter):
        if args[0].own != args[0].shape:
            raise translation.refuse(f"a view of the expanded parameter '{args[0].name}'", node)
        shape = tuple(translation.found[node.name].shape)
        return replace(args[0], shape=shape, own=shape)
    if not isinstance(args[0], Signal):
        return None
    try:
        return reshaped(args[0], translation.shape(node))
    except LayoutError as error:
        raise translation.refuse(
            f"the change of shape: {error}",
            node,
            "Channels may be split and merged in their order. ",
        ) from error


@function_rule("permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "mT", "t")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    if not isinstance(args[0], Signal):
        return None
    sizes = tuple(range(2, 3 + len(args[0].layout.groups)))
    out = run(node.target, (torch.empty(sizes, device="meta"), *args[1:]), kwargs)
    order = tuple(sizes.index(size) - 1 for size in out.shape)
    if order[0] != -1:
        raise translation.refuse(
            "moving the batch axis",
            node,
            "Instead of qkv.reshape(n, t, 3, heads, d).permute(2, 0, 3, 1, 4) write "
            "q, k, v = qkv.chunk(3, -1) and split the heads of each; attention with a softmax needs logits "
            "scaled by 1/d. ",
        )
    return permuted(args[0], order[1:])


@function_rule("getattr")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    if args[1] in ("shape", "dtype", "device", "ndim"):
        return translation.found[node.name]
    if args[1] in ("data", "grad") and isinstance(args[0], Signal | Parameter):
        raise translation.refuse(f"the attribute .{args[1]}", node, "Gradients do not pass it. ")
    if args[1] in ("mT", "T") and isinstance(args[0], Signal):
        count = len(args[0].layout.groups)
        return permuted(args[0], (*range(count - 2), count - 1, count - 2))
    if args[1] in ("mT", "T", "mH", "H") and isinstance(args[0], Parameter):
        hint = "For x @ self.weight.T + self.bias write F.linear(x, self.weight, self.bias). "
        raise translation.refuse(f"the attribute .{args[1]} of a parameter", node, hint)
    return None


@function_rule("size", "dim", "numel", "len", "is_floating_point")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    return translation.found[node.name]


@function_rule("heaviside")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    raise translation.refuse(
        "the function heaviside",
        node,
        "torch has no gradient of it: use net2gp.limits.modules.RectifiedMonomial(0). ",
    )


@function_rule("detach")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    if not isinstance(args[0], Signal):
        return None
    raise translation.refuse(
        "detach", node, "The tangent kernel takes in all weights; leave it out for the NNGP. "
    )


@function_rule("contiguous", "clone", "float", "double", "to", "type_as", "half", "bfloat16")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    result = translation.found[node.name]
    if not isinstance(result, Tensor) or not result.is_floating_point():
        raise translation.refuse(
            f"a signal as {getattr(result, 'dtype', type(result).__name__)}",
            node,
            "Whole numbers have a jump at every step, and no gradient. ",
        )
    return args[0]


@function_rule("expand", "expand_as", "repeat")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    found = tuple(translation.found[node.name].shape)
    if isinstance(args[0], Parameter):
        own = (1,) * (len(found) - len(args[0].own)) + args[0].own
        if any(a not in (1, b) for a, b in zip(own, found, strict=True)):
            raise translation.refuse(f"repetitions of the parameter '{args[0].name}'", node)
        shape = (1, *found[1:]) if found[0] == BATCH and own[0] == 1 else found
        return replace(args[0], shape=shape, own=own)
    if not isinstance(args[0], Signal):
        return None
    signal = plain(args[0], translation, node)
    shape, axis = signal.layout.shape, signal.layout.channel_axis()
    grown = [number for number, size in enumerate(found[1:]) if (*shape, 0)[number] != size]
    if len(found) != len(shape) + 1 or found[0] != BATCH or any(shape[n] != 1 for n in grown):
        raise translation.refuse("an expansion of axes that have more than one position", node)
    if axis in grown:
        raise translation.refuse("an expansion of one channel to many", node)
    layout = Layout.of(found[1:], axis)
    return expanded(signal, layout.positions, layout)


@function_rule("dropout")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    if not isinstance(args[0], Signal | Logits):
        return None
    probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", True)
    return dropped(args[0], float(probability) if training else 0.0, translation, node)


@function_rule("glu")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    return gated(args[0], dim, translation, node) if isinstance(args[0], Signal) else None


@rule.register
def _(layer: nn.GLU, translation: Translation, node: fx.Node, value: Any) -> Any:
    if not isinstance(value, Signal):
        raise translation.refuse("GLU of anything but a signal", node)
    return gated(value, layer.dim, translation, node)


def gated(signal: Signal, dim: int, translation: Translation, node: fx.Node) -> Signal:
    """Return the first half of the channels times the sigmoid of the second."""
    half = signal.layout.width // 2
    first, second = parts_of(signal, dim, [half, half], translation, node)
    gate = activated(second, activation_of(nn.Sigmoid()), translation, node)
    return product_of(translation, node, first, gate)


@function_rule("chunk", "split", "tensor_split", "unsafe_chunk", "unsafe_split")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    signal = args[0]
    if not isinstance(signal, Signal):
        return None
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    axis = dim % (len(signal.layout.groups) + 1)
    sizes = [one.shape[axis] for one in translation.found[node.name]]
    return tuple(parts_of(signal, dim, sizes, translation, node))


def parts_of(
    signal: Signal, dim: int, sizes: list[int], translation: Translation, node: fx.Node
) -> list[Signal]:
    """Split a signal along its channels into parts of these sizes."""
    axis = dim % (len(signal.layout.groups) + 1) - 1
    if axis != signal.layout.channel_axis() or not signal.layout.is_plain():
        raise translation.refuse("splitting along positions", node, "Index them: x[:, a:b]. ")
    parts, start = [], 0
    for size in sizes:
        shape = list(signal.layout.shape)
        shape[axis] = size
        parts.append(Signal(sliced(signal, start, start + size), Layout.of(shape, axis)))
        start += size
    return parts


@function_rule("getitem")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    if isinstance(args[0], tuple | list | torch.Size):
        return args[0][args[1]]
    if isinstance(args[0], Parameter):
        raise translation.refuse(f"indexing the parameter '{args[0].name}'", node)
    return None


@function_rule("cat", "concat", "concatenate")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    values = list(args[0])
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    first = next((value for value in values if isinstance(value, Signal)), None)
    if first is None:
        return None
    axis = dim % (len(first.layout.groups) + 1) - 1
    parts = [_like(value, first, axis, translation, node) for value in values]
    if axis == first.layout.channel_axis():
        if len({part.positions for part in parts}) != 1:
            raise translation.refuse("a concatenation of different shapes", node)
        blocks = tuple(block for part in parts for block in part.blocks)
        return Signal(blocks, Layout.of(translation.shape(node), axis))
    shape = translation.shape(node)
    layout = Layout.of(shape, first.layout.channel_axis())
    terms, start = [], 0
    for part in parts:
        length = part.layout.shape[axis]
        places = torch.full(layout.positions, -1)
        index = [slice(None)] * len(layout.positions)
        number = layout.position_numbers(axis)[0]
        index[number] = slice(start, start + length)
        places[tuple(index)] = torch.arange(prod(part.positions)).reshape(part.positions)
        spread = PositionMap(part.positions, layout.positions, index=places.reshape(-1))
        terms.append((1.0, mapped(part, spread, layout)))
        start += length
    return total(terms, layout, translation, node)


def _like(value: Any, first: Signal, axis: int, translation: Translation, node: fx.Node) -> Signal:
    """Return a part of a concatenation as a signal with plain axes."""
    if isinstance(value, Signal):
        return plain(value, translation, node)
    if isinstance(value, Data):
        return translation.raw(value, first.layout.channel_axis())
    if isinstance(value, Parameter):
        shape = list(plain(first, translation, node).layout.shape)
        own = (1,) * (len(shape) + 1 - len(value.shape)) + value.shape
        shape[axis] = own[axis + 1]
        frame = Signal((), Layout.of(shape, first.layout.channel_axis()))
        return parameter_signal(value, frame, translation, node)
    raise translation.refuse(f"a concatenation with {type(value).__name__}", node)
