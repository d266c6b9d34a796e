"""One rule per kind of layer: from the signal that it gets to the signal that it makes."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch
from torch import fx, nn

from net2gp.limits.duals.activations import activation_of
from net2gp.limits.graph.probing import position_operation
from net2gp.limits.graph.translate import (
    Logits,
    Signal,
    Translation,
    activated,
    plain,
    reshaped,
)
from net2gp.limits.signals import expressions as ex

HINTS = {
    "MaxPool": "The maximum of Gaussians is not a function of their second moments; average pooling is. ",
    "BatchNorm": "It couples the inputs of a batch; LayerNorm and GroupNorm have limits. ",
    "InstanceNorm": "Its statistics are over finitely many positions and stay random. ",
    "Softmax": "It couples the channels. Leave it out and take the limit of the logits. ",
    "LogSoftmax": "It couples the channels. Leave it out and take the limit of the logits. ",
    "MultiheadAttention": "Softmax of logits scaled by 1/√d has no known closed form; "
    "F.scaled_dot_product_attention(q, k, v, scale=1/d) has one. ",
    "Transformer": "Softmax of logits scaled by 1/√d has no known closed form; "
    "F.scaled_dot_product_attention(q, k, v, scale=1/d) has one. ",
    "LSTM": "Products of gates that share weights; nn.RNN has a rule. ",
    "GRU": "Products of gates that share weights; nn.RNN has a rule. ",
    "Bilinear": "Its sums are over pairs of channels of two signals, which are not independent; write the "
    "product of two Linear layers. ",
}


def hint_of(layer: nn.Module) -> str:
    """Return why a layer has no rule, or "" if that is not known."""
    kinds = [base.__name__ for base in type(layer).__mro__]
    fixed = isinstance(layer, nn.modules.batchnorm._BatchNorm) and not layer.training
    if fixed and layer.running_mean is not None:
        return (
            "In eval mode it has fixed statistics of one training, which random weights of another width do "
            "not have; LayerNorm and GroupNorm have limits. "
        )
    return next(
        (text for start, text in HINTS.items() if any(k.startswith(start) for k in kinds)), ""
    )


@singledispatch
def rule(layer: nn.Module, translation: Translation, node: fx.Node, *values: Any) -> Any:
    """Translate a layer: return the value of its output. Add layers with `@rule.register`.

    Two kinds of layers need no rule: pointwise functions (see `activation_of`), and parameter-free layers
    that probing shows to be linear in the positions and identical for every channel.

    Args:
        layer: The layer; its class selects the rule.
        translation: The state of the translation: the graph, shapes, and how to refuse a layer.
        node: The node of the graph that calls the layer.
        values: The values of the arguments, mostly one `Signal`.

    Returns:
        The value of the output, mostly a `Signal`.

    Raises:
        NetworkError: An `UnsupportedLayer`, if the layer has no rule and needs one.
    """
    kind = type(layer).__name__
    if is_activation(layer):
        return activated(values[0], activation_of(layer), translation, node)
    hint = hint_of(layer)
    has_state = any(True for _ in layer.parameters()) or any(True for _ in layer.buffers())
    if not has_state and not hint and len(values) == 1 and isinstance(values[0], Signal):
        found = position_operation(values[0], layer, translation, node)
        if found is not None:
            return found
    raise translation.refuse(kind, node, hint)


def is_activation(layer: nn.Module) -> bool:
    """Whether the layer is a function of one number."""
    return activation_of.dispatch(type(layer)) is not activation_of.dispatch(object)


def normalized_over(
    signal: Signal,
    axes: range,
    center: bool,
    eps: float,
    translation: Translation,
    node: fx.Node,
    groups: int = 1,
) -> Signal:
    """Divide by the root mean square over these axes, which must include the channels."""
    if signal.layout.channel_axis() not in axes:
        raise translation.refuse("a normalization over positions alone", node)
    over = tuple(n for axis in axes for n in signal.layout.position_numbers(axis))
    e = signal.only("a normalization")
    return signal.each(lambda _: ex.Normalized(e, over, center, eps, e.positions, groups))


@rule.register
def _(layer: nn.LayerNorm, translation: Translation, node: fx.Node, value: Signal) -> Signal:
    axes = last_axes(value, len(layer.normalized_shape), translation, node)
    return normalized_over(value, axes, True, layer.eps, translation, node)


@rule.register
def _(layer: nn.RMSNorm, translation: Translation, node: fx.Node, value: Signal) -> Signal:
    axes = last_axes(value, len(layer.normalized_shape), translation, node)
    eps = smallest(translation, node) if layer.eps is None else layer.eps
    return normalized_over(value, axes, False, eps, translation, node)


def last_axes(value: Any, count: int, translation: Translation, node: fx.Node) -> range:
    """Return the last `count` axes of a signal."""
    if not isinstance(value, Signal):
        raise translation.refuse(f"a normalization of {type(value).__name__}", node)
    rank = len(value.layout.groups)
    return range(rank - count, rank)


def smallest(translation: Translation, node: fx.Node) -> float:
    """Return what torch adds to a mean square by default: the eps of the signal's dtype."""
    return float(torch.finfo(translation.found[node.name].dtype).eps)


@rule.register
def _(layer: nn.GroupNorm, translation: Translation, node: fx.Node, value: Signal) -> Signal:
    return grouped(value, layer.num_groups, layer.eps, translation, node)


def grouped(value: Any, groups: int, eps: float, translation: Translation, node: fx.Node) -> Signal:
    """Normalize groups of channels."""
    if not isinstance(value, Signal):
        raise translation.refuse(f"a normalization of {type(value).__name__}", node)
    signal = plain(value, translation, node)
    if signal.layout.channel_axis() != 0:
        raise translation.refuse("GroupNorm whose channels are not the first axis", node)
    if groups == signal.layout.width:
        raise translation.refuse(
            "GroupNorm with one channel per group", node, HINTS["InstanceNorm"]
        )
    axes = range(len(signal.layout.groups))
    return normalized_over(signal, axes, True, eps, translation, node, groups)


@rule.register
def _(layer: nn.Dropout, translation: Translation, node: fx.Node, value: Any) -> Any:
    return dropped(value, layer.p if layer.training else 0.0, translation, node)


def dropped(signal: Any, probability: float, translation: Translation, node: fx.Node) -> Any:
    """Apply dropout with this probability."""
    if probability == 0:
        return signal
    if isinstance(signal, Logits):
        raise translation.refuse(
            "dropout of attention weights in training",
            node,
            "Its masks are shared by the channels, so that values are not Gaussian. Call network.eval(). ",
        )
    if not isinstance(signal, Signal) or probability >= 1:
        raise translation.refuse(f"dropout of {type(signal).__name__}", node)
    return signal.each(lambda e: ex.Dropped(e, 1 - probability, e.positions))


def _drops_channels(layer: Any, translation: Translation, node: fx.Node, value: Signal) -> Signal:
    if layer.training and layer.p > 0:
        raise translation.refuse(
            f"{type(layer).__name__} in training", node, "Call network.eval(). "
        )
    return value


for _dropping in (
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
):
    rule.register(_dropping, _drops_channels)


@rule.register
def _(layer: nn.Identity, translation: Translation, node: fx.Node, value: Any) -> Any:
    return value


def _reshapes(layer: Any, translation: Translation, node: fx.Node, value: Signal) -> Signal:
    return reshaped(value, translation.shape(node))


for _reshaping in (nn.Flatten, nn.Unflatten):
    rule.register(_reshaping, _reshapes)
