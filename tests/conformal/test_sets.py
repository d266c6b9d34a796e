"""Laws of sets of classes: coverage in exact arithmetic, slow references of the scores, classes as groups."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor, distributions

import net2gp as n2g
from conformal.cases import classification, labeled, noisy, perceptron, regression, seeded, without
from net2gp import conformal
from net2gp.conformal import (
    ByClass,
    ClassProbability,
    CumulativeProbability,
    RandomizedCumulativeProbability,
    TooFewPoints,
    calibrate_sets,
)
from net2gp.conformal.class_scores import class_probabilities
from net2gp.errors import InputError

FIXED = (
    ClassProbability(),
    CumulativeProbability(),
    CumulativeProbability(penalty=0.1, free_classes=1),
)
POSTERIOR = classification()


@pytest.mark.parametrize(("score", "alpha"), [*zip(FIXED, ["0.1", "0.29", "0.5"], strict=True)])
def test_exchangeable_points_are_covered_exactly_as_promised(score, alpha) -> None:
    x, y = labeled(24, 1)
    covered = 0
    for new in range(24):
        rest = without(24, new)
        promise = calibrate_sets(POSTERIOR, (x[rest], y[rest]), alpha=float(alpha), score=score)
        covered += int(promise.sets(x[new : new + 1]).contains(y[new : new + 1]))
    promised = math.ceil((1 - Fraction(alpha)) * 24)
    assert promise.coverage == promised / 24
    right = int((POSTERIOR.predict(x).probs.argmax(-1) == y).sum())
    equal = right if isinstance(score, CumulativeProbability) else 0  # the first class has score 0
    assert covered == max(promised, equal)


def test_draws_of_probability_right_posteriors_have_uniform_scores() -> None:
    """The law behind the exactness of the randomized score, tested by its moments and its distribution."""
    raw = torch.randn(20000, 5, generator=seeded(0), dtype=torch.float64)
    probs = (2 * raw).softmax(-1)
    y = probs.multinomial(1, generator=seeded(1))
    found = RandomizedCumulativeProbability().scores(probs, seeded(2)).gather(1, y)[:, 0]
    gaps = found.sort().values - (torch.arange(20000) + 0.5) / 20000
    assert float(gaps.abs().max()) < 1.63 / math.sqrt(20000)  # Kolmogorov's bound at 1 %


@pytest.mark.parametrize("penalty", [0.0, 0.3])
@pytest.mark.parametrize("randomized", [False, True])
def test_cumulative_scores_are_sums_over_classes_that_are_more_probable(
    randomized, penalty
) -> None:
    probs = torch.rand(6, 4, generator=seeded(0), dtype=torch.float64)
    probs = probs / probs.sum(-1, keepdim=True)
    kind = RandomizedCumulativeProbability if randomized else CumulativeProbability
    found = kind(penalty=penalty, free_classes=2).scores(probs, seeded(3))
    share = (
        torch.rand(6, 1, generator=seeded(3), dtype=torch.float64)
        if randomized
        else torch.zeros(6, 1)
    )
    for n in range(6):
        for c in range(4):
            above = [p for p in probs[n].tolist() if p > float(probs[n, c])]
            expected = sum(above) + float(share[n]) * float(probs[n, c])
            expected += penalty * max(0, len(above) - 1)
            assert float(found[n, c]) == pytest.approx(expected, abs=1e-14)


def test_randomized_sets_repeat_with_their_generator_and_fixed_ones_are_never_empty() -> None:
    data, x = labeled(60, 1), labeled(40, 9)[0]
    score = RandomizedCumulativeProbability()
    one, other = (
        calibrate_sets(POSTERIOR, data, score=score, generator=seeded(4)) for _ in range(2)
    )
    assert torch.equal(one.thresholds, other.thresholds)
    found = one.sets(x, generator=seeded(5))
    assert torch.equal(found.members, other.sets(x, generator=seeded(5)).members)
    fixed = calibrate_sets(POSTERIOR, data, score=CumulativeProbability())
    assert int(fixed.sets(x).sizes.min()) == 1


@pytest.mark.parametrize("score", FIXED)
def test_permutations_alpha_and_one_group(score) -> None:
    x, y = labeled(50, 1)
    order, new = torch.randperm(50, generator=seeded(0)), labeled(10, 3)[0]
    plain = calibrate_sets(POSTERIOR, (x, y), score=score)
    turned = calibrate_sets(POSTERIOR, (x[order], y[order]), score=score)
    one = calibrate_sets(POSTERIOR, (x, y), score=score, groups=torch.zeros(50).long())
    torch.testing.assert_close(turned.thresholds, plain.thresholds, rtol=1e-12, atol=0)
    assert torch.equal(one.thresholds, plain.thresholds)
    sets = [
        calibrate_sets(POSTERIOR, (x, y), alpha=a, score=score).sets(new) for a in (0.05, 0.3, 0.7)
    ]
    for large, small in itertools.pairwise(sets):
        assert bool((large.members | ~small.members).all())
    assert int(sets[0].sizes.sum()) > int(sets[-1].sizes.sum())


def test_every_class_is_covered_with_classes_as_groups() -> None:
    """Among n_c + 1 exchangeable points of a class, ⌈(1 − alpha)(n_c + 1)⌉ are covered, in each class."""
    x, y = labeled(36, 1)
    covered = torch.zeros(3, dtype=torch.long)
    for new in range(36):
        rest = without(36, new)
        promise = calibrate_sets(POSTERIOR, (x[rest], y[rest]), alpha=0.25, groups=ByClass())
        covered[y[new]] += int(promise.sets(x[new : new + 1]).contains(y[new : new + 1]))
    expected = [math.ceil(Fraction(3, 4) * int((y == c).sum())) for c in range(3)]
    assert covered.tolist() == expected
    with pytest.raises(
        InputError, match=r"the groups of this promise are the classes.*Leave groups out"
    ):
        promise.sets(x, groups=y)


def test_a_class_without_examples_is_in_every_set() -> None:
    x, y = labeled(60, 1)
    keep = y != 2
    with pytest.warns(TooFewPoints, match=r"at least 9 .* group 2 has only 0: it is in every set"):
        promise = calibrate_sets(POSTERIOR, (x[keep], y[keep]), groups=ByClass())
    assert bool(promise.sets(x).members[:, 2].all())
    assert not bool(promise.sets(x).members[:, :2].all())


def test_too_few_points_give_all_classes() -> None:
    with pytest.warns(TooFewPoints, match=r"at least 19 .* only 18: sets hold all classes"):
        promise = calibrate_sets(POSTERIOR, labeled(18, 1), alpha=0.05)
    assert bool(promise.sets(labeled(5, 3)[0]).members.all())


def test_binary_labels_have_two_classes() -> None:
    x, y = noisy(40, 1)
    labels = (y[:, 0] > 0).long()
    posterior = n2g.condition(n2g.RBF(), (x[:20], labels[:20]), n2g.Bernoulli())
    probs = class_probabilities(posterior.predict(x))
    torch.testing.assert_close(probs[:, 1:], posterior.predict(x).probs)
    torch.testing.assert_close(probs.sum(-1), torch.ones(40, dtype=torch.float64))
    for y_cal in (labels[20:], labels[20:, None].double()):
        found = calibrate_sets(posterior, (x[20:], y_cal), alpha=0.2).sets(x[20:])
        assert found.members.shape == (20, 2)
        assert int(found.contains(y_cal).sum()) >= 16


@pytest.mark.parametrize("which", ["ordinal", "codes"])
def test_other_posteriors_of_labels(which) -> None:
    x, y = labeled(60, 1)
    known, held_out = (x[:30], y[:30]), (x[30:], y[30:])
    if which == "ordinal":
        likelihood = n2g.likelihoods.Ordinal(torch.tensor([-0.5, 0.5], dtype=torch.float64))
        posterior = n2g.condition(n2g.RBF(), known, likelihood)
    else:
        posterior = n2g.adapt_classes(perceptron(2, 1), known)
    found = calibrate_sets(posterior, held_out, alpha=0.2).sets(x[30:])
    assert int(found.contains(y[30:]).sum()) == math.ceil(0.8 * 31)


def test_sets_list_their_labels() -> None:
    found = calibrate_sets(POSTERIOR, labeled(30, 1)).sets(labeled(4, 3)[0])
    assert [len(labels) for labels in found.labels()] == found.sizes.tolist()
    for bad in (torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1]), torch.tensor([0, -1, 0, 0])):
        with pytest.raises(InputError, match=r"y must hold 4 labels from 0 to 2"):
            found.contains(bad)


def test_saved_sets_are_the_same(tmp_path) -> None:
    x, y = labeled(60, 1)
    score = CumulativeProbability(penalty=0.1, free_classes=1)
    promise = calibrate_sets(POSTERIOR, (x, y), score=score, groups=ByClass())
    promise.save(tmp_path / "sets.safetensors")
    again = conformal.load(tmp_path / "sets.safetensors", perceptron(2, 3))
    assert torch.equal(again.sets(x).members, promise.sets(x).members)
    assert again.score == score


def several_labels() -> n2g.Posterior:
    x, y = noisy(20, 1, 2)
    return n2g.adapt(perceptron(1, 2), (x, (y > 0).long()), n2g.Bernoulli(), prior_var=1.0)


def data_with(y: Tensor) -> tuple[Tensor, Tensor]:
    return labeled(20, 1)[0], y


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.full((20,), 3), r"3"),
        (torch.full((20,), -100), r"labels of -100 mark points to ignore"),
        (torch.zeros(20), r"y"),
        (torch.zeros(20, 2).long(), r"y"),
        (torch.zeros(19).long(), r"x has 20 rows and y has 19"),
    ],
)
def test_other_labels_are_refused(y, message) -> None:
    with pytest.raises(InputError, match=message):
        calibrate_sets(POSTERIOR, data_with(y), alpha=0.5)


def test_other_posteriors_scores_and_groups_are_refused() -> None:
    data = labeled(20, 1)
    with pytest.raises(InputError, match=r"predicts numbers.*Use conformal\.calibrate_intervals"):
        calibrate_sets(regression(), noisy(20, 1))
    x, y = noisy(20, 7, 2)
    with pytest.raises(
        InputError, match=r"predicts 2 binary labels per point\. Calibrate a posterior"
    ):
        calibrate_sets(several_labels(), (x, (y > 0).long()))
    for score in (ClassProbability, "aps", conformal.AbsoluteResidual()):
        with pytest.raises(InputError, match=r"score must be ClassProbability\(\).* Pass score="):
            calibrate_sets(POSTERIOR, data, score=score)
    with pytest.raises(InputError, match=r"groups is the class ByClass\. Write ByClass\(\)"):
        calibrate_sets(POSTERIOR, data, groups=ByClass)
    with pytest.raises(InputError, match=r"penalty must be zero or positive"):
        CumulativeProbability(penalty=-1.0)
    with pytest.raises(InputError, match=r"free_classes must be zero or a positive whole number"):
        CumulativeProbability(free_classes=1.5)
    with pytest.raises(InputError, match=r"generator must be a torch\.Generator"):
        calibrate_sets(POSTERIOR, data, score=RandomizedCumulativeProbability(), generator=0)
    with pytest.raises(InputError, match=r"must be finite"):
        class_probabilities(
            distributions.Categorical(torch.full((1, 2), torch.nan), validate_args=False)
        )
