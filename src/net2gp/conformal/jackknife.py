"""Prediction intervals from the posterior's own data, each point of which is left out in turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from net2gp.conformal.answers import Intervals, rounded_outwards
from net2gp.conformal.calibration import check_posterior
from net2gp.conformal.interval_scores import (
    IntervalScore,
    StandardizedResidual,
    check_interval_score,
)
from net2gp.conformal.promise import Promise
from net2gp.conformal.ranks import (
    Groups,
    check_alpha,
    kth_smallest,
    make_groups,
    misses,
    rank,
    warn_of_few,
)
from net2gp.errors import InputError, NotAvailable
from net2gp.inputs import chunks, num_rows
from net2gp.likelihoods.laws import Variances, gaussian_law
from net2gp.likelihoods.targets import shape_targets
from net2gp.likelihoods.traits import has_gaussian_noise, tied_points
from net2gp.methods.explain.influence import Removal, removal
from net2gp.posteriors import Posterior
from net2gp.posteriors.condition import ByConditioning
from net2gp.tags import savable
from net2gp.types import Inputs

NUMBERS = 2**22
"""The most means of leave-one-out predictions, or covariances with training outputs, held at once."""


@torch.no_grad()
def jackknife_plus(
    posterior: Posterior,
    *,
    alpha: float = 0.1,
    score: IntervalScore | None = None,
    groups: Tensor | None = None,
) -> JackknifeIntervals:
    """Return prediction intervals from all data, with no point set aside: the jackknife+.

    Let R_n be the score of training point n under the posterior without it. At a new x each of these N
    posteriors gives the interval of the targets whose score is at most R_n. The lower end is the
    ⌊alpha(N + 1)⌋-th smallest of the N lower ends, and the upper end is the ⌈(1 − alpha)(N + 1)⌉-th smallest
    of the upper ends. A new target is covered with probability above 1 − 2·alpha if the points are
    exchangeable (`coverage` has the exact bound), and usually with about 1 − alpha. All N posteriors come
    from one factorization, in closed form.

    The promise is for a kernel, noise and prior mean that were not chosen with these data. If their few
    numbers were tuned on them, each left-out point took part in that, and the promise holds approximately.
    If a network was trained on them, it does not hold: `laplace` is refused, and for the kernel of a network
    that was trained on these data use `calibrate_intervals`.

    Cost: N solves here, O(N³); for M new points k(X, x), M solves, and O(M·N·C) memory in parts, O(M·N·C²) if
    the kernel couples outputs.

    Args:
        posterior: What `condition` or `adapt` return, with Gaussian noise.
        alpha: The share of misses that is usual, between 0 and 1; at most 2·alpha is certain.
        score: How far a target is from its prediction. None means `StandardizedResidual()`; `Jointly()` is
            for all targets of a point together.
        groups: Whole numbers, (N,). The promise then holds within each group by itself, and new points need
            their groups as well. None makes one promise for all points.

    Returns:
        The promise, whose method `intervals(x)` gives intervals.

    Raises:
        InputError: If alpha, the groups or the score have another form, or if each point has its own noise.
        NotAvailable: If the posterior does not hold its data, or cannot leave a point out exactly.

    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Gaussian
    >>> from net2gp.posteriors import condition
    >>> x = torch.linspace(-3, 3, 30, dtype=torch.float64)[:, None]
    >>> y = torch.sin(x) + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).double()
    >>> promise = jackknife_plus(condition(RBF(), (x, y), Gaussian(noise_var=0.01)), alpha=0.1)
    >>> promise
    JackknifeIntervals(level=0.9, coverage=0.8387, n=30, score=StandardizedResidual())
    >>> found = promise.intervals(torch.tensor([[0.5], [4.0]], dtype=torch.float64))
    >>> bool(found.width[1] > found.width[0])
    True

    References: Barber et al., Predictive inference with the jackknife+, Annals of Statistics 2021. With
    standardized residuals: Jaber et al., Conformal approach to Gaussian process surrogate evaluation with
    marginal coverage guarantees, Journal of Machine Learning for Modeling and Computing 2025.
    """
    check_posterior(posterior)
    alpha = check_alpha(alpha)
    score = StandardizedResidual() if score is None else score
    check_interval_score(score)
    _check_removable(posterior)
    count = num_rows(posterior.data[0])
    found, place = make_groups(groups, count)
    warn_of_few(alpha, found, "intervals are infinite there")
    f, taken = removal(posterior)
    law = posterior.likelihood.predict(gaussian_law(f.mean.double(), f.covariance_matrix.double()))
    y = shape_targets(law.mean, posterior.data[1]).double()
    return JackknifeIntervals(posterior, alpha, score, found, place, score.scores(law, y), taken)


@savable("conformal.JackknifeIntervals")
@dataclass(frozen=True, eq=False, repr=False)
class JackknifeIntervals(Promise):
    """Intervals from leaving each point out in turn: see `jackknife_plus`.

    Args:
        posterior: The posterior.
        alpha: The share of misses that is usual.
        score: How far a target is from its prediction.
        groups: The groups of the training points.
        place: The place of each training point's group, (N,).
        scores: The scores of the training points under the posterior without them, (N, D), or (N, 1).
        removal: What it takes to leave points out.
    """

    posterior: Posterior
    alpha: float
    score: IntervalScore
    groups: Groups
    place: Tensor = field(repr=False)
    scores: Tensor = field(repr=False)
    removal: Removal = field(repr=False)

    @property
    def coverage(self) -> float:
        """The bound 1 − (2⌊alpha(N + 1)⌋ − 1)/(N + 1) > 1 − 2·alpha, the smallest over groups."""
        bounds = (1 - (2 * misses(self.alpha, n) - 1) / (n + 1) for n in self.groups.counts)
        return min(1.0, max(0.0, min(bounds)))

    @torch.no_grad()
    def intervals(self, x: Inputs, *, groups: Tensor | None = None) -> Intervals:
        """Return an interval for each target of new points. Rounding moves its ends outwards.

        Args:
            x: M points.
            groups: Their groups, (M,), if the promise is made within groups.

        Returns:
            The intervals, (M, C), in the dtype of the prediction.

        Raises:
            InputError: If the points do not have the shape of the data, or if a group is missing or unknown.
        """
        own = self.posterior.mean(x)
        place = self.groups.index(groups, len(own)).to(self.scores.device)
        N, C, c = len(self.scores), self.posterior.num_outputs, self.removal.gain.shape[-1]
        size = max(1, NUMBERS // (N * max(C, c * c)))
        parts = zip(chunks(x, size), place.split(size), strict=True)
        found = [torch.stack(self._ends(part, mine)) for part, mine in parts]
        lower, upper = torch.cat(found, 1)
        return rounded_outwards(lower, upper, own.dtype)

    def _ends(self, x: Inputs, place: Tensor) -> tuple[Tensor, Tensor]:
        """The ends of the intervals at M points whose groups have these places: (M, C) each."""
        mean, variance = self.removal.moments(self.posterior, x)
        M, N, C = mean.shape
        law = self.posterior.likelihood.predict(
            Variances(mean.flatten(0, 1), variance.flatten(0, 1))
        )
        ends = self.score.interval(law, self.scores.repeat(M, 1))
        lower, upper = (end.reshape(M, N, C) for end in ends)
        found = torch.empty(2, M, C).to(lower)
        for g, count in enumerate(self.groups.counts):
            here, mine = place == g, self.place.to(place.device) == g
            k = rank(self.alpha, count)
            found[0, here] = -kth_smallest(-lower[here][:, mine], k, 1)
            found[1, here] = kth_smallest(upper[here][:, mine], k, 1)
        return found[0], found[1]


def _check_removable(posterior: Posterior) -> None:
    likelihood: Any = posterior.likelihood
    if posterior.x is not None and not (
        isinstance(posterior.recipe, ByConditioning) and has_gaussian_noise(likelihood)
    ):
        raise NotAvailable(
            "the jackknife+ needs the posterior without each of its points, exactly. That is known for what "
            "condition and adapt return under Gaussian noise, but this posterior is "
            f"{type(posterior.recipe).__name__} with {type(likelihood).__name__}. Use "
            "conformal.calibrate_intervals(posterior, held_out_data), or calibrate_sets for labels."
        )
    _ = posterior.data
    if tied_points(likelihood) is not None:
        raise InputError(
            "each training point has its own noise, so that the noise of a new point is not known. Condition "
            "with one noise variance, or use conformal.calibrate_intervals(posterior, held_out_data, "
            "likelihood=Gaussian(noise_var=...))."
        )
