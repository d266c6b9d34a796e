"""Sums, differences, products and quotients of signals, numbers, parameters and data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from net2gp.limits.duals.activations import activation_of
from net2gp.limits.graph.function_registry import function_rule, name_of
from net2gp.limits.graph.translate import (
    Data,
    Logits,
    Parameter,
    Signal,
    Translation,
    activated,
    mapped,
    parameter_signal,
    plain,
    sliced,
)
from net2gp.limits.modules.pointwise import Pointwise
from net2gp.limits.rules.attention import filled_logits, masked_logits, scaled_logits
from net2gp.limits.signals import expressions as ex
from net2gp.limits.signals.layout import Layout
from net2gp.limits.signals.positions import PositionMap


def total(
    terms: list[tuple[float, Signal]], layout: Layout, translation: Translation, node: fx.Node
) -> Signal:
    """Return Σ c · signal for signals of the same axes, block by block."""
    # concatenations may be cut at different channels: blocks end wherever one of them does
    cuts = sorted({cut for _, signal in terms for cut in _cuts(signal)})
    blocks, start = [], 0
    for cut in cuts:
        parts = []
        for c, signal in terms:
            inside = sliced(signal, start, cut)
            if len(inside) != 1:
                raise translation.refuse("a sum of concatenations that do not line up", node)
            parts.append((c, inside[0][1]))
        blocks.append((cut - start, ex.Sum(_flat(parts), layout.positions)))
        start = cut
    return Signal(tuple(blocks), layout)


def _flat(parts: list[tuple[float, ex.Expression]]) -> tuple[tuple[float, ex.Expression], ...]:
    """Add up the coefficients of equal terms."""
    found: dict[int, tuple[float, ex.Expression]] = {}
    for c, e in parts:
        before = found[e.order][0] if e.order in found else 0.0
        found[e.order] = (before + c, e)
    return tuple(found.values())


def _cuts(signal: Signal) -> list[int]:
    cuts, start = [], 0
    for width, _ in signal.blocks:
        start += width
        cuts.append(start)
    return cuts


def _numbers(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    return None


@dataclass(frozen=True)
class Shift:
    """The function x ↦ x + number, by which the mean of a signal is known not to be zero."""

    number: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return x + number."""
        return x + self.number


def _sum(translation: Translation, node: fx.Node, a: Any, b: Any, sign: float) -> Any:
    """Return a + sign · b."""
    for one, other, first in ((a, b, True), (b, a, False)):
        number = _numbers(other)
        if isinstance(one, Signal) and number is not None:
            scale, shift = (1.0, sign * number) if first else (sign, number)
            scaled = one.scaled(scale)
            if shift == 0:
                return scaled
            shifted = activation_of(Pointwise(Shift(shift)))
            return activated(scaled, shifted, translation, node)
        if isinstance(one, Logits):
            return masked_logits(translation, node, one, other, sign, first)
    like = a if isinstance(a, Signal) else b
    if not isinstance(like, Signal):
        return None
    one, other = (_as_signal(value, like, translation, node) for value in (a, b))
    if one.layout != other.layout:
        one, other = _broadcast(one, other, translation, node)
    return total([(1.0, one), (sign, other)], one.layout, translation, node)


def _as_signal(value: Any, like: Signal, translation: Translation, node: fx.Node) -> Signal:
    if isinstance(value, Signal):
        return value
    if isinstance(value, Data):
        return translation.raw(value, like.layout.channel_axis())
    if isinstance(value, Parameter):
        return parameter_signal(value, like, translation, node)
    if isinstance(value, Tensor):
        return translation.constant(value, plain(like, translation, node), node)
    raise translation.refuse(f"arithmetic with {type(value).__name__}", node)


def _broadcast(
    a: Signal, b: Signal, translation: Translation, node: fx.Node
) -> tuple[Signal, Signal]:
    """Return two signals under the same plain axes, with axes of size one expanded."""
    a, b = plain(a, translation, node), plain(b, translation, node)
    axis = a.layout.channel_axis()
    if axis != b.layout.channel_axis() or len(a.layout.groups) != len(b.layout.groups):
        raise translation.refuse("arithmetic of signals with different axes", node)
    if a.layout.width != b.layout.width:
        raise translation.refuse("arithmetic of signals with different numbers of channels", node)
    wide = torch.broadcast_shapes(a.positions, b.positions)
    shape = [*wide]
    shape.insert(axis, a.layout.width)
    layout = Layout.of(shape, axis)
    return tuple(expanded(one, wide, layout) for one in (a, b))  # type: ignore[return-value]


