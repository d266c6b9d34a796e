"""From the graph of a module to the expression of its output.

Every node of the graph becomes a value: data that no weights have touched yet, a signal (blocks of
channels, each with an expression, and the layout of the axes), a parameter, attention logits, or plain
Python.
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
    """A tensor of the network behind some weights.

    Args:
        blocks: Blocks of channels that were concatenated: the number of channels and the expression of each.
        layout: Which axes are channels and which are positions.
    """

    blocks: tuple[Block, ...]
    layout: Layout

    @property
    def positions(self) -> tuple[int, ...]:
        """Return the shape of the positions."""
        return self.layout.positions

    def each(self, function: Callable[[Expression], Expression]) -> Signal:
        """Apply a function to the expression of every block."""
        return replace(self, blocks=tuple((width, function(e)) for width, e in self.blocks))

    def scaled(self, factor: float) -> Signal:
        """Return `factor` times the signal."""
        if factor == 1:
            return self
        return self.each(lambda e: ex.Sum(((factor, e),), e.positions))

    def only(self, where: str) -> Expression:
        """Return the expression of a signal with one block; refuse several blocks."""
        if len(self.blocks) != 1:
            raise UnsupportedLayer(
                f"no infinite-width rule for {where} after a concatenation of channels. "
                "Use monte_carlo_kernel(network)."
            )
        return self.blocks[0][1]


@dataclass(frozen=True, eq=False)
class Data:
    """A tensor that is computed from the inputs alone.

    Args:
        node: The name of the node that computes it.
        shape: Its shape without the batch.
        floating: Whether it holds floating-point numbers.
    """

    node: str
    shape: tuple[int, ...]
    floating: bool


@dataclass(frozen=True, eq=False)
class Parameter:
    """A parameter of the module that is used directly, not through a layer.

    Args:
        name: The name under which the prior knows it.
        shape: The shape with which it is used.
        own: The shape before it was expanded.
        layer: The name of the layer whose weight or bias it is; None if it belongs to no layer.
        path: The full name of the attribute.
    """

    name: str
    shape: tuple[int, ...]
    own: tuple[int, ...]
    layer: str | None = None
    path: str = ""


@dataclass(frozen=True, eq=False)
class Logits:
    """The products q kᵀ of attention, per head, and what was done to them since.

    Args:
        query: The expression of the queries.
        key: The expression of the keys.
        size: The size d of a head.
        factors: Numbers by which the products were multiplied.
        layout: The factors of all axes but the last, which runs over keys.
        layouts: The layouts of queries and keys.
        steps: Functions that were applied to the scaled products, such as a mask or a softmax.
        masks: The names of data that the steps need.
    """

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
    """The state of a translation.

    Args:
        graph: The network's graph.
        found: What each node gives in a run that finds shapes, by the name of the node.
        values: What each node has become so far.
        extract: The data that the moments need: the node it comes from, and how to extract it.
        owners: The name of the first layer with each weight, by the id of the tensor.
        kinds: The kind of layer that uses each weight.
        biases: The name of the weights whose prior has the variance of each bias.
    """

    graph: fx.GraphModule
    found: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    extract: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    biases: dict[str, str] = field(default_factory=dict)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Return the shape of a node's tensor without the batch."""
        return tuple(self.found[node.name].shape[1:])

    def value(self, argument: Any) -> Any:
        """Return an argument of a node, with the nodes in it replaced by their values."""
        return fx.node.map_arg(argument, lambda node: self.values[node.name])

    def owner(self, weights: Tensor | nn.Module, name: str) -> str:
        """Return the name of the first layer with these weights, so that shared weights have one name."""
        return self.owners.setdefault(id(weights), name)

    def refuse(self, what: str, node: fx.Node, hint: str = "") -> UnsupportedLayer:
        """Return the error for an operation without a rule."""
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
        """Return data as a signal; `channel` is its axis of channels, counted without the batch."""
        if not data.shape or not data.floating:
            what = "whole numbers" if data.shape else "one number per point"
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
        e = ex.Raw(name, 0, width, layout.positions)
        return Signal(((width, e),), layout)

    def constant(self, tensor: Tensor, like: Signal, node: fx.Node) -> Signal:
        """Return a fixed tensor as a signal that broadcasts to `like`."""
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
        # any data will do as a source: the extraction reads only its device and number of points
        source = next(name for name, value in self.values.items() if isinstance(value, Data))
        self.extract[key] = (source, extract)
        return Signal(((width, ex.Raw(key, 0, width, like.positions)),), like.layout)


def mapped(signal: Signal, map: PositionMap, layout: Layout) -> Signal:
    """Map the positions of every block."""
    if map.keeps and map.before == map.after:
        return replace(signal, layout=layout)
    return replace(signal.each(lambda e: ex.Mapped(map, e, map.after)), layout=layout)


def reshaped(signal: Signal, shape: tuple[int, ...]) -> Signal:
    """Give the axes of a signal other sizes."""
    layout = signal.layout.regrouped(shape)
    return mapped(signal, reshaping(signal.positions, layout.positions), layout)


def permuted(signal: Signal, order: tuple[int, ...]) -> Signal:
    """Put the axes (without the batch) in another order."""
    layout = signal.layout.permuted(order)
    numbers = signal.layout.position_order(order)
    if numbers == tuple(range(len(numbers))):
        return replace(signal, layout=layout)
    return mapped(signal, reordering(signal.positions, numbers), layout)


def plain(signal: Signal, translation: Translation, node: fx.Node) -> Signal:
    """Return the signal with channels alone on one axis, and one position factor on every other axis."""
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
    """Apply an activation to every channel."""

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
    """Return the activation u ↦ outer(inner(u))."""
    return activation_of(Pointwise(lambda u: outer(inner(u))))


def parameter_signal(
    parameter: Parameter, like: Signal, translation: Translation, node: fx.Node
) -> Signal:
    """Return a parameter as a signal that broadcasts to `like`."""
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
    """Return the channels from `first` to before `last`, as parts of the blocks that hold them."""
    blocks, start = [], 0
    for width, e in signal.blocks:
        low, high = max(first - start, 0), min(last - start, width)
        if low < high:
            whole = low == 0 and high == width
            blocks.append((high - low, e if whole else rows(e, low, high)))
        start += width
    return tuple(blocks)


def module_of(translation: Translation, node: fx.Node) -> nn.Module:
    """Return the module that a node calls."""
    return translation.graph.get_submodule(str(node.target))
