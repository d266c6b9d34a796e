"""Layers with weights: which weights and biases they have, and the signal that they make."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, fx, nn

from net2gp.errors import InputError
from net2gp.limits.graph.trace import parameter_of
from net2gp.limits.graph.translate import Data, Signal, Translation, plain, sliced
from net2gp.limits.modules import layers
from net2gp.limits.rules.layer_rules import rule
from net2gp.limits.signals import expressions as ex
from net2gp.limits.signals.expressions import Expression
from net2gp.limits.signals.layout import CHANNEL, POSITION, Factor, Layout
from net2gp.limits.signals.positions import Window

KINDS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
    layers.LocallyConnected1d,
    layers.LocallyConnected2d,
)


@dataclass(frozen=True)
class Names:
    """The names under which a layer's weights and biases are known.

    Args:
        weight: The name of the weights, and of their variance.
        bias: The name of the biases' variance; None without biases.
        shift: The name of the biases themselves, which layers may share; None without biases.
    """

    weight: str
    bias: str | None
    shift: str | None


def names_of(
    layer: nn.Module, translation: Translation, node: fx.Node, suffix: str = "", path: str = ""
) -> Names:
    """Return the names of a layer's weights and biases; shared ones are named after the first layer."""
    forms: Any = getattr(layer, "parametrizations", {})
    foreign = [one for form in forms.values() for one in form if not is_scale(one)]
    kind, target = kind_name(layer), str(node.target)
    weight = parameter_of(layer, f"weight{suffix}")
    if foreign or weight is None:
        raise translation.refuse(f"{kind} whose weights are a function of others", node)
    name = translation.owner(weight, path or target)
    known = translation.kinds.setdefault(name, kind)
    if known != kind:
        raise translation.refuse(
            f"{kind} with the weights of another kind of layer, '{name}',", node
        )
    bias = parameter_of(layer, f"bias{suffix}")
    return with_bias(translation, name, bias, f"{target}.bias{suffix}")


def kind_name(layer: nn.Module) -> str:
    """Return the name of the layer of torch, or of this library, that a layer is or extends."""
    homes = ("torch.nn.modules", "net2gp")
    bases = [base.__name__ for base in type(layer).__mro__ if base.__module__.startswith(homes)]
    return bases[0] if bases else type(layer).__name__


def with_bias(translation: Translation, name: str, bias: Tensor | None, path: str) -> Names:
    """Return the names of weights and biases; biases may be shared with a layer that came before."""
    if bias is None:
        return Names(name, None, None)
    shift = translation.owner(bias, path)
    return Names(name, translation.biases.setdefault(shift, name), shift)


def is_scale(parametrization: nn.Module) -> bool:
    """Whether weights are a fixed multiple of parameters, as in a twin."""
    return hasattr(parametrization, "scale") and not any(True for _ in parametrization.parameters())


def fractions(blocks: tuple[tuple[int, Expression], ...]) -> tuple[tuple[float, Expression], ...]:
    """Return the blocks with their share of the channels instead of their number."""
    total = sum(width for width, _ in blocks)
    return tuple((width / total, e) for width, e in blocks)


@rule.register
def _(layer: nn.Linear, translation: Translation, node: fx.Node, value: Any) -> Signal:
    return linear(layer.in_features, layer.out_features, translation, node, value, layer)


def linear(
    into: int, out: int, translation: Translation, node: fx.Node, value: Any, named: Any
) -> Signal:
    """Return W u + b over the last axis; `named` is the layer, or the names of its weights."""
    signal = translation.raw(value, -1) if isinstance(value, Data) else value
    last = len(signal.layout.groups) - 1
    if signal.layout.channel_axis() != last:
        raise translation.refuse("Linear over positions, which are finitely many,", node)
    outside = [factor for group in signal.layout.groups[:-1] for factor in group]
    if any(factor.kind != POSITION for factor in outside):
        raise translation.refuse("Linear shared by groups of channels", node)
    names = named if isinstance(named, Names) else names_of(named, translation, node)
    averaged = signal.layout.position_numbers(last)
    kept = tuple(size for n, size in enumerate(signal.positions) if n not in averaged)
    e = ex.Weighted(
        names.weight,
        fractions(signal.blocks),
        kept,
        into,
        bias=names.bias,
        averaged=averaged,
        axis=signal.layout.groups[-1],
        shift=names.shift,
    )
    groups = (*signal.layout.groups[:-1], (Factor(CHANNEL, out, 1),))
    return Signal(((out, e),), Layout(groups))


