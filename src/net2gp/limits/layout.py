"""Which axes of a hidden tensor are channels (infinitely many) and which are positions.

A layout lists, for every axis of the tensor after the batch axis, the factors that were merged into
it, outermost first: `channel` (the infinite one), `copy` (a piece split off the channels: heads,
groups; independent and identically distributed) and `position`. Flattening an image of C channels
gives one axis with the factors channel, position, position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

CHANNEL, COPY, POSITION = "channel", "copy", "position"

Factor = tuple[str, int]


class LayoutError(ValueError):
    """A change of axes that mixes channels and positions in a way that has no limit."""


@dataclass(frozen=True)
class Layout:
    """The factors of each axis after the batch axis."""

    groups: tuple[tuple[Factor, ...], ...]

    @staticmethod
    def of(shape: Sequence[int], channel: int) -> Layout:
        """Axes of sizes `shape` (without the batch), of which number `channel` holds the channels."""
        return Layout(
            tuple(
                ((CHANNEL if axis == channel else POSITION, size),)
                for axis, size in enumerate(shape)
            )
        )

    @property
    def factors(self) -> tuple[Factor, ...]:
        """All factors, in order."""
        return tuple(factor for group in self.groups for factor in group)

    @property
    def positions(self) -> tuple[int, ...]:
        """Sizes of the position factors, in order: the shape of the positions of the moments."""
        return tuple(size for kind, size in self.factors if kind == POSITION)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(prod(size for _, size in group) for group in self.groups)

    @property
    def width(self) -> int:
        """The number of channels, with all pieces split off them."""
        return prod(size for kind, size in self.factors if kind != POSITION)

    def channel_axis(self) -> int:
        """The axis (after the batch) with the channel factor."""
        for axis, group in enumerate(self.groups):
            if any(kind == CHANNEL for kind, _ in group):
                return axis
        raise LayoutError("there is no channel axis")

    def is_plain(self) -> bool:
        """Whether one axis holds the channels alone and every other axis positions alone."""
        axis = self.channel_axis()
        return all(
            all((kind == POSITION) == (number != axis) for kind, _ in group)
            for number, group in enumerate(self.groups)
        )

    def position_numbers(self, axis: int) -> tuple[int, ...]:
        """Which of the positions' axes (counted among positions only) lie in this axis."""
        before = sum(kind == POSITION for group in self.groups[:axis] for kind, _ in group)
        here = sum(kind == POSITION for kind, _ in self.groups[axis])
        return tuple(range(before, before + here))

    def permuted(self, order: Sequence[int]) -> Layout:
        """The axes in another order."""
        return Layout(tuple(self.groups[axis] for axis in order))

    def position_order(self, order: Sequence[int]) -> tuple[int, ...]:
        """Where the positions' axes come from after `permuted(order)`."""
        return tuple(number for axis in order for number in self.position_numbers(axis))

    def regrouped(self, shape: Sequence[int]) -> Layout:
        """The same factors on axes of other sizes (reshape); a factor is split where it must be.

        >>> Layout.of((4, 6, 5), 0).regrouped((120,)).groups
        ((('channel', 4), ('position', 6), ('position', 5)),)
        >>> Layout.of((7, 8), 1).regrouped((7, 2, 4)).groups
        ((('position', 7),), (('copy', 2),), (('channel', 4),))
        """
        pending = [factor for factor in self.factors if factor[1] != 1 or factor[0] == CHANNEL]
        groups: list[tuple[Factor, ...]] = []
        for size in shape:
            group: list[Factor] = []
            left = size
            while left > 1:
                if not pending:
                    raise LayoutError(f"{self.shape} cannot become {tuple(shape)}")
                kind, length = pending.pop(0)
                if left % length == 0:
                    group.append((kind, length))
                    left //= length
                elif length % left == 0:
                    outer = COPY if kind == CHANNEL else kind
                    group.append((outer, left))
                    pending.insert(0, (kind, length // left))
                    left = 1
                else:
                    raise LayoutError(f"{self.shape} cannot become {tuple(shape)}")
            groups.append(tuple(group))
        return Layout(_settle(groups, pending))

    def merged(self) -> Layout:
        """One position factor for each axis without channels (a factor of size one where there is none)."""
        axis = self.channel_axis()
        return Layout(
            tuple(
                group if number == axis else ((POSITION, prod(size for _, size in group)),)
                for number, group in enumerate(self.groups)
            )
        )


def _settle(
    groups: list[tuple[Factor, ...]], pending: list[Factor]
) -> tuple[tuple[Factor, ...], ...]:
    """Put what is left (factors of size one) where it is found again, and join split channels."""
    if any(size != 1 for _, size in pending):
        raise LayoutError("elements are left over")
    if pending:
        if not groups:
            groups = [()]
        groups[-1] = (*groups[-1], *pending)
    return tuple(_joined(group) for group in groups)


def _joined(group: tuple[Factor, ...]) -> tuple[Factor, ...]:
    result: list[Factor] = []
    for kind, size in group:
        if result and kind != POSITION and result[-1][0] != POSITION:
            both = CHANNEL if CHANNEL in (kind, result[-1][0]) else COPY
            result[-1] = (both, result[-1][1] * size)
        else:
            result.append((kind, size))
    return tuple(result)
