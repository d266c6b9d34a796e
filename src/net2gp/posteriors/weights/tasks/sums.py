"""Sums over the data of targets and outputs: noise, evidence and the check of classes need no more."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from net2gp.likelihoods.traits import (
    class_counts,
    has_gaussian_noise,
    has_one_class,
    rows_per_point,
    target_columns,
)
from net2gp.types import Likelihood


@dataclass(frozen=True, eq=False)
class Moments:
    """The number of rows of targets (N, D), and of each column the mean and the sum of squares around it.

    Args:
        count: N.
        mean: The means, (D,), in float64.
        squares: Σ_n (y_n − mean)², (D,).
    """

    count: int
    mean: Tensor
    squares: Tensor

    @staticmethod
    def of(y: Tensor) -> Moments:
        """Those of targets (N, D)."""
        y = y.double()
        mean = y.mean(0)
        return Moments(len(y), mean, (y - mean).square().sum(0))

    def plus(self, other: Moments) -> Moments:
        """Those of the rows of both, without cancellation (Chan, Golub and LeVeque, 1983)."""
        count = self.count + other.count
        gap = other.mean - self.mean
        mean = self.mean + gap * (other.count / count)
        between = gap.square() * (self.count * other.count / count)
        return Moments(count, mean, self.squares + other.squares + between)

    def deviations(self) -> Tensor:
        """The standard deviation of each column, (D,), with N − 1."""
        return (self.squares / (self.count - 1)).sqrt()

    def scale(self) -> float:
        """The variance of the targets, with the share 1/N⁴ of their squared mean; 1 if all are zero.

        Two points may be close to each other by chance, and one has no variance: then their size counts.
        """
        spread, center = float(self.squares.mean()) / self.count, float(self.mean.square().mean())
        size, found = spread + center, spread + center / self.count**4
        return found if found > 1e-12 * size else (size if size > 0 else 1.0)


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over the points of a task, which grow by those of more points.

    Args:
        count: The number of points N.
        num_outputs: The number of outputs C.
        log_prob: Σ_n log p(y_n | f_n).
        largest: The largest output, without its sign.
        squares: Σ_n |y_n − f_n|² under Gaussian noise, else None.
        targets: The moments of the targets under Gaussian noise, else None.
        classes: How often each class is the label, where one class is; else None.
    """

    count: int
    num_outputs: int
    log_prob: Tensor
    largest: float
    squares: Tensor | None = None
    targets: Moments | None = None
    classes: Tensor | None = None

    @staticmethod
    def of(likelihood: Likelihood, f: Tensor, y: Tensor) -> Sums:
        """The sums over some points.

        Args:
            likelihood: The likelihood of the points.
            f: Their outputs, (N, C), in float64.
            y: Their targets.

        Returns:
            The sums.
        """
        squares = targets = classes = None
        if has_gaussian_noise(likelihood):
            shaped = target_columns(likelihood, f, y).double()
            rows = rows_per_point(likelihood)
            squares = (shaped - f).square().sum()
            targets = Moments.of(shaped if rows is None else rows(shaped))
        if has_one_class(likelihood):
            classes = class_counts(likelihood, y, f.shape[1])
        total, largest = likelihood.log_prob(f, y).sum(), float(f.abs().max())
        return Sums(len(f), f.shape[1], total, largest, squares, targets, classes)

    def plus(self, other: Sums) -> Sums:
        """The sums over the points of both."""
        both = self.targets is not None and other.targets is not None
        return Sums(
            self.count + other.count,
            self.num_outputs,
            self.log_prob + other.log_prob,
            max(self.largest, other.largest),
            _total(self.squares, other.squares),
            self.targets.plus(other.targets) if both else None,  # type: ignore[union-attr,arg-type]
            _total(self.classes, other.classes),
        )

    def log_likelihood(self, noise_var: Tensor | None) -> Tensor:
        """log p(y | f), with the noise variance where it is open.

        Args:
            noise_var: The noise variance, or None where it belongs to the likelihood.

        Returns:
            A scalar, differentiable in the noise.
        """
        if noise_var is None:
            return self.log_prob
        assert self.squares is not None
        log_noise = (2 * math.pi * noise_var).log()
        return -0.5 * (self.squares / noise_var + self.num_rows * log_noise)

    @property
    def num_rows(self) -> int:
        """N·C."""
        return self.count * self.num_outputs

    @property
    def error(self) -> float:
        """The mean squared residual."""
        assert self.squares is not None
        return float(self.squares) / self.num_rows


def _total(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if one is None or other is None else one + other
