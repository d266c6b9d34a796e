"""Where the layers of a network keep the points of a batch, found from gradients at a few points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor, nn

from net2gp.linear.forward.calls import Call, Key
from net2gp.linear.forward.evaluation import differentiates


@dataclass(frozen=True)
class Layout:
    """Where the points are in a layer's input.

    Args:
        axis: The axis along which the points lie.
        repeat: How many consecutive rows along it belong to each point.
    """

    axis: int
    repeat: int


def matched(keys: Sequence[Key], calls: Sequence[Call]) -> list[Call | None]:
    """Return the call for each key: the n-th call of a layer for its n-th key.

    A layer that is called more or less often than it has keys gets None for all of them.
    """
    theirs: dict[Key, list[Call]] = {key: [] for key in keys}
    for call in calls:
        theirs.setdefault(call.key, []).append(call)
    often = Counter(keys)
    turns: dict[Key, Iterator[Call | None]] = {
        key: iter(theirs[key]) if len(theirs[key]) == often[key] else repeat(None) for key in often
    }
    return [next(turns[key]) for key in keys]


def is_structured(
    name: str, calls: Sequence[Call | None], layouts: Sequence[Layout | None], edges: int
) -> bool:
    """Whether all `edges` operations that read a parameter are calls of layers with one and the same rule."""
    own = [
        (call, layout)
        for call, layout in zip(calls, layouts, strict=True)
        if call is not None and name in call.names.values()
    ]
    uses = sum(list(call.names.values()).count(name) for call, _ in own)
    kinds = {
        (
            call.rule,
            getattr(call.module, "groups", 1),
            tuple(suffix for suffix, n in call.names.items() if n == name),
        )
        for call, _ in own
    }
    return uses == edges and len(kinds) == 1 and all(layout is not None for _, layout in own)


def find_layouts(
    calls: Sequence[Call | None], short: Sequence[Call | None], turned: Tensor
) -> tuple[Layout | None, ...]:
    """Return where each call keeps its points: on the axis that grows from two points to three.

    The gradients of a point's outputs must also be zero outside the point's own rows. A layer whose rows do
    not grow with the batch, or that keeps two points in another order, has no layout. The order of three
    points is left to the comparison with plain reverse mode.
    """
    layouts = [
        None if b is None or a is None or a.edge is None else _layout(a, b)
        for a, b in zip(short, calls, strict=True)
    ]
    kept = [i for i, layout in enumerate(layouts) if layout is not None]
    for i, g in zip(kept, _gradients_of(turned, 0, [short[i] for i in kept]), strict=True):
        layouts[i] = _confirmed(layouts[i], g, 0)
    return tuple(layouts)


def _layout(short: Call, call: Call) -> Layout | None:
    two, three = (short.a.shape, short.shape), (call.a.shape, call.shape)
    for axis in (0, 1):
        if min(map(len, two)) <= axis or min(map(len, three)) <= axis:
            continue
        grows = all(3 * a[axis] == 2 * b[axis] for a, b in zip(two, three, strict=True))
        others = all(
            a[:axis] + a[axis + 1 :] == b[:axis] + b[axis + 1 :]
            for a, b in zip(two, three, strict=True)
        )
        repeat = call.shape[axis] // 3
        if not (grows and others and call.a.shape[axis] == call.shape[axis]) or repeat == 0:
            continue
        if axis == 1 and (repeat > 1 or not isinstance(call.module, _ELEMENTWISE_IN_FRONT)):
            return None
        return Layout(axis, repeat)
    return None


_ELEMENTWISE_IN_FRONT = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding)
"""Layers that treat all axes but the last alike, so that the points may lie along the second axis."""


def _gradients_of(out: Tensor, n: int, calls: Sequence[Call | None]) -> list[Tensor | None]:
    """Return the gradient of a mixture of the outputs of point n at each call's output."""
    edges = [call.edge for call in calls if call is not None and call.edge is not None]
    if not edges:
        return []
    seed = torch.zeros_like(out)
    # different weights, all nonzero, so that the gradients of several outputs do not cancel
    seed[n] = 1.5 + torch.arange(out.shape[1], device=out.device, dtype=out.dtype).cos()
    with differentiates():
        return list(torch.autograd.grad(out, edges, seed, retain_graph=True, allow_unused=True))


def _confirmed(layout: Layout | None, g: Tensor | None, n: int) -> Layout | None:
    """Return `layout` if the gradient of point n is zero outside the rows of point n, and None otherwise."""
    if layout is None or g is None or not bool(g.any()):
        # without a gradient nothing can be seen; one row per point is taken to be in order
        return layout if layout is not None and layout.repeat == 1 else None
    start, stop = n * layout.repeat, (n + 1) * layout.repeat
    before = g.narrow(layout.axis, 0, start)
    after = g.narrow(layout.axis, stop, g.shape[layout.axis] - stop)
    return None if bool(before.any()) or bool(after.any()) else layout
