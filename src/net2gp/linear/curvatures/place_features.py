"""Features of a last layer at places: f_np = W φ_np + b s_np for each place p of a point."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from net2gp.inputs import follows
from net2gp.linear.forward.calls import recording
from net2gp.linear.forward.evaluation import LOCK, accepts
from net2gp.linear.forward.modes import in_eval_mode
from net2gp.linear.forward.places import channels_of
from net2gp.types import Inputs, Params

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized


def place_features(linearized: Linearized, layer: nn.Module, x: Inputs) -> tuple[Tensor, Tensor]:
    """Return φ with s behind it for a bias, (N·P, D'), and the outputs, (N·P, C).

    Where the layer's outputs are the network's own, φ is its input, from one pass. Otherwise, as when logits
    are resized behind it, the network is linear in W, and ⌈D/C⌉ + 2 passes with unit vectors as rows of W
    return C features each.

    Args:
        linearized: The network, with the layer's parameters as the chosen ones and outputs at places.
        layer: The layer.
        x: N points.

    Returns:
        Both, differentiable in `x`.
    """
    channels = channels_of(linearized)
    assert channels is not None
    linearized.check(x)
    calls: list[tuple[Tensor, Tensor]] = []

    def hook(module: nn.Module, given: tuple, keywords: dict, out: Tensor) -> None:
        h = given[0] if given else keywords["input"]
        calls.append((_by_place(h, layer), _by_place(out, layer).clone()))

    with torch.set_grad_enabled(follows(x)), accepts(x):
        with LOCK, in_eval_mode(linearized, x), recording():
            handle = layer.register_forward_hook(hook, with_kwargs=True)
            try:
                f = linearized.evaluate(linearized.params, x).reshape(-1, channels)
            finally:
                handle.remove()
        if len(calls) == 1:
            h, z = (value.to(f.dtype) for value in calls[0])
            if z.shape == f.shape and torch.equal(z, f):
                biased = len(linearized.params) == 2
                return torch.cat([h, torch.ones_like(h[:, :1])], 1) if biased else h, f
        return _probed(linearized, x, channels), f


def _probed(linearized: Linearized, x: Inputs, channels: int) -> Tensor:
    """φ from the network's outputs for unit vectors in place of the rows of W."""
    zero = {name: torch.zeros_like(value) for name, value in linearized.params.items()}
    weight, *bias = zero
    base = linearized.evaluate(zero, x).reshape(-1, channels)
    width, parts = zero[weight][0].numel(), []

    def change(params: Params) -> Tensor:
        return linearized.evaluate(params, x).reshape(-1, channels) - base

    for start in range(0, width, channels):
        count = min(channels, width - start)
        units = torch.zeros(len(zero[weight]), width).to(zero[weight])
        units[range(count), range(start, start + count)] = 1
        parts.append(change({**zero, weight: units.reshape(zero[weight].shape)})[:, :count])
    for name in bias:
        parts.append(change({**zero, name: torch.ones_like(zero[name])})[:, :1])
    return torch.cat(parts, 1)


def _by_place(value: Tensor, layer: nn.Module) -> Tensor:
    """A tensor of the layer as (places of all points, channels)."""
    value = value if isinstance(layer, nn.Linear) else value.movedim(1, -1)
    return value.reshape(-1, value.shape[-1])
