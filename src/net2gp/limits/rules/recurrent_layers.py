"""Recurrent layers, unrolled step by step with the same weights at every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from net2gp.limits.duals.activations import activation_of
from net2gp.limits.graph.translate import (
    Data,
    Parameter,
    Signal,
    Translation,
    parameter_signal,
    plain,
)
from net2gp.limits.rules.layer_rules import rule
from net2gp.limits.rules.weighted_layers import Names, names_of
from net2gp.limits.signals import expressions as ex
from net2gp.limits.signals.expressions import Expression
from net2gp.limits.signals.layout import Layout
from net2gp.limits.signals.positions import PositionMap

KINDS = (nn.RNN, nn.RNNCell)


def weight_names(layer: nn.Module) -> list[str]:
    """Return the names of all weights of a recurrent layer."""
    numbers = range(layer.num_layers) if isinstance(layer, nn.RNN) else None
    suffixes = [""] if numbers is None else [f"_l{number}" for number in numbers]
    return [f"weight_{kind}{suffix}" for suffix in suffixes for kind in ("ih", "hh")]


def _names(layer: Any, suffix: str, translation: Translation, node: fx.Node) -> dict[str, Names]:
    """Return the names of the weights on the inputs and on the state of one layer."""
    return {
        kind: names_of(
            layer, translation, node, f"_{kind}{suffix}", f"{node.target}.weight_{kind}{suffix}"
        )
        for kind in ("ih", "hh")
    }


def recurrent_step(
    layer: Any, names: dict[str, Names], given: Expression, hidden: Expression | None
) -> Expression:
    """Return φ(W_ih x + W_hh h), whose weights are the same at every step (Yang, 2019).

    A state of None is zero. It then contributes only its bias, as the layer of a signal that is zero.
    """
    parts = []
    zero = PositionMap((), (), index=torch.tensor([-1]))
    for kind, e, size in (("ih", given, layer.input_size), ("hh", hidden, layer.hidden_size)):
        name = names[kind]
        if e is None:
            if name.bias is None:
                continue
            e = ex.Mapped(zero, given, ())
        weighted = ex.Weighted(name.weight, ((1.0, e),), (), size, bias=name.bias, shift=name.shift)
        parts.append((1.0, weighted))
    activation = activation_of(nn.Tanh() if layer.nonlinearity == "tanh" else nn.ReLU())
    return ex.Point(activation, ex.Sum(tuple(parts), ()), ())


@rule.register
def _(layer: nn.RNN, translation: Translation, node: fx.Node, value: Any, *state: Any) -> Any:
    if layer.bidirectional or not layer.batch_first or any(one is not None for one in state):
        raise translation.refuse(
            "RNN with these options", node, "batch_first=True, one direction, no initial state. "
        )
    signal = (
        translation.raw(value, -1) if isinstance(value, Data) else plain(value, translation, node)
    )
    if signal.layout.channel_axis() != 1 or len(signal.positions) != 1:
        raise translation.refuse("RNN on anything but (N, T, C)", node)
    length, given = signal.positions[0], signal.only("RNN")
    current: list[Expression] = [
        ex.Mapped(PositionMap((length,), (), index=torch.tensor([t])), given, ())
        for t in range(length)
    ]
    drops = layer.dropout if layer.training else 0.0
    last: list[Expression] = []
    for number in range(layer.num_layers):
        names = _names(layer, f"_l{number}", translation, node)
        hidden: Expression | None = None
        outputs: list[Expression] = []
        for e in current:
            hidden = recurrent_step(layer, names, e, hidden)
            outputs.append(hidden)
        last.append(outputs[-1])
        between = drops > 0 and number < layer.num_layers - 1
        current = [ex.Dropped(e, 1 - drops, ()) for e in outputs] if between else outputs
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
    before = _state(layer, translation, node, state[0] if state else None)
    names = _names(layer, "", translation, node)
    e = recurrent_step(layer, names, signal.only("RNNCell"), before)
    return Signal(((layer.hidden_size, e),), Layout.of((layer.hidden_size,), 0))


def _state(layer: Any, translation: Translation, node: fx.Node, state: Any) -> Expression | None:
    """Return the state that a cell starts from, or None if it is zero."""
    if state is None or (isinstance(state, Tensor) and not bool(state.any())):
        return None
    if isinstance(state, Data):
        state = translation.raw(state, -1)
    if isinstance(state, Parameter):
        frame = Signal((), Layout.of((layer.hidden_size,), 0))
        state = parameter_signal(state, frame, translation, node)
    if not isinstance(state, Signal):
        raise translation.refuse(f"RNNCell with {type(state).__name__} as its state", node)
    return state.only("RNNCell")
