"""Recurrent layers and bags of embeddings as steps that the rules of other layers know.

torch computes them in one operation, whose gradients do not say what happened at which time. Here each step
is a linear map of the state, with the same weights at all steps. A function gets the arguments of torch's
own, and `linear` or `embedding`, which apply a weight and record it. It returns None where it does not know
a case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""From an input, a weight and a bias to the output of a linear map."""

State = tuple[Tensor, ...]
"""The hidden state, and for an LSTM the cell's, each (B, H)."""


def _lstm_step(
    linear: Linear, gates: Tensor, state: State, weight: Tensor, bias: Tensor | None
) -> State:
    h, c = state
    inward, forget, new, outward = (gates + linear(h, weight, bias)).chunk(4, -1)
    c = forget.sigmoid() * c + inward.sigmoid() * new.tanh()
    return outward.sigmoid() * c.tanh(), c


def _gru_step(
    linear: Linear, gates: Tensor, state: State, weight: Tensor, bias: Tensor | None
) -> State:
    (h,) = state
    reset, update, new = gates.chunk(3, -1)
    reset_h, update_h, new_h = linear(h, weight, bias).chunk(3, -1)
    new = (new + (reset + reset_h).sigmoid() * new_h).tanh()
    return ((h - new) * (update + update_h).sigmoid() + new,)


def _plain_step(
    activation: Callable[[Tensor], Tensor],
    linear: Linear,
    gates: Tensor,
    state: State,
    weight: Tensor,
    bias: Tensor | None,
) -> State:
    return (activation(gates + linear(state[0], weight, bias)),)


Step = Callable[[Linear, Tensor, State, Tensor, Tensor | None], State]


def _direction(
    step: Step,
    linear: Linear,
    x: Tensor,
    state: State,
    weights: Sequence[Tensor | None],
    back: bool,
) -> tuple[Tensor, State]:
    """Return the states at all times (T, B, H) of one direction of one layer, and the last state."""
    inward, onward, inward_bias, onward_bias, projection = weights
    assert inward is not None
    assert onward is not None
    # unbound at once: the gradient of a step would else be a copy of all steps
    gates = linear(x, inward, inward_bias).unbind(0)
    states = []
    for now in reversed(gates) if back else gates:
        state = step(linear, now, state, onward, onward_bias)
        if projection is not None:
            state = linear(state[0], projection, None), *state[1:]
        states.append(state[0])
    return torch.stack(states[::-1] if back else states), state


def _layers(step: Step, linear: Linear, x: Tensor, starts: State, *rest: Any) -> Any:
    """Return what torch's function returns: the states at all times, and the last ones."""
    params, has_biases, num_layers, dropout, training, bidirectional, batch_first = rest
    if dropout and training:
        return None
    x, number = x.transpose(0, 1) if batch_first else x, 2 if bidirectional else 1
    each = len(params) // (num_layers * number)
    last = []
    for layer in range(num_layers):
        outputs = []
        for side in range(number):
            place = layer * number + side
            own = list(params[place * each : (place + 1) * each])
            biases = own[2:4] if has_biases else [None, None]
            projection = own[-1] if each % 2 else None
            state = tuple(start[place] for start in starts)
            weights = [*own[:2], *biases, projection]
            states, state = _direction(step, linear, x, state, weights, bool(side))
            outputs.append(states)
            last.append(state)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
    ends = [torch.stack(parts) for parts in zip(*last, strict=True)]
    return (x.transpose(0, 1) if batch_first else x, *ends)


def _recurrent(step: Step, linear: Linear, x: Tensor, starts: Any, *rest: Any) -> Any:
    if len(rest) != 7 or not isinstance(rest[1], bool):
        return None  # packed sequences, whose points have rows at different places
    return _layers(step, linear, x, starts if isinstance(starts, tuple) else (starts,), *rest)


def _cell(
    step: Step,
    linear: Linear,
    x: Tensor,
    state: Any,
    inward: Tensor,
    onward: Tensor,
    inward_bias: Tensor | None = None,
    onward_bias: Tensor | None = None,
) -> Any:
    several = isinstance(state, tuple | list)
    gates = linear(x, inward, inward_bias)
    state = step(linear, gates, tuple(state) if several else (state,), onward, onward_bias)
    return state if several else state[0]


def embedding_bag(
    embedding: Callable[[Tensor, Tensor, int | None], Tensor],
    ids: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    *_: Any,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
    **__: Any,
) -> Tensor | None:
    """Return the sum, the mean or the maximum of the rows of a table, for bags of one size."""
    if ids.dim() != 2 or offsets is not None or max_norm is not None or _:
        return None
    padding = None if padding_idx is None else padding_idx % len(weight)
    found = embedding(ids, weight, padding)
    real = torch.ones_like(ids, dtype=torch.bool) if padding is None else ids != padding
    if mode == "max":
        largest = found.masked_fill(~real[..., None], -torch.inf).max(1).values
        return torch.where(real.any(1)[:, None], largest, 0.0)
    shares = real.to(found) if per_sample_weights is None else real * per_sample_weights
    total = (found * shares[..., None]).sum(1)
    return total / real.sum(1).clamp(min=1)[:, None] if mode == "mean" else total


_STEPS: dict[str, Step] = {
    "lstm": _lstm_step,
    "gru": _gru_step,
    "rnn_tanh": partial(_plain_step, torch.tanh),
    "rnn_relu": partial(_plain_step, torch.relu),
}
RECURRENT: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, name): partial(_recurrent, step) for name, step in _STEPS.items()},
    **{getattr(torch, f"{name}_cell"): partial(_cell, step) for name, step in _STEPS.items()},
}
"""What does the work of each recurrent function of torch, given `linear` and the function's arguments."""
