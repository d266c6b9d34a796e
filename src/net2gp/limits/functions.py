"""Rules for functions and tensor methods in a module's forward: shapes, splits, concatenations."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from net2gp.limits.activations import activation_of
from net2gp.limits.arithmetic import scale_by, total
from net2gp.limits.layout import Layout, LayoutError
from net2gp.limits.pointwise import Pointwise
from net2gp.limits.positions import PositionMap
from net2gp.limits.registry import FUNCTIONS, function_rule, name_of, run
from net2gp.limits.rules import dropped
from net2gp.limits.torch_functions import from_function
from net2gp.limits.translate import (
    Data,
    Logits,
    Parameter,
    Signal,
    Translation,
    activated,
    is_pointwise,
    linear_factor,
    mapped,
    parameter_signal,
    permuted,
    plain,
    position_operation,
    reshaped,
    sliced,
)

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
    """The value of a function's result."""
    args, kwargs = translation.value(node.args), dict(translation.value(node.kwargs))
    name = name_of(node.target)
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
    if is_pointwise(apply):
        factor = linear_factor(apply)
        if factor is not None:
            return scale_by(args[place], factor)
        return activated(args[place], activation_of(Pointwise(apply)), translation, node)
    found = position_operation(args[place], apply, translation, node)
    if found is None:
        hint = "It couples the channels. " if name in ("softmax", "log_softmax") else ""
        raise translation.refuse(f"the function {name}", node, hint)
    return found


@function_rule("flatten", "view", "reshape", "unsqueeze", "squeeze", "unflatten")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    if isinstance(args[0], Parameter):
        return replace(args[0], shape=tuple(translation.found[node.name].shape))
    if not isinstance(args[0], Signal):
        return None
    try:
        return reshaped(args[0], translation.shape(node))
    except LayoutError as error:
        raise translation.refuse(f"the change of shape {error}", node) from error


@function_rule("permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "mT", "t")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    if not isinstance(args[0], Signal):
        return None
    sizes = tuple(range(2, 3 + len(args[0].layout.groups)))
    out = run(node.target, (torch.empty(sizes, device="meta"), *args[1:]), kwargs)
    order = tuple(sizes.index(size) - 1 for size in out.shape)
    if order[0] != -1:
        raise translation.refuse("moving the batch axis", node)
    return permuted(args[0], order[1:])


@function_rule("getattr")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    if args[1] in ("shape", "dtype", "device", "ndim"):
        return translation.found[node.name]
    if args[1] in ("mT", "T") and isinstance(args[0], Signal):
        count = len(args[0].layout.groups)
        return permuted(args[0], (*range(count - 2), count - 1, count - 2))
    return None


@function_rule("size", "dim", "numel", "len", "is_floating_point")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    return translation.found[node.name]


@function_rule("detach")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    if not isinstance(args[0], Signal):
        return None
    raise translation.refuse(
        "detach", node, "The tangent kernel is that of all weights; leave it out for the NNGP. "
    )


@function_rule("contiguous", "clone", "float", "double", "to", "type_as", "expand_as")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    return args[0]


@function_rule("expand", "repeat")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    if not isinstance(args[0], Parameter):
        return None
    return replace(args[0], shape=(1, *translation.shape(node)))


@function_rule("dropout")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    if not isinstance(args[0], Signal):
        return args[0] if isinstance(args[0], Logits) else None
    probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", True)
    return dropped(args[0], float(probability) if training else 0.0)


@function_rule(
    "layer_norm", "rms_norm", "group_norm", "linear", "conv1d", "conv2d", "conv3d", "embedding"
)
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    name = name_of(node.target)
    raise translation.refuse(
        f"the function {name}", node, "Use the module of that name, e.g. nn.Linear. "
    )


@function_rule("chunk", "split")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    signal = args[0]
    if not isinstance(signal, Signal):
        return None
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    axis = dim % (len(signal.layout.groups) + 1) - 1
    sizes = [one.shape[axis + 1] for one in translation.found[node.name]]
    if axis != signal.layout.channel_axis() or not signal.layout.is_plain():
        raise translation.refuse("splitting along positions", node, "Index them: x[:, a:b]. ")
    parts, start = [], 0
    for size in sizes:
        shape = list(signal.layout.shape)
        shape[axis] = size
        parts.append(Signal(sliced(signal, start, start + size), Layout.of(shape, axis)))
        start += size
    return tuple(parts)


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
    """A part of a concatenation as a signal with plain axes."""
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