def expanded(signal: Signal, wide: tuple[int, ...], layout: Layout) -> Signal:
    """Repeat the axes of a signal that have one position."""
    if signal.positions == tuple(wide):
        return replace(signal, layout=layout)
    places = torch.arange(prod(signal.positions)).reshape(signal.positions).broadcast_to(wide)
    return mapped(
        signal, PositionMap(signal.positions, tuple(wide), index=places.reshape(-1)), layout
    )


@function_rule("add", "iadd")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    return _sum(translation, node, args[0], args[1], float(kwargs.get("alpha", 1.0)))


@function_rule("sub", "isub")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    return _sum(translation, node, args[0], args[1], -float(kwargs.get("alpha", 1.0)))


@function_rule("rsub")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    return _sum(translation, node, args[1], args[0], -1.0)


@function_rule("neg", "negative")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    return args[0].scaled(-1.0) if isinstance(args[0], Signal) else None


@function_rule("mul", "imul", "multiply", "truediv", "div", "itruediv")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    a, b = args[0], args[1]
    divides = name_of(node.target) in ("truediv", "div", "itruediv")
    number = _numbers(b)
    if number is not None:
        factor = 1 / number if divides else number
        if isinstance(a, Signal):
            return a.scaled(factor)
        if isinstance(a, Logits):
            return scaled_logits(a, factor)
        return None
    if divides:
        return _gained(translation, node, a, b, True) if isinstance(b, Data) else None
    number = _numbers(a)
    if number is not None and isinstance(b, Signal | Logits):
        return b.scaled(number) if isinstance(b, Signal) else scaled_logits(b, number)
    if isinstance(a, Signal) and isinstance(b, Signal):
        return product_of(translation, node, a, b)
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Signal) and isinstance(other, Data):
            return _gained(translation, node, one, other, False)
        if isinstance(other, Parameter):
            raise translation.refuse(
                f"a product with the parameter '{other.path or other.name}'",
                node,
                "A scale that is held fixed may be a buffer or a number. ",
            )
    return None


def product_of(translation: Translation, node: fx.Node, a: Signal, b: Signal) -> Signal:
    """Return the product of two signals, channel by channel."""
    if a.layout != b.layout:
        a, b = _broadcast(a, b, translation, node)
    one, other = a.only("a product"), b.only("a product")
    pair = ex.Product(one, other, one.positions)
    inner = ex.as_function(pair)
    if inner is not None:
        # both factors are functions of one Gaussian signal, so their product is an activation of it
        function, base = inner
        return a.each(lambda _: ex.Point(activation_of(Pointwise(function)), base, base.positions))
    if ex.independent(one, other) or (ex.is_gaussian(one) and ex.is_gaussian(other)):
        return a.each(lambda _: pair)
    raise translation.refuse(
        "a product of signals that share weights and are not Gaussian",
        node,
        "Give the factors weights of their own. ",
    )


def _gained(translation: Translation, node: fx.Node, signal: Any, data: Data, inverse: bool) -> Any:
    """Multiply a signal by a factor that is computed from the data and is the same for all channels."""
    if not isinstance(signal, Signal):
        return None
    signal = plain(signal, translation, node)
    axis, rank = signal.layout.channel_axis(), len(signal.layout.groups)
    own = (1,) * (rank - len(data.shape)) + data.shape
    if len(own) != rank or own[axis] != 1:
        raise translation.refuse("a factor from the data that differs between channels", node)
    wide = signal.positions

    def extract(t: Tensor) -> Tensor:
        t = t if t.is_floating_point() else t.double()
        t = t.reshape(t.shape[0], *own).select(axis + 1, 0)
        t = t.broadcast_to(t.shape[0], *wide).reshape(t.shape[0], -1).T[..., None]
        return 1 / t if inverse else t.contiguous()

    key = f"factor {axis} {wide} {inverse}"
    reference = translation.reference(data, key, extract)
    return signal.each(lambda e: ex.Gained(reference, e, e.positions))


@function_rule("masked_fill")
def _(translation: Translation, node: fx.Node, args: tuple, kwargs: dict) -> Any:
    given = {**dict(zip(("input", "mask", "value"), args, strict=False)), **kwargs}
    target, mask, value = given["input"], given["mask"], given["value"]
    if isinstance(target, Logits):
        return filled_logits(translation, node, target, mask, float(value))
    if isinstance(target, Signal) and isinstance(mask, Data) and float(value) == 0:
        return _kept(translation, node, target, mask)
    return None


def _kept(translation: Translation, node: fx.Node, signal: Signal, mask: Data) -> Signal:
    """Set a signal to zero where the mask is true."""
    found = _gained(translation, node, signal, mask, False)
    name = found.blocks[0][1].reference
    source, extract = translation.extract[name]
    key = f"{name} kept"
    translation.extract[key] = (source, lambda t: (~extract(t).bool()).to(torch.float64))
    return found.each(lambda e: ex.Gained(key, e.input, e.positions))
