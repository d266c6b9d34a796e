"""Torchmetrics: scores of predictions whose states are sums, so that devices and batches add up.

A state has as many numbers as bins or levels, however many points there are. Scores are those of
`net2gp.metrics` but for rounding; `RiskCoverage` has them at the edges of its bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    MultivariateNormal,
    Normal,
)

from net2gp import metrics
from net2gp.errors import InputError, check_count
from net2gp.metrics.checks import checked_classes

try:
    from torchmetrics import Metric
except ImportError as error:
    raise ImportError(
        "these metrics need torchmetrics: pip install 'net2gp[torchmetrics]'."
    ) from error

__all__ = [
    "BrierScore",
    "CalibrationError",
    "Coverage",
    "NegativeLogLikelihood",
    "RiskCoverage",
]

Prediction = Distribution | Tensor


class _Sums(Metric):
    """A metric whose states are sums over points, in float64."""

    full_state_update = False
    count: Tensor

    def _sum(self, name: str, *shape: int) -> None:
        self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def _seen(self) -> Tensor:
        if not bool(self.count.sum()):
            raise InputError(
                f"{type(self).__name__} has seen no point yet. Call update(prediction, y)."
            )
        return self.count


def _classes(prediction: Prediction, y: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities (N, C) and labels (N,), of a law or of probabilities."""
    found = prediction
    if isinstance(prediction, Categorical | Bernoulli):
        found = prediction.probs
    if not isinstance(found, Tensor):
        raise InputError(
            f"labels are predicted by probabilities, but got {type(prediction).__name__}. Pass "
            "posterior.predict(x) of a classifier, or its probs."
        )
    probs, labels = checked_classes(found, y)
    return probs.double(), labels


class NegativeLogLikelihood(_Sums):
    """−log p(y) on average over points: `metrics.nll`.

    >>> from torch.distributions import Categorical
    >>> score = NegativeLogLikelihood()
    >>> score.update(Categorical(torch.tensor([[0.5, 0.5]])), torch.tensor([0]))
    >>> score.compute()
    tensor(0.6931, dtype=torch.float64)
    """

    higher_is_better = False
    total: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._sum("total")
        self._sum("count")

    def update(self, prediction: Distribution, y: Tensor) -> None:
        """Add points.

        Args:
            prediction: The law of y at each point, as `posterior.predict(x)` gives it.
            y: The targets.
        """
        self.total += metrics.nll(prediction, y).double() * len(y)
        self.count += len(y)

    def compute(self) -> Tensor:
        """The mean over all points."""
        count = self._seen()
        return self.total / count


class BrierScore(_Sums):
    """Σ_c (p_c − [y = c])² on average over points: `metrics.brier`.

    >>> score = BrierScore()
    >>> score.update(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    >>> score.compute()
    tensor(0.5000, dtype=torch.float64)
    """

    higher_is_better = False
    total: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._sum("total")
        self._sum("count")

    def update(self, prediction: Prediction, y: Tensor) -> None:
        """Add points.

        Args:
            prediction: `posterior.predict(x)`, or probabilities (N, C) or (N,).
            y: The labels, (N,).
        """
        probs, y = _classes(prediction, y)
        self.total += metrics.brier(probs, y) * len(y)
        self.count += len(y)

    def compute(self) -> Tensor:
        """The mean over all points."""
        count = self._seen()
        return self.total / count


class CalibrationError(_Sums):
    """Σ_b n_b/N |accuracy_b − confidence_b| over bins: `metrics.expected_calibration_error`.

    Args:
        num_bins: The number of bins B of equal width; the state has 3·B numbers.
        **options: Those of `torchmetrics.Metric`.

    >>> score = CalibrationError(num_bins=1)
    >>> score.update(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
    >>> score.compute()
    tensor(0.3500, dtype=torch.float64)
    """

    higher_is_better = False
    confidence: Tensor
    correct: Tensor

    def __init__(self, num_bins: int = 15, **options: Any) -> None:
        super().__init__(**options)
        check_count(num_bins, "num_bins")
        self.num_bins = num_bins
        for name in ("confidence", "correct", "count"):
            self._sum(name, num_bins)

    def update(self, prediction: Prediction, y: Tensor) -> None:
        """Add points.

        Args:
            prediction: `posterior.predict(x)`, or probabilities (N, C) or (N,).
            y: The labels, (N,).
        """
        bins = metrics.reliability(*_classes(prediction, y), self.num_bins)
        self.confidence += (bins.confidence * bins.count).nan_to_num(0)
        self.correct += (bins.accuracy * bins.count).nan_to_num(0)
        self.count += bins.count

    def compute(self) -> Tensor:
        """The error over all points."""
        count = self._seen()
        return (self.correct - self.confidence).abs().sum() / count.sum()


