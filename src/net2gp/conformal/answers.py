"""What is returned for new points: intervals of numbers and sets of classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import describe
from net2gp.likelihoods.targets import shape_targets


def slack(dtype: torch.dtype) -> float:
    """By which share ends and thresholds are moved outwards, since a target may lie on them exactly.

    Args:
        dtype: The dtype of the prediction, whose last digits depend on which points are predicted together.

    Returns:
        The share, 6e-6 for float32 and 2e-12 for float64.
    """
    return torch.finfo(dtype).eps ** 0.75


@dataclass(frozen=True, eq=False)
class Intervals:
    """An interval for each target.

    Args:
        lower: The lower ends, (N, D); −∞ where nothing can be excluded.
        upper: The upper ends, (N, D).

    >>> import torch
    >>> one = Intervals(torch.tensor([[0.0]]), torch.tensor([[2.0]]))
    >>> one.width, one.contains(torch.tensor([1.0]))
    (tensor([[2.]]), tensor([[True]]))
    """

    lower: Tensor
    upper: Tensor

    @property
    def width(self) -> Tensor:
        """The widths, (N, D)."""
        return self.upper - self.lower

    def contains(self, y: Tensor) -> Tensor:
        """Return whether targets lie in their intervals.

        Args:
            y: Targets, (N, D), or (N,) if D = 1.

        Returns:
            One truth value per target, (N, D); `.all(-1)` says whether a box holds all targets of a point.

        Raises:
            InputError: If `y` is no tensor or has another shape.
        """
        if not isinstance(y, Tensor):
            raise InputError(f"y must be a tensor, but is {describe(y)}. Use torch.as_tensor(y).")
        y = shape_targets(self.lower, y)
        return (self.lower <= y) & (y <= self.upper)


def rounded_outwards(lower: Tensor, upper: Tensor, dtype: torch.dtype) -> Intervals:
    """Round the ends of intervals to a dtype so that no target with the threshold's own score is lost.

    Args:
        lower: The lower ends, (N, D), float64.
        upper: The upper ends, (N, D), float64.
        dtype: The dtype of the prediction.

    Returns:
        The intervals.
    """
    moved = slack(dtype) * torch.maximum(lower.abs(), upper.abs())
    return Intervals((lower - moved).to(dtype), (upper + moved).to(dtype))


@dataclass(frozen=True, eq=False)
class ClassSets:
    """A set of classes for each point.

    Args:
        members: Whether each of K classes is in the set, (N, K).

    >>> import torch
    >>> sets = ClassSets(torch.tensor([[True, False, True], [False, True, False]]))
    >>> sets.sizes, sets.labels(), sets.contains(torch.tensor([2, 2]))
    (tensor([2, 1]), [tensor([0, 2]), tensor([1])], tensor([ True, False]))
    """

    members: Tensor

    @property
    def sizes(self) -> Tensor:
        """The number of classes in each set, (N,)."""
        return self.members.sum(-1)

    def labels(self) -> list[Tensor]:
        """Return the classes of each set.

        Returns:
            N tensors of labels in ascending order.
        """
        return [row.nonzero()[:, 0] for row in self.members]

    def contains(self, y: Tensor) -> Tensor:
        """Return whether labels are in their sets.

        Args:
            y: Labels, (N,).

        Returns:
            One truth value per point, (N,).

        Raises:
            InputError: If `y` has another shape, or labels outside the classes.
        """
        N, K = self.members.shape
        good = isinstance(y, Tensor) and y.numel() == N and y.shape[:1] == (N,)
        if not good or bool(((y < 0) | (y >= K) | (y != y.long())).any()):
            raise InputError(
                f"y must hold {N} labels from 0 to {K - 1}, but is {describe(y)}. Pass the labels of the "
                "points for which the sets were made."
            )
        return self.members.gather(1, y.reshape(N, 1).long())[:, 0]
