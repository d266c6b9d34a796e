"""Where the layers of a network keep the points of a batch, found from gradients at a few points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import torch
from torch import Tensor, nn

from net2gp.linear.forward.calls import Call, Key
from net2gp.linear.forward.evaluation import differentiates
from net2gp.linear.forward.layers import Part, Turned


@dataclass(frozen=True)
class Layout:
    """Where the points are in a layer's input.

    Args:
        axis: The axis along which the points lie.
        repeat: How many rows along it belong to each point.
        strided: Whether these lie as many rows apart as there are points, and do not follow on each other.
    """

    axis: int
    repeat: int
    strided: bool = False

    def points_first(self, value: Tensor) -> Tensor:
        """Return a signal with the points along the first axis, and the rows of each next to each other."""
        if self.axis:
            return value.movedim(self.axis, 0)
        if self.strided:
            return value.unflatten(0, (self.repeat, -1)).transpose(0, 1).flatten(0, 1)
        return value

    def rows(self, value: Tensor, n: int) -> Tensor:
        """Return the rows of point n, with the points first."""
        return self.points_first(value)[n * self.repeat : (n + 1) * self.repeat]


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
    """Whether all `edges` operations that read a parameter are calls of layers with a rule."""
    own = [
        (call, layout)
        for call, layout in zip(calls, layouts, strict=True)
        if call is not None and name in call.names.values()
    ]
    uses = sum(list(call.names.values()).count(name) for call, _ in own)
    return uses == edges > 0 and all(layout is not None for _, layout in own)


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
    first, second = (_gradients_of(turned, n, short, layouts) for n in (0, 1))
    return tuple(map(_confirmed, layouts, first, second))


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


_ELEMENTWISE_IN_FRONT = (nn.Linear, Part, Turned, nn.LayerNorm, nn.RMSNorm, nn.Embedding)
"""Layers that treat all axes but the last alike, so that the points may lie along the second axis."""


def _gradients_of(
    out: Tensor, n: int, calls: Sequence[Call | None], layouts: Sequence[Layout | None]
) -> list[Tensor | None]:
    """Return the gradient of a mixture of the outputs of point n at the output of each call with a layout.

    Point 1 is asked for only where a point has several rows, which one point alone does not tell apart.
    """
    kept = [i for i, found in enumerate(layouts) if found is not None and found.repeat > n]
    edges = [call.edge for call in (calls[i] for i in kept) if call is not None]
    gradients: list[Tensor | None] = [None] * len(layouts)
    if not edges:
        return gradients
    seed = torch.zeros_like(out)
    # different weights, all nonzero, so that the gradients of several outputs do not cancel
    seed[n] = 1.5 + torch.arange(out.shape[1], device=out.device, dtype=out.dtype).cos()
    with differentiates():
        found = torch.autograd.grad(
            out,
            edges,  # type: ignore[arg-type]
            seed,
            retain_graph=True,
            allow_unused=True,
        )
    for i, g in zip(kept, found, strict=True):
        gradients[i] = g
    return gradients


def _confirmed(layout: Layout | None, *gradients: Tensor | None) -> Layout | None:
    """Return the layout for which the gradients of points 0 and 1 are zero outside of their own rows."""
    if layout is None:
        return None
    seen = [(n, g) for n, g in enumerate(gradients) if g is not None and bool(g.any())]
    if len(seen) < min(layout.repeat, 2):
        # without a gradient nothing can be seen; one row per point is taken to be in order
        return layout if layout.repeat == 1 else None
    ways = [layout, replace(layout, strided=True)][: layout.repeat]
    for way in ways:
        if all(way.rows(g, n).count_nonzero() == g.count_nonzero() for n, g in seen):
            return way
    return None
