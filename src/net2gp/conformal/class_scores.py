"""How little a class fits its predicted probabilities: the classes whose scores are small form the set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, distributions
from torch.distributions import Distribution

from net2gp.errors import InputError, check_count, check_finite, check_generator, check_positive
from net2gp.inputs import describe
from net2gp.tags import savable


class ClassScore(ABC):
    """A score of each class under predicted probabilities. A set holds the classes of the smaller scores."""

    @abstractmethod
    def scores(self, probs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Compute the scores of all classes.

        Args:
            probs: The probabilities of K classes at N points, (N, K), float64.
            generator: Draws the random numbers, if the score has some.

        Returns:
            The scores, (N, K).
        """


@savable("conformal.ClassProbability")
@dataclass(frozen=True)
class ClassProbability(ClassScore):
    """s_c = −p_c: a set holds the classes above one threshold of probability. Sets are small on average.

    This is the score LAC (1 − p_c orders classes in the same way). Where no class reaches the threshold, the
    set is empty.

    >>> ClassProbability().scores(torch.tensor([[0.75, 0.25]]), None)
    tensor([[-0.7500, -0.2500]])

    Reference: Sadinle, Lei and Wasserman, Least ambiguous set-valued classifiers with bounded error levels,
    JASA 2019.
    """

    def scores(self, probs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Compute −p: (N, K)."""
        return -probs


@savable("conformal.CumulativeProbability")
@dataclass(frozen=True)
class CumulativeProbability(ClassScore):
    """s_c = Σ p_b over the classes b that are more probable than c.

    With a penalty, penalty · max(0, rank_c − free_classes) is added, where the most probable class has rank
    1. A set holds the most probable classes until their probabilities sum up far enough, so that it grows
    where the posterior is unsure, and is never empty if there is no penalty on the first class. If the most
    probable class alone is right often enough for alpha, it is the set everywhere, and more is covered than
    promised. The score is APS with a random share of 0, and with a penalty RAPS.

    Args:
        penalty: What each class after the first `free_classes` costs; 0 for none.
        free_classes: How many classes cost nothing.

    Raises:
        InputError: If the penalty is negative, or if `free_classes` is no whole number.

    >>> CumulativeProbability().scores(torch.tensor([[0.25, 0.75]]), None)
    tensor([[0.7500, 0.0000]])

    References: Romano, Sesia and Candès, Classification with valid and adaptive coverage, NeurIPS 2020.
    Angelopoulos et al., Uncertainty sets for image classifiers using conformal prediction, ICLR 2021.
    """

    penalty: float = 0.0
    free_classes: int = 1

    def __post_init__(self) -> None:
        check_positive(self.penalty, "penalty", zero=True, single=True)
        check_count(self.free_classes, "free_classes", zero=True)

    def scores(self, probs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Compute the sums of the probabilities before each class: (N, K)."""
        return self._sums(probs, 0.0)

    def _sums(self, probs: Tensor, share: Tensor | float) -> Tensor:
        """The sums, in which each class's own probability counts to a share."""
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        before = torch.cat([torch.zeros_like(ordered[:, :1]), ordered.cumsum(-1)[:, :-1]], -1)
        place = torch.arange(1, probs.shape[-1] + 1).to(probs)
        sums = before + share * ordered + self.penalty * (place - self.free_classes).clamp(min=0)
        return torch.zeros_like(sums).scatter(-1, order, sums)


@savable("conformal.RandomizedCumulativeProbability")
@dataclass(frozen=True)
class RandomizedCumulativeProbability(CumulativeProbability):
    """The sums of `CumulativeProbability`, in which a random share u of the class's own probability counts.

    With u uniform on (0, 1), one for each point, the scores of a posterior with the right probabilities are
    uniform, and the promise is met exactly and not exceeded. A set may be empty. This is APS, and with a
    penalty RAPS.

    Args:
        penalty: What each class after the first `free_classes` costs; 0 for none.
        free_classes: How many classes cost nothing.

    >>> score = RandomizedCumulativeProbability()
    >>> drawn = score.scores(torch.tensor([[0.25, 0.75]]), torch.Generator().manual_seed(0))
    >>> bool(0.0 <= drawn[0, 1] <= 0.75 <= drawn[0, 0])
    True

    Reference: Romano, Sesia and Candès, Classification with valid and adaptive coverage, NeurIPS 2020.
    """

    def scores(self, probs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Compute the sums, in which a random share of each class's own probability counts: (N, K)."""
        check_generator(generator)
        device = "cpu" if generator is None else generator.device
        share = torch.rand(len(probs), 1, generator=generator, dtype=probs.dtype, device=device)
        return self._sums(probs, share.to(probs.device))


@savable("conformal.ByClass")
@dataclass(frozen=True)
class ByClass:
    """Groups of points by their class: each class is covered with the promised probability.

    Pass it as `groups` to `calibrate_sets`. Every class has a threshold of its own then. A class without
    calibration points is in every set.

    Reference: Vovk, Conditional validity of inductive conformal predictors, ACML 2012.
    """


def check_class_score(score: object) -> None:
    """Raise unless `score` is a score of classes.

    Args:
        score: What was passed as `score`.

    Raises:
        InputError: If it is anything else.
    """
    if not isinstance(score, ClassScore):
        raise InputError(
            "score must be ClassProbability(), CumulativeProbability() or RandomizedCumulativeProbability() "
            f"for classes, but is {score if isinstance(score, type) else describe(score)}. Pass "
            "score=ClassProbability()."
        )


def class_probabilities(law: Distribution) -> Tensor:
    """Take the probabilities of all classes from a law of labels.

    Args:
        law: The predicted law of N points with one label each.

    Returns:
        The probabilities, (N, K), float64; two classes, 0 and 1, for a binary label.

    Raises:
        InputError: If the law is of numbers or of several labels per point, or not finite.
    """
    if isinstance(law, distributions.Bernoulli):
        if law.probs.shape[-1] != 1:
            raise InputError(
                f"a set is for one label per point, but this posterior predicts {law.probs.shape[-1]} binary "
                "labels per point. Calibrate a posterior for each label."
            )
        # a difference of two probabilities would lose the digits of small ones
        probs = torch.cat([(-law.logits.double()).sigmoid(), law.logits.double().sigmoid()], -1)
    elif isinstance(law, distributions.Categorical):
        probs = law.probs.double()
    else:
        raise InputError(
            "this posterior predicts numbers, which have no sets of classes. Use "
            "conformal.calibrate_intervals."
        )
    check_finite(probs, "the predicted probability")
    return probs
