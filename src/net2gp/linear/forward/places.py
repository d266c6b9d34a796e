"""Outputs of a network at places of a point (pixels, tokens, times), with channels behind the places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from net2gp.calling import picked
from net2gp.inputs import rows
from net2gp.types import Inputs

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized


FEW_OUTPUTS = 64
"""Outputs of a point, over all its places, up to which each may have a backward pass of its own."""


@dataclass(frozen=True)
class AtPlaces:
    """Picks outputs and moves their channels behind the places: (N, …, C), which are flattened to (N, P·C).

    Args:
        axis: The axis of the network's outputs that counts channels; 0 counts points.
        channels: Their number C.
        output: Picks the tensor of outputs; None takes the obvious one.
    """

    axis: int
    channels: int
    output: Callable[[Any], Tensor] | None = field(default=None, repr=False)

    def __call__(self, out: Any) -> Any:
        """The chosen outputs, with their channels as the last axis."""
        found = picked(out, self.output)
        return found.movedim(self.axis, -1) if isinstance(found, Tensor) else found


def at_places(linearized: Linearized, axis: int, channels: int) -> Linearized:
    """The same network, with its outputs in the order of places.

    Args:
        linearized: The network.
        axis: The axis of its outputs that counts channels.
        channels: Their number.

    Returns:
        A linearization whose output p·C + c is channel c of place p.
    """
    plans = type(linearized.plans)()
    return replace(linearized, output=AtPlaces(axis, channels, linearized.output), plans=plans)


def channels_of(linearized: Linearized) -> int | None:
    """The number of channels at each place, or None if outputs are of whole points."""
    return linearized.output.channels if isinstance(linearized.output, AtPlaces) else None


def num_places(linearized: Linearized, x: Inputs) -> int:
    """The number of places of a point, 1 if outputs are of whole points.

    Args:
        linearized: The network.
        x: Some points.

    Returns:
        The number.
    """
    channels = channels_of(linearized)
    return 1 if channels is None else output_shape(linearized, x).numel() // channels


def has_few_outputs(linearized: Linearized, x: Inputs) -> bool:
    """Whether the outputs of a point at all its places are few enough for a Jacobian.

    Args:
        linearized: The network.
        x: Some points.

    Returns:
        The answer.
    """
    return output_shape(linearized, x).numel() <= FEW_OUTPUTS


def output_shape(linearized: Linearized, x: Inputs) -> torch.Size:
    """The shape of a point's outputs, before they are flattened, from a pass over the first point.

    Args:
        linearized: The network.
        x: Some points.

    Returns:
        The shape without the axis of points.
    """
    return _with_shape(linearized, rows(x, slice(0, 1)))[1]


def outputs_by_place(linearized: Linearized, x: Inputs) -> Tensor:
    """The network's outputs in the shape of the places: (N, …, C), in one pass.

    Args:
        linearized: A network with outputs at places.
        x: N points.

    Returns:
        The outputs; differentiable in `x`.
    """
    out, shape = _with_shape(linearized, x)
    return out.reshape(len(out), *shape)


def _with_shape(linearized: Linearized, x: Inputs) -> tuple[Tensor, torch.Size]:
    """The flattened outputs, and their shape before."""
    shapes: list[torch.Size] = []

    def seen(out: Any) -> Any:
        found = picked(out, linearized.output)
        if isinstance(found, Tensor):
            shapes.append(found.shape[1:])
        return found

    out = replace(linearized, output=seen)(x)
    return out, shapes[-1]
