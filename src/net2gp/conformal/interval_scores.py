"""How far a number is from its prediction, and the interval of the numbers that are not farther."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributions
from torch.distributions import Distribution

from net2gp.errors import InputError, NotAvailable, check_finite
from net2gp.inputs import describe
from net2gp.likelihoods.laws import Average
from net2gp.tags import savable

HALVINGS = 80
"""How often the bracket of a quantile is halved: to the last digit of float64."""

TINY = 1e-300
"""The smallest variance, so that a target without variance is on one side of its mean or the other."""


class IntervalScore(ABC):
    """A score s(y) ≥ 0 of a target under its predicted law, whose level sets {y: s(y) ≤ q} are intervals.

    Write both methods for a score of your own, and register it with `likelihoods.savable` to save it.
    """

    @abstractmethod
    def scores(self, law: Distribution, y: Tensor) -> Tensor:
        """Compute the scores of targets.

        Args:
            law: The predicted law of N points with D targets each.
            y: Targets, (N, D), float64.

        Returns:
            One score per target, (N, D), or one per point, (N, 1).
        """

    @abstractmethod
    def interval(self, law: Distribution, threshold: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the intervals of the targets whose scores are at most the thresholds.

        Args:
            law: The predicted law of N points with D targets each.
            threshold: Thresholds, (N, D), or (N, 1) for all targets of a point; infinity takes all numbers.

        Returns:
            The lower and the upper ends, (N, D), float64.
        """


@savable("conformal.StandardizedResidual")
@dataclass(frozen=True)
class StandardizedResidual(IntervalScore):
    """s = |y − E y| / √Var y, so that intervals are as wide as the posterior is unsure.

    >>> law = distributions.Normal(torch.tensor([[1.0]]), torch.tensor([[2.0]]))
    >>> StandardizedResidual().scores(law, torch.tensor([[4.0]]))
    tensor([[1.5000]], dtype=torch.float64)

    Reference: Lei et al., Distribution-free predictive inference for regression, JASA 2018, section 5.2.
    """

    def scores(self, law: Distribution, y: Tensor) -> Tensor:
        """Compute |y − E y| / √Var y: (N, D).

        Raises:
            InputError: If a variance is zero or infinite.
        """
        mean, std = law.mean.double(), law.variance.double().sqrt()
        bad = ~(std.isfinite() & (std > 0))
        if bool(bad.any()):
            raise InputError(
                f"the predicted variance is {float(std[bad][0]) ** 2:g} at {int(bad.any(-1).sum())} of "
                f"{len(std)} points, so that residuals cannot be standardized. Pass "
                "score=AbsoluteResidual(), or a likelihood whose variance is positive and finite."
            )
        return (y - mean).abs() / std

    def interval(self, law: Distribution, threshold: Tensor) -> tuple[Tensor, Tensor]:
        """Compute E y ± threshold · √Var y: (N, D)."""
        mean, std = law.mean.double(), law.variance.double().sqrt()
        # 0 · ∞ would be NaN
        half = torch.where(threshold.isinf(), threshold, threshold * std)
        return mean - half, mean + half


@savable("conformal.AbsoluteResidual")
@dataclass(frozen=True)
class AbsoluteResidual(IntervalScore):
    """s = |y − E y|, so that all intervals have the same width. Only the mean of the posterior counts.

    >>> law = distributions.Normal(torch.tensor([[1.0]]), torch.tensor([[2.0]]))
    >>> AbsoluteResidual().scores(law, torch.tensor([[4.0]]))
    tensor([[3.]], dtype=torch.float64)

    Reference: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005.
    """

    def scores(self, law: Distribution, y: Tensor) -> Tensor:
        """Compute |y − E y|: (N, D)."""
        return (y - law.mean.double()).abs()

    def interval(self, law: Distribution, threshold: Tensor) -> tuple[Tensor, Tensor]:
        """Compute E y ± threshold: (N, D)."""
        mean = law.mean.double()
        return mean - threshold, mean + threshold