@dataclass(frozen=True)
class Geometry:
    """What a convolution does to channels and positions.

    Args:
        in_channels: The number of channels before it.
        out_channels: The number of channels after it.
        groups: The number of groups of channels that do not mix.
        window: The window over the positions.
    """

    in_channels: int
    out_channels: int
    groups: int
    window: Window

    @property
    def fan_in(self) -> int:
        """Return the number of terms that are summed into one output."""
        return self.in_channels // self.groups * prod(self.window.kernel)


def _convolution(layer: Any, translation: Translation, node: fx.Node, value: Any) -> Signal:
    geometry = Geometry(layer.in_channels, layer.out_channels, layer.groups, window_of(layer))
    return convolution(geometry, translation, node, value, layer)


def convolution(
    geometry: Geometry, translation: Translation, node: fx.Node, value: Any, named: Any
) -> Signal:
    """Return a convolution; `named` is the layer, or the names of its weights."""
    signal = translation.raw(value, 0) if isinstance(value, Data) else value
    signal = plain(signal, translation, node)
    window = geometry.window
    if signal.layout.channel_axis() != 0 or len(signal.positions) != len(window.kernel):
        raise translation.refuse(
            f"a convolution on an input of shape (N, {str(signal.layout.shape)[1:]}", node
        )
    names = named if isinstance(named, Names) else names_of(named, translation, node)
    after, out, groups = window.size(signal.positions), geometry.out_channels, geometry.groups
    wide, narrow = out // groups, geometry.in_channels // groups
    given = [sliced(signal, g * narrow, (g + 1) * narrow) for g in range(groups)]
    alike = groups == 1 or (len(signal.blocks) == 1 and not isinstance(value, Data))
    blocks = []
    for g, inputs in enumerate([signal.blocks] if alike else given):
        e = ex.Weighted(
            names.weight,
            fractions(inputs),
            after,
            geometry.fan_in,
            names.bias,
            window,
            rows=None if alike else (g * wide, (g + 1) * wide),
            finite=narrow == 1 and groups > 1 and not isinstance(value, Data),
            shift=names.shift,
        )
        blocks.append((out if alike else wide, e))
    return Signal(tuple(blocks), Layout.of((out, *after), 0))


for _kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    rule.register(_kind, _convolution)


def window_of(layer: Any) -> Window:
    """Return the window of a convolution layer."""
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
    geometry = Geometry(layer.in_channels, layer.out_channels, 1, window)
    return convolution(geometry, translation, node, value, layer)


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
    names = names_of(layer, translation, node)
    e = ex.Weighted(
        names.weight,
        fractions(signal.blocks),
        after,
        layer.in_channels * prod(layer.kernel_size),
        names.bias,
        window,
        local=True,
        shift=names.shift,
    )
    return Signal(((layer.out_channels, e),), Layout.of((layer.out_channels, *after), 0))


for _local in (layers.LocallyConnected1d, layers.LocallyConnected2d):
    rule.register(_local, _locally_connected)


@rule.register
def _(layer: nn.Embedding, translation: Translation, node: fx.Node, value: Any) -> Signal:
    if layer.max_norm is not None or layer.scale_grad_by_freq:
        raise _renormalized(translation, node)
    names = names_of(layer, translation, node)
    sizes = (layer.num_embeddings, layer.embedding_dim)
    return embedding(sizes, layer.padding_idx, translation, node, value, names.weight)


def _renormalized(translation: Translation, node: fx.Node) -> Exception:
    return translation.refuse(
        "an Embedding with max_norm or scale_grad_by_freq",
        node,
        "It changes its vectors, or their gradients, with what it is given. ",
    )


def embedding(
    sizes: tuple[int, int],
    unused: int | None,
    translation: Translation,
    node: fx.Node,
    value: Any,
    name: str,
) -> Signal:
    """Return a random vector per token, and zero for the token `unused`."""
    if not isinstance(value, Data) or value.floating:
        raise translation.refuse("Embedding of anything but whole numbers from the inputs", node)

    def extract(t: Tensor) -> Tensor:
        if int(t.min()) < 0 or int(t.max()) >= sizes[0]:
            raise InputError(
                f"the tokens for '{node.target}' must lie in 0 … {sizes[0] - 1}, but lie in "
                f"{int(t.min())} … {int(t.max())}."
            )
        tokens = t.reshape(t.shape[0], -1).T[..., None].double()
        # moments compare tokens for equality, and NaN equals nothing: the padding's vector acts as zero
        return tokens if unused is None else tokens.masked_fill(tokens == unused, float("nan"))

    # the padding index is part of the name, since layers that share tokens may have different ones
    reference = translation.reference(value, f"tokens {unused}", extract)
    raw = ex.Raw(reference, 0, 1, value.shape, tokens=True)
    e = ex.Weighted(name, ((1.0, raw),), value.shape, 1)
    layout = Layout.of((*value.shape, sizes[1]), len(value.shape))
    return Signal(((sizes[1], e),), layout)