class Coverage(_Sums):
    """The share of targets within central intervals of a Gaussian prediction: `metrics.coverage`.

    Args:
        levels: The probabilities of the intervals: a number, or several.
        **options: Those of `torchmetrics.Metric`.

    >>> score = Coverage(0.9)
    >>> score.update((torch.zeros(2, 1), torch.ones(2, 1)), torch.tensor([[0.0], [3.0]]))
    >>> score.compute()
    tensor(0.5000, dtype=torch.float64)
    """

    inside: Tensor

    def __init__(self, levels: float | Sequence[float] = 0.9, **options: Any) -> None:
        super().__init__(**options)
        self.levels = levels if isinstance(levels, float | int) else tuple(levels)
        self._sum("inside", *(() if isinstance(self.levels, float | int) else (len(self.levels),)))
        self._sum("count")

    def update(self, prediction: Distribution | tuple[Tensor, Tensor], y: Tensor) -> None:
        """Add points.

        Args:
            prediction: `posterior.predict(x)` under Gaussian noise, or mean and variance.
            y: The targets, in the shape of the mean.
        """
        mean, var = (value.double() for value in _moments(prediction))
        level = torch.tensor(self.levels, dtype=torch.float64, device=mean.device)
        self.inside += metrics.coverage(mean, var, y.double(), level) * y.numel()
        self.count += y.numel()

    def compute(self) -> Tensor:
        """The share at each level."""
        count = self._seen()
        return self.inside / count


def _moments(prediction: Distribution | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance of a Gaussian prediction."""
    if isinstance(prediction, tuple):
        return prediction
    base = prediction.base_dist if isinstance(prediction, Independent) else prediction
    if not isinstance(base, Normal | MultivariateNormal):
        raise InputError(
            f"Coverage is that of Gaussian intervals, but got {type(base).__name__}. Pass "
            "posterior.predict(x) under Gaussian noise, or (mean, variance) to take the law as a Gaussian."
        )
    return base.mean, base.variance


class RiskCoverage(_Sums):
    """The mean loss of what is kept if the least certain points are refused: `metrics.risk_coverage`.

    Uncertainties fall into bins of equal width, and what lies beyond the range into the first or last one. At
    each edge of a bin coverage and risk are exact; between two edges nothing is known.

    Args:
        num_bins: The number of bins B; the state has 2·B numbers.
        low: The lowest uncertainty.
        high: The highest uncertainty, 1 for one minus the largest probability; log C for the entropy.
        **options: Those of `torchmetrics.Metric`.

    >>> score = RiskCoverage(num_bins=2)
    >>> score.update(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([0.0, 1.0, 1.0]))
    >>> score.compute()
    (tensor([0.6667, 1.0000], dtype=torch.float64), tensor([0.5000, 0.6667], dtype=torch.float64))
    """

    loss: Tensor

    def __init__(
        self, num_bins: int = 100, low: float = 0.0, high: float = 1.0, **options: Any
    ) -> None:
        super().__init__(**options)
        check_count(num_bins, "num_bins")
        if not low < high:
            raise InputError(
                f"low must be below high, but they are {low} and {high}. Try 0.0 and 1.0."
            )
        self.num_bins, self.low, self.high = num_bins, float(low), float(high)
        self._sum("loss", num_bins)
        self._sum("count", num_bins)

    def update(self, uncertainty: Tensor, loss: Tensor) -> None:
        """Add points.

        Args:
            uncertainty: A number for each point, larger where it is less certain: (N,).
            loss: The loss at each point, (N,), such as 1 where a label is wrong.
        """
        metrics.risk_coverage(uncertainty, loss)  # refuses what cannot be ranked
        uncertainty, loss = uncertainty.double().reshape(-1), loss.double().reshape(-1)
        edges = torch.linspace(
            self.low, self.high, self.num_bins + 1, dtype=torch.float64, device=uncertainty.device
        )
        index = torch.bucketize(uncertainty, edges[1:-1])
        self.loss.index_add_(0, index, loss)
        self.count.index_add_(0, index, torch.ones_like(loss))

    def compute(self) -> tuple[Tensor, Tensor]:
        """Coverage and risk at the upper edges of the bins that have points."""
        count = self._seen()
        some = count > 0
        kept = count[some].cumsum(0)
        risk = self.loss[some].cumsum(0) / kept
        return kept / kept[-1], risk
