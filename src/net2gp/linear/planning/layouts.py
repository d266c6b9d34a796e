"""Where the layers of a network keep the points of a batch, found from gradients on a few of them."""

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
    """Where the points are in a layer's input: along `axis`, each taking `repeat` rows in a run."""

    axis: int
    repeat: int


def matched(keys: Sequence[Key], calls: Sequence[Call]) -> list[Call | None]:
    """For each key, in order, the call of the same layer and turn; None where calls are more or fewer."""
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
    """Whether `edges`, the operations that read a parameter, are the calls of layers with one rule."""
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
    """Return where each call keeps its points: the axis that grows from two points to three.

    The gradients of a point's outputs must then live on the point's own rows; a layer whose rows do
    not grow with the batch, or that keeps two points in another order, has no layout. Three points are
    left to the comparison with plain reverse mode.
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
"""Layers that treat all axes but the last alike, so that the points may stand on the second."""


def _gradients_of(out: Tensor, n: int, calls: Sequence[Call | None]) -> list[Tensor | None]:
    """Return the gradient of a mixture of the outputs of point n at each call's output."""
    edges = [call.edge for call in calls if call is not None and call.edge is not None]
    if not edges:
        return []
    seed = torch.zeros_like(out)
    seed[n] = 1.5 + torch.arange(out.shape[1], device=out.device, dtype=out.dtype).cos()
    with differentiates():
        return list(torch.autograd.grad(out, edges, seed, retain_graph=True, allow_unused=True))


def _confirmed(layout: Layout | None, g: Tensor | None, n: int) -> Layout | None:
    """`layout` if the gradient of point n lives on the rows where it puts point n."""
    if layout is None or g is None or not bool(g.any()):
        # nothing to see: rows that are as many as points are taken to be in order
        return layout if layout is not None and layout.repeat == 1 else None
    start, stop = n * layout.repeat, (n + 1) * layout.repeat
    before = g.narrow(layout.axis, 0, start)
    after = g.narrow(layout.axis, stop, g.shape[layout.axis] - stop)
    return None if bool(before.any()) or bool(after.any()) else layout
