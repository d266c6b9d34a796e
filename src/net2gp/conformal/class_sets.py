"""Sets of classes from calibration data that the posterior has not seen."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from net2gp.conformal.answers import ClassSets, slack
from net2gp.conformal.calibration import check_posterior, predict, predicted, thresholds
from net2gp.conformal.class_scores import (
    ByClass,
    ClassProbability,
    ClassScore,
    check_class_score,
    class_probabilities,
)
from net2gp.conformal.promise import SplitPromise
from net2gp.conformal.ranks import Groups, check_alpha, make_groups, warn_of_few
from net2gp.errors import InputError
from net2gp.posteriors import Posterior
from net2gp.tags import savable
from net2gp.types import Data, Inputs


def calibrate_sets(
    posterior: Posterior,
    data: Data,
    *,
    alpha: float = 0.1,
    score: ClassScore | None = None,
    groups: Tensor | ByClass | None = None,
    generator: torch.Generator | None = None,
) -> SplitSets:
    """Return sets of classes that hold a new label with probability 1 − alpha or more.

    The promise is the one of `calibrate_intervals`: with the k-th smallest score q of the n calibration
    labels and k = ⌈(1 − alpha)(n + 1)⌉, the set at x holds all classes with s(x, c) ≤ q. A new label is in
    its set with probability k/(n + 1) ≥ 1 − alpha or more if points are exchangeable given the posterior. If
    there are too few points for alpha, sets hold all classes, and `TooFewPoints` warns.

    Cost: one prediction for n points, and sorting.

    Args:
        posterior: Any posterior that predicts labels.
        data: n calibration points (x, y), or a DataLoader. Nothing may have been fitted or chosen with them.
        alpha: The share of misses that is allowed, between 0 and 1.
        score: How little a class fits. None means `ClassProbability()`.
        groups: Whole numbers, (n,). The promise then holds within each group by itself, and new points need
            their groups as well. `ByClass()` makes one promise per class, which needs no groups of new
            points. None makes one promise for all points.
        generator: Makes the draws of a score that has some repeatable. None uses torch's global random
            state.

    Returns:
        The promise, whose method `sets(x)` gives sets.

    Raises:
        InputError: If alpha, the data, the groups or the score have another form, or if the posterior
            predicts numbers.

    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Bernoulli
    >>> from net2gp.posteriors import condition
    >>> x = torch.linspace(-3, 3, 60, dtype=torch.float64)[:, None]
    >>> y = (x[:, 0] > 0).long()
    >>> posterior = condition(RBF(), (x[::2], y[::2]), Bernoulli())
    >>> promise = calibrate_sets(posterior, (x[1::2], y[1::2]), alpha=0.1)
    >>> promise.sets(torch.tensor([[-2.0], [2.0]], dtype=torch.float64)).labels()
    [tensor([0]), tensor([1])]

    Reference: Sadinle, Lei and Wasserman, Least ambiguous set-valued classifiers with bounded error levels,
    JASA 2019.
    """
    check_posterior(posterior)
    alpha = check_alpha(alpha)
    score = ClassProbability() if score is None else score
    check_class_score(score)
    law, y = predicted(posterior, data, None)
    probs, labels = class_probabilities(law), y.reshape(-1).long()
    by_class = isinstance(groups, ByClass)
    found, place = _groups(groups, labels, probs.shape[1])
    warn_of_few(alpha, found, "it is in every set" if by_class else "sets hold all classes there")
    scores = score.scores(probs, generator).gather(1, labels[:, None])
    return SplitSets(
        posterior, alpha, score, found, thresholds(scores, found, place, alpha), by_class
    )


def _groups(
    groups: Tensor | ByClass | None, labels: Tensor, num_classes: int
) -> tuple[Groups, Tensor]:
    if not isinstance(groups, ByClass):
        if isinstance(groups, type):
            raise InputError(f"groups is the class {groups.__name__}. Write {groups.__name__}().")
        return make_groups(groups, len(labels))
    counts = labels.bincount(minlength=num_classes)
    return Groups(torch.arange(num_classes), tuple(counts.tolist())), labels.cpu()


@savable("conformal.SplitSets")
@dataclass(frozen=True, eq=False, repr=False)
class SplitSets(SplitPromise):
    """Sets of classes that hold a new label with probability 1 − alpha or more: see `calibrate_sets`.

    Args:
        posterior: The posterior.
        alpha: The share of misses that is allowed.
        score: How little a class fits.
        groups: The groups of the calibration points, or the classes.
        thresholds: The largest score inside of a set, (G, 1).
        by_class: Whether the groups are the classes.
    """

    posterior: Posterior
    alpha: float
    score: ClassScore
    groups: Groups
    thresholds: Tensor = field(repr=False)
    by_class: bool = False

    def sets(
        self,
        x: Inputs,
        *,
        groups: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> ClassSets:
        """Return a set of classes for each new point.

        Args:
            x: N points.
            groups: Their groups, (N,), if the promise is made within groups that are not classes.
            generator: Makes the draws of a score that has some repeatable. None uses torch's global random
                state. Two calls with equal generators draw the same numbers for different points.

        Returns:
            The sets, (N, K).

        Raises:
            InputError: If the points do not have the shape of the data, or if a group is missing or unknown.
        """
        law = predict(self.posterior, x, None)
        probs = class_probabilities(law)
        q = self.thresholds.to(probs.device)
        q = q + slack(law.mean.dtype) * q.abs()
        if self.by_class:
            if groups is not None:
                raise InputError(
                    "the groups of this promise are the classes, which new points do not have yet. Leave "
                    "groups out."
                )
            q = q.mT
        else:
            q = q[self.groups.index(groups, len(probs)).to(probs.device)]
        return ClassSets(self.score.scores(probs, generator) <= q)
