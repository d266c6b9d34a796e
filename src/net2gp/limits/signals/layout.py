"""Which axes of a hidden tensor are channels (infinitely many) and which are positions.

A layout lists, for every axis of the tensor after the batch axis, the factors that were merged into
it, outermost first. There are three kinds: `channel` (the infinite one), `copy` (a piece split off the
channels, such as heads or groups, which are independent and identically distributed) and `position`.
Flattening an image of C channels gives one axis with the factors channel, position, position. Channels and
copies keep their stride, the distance between neighbors in the signal's own numbering of channels, so that
a changed order is noticed when they are merged again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import Tensor

CHANNEL, COPY, POSITION = "channel", "copy", "position"


class Factor(NamedTuple):
    """One factor of an axis: its kind, its size, and for channels and copies their stride."""

    kind: str
    size: int
    stride: int = 0


class LayoutError(ValueError):
    """A change of axes that mixes channels and positions in a way that has no limit."""


@dataclass(frozen=True)
class Layout:
    """The factors of each axis after the batch axis.

    Args:
        groups: The factors per axis, outermost first.
    """

    groups: tuple[tuple[Factor, ...], ...]

    @staticmethod
    def of(shape: Sequence[int], channel: int) -> Layout:
        """Return the layout of axes with these sizes (without the batch); axis `channel` has the channels."""
        return Layout(
            tuple(
                (Factor(CHANNEL, size, 1) if axis == channel else Factor(POSITION, size),)
                for axis, size in enumerate(shape)
            )
        )

    @property
    def factors(self) -> tuple[Factor, ...]:
        """Return all factors, in order."""
        return tuple(factor for group in self.groups for factor in group)

    @property
    def positions(self) -> tuple[int, ...]:
        """Return the sizes of the position factors in order, which is the shape of positions in moments."""
        return tuple(f.size for f in self.factors if f.kind == POSITION)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the sizes of the axes."""
        return tuple(prod(f.size for f in group) for group in self.groups)

    @property
    def width(self) -> int:
        """Return the number of channels, including all pieces that were split off them."""
        return prod(f.size for f in self.factors if f.kind != POSITION)

    def channel_axis(self) -> int:
        """Return the axis with the channel factor, counted without the batch."""
        for axis, group in enumerate(self.groups):
            if any(f.kind == CHANNEL for f in group):
                return axis
        raise LayoutError("there is no channel axis")

    def is_plain(self) -> bool:
        """Whether one axis holds the channels alone and every other axis positions alone."""
        axis = self.channel_axis()
        return all(
            all((f.kind == POSITION) == (number != axis) for f in group)
            for number, group in enumerate(self.groups)
        )

    def position_numbers(self, axis: int) -> tuple[int, ...]:
        """Return which position factors, numbered among positions only, lie in this axis."""
        before = sum(f.kind == POSITION for group in self.groups[:axis] for f in group)
        here = sum(f.kind == POSITION for f in self.groups[axis])
        return tuple(range(before, before + here))

    def permuted(self, order: Sequence[int]) -> Layout:
        """Return the axes in another order."""
        return Layout(tuple(self.groups[axis] for axis in order))

    def position_order(self, order: Sequence[int]) -> tuple[int, ...]:
        """Return where the positions' axes come from after `permuted(order)`."""
        return tuple(number for axis in order for number in self.position_numbers(axis))

    def regrouped(self, shape: Sequence[int]) -> Layout:
        """Return the same factors on axes of other sizes, as in a reshape; factors are split if necessary.

        >>> [tuple(f) for f in Layout.of((4, 6, 5), 0).regrouped((120,)).factors]
        [('channel', 4, 1), ('position', 6, 0), ('position', 5, 0)]
        >>> [tuple(f) for f in Layout.of((7, 8), 1).regrouped((7, 2, 4)).factors]
        [('position', 7, 0), ('copy', 2, 4), ('channel', 4, 1)]
        """
        pending = [factor for factor in self.factors if factor.size != 1 or factor.kind == CHANNEL]
        groups: list[tuple[Factor, ...]] = []
        for size in shape:
            group: list[Factor] = []
            left = size
            while left > 1:
                if not pending:
                    raise LayoutError(f"{self.shape} cannot become {tuple(shape)}")
                kind, length, stride = pending.pop(0)
                if left % length == 0:
                    group.append(Factor(kind, length, stride))
                    left //= length
                elif length % left == 0:
                    outer, inner = COPY if kind == CHANNEL else kind, length // left
                    group.append(Factor(outer, left, stride * inner))
                    pending.insert(0, Factor(kind, inner, stride))
                    left = 1
                else:
                    raise LayoutError(f"{self.shape} cannot become {tuple(shape)}")
            groups.append(tuple(group))
        return Layout(_settle(groups, pending))

    def merged(self) -> Layout:
        """Return the layout with one position factor per axis without channels, if only of size one."""
        axis = self.channel_axis()
        return Layout(
            tuple(
                group if number == axis else (Factor(POSITION, prod(f.size for f in group)),)
                for number, group in enumerate(self.groups)
            )
        )


