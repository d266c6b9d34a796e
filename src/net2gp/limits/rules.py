"""One rule for each kind of layer: the signal that it makes of the signal it gets."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch
from torch import Tensor, fx, nn

from net2gp.errors import InputError
from net2gp.limits import expressions as ex
from net2gp.limits import layers
from net2gp.limits.activations import activation_of
from net2gp.limits.expressions import Expression
from net2gp.limits.layout import CHANNEL, POSITION, Layout
from net2gp.limits.positions import PositionMap, Window
from net2gp.limits.translate import (
    Data,
    Signal,
    Translation,
    activated,
    plain,
    position_operation,
    reshaped,
    sliced,
)

HINTS = {
    "MaxPool": "The maximum of Gaussians is not a function of their second moments; average pooling is. ",
    "BatchNorm": "It couples the inputs of a batch; LayerNorm and GroupNorm have limits. ",
    "InstanceNorm": "Its statistics are over finitely many positions and stay random. ",
    "Softmax": "It couples the channels. Leave it out: the limit is that of the logits. ",
    "LogSoftmax": "It couples the channels. Leave it out: the limit is that of the logits. ",
    "MultiheadAttention": "Softmax of logits scaled by 1/√d has no known closed form; "
    "F.scaled_dot_product_attention(q, k, v, scale=1/d) has one. ",
    "Transformer": "Softmax of logits scaled by 1/√d has no known closed form; "
    "F.scaled_dot_product_attention(q, k, v, scale=1/d) has one. ",
    "LSTM": "Products of gates that share weights; nn.RNN has a rule. ",
    "GRU": "Products of gates that share weights; nn.RNN has a rule. ",
}


@singledispatch
def rule(layer: nn.Module, translation: Translation, node: fx.Node, *values: Any) -> Any:
    """The value of a layer's output. Add layers with `@rule.register`.

    A rule takes the layer, the state of the translation, the node of the graph and the values of the
    arguments (mostly one `Signal`), and returns a `Signal`. No rule of their own need pointwise functions
    (`activation_of`), and parameter-free layers that turn out, by probing, to act on positions
    linearly and in the same way on every channel.
    """
    kind = type(layer).__name__
    if is_activation(layer):
        return activated(values[0], activation_of(layer), translation, node)
    hint = next((text for start, text in HINTS.items() if kind.startswith(start)), "")
    has_state = any(True for _ in layer.parameters()) or any(True for _ in layer.buffers())
    if not has_state and not hint and len(values) == 1 and isinstance(values[0], Signal):
        found = position_operation(values[0], layer, translation, node)
        if found is not None:
            return found
    raise translation.refuse(kind, node, hint)


def is_scale(parametrization: nn.Module) -> bool:
    """Whether weights are a multiple of others, as those of a twin are."""
    return hasattr(parametrization, "scale") and not any(True for _ in parametrization.parameters())


def is_activation(layer: nn.Module) -> bool:
    """Whether the layer is a function of one number."""
    return activation_of.dispatch(type(layer)) is not activation_of.dispatch(object)


def weight_name(layer: nn.Module, translation: Translation, node: fx.Node) -> str:
    """The name of the weights: that of the first layer that has them."""
    forms: Any = getattr(layer, "parametrizations", {})
    foreign = [one for form in forms.values() for one in form if not is_scale(one)]
    if foreign or "weight_g" in layer._parameters:
        raise translation.refuse(
            f"{type(layer).__name__} whose weights are a function of others", node
        )
    weight = layer._parameters.get("weight")
    name = translation.owner(layer if weight is None else weight, str(node.target))
    if translation.kinds.setdefault(name, type(layer)) is not type(layer):
        raise translation.refuse(
            f"{type(layer).__name__} with the weights of another kind of layer, '{name}',", node
        )
    return name


def fractions(blocks: tuple[tuple[int, Expression], ...]) -> tuple[tuple[float, Expression], ...]:
    """Blocks with their share of the channels instead of their number."""
    total = sum(width for width, _ in blocks)
    return tuple((width / total, e) for width, e in blocks)


@rule.register
def _(layer: nn.Linear, translation: Translation, node: fx.Node, value: Any) -> Signal:
    signal = translation.raw(value, -1) if isinstance(value, Data) else value
    last = len(signal.layout.groups) - 1
    if signal.layout.channel_axis() != last:
        raise translation.refuse("Linear over positions, which are finitely many,", node)
    outside = [kind for group in signal.layout.groups[:-1] for kind, _ in group]
    if any(kind != POSITION for kind in outside):
        raise translation.refuse("Linear shared by groups of channels", node)
    name = weight_name(layer, translation, node)
    averaged = signal.layout.position_numbers(last)
    kept = tuple(size for n, size in enumerate(signal.positions) if n not in averaged)
    e = ex.Weighted(
        name,
        fractions(signal.blocks),
        kept,
        layer.in_features,
        bias=name if layer.bias is not None else None,
        averaged=averaged,
    )
    groups = (*signal.layout.groups[:-1], ((CHANNEL, layer.out_features),))
    return Signal(((layer.out_features, e),), Layout(groups))


def _convolution(layer: Any, translation: Translation, node: fx.Node, value: Any) -> Signal:
    signal = translation.raw(value, 0) if isinstance(value, Data) else value
    signal = plain(signal, translation, node)
    if signal.layout.channel_axis() != 0 or len(signal.positions) != len(layer.kernel_size):
        raise translation.refuse(
            f"{type(layer).__name__} on an input of shape (N, {str(signal.layout.shape)[1:]}", node
        )
    window = window_of(layer)
    after = window.size(signal.positions)
    name = weight_name(layer, translation, node)
    bias = name if layer.bias is not None else None
    fan_in = layer.in_channels // layer.groups
    for size in layer.kernel_size:
        fan_in *= size
    wide, narrow = layer.out_channels // layer.groups, layer.in_channels // layer.groups
    given = [sliced(signal, g * narrow, (g + 1) * narrow) for g in range(layer.groups)]
    alike = layer.groups == 1 or (len(signal.blocks) == 1 and not isinstance(value, Data))
    blocks = []
    for g, inputs in enumerate([signal.blocks] if alike else given):
        e = ex.Weighted(
            name,
            fractions(inputs),
            after,
            fan_in,
            bias,
            window,
            rows=None if alike else (g * wide, (g + 1) * wide),
            finite=narrow == 1 and layer.groups > 1 and not isinstance(value, Data),
        )
        blocks.append((layer.out_channels if alike else wide, e))
    return Signal(tuple(blocks), Layout.of((layer.out_channels, *after), 0))


for _kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    rule.register(_kind, _convolution)


def window_of(layer: Any) -> Window:
    """The window of a convolution layer."""
    reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    if layer.padding == "same":
        padding = tuple((r // 2, r - r // 2) for r in reach)
    elif layer.padding == "valid":
        padding = tuple((0, 0) for _ in reach)
    else:
        padding = tuple((p, p) for p in layer.padding)
    stride, dilation = tuple(layer.stride), tuple(layer.dilation)
    return Window(tuple(layer.kernel_size), stride, dilation, padding, layer.padding_mode)


def _transposed(layer: Any, translation: Translation, node: fx.Node, value: Any) -> Signal:
    signal = translation.raw(value, 0) if isinstance(value, Data) else value
    signal = plain(signal, translation, node)
    if layer.groups != 1:
        raise translation.refuse(f"{type(layer).__name__} with groups", node)
    padding = tuple(
        (d * (k - 1) - p, d * (k - 1) - p + extra)
        for d, k, p, extra in zip(
            layer.dilation, layer.kernel_size, layer.padding, layer.output_padding, strict=True
        )
    )
    window = Window(
        tuple(layer.kernel_size),
        (1,) * len(padding),
        tuple(layer.dilation),
        padding,
        insert=tuple(s - 1 for s in layer.stride),
    )
    after = window.size(signal.positions)
    name = weight_name(layer, translation, node)
    fan_in = layer.in_channels
    for size in layer.kernel_size:
        fan_in *= size
    bias = name if layer.bias is not None else None
    e = ex.Weighted(name, fractions(signal.blocks), after, fan_in, bias, window)
    return Signal(((layer.out_channels, e),), Layout.of((layer.out_channels, *after), 0))


for _transposing in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    rule.register(_transposing, _transposed)


def _locally_connected(layer: Any, translation: Translation, node: fx.Node, value: Any) -> Signal:
    signal = translation.raw(value, 0) if isinstance(value, Data) else value
    signal = plain(signal, translation, node)
    window = Window(
        tuple(layer.kernel_size),
        tuple(layer.stride),
        (1,) * len(layer.kernel_size),
        tuple((p, p) for p in layer.padding),
        layer.padding_mode,
    )
    after = window.size(signal.positions)
    name = weight_name(layer, translation, node)
    fan_in = layer.in_channels
    for size in layer.kernel_size:
        fan_in *= size
    bias = name if layer.bias is not None else None
    e = ex.Weighted(name, fractions(signal.blocks), after, fan_in, bias, window, local=True)
    return Signal(((layer.out_channels, e),), Layout.of((layer.out_channels, *after), 0))


for _local in (layers.LocallyConnected1d, layers.LocallyConnected2d):
    rule.register(_local, _locally_connected)


@rule.register
def _(layer: nn.Embedding, translation: Translation, node: fx.Node, value: Any) -> Signal:
    if not isinstance(value, Data) or value.floating:
        raise translation.refuse("Embedding of anything but whole numbers from the inputs", node)
    unused = layer.padding_idx

    def extract(t: Tensor) -> Tensor:
        if int(t.min()) < 0 or int(t.max()) >= layer.num_embeddings:
            raise InputError(
                f"the tokens for '{node.target}' must lie in 0 … {layer.num_embeddings - 1}, but lie in "
                f"{int(t.min())} … {int(t.max())}."
            )
        tokens = t.reshape(t.shape[0], -1).T[..., None].double()
        # NaN differs from itself: the vector of the padding index is zero
        return tokens if unused is None else tokens.masked_fill(tokens == unused, float("nan"))

    reference = translation.reference(value, "tokens", extract)
    raw = ex.Raw(reference, -1, 0, 1, value.shape, tokens=True)
    name = weight_name(layer, translation, node)
    e = ex.Weighted(name, ((1.0, raw),), value.shape, 1)
    layout = Layout.of((*value.shape, layer.embedding_dim), len(value.shape))
    return Signal(((layer.embedding_dim, e),), layout)


def normalized_over(
    signal: Signal, axes: range, center: bool, eps: float, translation: Translation, node: fx.Node
) -> Signal:
    """Division by the root mean square over these axes, which must hold the channels."""
    if signal.layout.channel_axis() not in axes:
        raise translation.refuse("a normalization over positions alone", node)
    over = tuple(n for axis in axes for n in signal.layout.position_numbers(axis))
    e = signal.only("a normalization")
    return signal.each(lambda _: ex.Normalized(e, over, center, eps, e.positions))


@rule.register
def _(layer: nn.LayerNorm, translation: Translation, node: fx.Node, value: Signal) -> Signal:
    count = len(value.layout.groups)
    axes = range(count - len(layer.normalized_shape), count)
    return normalized_over(value, axes, True, layer.eps, translation, node)


@rule.register
def _(layer: nn.RMSNorm, translation: Translation, node: fx.Node, value: Signal) -> Signal:
    count = len(value.layout.groups)
    axes = range(count - len(layer.normalized_shape), count)
    eps = torch.finfo(torch.float32).eps if layer.eps is None else layer.eps
    return normalized_over(value, axes, False, eps, translation, node)


@rule.register
def _(layer: nn.GroupNorm, translation: Translation, node: fx.Node, value: Signal) -> Signal:
    if layer.num_groups == layer.num_channels:
        raise translation.refuse("GroupNorm with one channel a group", node, HINTS["InstanceNorm"])
    signal = plain(value, translation, node)
    axes = range(len(signal.layout.groups))
    return normalized_over(signal, axes, True, layer.eps, translation, node)


@rule.register
def _(layer: nn.Dropout, translation: Translation, node: fx.Node, value: Signal) -> Signal:
    return dropped(value, layer.p if layer.training else 0.0)


def dropped(signal: Signal, probability: float) -> Signal:
    """Dropout of this probability."""
    if probability == 0:
        return signal
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


def recurrent_step(
    layer: Any, suffix: str, target: str, given: Expression, hidden: Expression | None
) -> Expression:
    """φ(W_ih x + W_hh h), with the weights of every other step (Yang, 2019)."""
    parts = []
    biased = bool(layer.bias)
    zero = PositionMap((), (), index=torch.tensor([-1]))
    for kind, e, size in (("ih", given, layer.input_size), ("hh", hidden, layer.hidden_size)):
        name = f"{target}.weight_{kind}{suffix}"
        if e is None:
            if not biased:
                continue
            e = ex.Mapped(zero, given, ())
        parts.append((1.0, ex.Weighted(name, ((1.0, e),), (), size, name if biased else None)))
    activation = activation_of(nn.Tanh() if layer.nonlinearity == "tanh" else nn.ReLU())
    return ex.Point(activation, ex.Sum(tuple(parts), ()), ())


@rule.register
def _(layer: nn.RNN, translation: Translation, node: fx.Node, value: Any, *state: Any) -> Any:
    if layer.bidirectional or not layer.batch_first or state:
        raise translation.refuse(
            "RNN with these options", node, "batch_first=True, one direction, no initial state. "
        )
    signal = (
        translation.raw(value, -1) if isinstance(value, Data) else plain(value, translation, node)
    )
    if signal.layout.channel_axis() != 1 or len(signal.positions) != 1:
        raise translation.refuse("RNN on anything but (N, T, C)", node)
    length = signal.positions[0]
    given = signal.only("RNN")
    steps = [
        ex.Mapped(PositionMap((length,), (), index=torch.tensor([t])), given, ())
        for t in range(length)
    ]
    current: list[Expression] = list(steps)
    last: list[Expression] = []
    for number in range(layer.num_layers):
        hidden: Expression | None = None
        outputs = []
        for e in current:
            hidden = recurrent_step(layer, f"_l{number}", str(node.target), e, hidden)
            outputs.append(hidden)
        current = outputs
        last.append(outputs[-1])
    width = layer.hidden_size
    spread = []
    for t, e in enumerate(current):
        places = torch.full((length,), -1)
        places[t] = 0
        spread.append((1.0, ex.Mapped(PositionMap((), (length,), index=places), e, (length,))))
    layout = Layout.of((length, width), 1)
    sequence = Signal(((width, ex.Sum(tuple(spread), (length,))),), layout)
    final = [Signal(((width, e),), Layout.of((width,), 0)) for e in last]
    return (sequence, final)


@rule.register
def _(
    layer: nn.RNNCell, translation: Translation, node: fx.Node, value: Any, *state: Any
) -> Signal:
    signal = translation.raw(value, -1) if isinstance(value, Data) else value
    if signal.positions:
        raise translation.refuse("RNNCell on anything but (N, C)", node)
    before = state[0].only("RNNCell") if state and isinstance(state[0], Signal) else None
    e = recurrent_step(layer, "", str(node.target), signal.only("RNNCell"), before)
    return Signal(((layer.hidden_size, e),), Layout.of((layer.hidden_size,), 0))
