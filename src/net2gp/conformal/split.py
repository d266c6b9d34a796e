"""Prediction intervals from calibration data that the posterior has not seen."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from net2gp.conformal.answers import Intervals, rounded_outwards
from net2gp.conformal.calibration import check_posterior, predict, predicted, thresholds
from net2gp.conformal.interval_scores import (
    IntervalScore,
    StandardizedResidual,
    check_interval_score,
    check_law_of_numbers,
)
from net2gp.conformal.promise import SplitPromise
from net2gp.conformal.ranks import Groups, check_alpha, make_groups, warn_of_few
from net2gp.likelihoods.targets import shape_targets
from net2gp.posteriors import Posterior
from net2gp.tags import savable
from net2gp.types import Data, Inputs, Likelihood


def calibrate_intervals(
    posterior: Posterior,
    data: Data,
    *,
    alpha: float = 0.1,
    score: IntervalScore | None = None,
    groups: Tensor | None = None,
    likelihood: Likelihood | None = None,
) -> SplitIntervals:
    """Return prediction intervals that cover a new target with probability 1 − alpha or more.

    Let s_1, …, s_n be the scores of the calibration points, and q the k-th smallest of them with
    k = ⌈(1 − alpha)(n + 1)⌉. The interval at x holds all y with s(x, y) ≤ q. If the calibration points and
    the new point are exchangeable given the posterior, such as independent draws of one law, the rank of the
    new score is uniform, so that P(y in interval) ≥ k/(n + 1) ≥ 1 − alpha, with equality on the left if no
    scores are equal. This holds for every n, law of the data and posterior, however wrong the posterior is.
    It is a promise on average over calibration sets and x, not for each x. With several targets each is
    covered by itself; `score=Jointly()` covers all of a point together. If n < 1/alpha − 1, intervals are
    infinite, and `TooFewPoints` warns.

    Cost: one prediction for n points, and sorting.

    Args:
        posterior: Any posterior that predicts numbers.
        data: n calibration points (x, y), or a DataLoader. Nothing may have been fitted or chosen with them.
        alpha: The share of misses that is allowed, between 0 and 1.
        score: How far a target is from its prediction. None means `StandardizedResidual()`.
        groups: Whole numbers, (n,). The promise then holds within each group by itself, and new points need
            their groups as well. None makes one promise for all points.
        likelihood: Replaces the posterior's own likelihood, which is needed if that one holds the noise of
            each training point.

    Returns:
        The promise, whose method `intervals(x)` gives intervals.

    Raises:
        InputError: If alpha, the data, the groups or the score have another form, or if the posterior
            predicts labels.

    >>> import torch
    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Gaussian
    >>> from net2gp.posteriors import condition
    >>> x = torch.linspace(-3, 3, 60, dtype=torch.float64)[:, None]
    >>> y = torch.sin(x) + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).double()
    >>> posterior = condition(RBF(), (x[::2], y[::2]), Gaussian(noise_var=0.01))  # too small a variance
    >>> promise = calibrate_intervals(posterior, (x[1::2], y[1::2]), alpha=0.1)
    >>> round(promise.coverage, 3), round(float(promise.thresholds), 2)  # not 1.64
    (0.903, 4.82)
    >>> found = promise.intervals(torch.tensor([[0.5]], dtype=torch.float64))
    >>> bool(found.lower < found.upper)
    True

    Reference: Lei et al., Distribution-free predictive inference for regression, JASA 2018.
    """
    check_posterior(posterior)
    alpha = check_alpha(alpha)
    score = StandardizedResidual() if score is None else score
    check_interval_score(score)
    law, y = predicted(posterior, data, likelihood)
    check_law_of_numbers(law)
    found, place = make_groups(groups, len(y))
    warn_of_few(alpha, found, "intervals are infinite there")
    scores = score.scores(law, shape_targets(law.mean, y).double())
    q = thresholds(scores, found, place, alpha)
    return SplitIntervals(posterior, alpha, score, found, q, likelihood)


@savable("conformal.SplitIntervals")
@dataclass(frozen=True, eq=False, repr=False)
class SplitIntervals(SplitPromise):
    """Intervals that cover a new target with probability 1 − alpha or more: see `calibrate_intervals`.

    Args:
        posterior: The posterior.
        alpha: The share of misses that is allowed.
        score: How far a target is from its prediction.
        groups: The groups of the calibration points.
        thresholds: The largest score inside of an interval, (G, D), or (G, 1) for all targets together.
        likelihood: Replaces the posterior's own likelihood; None does not.
    """

    posterior: Posterior
    alpha: float
    score: IntervalScore
    groups: Groups
    thresholds: Tensor = field(repr=False)
    likelihood: Likelihood | None = None

    def intervals(self, x: Inputs, *, groups: Tensor | None = None) -> Intervals:
        """Return an interval for each target of new points. Rounding moves its ends outwards.

        Args:
            x: N points.
            groups: Their groups, (N,), if the promise is made within groups.

        Returns:
            The intervals, (N, D), in the dtype of the prediction.

        Raises:
            InputError: If the points do not have the shape of the data, or if a group is missing or unknown.
        """
        law = predict(self.posterior, x, self.likelihood)
        place = self.groups.index(groups, len(law.mean))
        q = self.thresholds.to(law.mean.device)[place.to(law.mean.device)]
        lower, upper = self.score.interval(law, q)
        return rounded_outwards(lower, upper, law.mean.dtype)