@dataclass(frozen=True)
class Heads:
    """The layouts of queries, keys, values and the result of attention, and the size of a head."""

    query: Layout
    key: Layout
    value: Layout
    result: Layout
    size: int


def _settle(
    groups: list[tuple[Factor, ...]], pending: list[Factor]
) -> tuple[tuple[Factor, ...], ...]:
    """Put leftover factors of size one on the last axis, and join split channels.

    The channel factor may have size one and must not get lost.
    """
    if any(factor.size != 1 for factor in pending):
        raise LayoutError("elements are left over")
    if pending:
        if not groups:
            groups = [()]
        groups[-1] = (*groups[-1], *pending)
    return tuple(_joined(group) for group in groups)


def _joined(group: tuple[Factor, ...]) -> tuple[Factor, ...]:
    result: list[Factor] = []
    for factor in group:
        if result and POSITION not in (factor.kind, result[-1].kind):
            result[-1] = _both(result[-1], factor)
        else:
            result.append(factor)
    return tuple(result)


def _both(outer: Factor, inner: Factor) -> Factor:
    """Join two neighboring factors of the channels; raise unless they have the order of the split."""
    kind = CHANNEL if CHANNEL in (outer.kind, inner.kind) else COPY
    if outer.size == 1 or inner.size == 1:
        return Factor(kind, outer.size * inner.size, (inner if outer.size == 1 else outer).stride)
    if outer.stride != inner.size * inner.stride:
        raise LayoutError("it puts channels in another order (a channel shuffle)")
    return Factor(kind, outer.size * inner.size, inner.stride)


def arranged(t: Tensor, layout: Layout) -> Tensor:
    """Arrange values (n, *positions, channels) of a signal as the network's tensor (n, *shape)."""
    places, sizes = _places(layout)
    t = t.reshape(t.shape[0], *sizes)
    order = [places.index(number) + 1 for number in range(len(places))]
    return t.permute(0, *order).reshape(t.shape[0], *layout.shape)


def collected(t: Tensor, layout: Layout) -> Tensor:
    """Invert `arranged`: (n, *shape) → (n, *positions, channels)."""
    places, _ = _places(layout)
    t = t.reshape(t.shape[0], *(factor.size for factor in layout.factors))
    t = t.permute(0, *(place + 1 for place in places))
    return t.reshape(t.shape[0], *layout.positions, layout.width)


def _places(layout: Layout) -> tuple[list[int], list[int]]:
    """Return the numbers and the sizes of the factors: positions first, then channels by falling stride."""
    factors = layout.factors
    channels = [number for number, factor in enumerate(factors) if factor.kind != POSITION]
    channels.sort(key=lambda number: (-factors[number].stride, factors[number].size))
    places = [n for n, factor in enumerate(factors) if factor.kind == POSITION] + channels
    return places, [factors[number].size for number in places]
