"""Which order statistic promises which coverage, and the groups within which it is taken."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Any

import torch
from torch import Tensor

from net2gp.errors import InputError, Net2GPWarning, warn
from net2gp.inputs import describe
from net2gp.tags import savable


class TooFewPoints(Net2GPWarning):
    """There are too few calibration points for the level, so that only what holds everything keeps it."""


def check_alpha(alpha: Any) -> float:
    """Raise unless `alpha` is a number between 0 and 1, and return it.

    Args:
        alpha: The share of misses that is allowed.

    Returns:
        The same number.

    Raises:
        InputError: If it is anything else.

    >>> check_alpha(90)
    Traceback (most recent call last):
    ...
    net2gp.errors.InputError: alpha is the share of misses that is allowed and must lie between 0 and 1, ...
    """
    good = isinstance(alpha, int | float) and not isinstance(alpha, bool) and 0 < alpha < 1
    if not good:
        shown = repr(alpha) if isinstance(alpha, int | float | str) else describe(alpha)
        raise InputError(
            "alpha is the share of misses that is allowed and must lie between 0 and 1, both excluded, but "
            f"is {shown}. Pass alpha=0.1 for a promise of 90 %."
        )
    return float(alpha)


def misses(alpha: float, count: int) -> int:
    """Compute ⌊alpha·(count + 1)⌋ exactly, where alpha is the decimal number that was typed.

    Args:
        alpha: The share of misses that is allowed.
        count: The number n of calibration points.

    Returns:
        How many of n + 1 exchangeable points may be missed.

    >>> misses(0.29, 99), int(0.29 * 100)  # rounding would lose a point
    (29, 28)
    """
    return floor(Fraction(repr(alpha)) * (count + 1))


def rank(alpha: float, count: int) -> int:
    """Compute k = n + 1 − ⌊alpha·(n + 1)⌋ = ⌈(1 − alpha)(n + 1)⌉: the k-th smallest score is the threshold.

    Args:
        alpha: The share of misses that is allowed.
        count: The number n of calibration points.

    Returns:
        The rank, from 1 to n + 1. There is no score of rank n + 1: the threshold is infinite then.
    """
    return count + 1 - misses(alpha, count)


def kth_smallest(values: Tensor, k: int, dim: int) -> Tensor:
    """Take the k-th smallest value along an axis, or infinity if there are fewer than k.

    Args:
        values: Numbers of any shape.
        k: The rank, counted from 1.
        dim: The axis.

    Returns:
        The values without this axis.
    """
    if k > values.shape[dim]:
        return torch.full_like(values.sum(dim), torch.inf)
    return values.kthvalue(k, dim=dim).values


@savable("conformal.Groups")
@dataclass(frozen=True, eq=False)
class Groups:
    """The groups of the calibration points; each group is calibrated by itself.

    Args:
        labels: The labels of the groups in ascending order, (G,); None if there are no groups.
        counts: The number of calibration points of each group, with one entry if there are no groups.
    """

    labels: Tensor | None
    counts: tuple[int, ...]

    def index(self, groups: Tensor | None, num_points: int) -> Tensor:
        """Find the place of each point's group.

        Args:
            groups: The labels of the groups of N points, (N,), or None if there are no groups.
            num_points: N.

        Returns:
            Indices into `counts`, (N,).

        Raises:
            InputError: If the labels are missing, superfluous, of another shape, or of a group without
                calibration points.
        """
        if self.labels is None:
            if groups is not None:
                raise InputError(
                    "groups were given for new points, but none for the calibration points. Pass groups= to "
                    "the call that calibrates as well, or leave it out here."
                )
            return torch.zeros(num_points, dtype=torch.long)
        if groups is None:
            raise InputError(
                f"the promise is made within each of {len(self.counts)} groups, so new points need theirs: "
                f"pass groups=, a tensor of {num_points} labels."
            )
        found = check_groups(groups, num_points)
        place = torch.searchsorted(self.labels, found).clamp(max=len(self.labels) - 1)
        unknown = self.labels[place] != found
        if bool(unknown.any()):
            raise InputError(
                f"group {int(found[unknown][0])} has no calibration points, so nothing can be promised for "
                f"it. Groups with calibration points are {shown(self.labels)}. Add points of this group to "
                "the calibration data, or merge it with another group."
            )
        return place


def make_groups(groups: Tensor | None, num_points: int) -> tuple[Groups, Tensor]:
    """Sort calibration points into groups.

    Args:
        groups: The labels of the groups, (n,), or None for no groups.
        num_points: The number n of calibration points.

    Returns:
        The groups, and the place of each point's group, (n,).

    Raises:
        InputError: If the labels are no integers or have another shape.
    """
    if groups is None:
        return Groups(None, (num_points,)), torch.zeros(num_points, dtype=torch.long)
    checked = check_groups(groups, num_points)
    labels, place, counts = checked.unique(return_inverse=True, return_counts=True)
    return Groups(labels, tuple(counts.tolist())), place


def check_groups(groups: Any, num_points: int) -> Tensor:
    """Raise unless `groups` holds one whole number per point, and return it as int64 on the CPU.

    Args:
        groups: The labels of the groups.
        num_points: The number of points.

    Returns:
        The labels.

    Raises:
        InputError: If it has another form.

    >>> check_groups(torch.zeros(2), 2)
    Traceback (most recent call last):
    ...
    net2gp.errors.InputError: groups must hold one whole number per point, ... Pass groups=groups.long().
    """
    if not isinstance(groups, Tensor) or groups.shape != (num_points,):
        raise InputError(
            f"groups must hold one whole number per point, a tensor of shape ({num_points},), but is "
            f"{describe(groups)}. Pass for example groups=(x[:, 0] > 0).long()."
        )
    if groups.is_floating_point() or groups.is_complex():
        raise InputError(
            f"groups must hold one whole number per point, but is {describe(groups)}. Pass "
            "groups=groups.long()."
        )
    return groups.detach().cpu().long()


def warn_of_few(alpha: float, groups: Groups, consequence: str) -> None:
    """Warn if some group has so few calibration points that only what holds everything keeps the promise.

    Args:
        alpha: The share of misses that is allowed.
        groups: The groups.
        consequence: What the answer will be.
    """
    few = [g for g, count in enumerate(groups.counts) if not misses(alpha, count)]
    if not few:
        return
    needed = ceil(1 / Fraction(repr(alpha))) - 1
    whose = (
        "the calibration data" if groups.labels is None else f"group {shown(groups.labels[few])}"
    )
    warn(
        f"alpha={alpha:g} takes at least {needed} calibration points, but {whose} has only "
        f"{', '.join(str(groups.counts[g]) for g in few[:5])}: {consequence}. Add points, or pass a larger "
        "alpha.",
        TooFewPoints,
    )


def shown(labels: Tensor) -> str:
    """List labels for a message, at most five of them.

    Args:
        labels: Whole numbers, (G,).

    Returns:
        The text.

    >>> shown(torch.arange(9))
    '0, 1, 2, 3, 4, …'
    """
    return ", ".join([*map(str, labels[:5].tolist()), *["…"] * (len(labels) > 5)])