@savable("conformal.PredictiveQuantile")
@dataclass(frozen=True)
class PredictiveQuantile(IntervalScore):
    """s = −log 2 min(F(y), 1 − F(y)): how far out y lies in its predicted law, whose distribution is F.

    Intervals go from one quantile of the predicted law to the opposite one, so that they are not symmetric if
    the law is not. For a Gaussian law they are those of `StandardizedResidual`. The law must be a mixture of
    Gaussians, as the predictions of `Gaussian`, `HeteroscedasticGaussian`, ensembles and deep processes are.

    >>> law = distributions.Normal(torch.tensor([[1.0]]), torch.tensor([[2.0]]))
    >>> PredictiveQuantile().scores(law, torch.tensor([[1.0]])).abs()
    tensor([[0.]], dtype=torch.float64)

    Reference: Chernozhukov, Wüthrich and Zhu, Distributional conformal prediction, PNAS 2021.
    """

    def scores(self, law: Distribution, y: Tensor) -> Tensor:
        """Compute −log 2 min(F(y), 1 − F(y)): (N, D).

        Raises:
            NotAvailable: If the law is no mixture of Gaussians.
        """
        logs, means, stds = gaussian_parts(law)
        below = _log_probability(y, logs, means, stds)
        above = _log_probability(-y, logs, -means, stds)
        return (-math.log(2) - torch.minimum(below, above)).clamp(min=0.0)

    def interval(self, law: Distribution, threshold: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the quantiles of the law that belong to the threshold on either side: (N, D).

        Raises:
            NotAvailable: If the law is no mixture of Gaussians.
        """
        logs, means, stds = gaussian_parts(law)
        lower = _quantile(threshold, logs, means, stds)
        return lower, -_quantile(threshold, logs, -means, stds)


@savable("conformal.Jointly")
@dataclass(frozen=True)
class Jointly(IntervalScore):
    """s = max_d s_d, the largest score of a point's targets, so that a box covers all of them together.

    Without it, each target is calibrated by itself, and each is covered with the promised probability.

    Args:
        score: The score of each target.

    Raises:
        InputError: If `score` is no score of numbers.

    >>> law = distributions.Normal(torch.zeros(1, 2), torch.tensor([[1.0, 2.0]]))
    >>> Jointly().scores(law, torch.tensor([[1.0, 4.0]]))
    tensor([[2.]], dtype=torch.float64)
    """

    score: IntervalScore = field(default_factory=StandardizedResidual)

    def __post_init__(self) -> None:
        check_interval_score(self.score)

    def scores(self, law: Distribution, y: Tensor) -> Tensor:
        """Compute the largest score of each point: (N, 1)."""
        return self.score.scores(law, y).amax(-1, keepdim=True)

    def interval(self, law: Distribution, threshold: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the box of a point from its one threshold: (N, D)."""
        return self.score.interval(law, threshold.expand(law.mean.shape))


def check_interval_score(score: object) -> None:
    """Raise unless `score` is a score of numbers.

    Args:
        score: What was passed as `score`.

    Raises:
        InputError: If it is anything else.
    """
    if not isinstance(score, IntervalScore):
        raise InputError(
            "score must be StandardizedResidual(), AbsoluteResidual(), PredictiveQuantile() or Jointly(...) "
            f"for numbers, but is {score if isinstance(score, type) else describe(score)}. Pass "
            "score=StandardizedResidual()."
        )


def check_law_of_numbers(law: Distribution) -> None:
    """Raise unless a law is of numbers and has a finite mean.

    Args:
        law: A predicted law.

    Raises:
        InputError: If the law is of labels, or if its mean is not finite.
    """
    if isinstance(law, distributions.Categorical | distributions.Bernoulli):
        raise InputError(
            "this posterior predicts labels, which have no intervals. Use conformal.calibrate_sets."
        )
    check_finite(law.mean, "the predicted mean")


def gaussian_parts(law: Distribution) -> tuple[Tensor, Tensor, Tensor]:
    """Take apart a law whose targets are mixtures of Gaussians.

    Args:
        law: The law of N points with D targets each.

    Returns:
        The logarithms of the weights, the means and the standard deviations of K parts: (N, D, K) each,
        float64.

    Raises:
        NotAvailable: If it is another law.
    """
    if isinstance(law, distributions.Independent):
        return gaussian_parts(law.base_dist)
    if isinstance(law, distributions.MultivariateNormal | distributions.Normal):
        mean, variance = law.mean.double()[..., None], law.variance.double()[..., None]
        return torch.zeros_like(mean), mean, variance.clamp(min=TINY).sqrt()
    if isinstance(law, Average):
        weights = law.weights.double().log()
        found = [gaussian_parts(one) for one in law.laws]
        logs = [parts[0] + weights[s].to(parts[0]) for s, parts in enumerate(found)]
        means, stds = (torch.cat([parts[i] for parts in found], -1) for i in (1, 2))
        return torch.cat(logs, -1), means, stds
    if isinstance(law, distributions.MixtureSameFamily):
        normal, mixture = law.component_distribution, law.mixture_distribution
        if isinstance(normal, distributions.Normal):
            weight = mixture.logits.log_softmax(-1).double().expand(normal.mean.shape)
            return weight, normal.mean.double(), normal.stddev.double()
    raise NotAvailable(
        "predictive quantiles are for laws that are mixtures of Gaussians, but this posterior predicts a "
        f"{type(law).__name__}. Pass score=StandardizedResidual(), or AbsoluteResidual() if the variance is "
        "infinite."
    )


def _log_probability(y: Tensor, logs: Tensor, means: Tensor, stds: Tensor) -> Tensor:
    """log F(y), accurate in the lower tail: (N, D)."""
    z = (y[..., None] - means) / stds
    return (logs + torch.special.log_ndtr(z)).logsumexp(-1)


def _quantile(threshold: Tensor, logs: Tensor, means: Tensor, stds: Tensor) -> Tensor:
    """The y in the lower half of the law with log F(y) = −threshold − log 2: (N, D)."""
    infinite = threshold.isinf().expand(means.shape[:-1])
    depth = torch.where(threshold.isinf(), 0.0, threshold) + math.log(2)
    # Φ(−t) ≤ exp(−t²/2) bounds the quantile from below; at the largest mean F is at least ½
    low = (means - (2 * depth).sqrt()[..., None] * stds).amin(-1)
    high = means.amax(-1)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        beyond = _log_probability(middle, logs, means, stds) > -depth
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    return torch.where(infinite, -torch.inf, (low + high) / 2)
