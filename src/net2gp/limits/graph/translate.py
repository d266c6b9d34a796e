"""From the graph of a module to the expression of its output.

Every node of the graph becomes a value: data that was not touched by weights yet, a signal (blocks of
channels, each an expression, with the layout of its axes), a parameter, attention logits, or plain Python.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from net2gp.errors import InputError
from net2gp.limits.duals.activations import Activation, UnsupportedLayer, activation_of
from net2gp.limits.modules.pointwise import Pointwise
from net2gp.limits.signals import expressions as ex
from net2gp.limits.signals.channel_parts import rows
from net2gp.limits.signals.expressions import Expression
from net2gp.limits.signals.layout import POSITION, Factor, Layout
from net2gp.limits.signals.positions import PositionMap, reordering, reshaping

Block = tuple[int, Expression]


@dataclass(frozen=True, eq=False)
class Signal:
    """A tensor of the network behind some weights: blocks of channels (number, expression) and its axes."""

    blocks: tuple[Block, ...]
    layout: Layout

    @property
    def positions(self) -> tuple[int, ...]:
        """The shape of its positions."""
        return self.layout.positions

    def each(self, function: Callable[[Expression], Expression]) -> Signal:
        """The same function of every block; axes as they are."""
        return replace(self, blocks=tuple((width, function(e)) for width, e in self.blocks))

    def scaled(self, factor: float) -> Signal:
        """`factor` times the signal."""
        if factor == 1:
            return self
        return self.each(lambda e: ex.Sum(((factor, e),), e.positions))

    def only(self, where: str) -> Expression:
        """The expression of a signal with one block."""
        if len(self.blocks) != 1:
            raise UnsupportedLayer(
                f"no infinite-width rule for {where} after a concatenation of channels. "
                "Use monte_carlo_kernel(network)."
            )
        return self.blocks[0][1]


@dataclass(frozen=True, eq=False)
class Data:
    """A tensor computed from the inputs alone, by the node of this name; shape without the batch."""

    node: str
    shape: tuple[int, ...]
    floating: bool


@dataclass(frozen=True, eq=False)
class Parameter:
    """A parameter of the module used directly: its shape, and the one it had before it was expanded.

    `layer` is the name of the layer whose weight or bias it is, None for a parameter of its own.
    """

    name: str
    shape: tuple[int, ...]
    own: tuple[int, ...]
    layer: str | None = None
    path: str = ""


@dataclass(frozen=True, eq=False)
class Logits:
    """q kᵀ for each head of size `size`, its factors, and what happened to it since."""

    query: Expression
    key: Expression
    size: int
    factors: tuple[float, ...]
    layout: tuple[tuple[Factor, ...], ...]
    layouts: tuple[Layout, Layout]
    steps: tuple[Callable[[Tensor, tuple[Tensor, ...]], Tensor], ...] = ()
    masks: tuple[str, ...] = ()


@dataclass(eq=False)
class Translation:
    """The state of a translation: the module, shapes and values of its nodes, the data that is needed."""

    graph: fx.GraphModule
    found: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    extract: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    biases: dict[str, str] = field(default_factory=dict)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape of a node's tensor without the batch."""
        return tuple(self.found[node.name].shape[1:])

    def value(self, argument: Any) -> Any:
        """An argument of a node with the nodes in it replaced by their values."""
        return fx.node.map_arg(argument, lambda node: self.values[node.name])

    def owner(self, weights: Tensor | nn.Module, name: str) -> str:
        """The name of the first layer with these weights: shared ones have one name."""
        return self.owners.setdefault(id(weights), name)

    def refuse(self, what: str, node: fx.Node, hint: str = "") -> UnsupportedLayer:
        """The error for an operation without a rule."""
        name = node.target if node.op == "call_module" else node.name
        return UnsupportedLayer(
            f"no infinite-width rule for {what} ('{name}'). {hint}Known layers and functions: "
            "net2gp.limits.activation_table() and the guide; write a function of one signal as "
            "net2gp.limits.modules.Pointwise(function), add a rule with @net2gp.limits.rule.register, or "
            "use monte_carlo_kernel(network)."
        )

    def reference(self, data: Data, key: str, extract: Callable[[Tensor], Tensor]) -> str:
        """Ask for a tensor of the data in the form (positions, points, channels)."""
        name = f"{data.node} {key}"
        self.extract[name] = (data.node, extract)
        return name

    def raw(self, data: Data, channel: int) -> Signal:
        """Data as a signal, `channel` its axis of channels (after the batch)."""
        if not data.shape or not data.floating:
            what = "whole numbers" if data.shape else "one number a point"
            raise InputError(
                f"the network's weights need floating inputs of shape (N, ..., features), but get {what}. "
                "Convert them: x = x.float(), x = x[:, None] for one feature, or x[None] for one point."
            )
        channel %= len(data.shape)
        layout = Layout.of(data.shape, channel)
        width = data.shape[channel]

        def extract(t: Tensor) -> Tensor:
            t = t.movedim(channel + 1, -1)
            return t.reshape(t.shape[0], -1, width).movedim(1, 0).contiguous()

        name = self.reference(data, f"channels {channel}", extract)
        e = ex.Raw(name, channel, 0, width, layout.positions)
        return Signal(((width, e),), layout)

    def constant(self, tensor: Tensor, like: Signal, node: fx.Node) -> Signal:
        """A fixed tensor as a signal that broadcasts to `like`: a position's vector of channels."""
        if tensor.dim() > len(like.layout.shape) and tensor.shape[0] != 1:
            raise self.refuse("a fixed tensor that differs between the points of a batch", node)
        wide = tensor.detach().broadcast_to((1, *like.layout.shape))
        key = f"constant {node.name}"

        def extract(t: Tensor) -> Tensor:
            kept = wide.to(t.device).movedim(channel + 1, -1).reshape(1, -1, width).movedim(1, 0)
            return kept.expand(-1, t.shape[0], -1)

        channel, width = like.layout.channel_axis(), like.layout.width
        if not like.layout.is_plain():
            raise self.refuse("adding a fixed tensor to flattened features", node)
        source = next(name for name, value in self.values.items() if isinstance(value, Data))
        self.extract[key] = (source, extract)
        return Signal(((width, ex.Raw(key, channel, 0, width, like.positions)),), like.layout)


