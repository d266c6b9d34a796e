"""What an operation does to channels, to positions or to single numbers, found out by running it."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from net2gp.limits.graph.translate import Signal, Translation, mapped, plain, sliced
from net2gp.limits.signals.layout import Layout
from net2gp.limits.signals.positions import probed

POINTS = 3
"""The number of points that operations are run on."""

MOST_RUNS = 4
"""An operation that leaves more runs of neighboring channels than this is refused as a reordering."""


def position_operation(
    signal: Signal, apply: Callable[[Tensor], Tensor], translation: Translation, node: fx.Node
) -> Signal | None:
    """Find by probing a linear operation on positions that is the same for every channel.

    `apply` is the operation. It runs on unit vectors with one channel, which give its matrix, and on random
    numbers with all channels. Both must agree, so that an operation that is not linear, or that mixes
    channels, gives None.
    """
    signal = plain(signal, translation, node)
    axis, positions = signal.layout.channel_axis(), signal.positions

    def run(t: Tensor, channels: int) -> Tensor:
        """Run the operation on (K, channels, *positions)."""
        shape = list(signal.layout.shape)
        shape[axis] = channels
        return apply(t.movedim(1, axis + 1).reshape(t.shape[0], *shape))

    width = signal.layout.width
    try:
        # two numbers of channels: the one axis that changes with them is the axis of channels
        sizes = [run(torch.zeros(2, c, *positions, dtype=torch.float64), c).shape for c in (2, 5)]
        changed = [number for number, (a, b) in enumerate(zip(*sizes, strict=True)) if a != b]
        if len(changed) != 1 or changed[0] == 0 or sizes[0][0] != 2 or sizes[0][changed[0]] != 2:
            return None
        channel = changed[0]
        after = tuple(size for number, size in enumerate(sizes[0]) if number not in (0, channel))
        if prod(positions) * prod(after) > 2**24:
            raise translation.refuse("a linear map of that many positions", node)

        def map_one(t: Tensor) -> Tensor:
            return run(t[:, None], 1).movedim(channel, 1).reshape(t.shape[0], *after)

        found = probed(positions, after, map_one)
        test = _random(POINTS, width, *positions)
        given = run(test, width).movedim(channel, 1).reshape(POINTS, width, *after)
        if not torch.allclose(given, found(test, 2), rtol=1e-9, atol=1e-10):
            return None
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
        return None
    shape = list(sizes[0][1:])
    shape[channel - 1] = width
    return mapped(signal, found, Layout.of(shape, channel - 1))


def channel_operation(
    signal: Signal, apply: Callable[[Tensor], Any], translation: Translation, node: fx.Node
) -> Signal | None:
    """Find by probing an operation that cuts channels out or reorders them, in a few runs of neighbors.

    Each channel is marked with its number, and the numbers in the result show where each went. The result
    is None if all channels stay, or if the operation does something else.
    """
    if not signal.layout.is_plain():
        return None
    axis, width = signal.layout.channel_axis(), signal.layout.width
    shape = [1] * (len(signal.layout.shape) + 1)
    shape[axis + 1] = width
    marked = torch.arange(width, dtype=torch.float64).reshape(shape)
    try:
        out = apply(marked.expand(POINTS, *signal.layout.shape).clone())
    except Exception:
        return None
    same = [(POINTS, *signal.layout.shape), getattr(out, "shape", ())]
    if not isinstance(out, Tensor) or out.dim() != len(same[0]):
        return None
    if any(a != b for number, (a, b) in enumerate(zip(*same, strict=True)) if number != axis + 1):
        return None
    index = out.movedim(axis + 1, 0).flatten(1)[:, 0]
    if not bool((index == index.round()).all()) or bool(((index < 0) | (index >= width)).any()):
        return None
    places = index.long()
    test = _random(POINTS, *signal.layout.shape)
    expected = test.index_select(axis + 1, places)
    if places.tolist() == list(range(width)) or not torch.equal(apply(test), expected):
        return None
    runs = _runs(places.tolist())
    if len(runs) > MOST_RUNS or any(last - first == 1 for first, last in runs):
        raise translation.refuse(
            "channels that are taken one by one or in another order",
            node,
            "Parts of neighboring channels have limits: x[:, :d], x[:, d:], chunk, split. ",
        )
    blocks = tuple(block for first, last in runs for block in sliced(signal, first, last))
    new = list(signal.layout.shape)
    new[axis] = len(places)
    return Signal(blocks, Layout.of(new, axis))


def _runs(places: list[int]) -> list[tuple[int, int]]:
    """Return (first, last + 1) of each run of neighbors that stay neighbors."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def is_pointwise(function: Callable[[Tensor], Tensor], *shapes: tuple[int, ...]) -> bool:
    """Whether each output depends only on the input at its place, and in the same way everywhere.

    The function is tried on a tensor of three axes, and on tensors of the given `shapes`.
    """
    return all(_is_pointwise(function, shape) for shape in ((4, 6, 5), *shapes))


def _is_pointwise(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    other = torch.randn(shape, generator=generator, dtype=torch.float64)
    keep = torch.rand(shape, generator=generator) < 0.5
    try:
        with torch.no_grad():
            # a flat copy reveals a dependence on the place, other neighbors a dependence on them
            y, flat = function(x), function(x.flatten())
            mixed = function(torch.where(keep, x, other))
    except Exception:
        return False
    if not isinstance(y, Tensor) or y.shape != x.shape or not y.is_floating_point():
        return False
    same = torch.allclose(y.flatten(), flat, rtol=1e-12, atol=1e-12, equal_nan=True)
    return same and torch.allclose(mixed[keep], y[keep], rtol=1e-12, atol=1e-12, equal_nan=True)


def linear_factor(function: Callable[[Tensor], Tensor]) -> float | None:
    """Return c if the pointwise function is u ↦ c u, and None otherwise."""
    generator = torch.Generator().manual_seed(0)
    # wide enough to leave the linear part of functions such as clamps, and compared almost to rounding
    u = 30 * torch.randn(64, generator=generator, dtype=torch.float64)
    factor = float(function(torch.ones(1, dtype=torch.float64)))
    return factor if torch.allclose(function(u), factor * u, rtol=1e-14, atol=0) else None