def mapped(signal: Signal, map: PositionMap, layout: Layout) -> Signal:
    """A map of the positions of every block."""
    if map.keeps and map.before == map.after:
        return replace(signal, layout=layout)
    return replace(signal.each(lambda e: ex.Mapped(map, e, map.after)), layout=layout)


def reshaped(signal: Signal, shape: tuple[int, ...]) -> Signal:
    """Axes of other sizes."""
    layout = signal.layout.regrouped(shape)
    return mapped(signal, reshaping(signal.positions, layout.positions), layout)


def permuted(signal: Signal, order: tuple[int, ...]) -> Signal:
    """Axes (after the batch) in another order."""
    layout = signal.layout.permuted(order)
    numbers = signal.layout.position_order(order)
    if numbers == tuple(range(len(numbers))):
        return replace(signal, layout=layout)
    return mapped(signal, reordering(signal.positions, numbers), layout)


def plain(signal: Signal, translation: Translation, node: fx.Node) -> Signal:
    """The signal with channels alone on their axis and one axis of positions for every other axis."""
    axis = signal.layout.channel_axis()
    if any(factor.kind == POSITION for factor in signal.layout.groups[axis]):
        raise translation.refuse(
            "an operation on positions that were flattened into channels", node
        )
    others = [group for number, group in enumerate(signal.layout.groups) if number != axis]
    if any(factor.kind != POSITION for group in others for factor in group):
        raise translation.refuse("an operation across channels that were split", node)
    layout = signal.layout.merged()
    return mapped(signal, reshaping(signal.positions, layout.positions), layout)


def activated(
    signal: Signal, activation: Activation, translation: Translation, node: fx.Node
) -> Signal:
    """A function of every channel."""

    def apply(e: Expression) -> Expression:
        if ex.is_gaussian(e):
            return ex.Point(activation, e, e.positions)
        inner = ex.as_function(e)
        if inner is None:
            raise translation.refuse(
                "an activation of a signal that is not Gaussian",
                node,
                "It is a function of several signals, or was normalized, pooled, dropped out or multiplied "
                "after another activation: put a Linear or convolution in between. ",
            )
        function, base = inner
        return ex.Point(composed(activation, function), base, e.positions)

    return signal.each(apply)


def composed(outer: Callable[[Tensor], Tensor], inner: Callable[[Tensor], Tensor]) -> Activation:
    """The activation u ↦ outer(inner(u))."""
    return activation_of(Pointwise(lambda u: outer(inner(u))))


def parameter_signal(
    parameter: Parameter, like: Signal, translation: Translation, node: fx.Node
) -> Signal:
    """A parameter as a signal that broadcasts to `like`."""
    if parameter.layer is not None:
        raise translation.refuse(
            f"'{parameter.path}', which belongs to a layer, outside of that layer", node
        )
    like = plain(like, translation, node)
    axis, shape = like.layout.channel_axis(), like.layout.shape
    missing = (1,) * (len(shape) + 1 - len(parameter.shape))
    own, seen = missing + parameter.own, missing + parameter.shape
    if len(own) != len(shape) + 1 or own[0] != 1:
        raise translation.refuse(f"the parameter '{parameter.name}' along the batch", node)
    if own[axis + 1] != shape[axis] or seen[axis + 1] != shape[axis] or shape[axis] == 1:
        raise translation.refuse(f"the parameter '{parameter.name}' shared by all channels", node)
    inner = tuple(size for number, size in enumerate(own[1:]) if number != axis)
    e: Expression = ex.Parameter(parameter.name, inner, shape=own, channel=axis + 1)
    wide = like.positions
    if inner != wide:
        places = torch.arange(prod(inner)).reshape(inner).broadcast_to(wide).reshape(-1)
        e = ex.Mapped(PositionMap(inner, wide, index=places), e, wide)
    return Signal(((like.layout.width, e),), like.layout)


def sliced(signal: Signal, first: int, last: int) -> tuple[Block, ...]:
    """Channels `first` to `last`, with the blocks that they lie in."""
    blocks, start = [], 0
    for width, e in signal.blocks:
        low, high = max(first - start, 0), min(last - start, width)
        if low < high:
            whole = low == 0 and high == width
            blocks.append((high - low, e if whole else rows(e, low, high)))
        start += width
    return tuple(blocks)


def module_of(translation: Translation, node: fx.Node) -> nn.Module:
    """The module that a node calls."""
    return translation.graph.get_submodule(str(node.target))
