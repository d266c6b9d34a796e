"""Laws of promises from calibration data: coverage in exact arithmetic, order, groups, files."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn

import net2gp as n2g
from conformal.cases import classification, labeled, noisy, perceptron, regression, seeded, without
from net2gp import conformal
from net2gp.conformal import (
    AbsoluteResidual,
    Jointly,
    PredictiveQuantile,
    StandardizedResidual,
    TooFewPoints,
    calibrate_intervals,
)
from net2gp.conformal.ranks import misses
from net2gp.errors import InputError, NotAvailable

SCORES = (StandardizedResidual(), AbsoluteResidual(), PredictiveQuantile())
ALPHAS = ("0.05", "0.1", "0.29", "0.5", "0.9")


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("score", [*SCORES, Jointly()])
def test_exchangeable_points_are_covered_exactly_as_promised(score, alpha) -> None:
    """If each of n + 1 points is the new one once, k are covered: the law for every exchangeable draw."""
    posterior, (x, y) = regression(), noisy(24, 1)
    covered = 0
    for new in range(24):
        rest = without(24, new)
        promise = calibrate_intervals(
            posterior, (x[rest], y[rest]), alpha=float(alpha), score=score
        )
        covered += int(promise.intervals(x[new : new + 1]).contains(y[new : new + 1]).item())
    assert covered == math.ceil((1 - Fraction(alpha)) * 24)
    assert promise.coverage == covered / 24
    assert promise.level == 1 - float(alpha)
    assert promise.coverage >= promise.level - 1e-12


@pytest.mark.parametrize("joint", [False, True])
def test_several_targets_are_covered_each_or_all_together(joint) -> None:
    posterior, (x, y) = regression(outputs=3), noisy(20, 1, outputs=3)
    score = Jointly(AbsoluteResidual()) if joint else AbsoluteResidual()
    covered = torch.zeros(3, dtype=torch.long)
    together = 0
    for new in range(20):
        rest = without(20, new)
        promise = calibrate_intervals(posterior, (x[rest], y[rest]), alpha=0.2, score=score)
        inside = promise.intervals(x[new : new + 1]).contains(y[new : new + 1])
        covered, together = covered + inside[0], together + int(inside.all())
    if joint:
        assert together == 16
    else:
        assert covered.tolist() == [16, 16, 16]
        assert together < 16


@pytest.mark.parametrize("score", SCORES)
def test_the_interval_is_the_set_of_targets_with_small_scores(score) -> None:
    posterior, (x, y) = regression(outputs=2), noisy(15, 1, outputs=2)
    promise = calibrate_intervals(posterior, (x, y), alpha=0.3, score=score)
    found, law = promise.intervals(x), posterior.predict(x)
    for share in torch.linspace(-0.5, 1.5, 41).tolist():
        candidate = found.lower + share * found.width
        inside = score.scores(law, candidate) <= promise.thresholds
        if min(abs(share), abs(share - 1)) > 1e-3:
            assert bool((inside == (0 < share < 1)).all())
    for end in (found.lower, found.upper):
        torch.testing.assert_close(
            score.scores(law, end), promise.thresholds.expand(15, 2), rtol=1e-9, atol=1e-9
        )


def test_permuting_calibration_points_changes_nothing() -> None:
    posterior, (x, y) = regression(), noisy(40, 1)
    groups, order = torch.arange(40) % 3, torch.randperm(40, generator=seeded(0))
    one = calibrate_intervals(posterior, (x, y), groups=groups)
    other = calibrate_intervals(posterior, (x[order], y[order]), groups=groups[order])
    assert torch.equal(one.thresholds, other.thresholds)
    assert one.groups.counts == other.groups.counts


def test_intervals_shrink_as_alpha_grows() -> None:
    posterior, data = regression(), noisy(50, 1)
    x = noisy(10, 2)[0]
    found = [calibrate_intervals(posterior, data, alpha=a).intervals(x) for a in (0.05, 0.2, 0.6)]
    for wide, narrow in itertools.pairwise(found):
        assert bool((wide.lower <= narrow.lower).all() & (narrow.upper <= wide.upper).all())
        assert bool((wide.width > narrow.width).all())


def test_one_group_is_no_groups_and_groups_are_calibrated_by_themselves() -> None:
    posterior, (x, y) = regression(), noisy(60, 1)
    plain = calibrate_intervals(posterior, (x, y))
    one = calibrate_intervals(posterior, (x, y), groups=torch.full((60,), 7))
    assert torch.equal(one.thresholds, plain.thresholds)
    assert one.coverage == plain.coverage
    new = noisy(5, 2)[0]
    same = one.intervals(new, groups=torch.full((5,), 7))
    assert torch.equal(same.lower, plain.intervals(new).lower)
    groups = (x[:, 0] > 0).long() * 5 - 2
    promise = calibrate_intervals(posterior, (x, y), groups=groups, alpha=0.2)
    for label in (-2, 3):
        own = calibrate_intervals(posterior, (x[groups == label], y[groups == label]), alpha=0.2)
        mine = promise.intervals(new, groups=torch.full((5,), label))
        assert torch.equal(mine.upper, own.intervals(new).upper)
    assert promise.coverage >= 0.8


def test_quantiles_and_standardized_residuals_of_gaussians_give_the_same_intervals() -> None:
    posterior, data, x = regression(2), noisy(40, 1, 2), noisy(10, 2)[0]
    one, other = (
        calibrate_intervals(posterior, data, score=score).intervals(x)
        for score in (StandardizedResidual(), PredictiveQuantile())
    )
    torch.testing.assert_close(one.lower, other.lower, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(one.upper, other.upper, rtol=1e-9, atol=1e-9)


def test_infinitely_good_calibration_of_the_true_law_leaves_its_quantiles() -> None:
    """With targets at the quantiles of the predicted law itself, the threshold is that of the law."""
    posterior, x = regression(), noisy(999, 3)[0]
    law = posterior.predict(x)
    u = (torch.randperm(999, generator=seeded(0)).double()[:, None] + 1) / 1000
    y = law.mean + law.stddev * torch.special.ndtri(u)
    promise = calibrate_intervals(posterior, (x, y), alpha=0.1)
    assert float(promise.thresholds) == pytest.approx(1.6449, abs=0.01)


@pytest.mark.parametrize(
    "likelihood",
    [
        n2g.HeteroscedasticGaussian(),
        n2g.likelihoods.StudentT(degrees_of_freedom=4.0, scale_var=0.1),
        n2g.likelihoods.Poisson(),
    ],
    ids=lambda likelihood: type(likelihood).__name__,
)
def test_any_likelihood_of_numbers_is_covered(likelihood) -> None:
    x, y = noisy(30, 1)
    y = y.abs().round() if isinstance(likelihood, n2g.likelihoods.Poisson) else y
    outputs = 2 if isinstance(likelihood, n2g.HeteroscedasticGaussian) else 1
    network = perceptron(1, outputs)
    posterior = n2g.adapt(network, (x[:10], y[:10]), likelihood, prior_var=0.1)
    covered = 0
    for new in range(20):
        rest = without(20, new)
        promise = calibrate_intervals(posterior, (x[10:][rest], y[10:][rest]), alpha=0.2)
        found = promise.intervals(x[10 + new : 11 + new])
        covered += int(found.contains(y[10 + new : 11 + new]).item())
    assert covered >= 16


def test_quantiles_of_mixtures_are_those_of_their_distribution() -> None:
    x, y = noisy(40, 1)
    posterior = n2g.adapt(
        perceptron(1, 2), (x[:10], y[:10]), n2g.HeteroscedasticGaussian(), prior_var=0.5
    )
    promise = calibrate_intervals(
        posterior, (x[10:], y[10:]), alpha=0.2, score=PredictiveQuantile()
    )
    found, base = promise.intervals(x), posterior.predict(x).base_dist
    tail = 0.5 * (-promise.thresholds[0]).exp()
    torch.testing.assert_close(base.cdf(found.lower), tail.expand(40, 1), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(1 - base.cdf(found.upper), tail.expand(40, 1), rtol=1e-6, atol=1e-9)


def test_quantiles_are_refused_where_the_law_is_no_mixture_of_gaussians() -> None:
    x, y = noisy(20, 1)
    likelihood = n2g.likelihoods.StudentT(degrees_of_freedom=1.5, scale_var=0.1)
    posterior = n2g.condition(n2g.RBF(), (x[:10], y[:10]), likelihood)
    held_out = (x[10:], y[10:])
    with pytest.raises(NotAvailable, match=r"a Integrated\. Pass score=StandardizedResidual"):
        calibrate_intervals(posterior, held_out, score=PredictiveQuantile())
    with pytest.raises(InputError, match=r"variance is inf at 10 of 10 points.*AbsoluteResidual"):
        calibrate_intervals(posterior, held_out)
    found = calibrate_intervals(posterior, held_out, alpha=0.5, score=AbsoluteResidual())
    assert bool(found.intervals(x).contains(y).any())
    with pytest.raises(InputError, match=r"y must be a tensor, but is an object of type ndarray"):
        found.intervals(x).contains(y.numpy())


def test_arrays_take_the_dtype_of_a_network_whose_data_were_streamed() -> None:
    x, y = noisy(30, 1)
    linearized = n2g.linearize(nn.Linear(1, 1).double().eval())
    stream = n2g.data.Stream((x[:10], y[:10]))
    posterior = n2g.condition(linearized.kernel(), stream, n2g.Gaussian(0.1))
    found = calibrate_intervals(posterior, (x[10:].numpy(), y[10:].numpy()))
    expected = calibrate_intervals(posterior, (x[10:], y[10:]))
    assert torch.equal(found.thresholds, expected.thresholds)


def test_mixtures_of_posteriors_are_covered_too() -> None:
    x, y = noisy(40, 1)
    network = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    posterior = n2g.bayes.ensemble(
        network,
        (x[:20], y[:20]),
        n2g.Gaussian(0.1),
        num_members=2,
        training=n2g.bayes.Training(num_steps=20),
    )
    for score in SCORES:
        promise = calibrate_intervals(posterior, (x[20:], y[20:]), alpha=0.2, score=score)
        inside = promise.intervals(x[20:]).contains(y[20:])
        assert int(inside.sum()) == math.ceil(0.8 * 21)


def test_too_few_points_give_infinite_intervals_and_say_how_many_it_takes() -> None:
    posterior, data = regression(), noisy(8, 1)
    with pytest.warns(
        TooFewPoints, match=r"alpha=0.1 takes at least 9 calibration points.* only 8"
    ):
        promise = calibrate_intervals(posterior, data, alpha=0.1)
    found = promise.intervals(data[0])
    assert bool((found.width == torch.inf).all())
    assert promise.coverage == 1.0
    with pytest.raises(NotAvailable, match=r"too few calibration points.*larger alpha"):
        promise.coverage_law()
    enough = calibrate_intervals(posterior, noisy(9, 1), alpha=0.1)
    assert bool(enough.intervals(data[0]).width.isfinite().all())
    groups = torch.tensor([4] * 3 + [1] * 20)
    with pytest.warns(TooFewPoints, match=r"group 4 has only 3: intervals are infinite"):
        calibrate_intervals(posterior, noisy(23, 1), groups=groups)


@pytest.mark.parametrize("score", SCORES)
def test_one_calibration_point_is_enough_for_half(score) -> None:
    promise = calibrate_intervals(regression(), noisy(1, 1), alpha=0.5, score=score)
    assert promise.coverage == 0.5
    assert bool(promise.intervals(noisy(3, 2)[0]).width.isfinite().all())


def test_alpha_is_the_decimal_number_that_was_typed() -> None:
    for percent in range(1, 100):
        assert misses(percent / 100, 99) == percent


def test_float32_keeps_its_dtype() -> None:
    x, y = (v.float() for v in noisy(40, 1))
    posterior = n2g.condition(n2g.RBF(), (x[:20], y[:20]), n2g.Gaussian(0.05))
    promise = calibrate_intervals(posterior, (x[20:].numpy(), y[20:].numpy()), alpha=0.2)
    found = promise.intervals(x)
    assert found.lower.dtype == torch.float32
    assert int(found.contains(y)[20:].sum()) >= math.ceil(0.8 * 21) - 1


def test_the_coverage_of_one_calibration_set_follows_its_law() -> None:
    """With true coverage known in closed form, its mean over calibration sets is that of the Beta law."""
    posterior = regression()
    x = torch.full((20, 1), 0.3, dtype=torch.float64)
    law = posterior.predict(x)
    found = []
    for seed in range(400):
        noise = torch.randn(20, 1, generator=seeded(seed), dtype=torch.float64)
        promise = calibrate_intervals(posterior, (x, law.mean + 3 * noise), alpha=0.2)
        half = promise.thresholds.item() * law.stddev[0, 0].item() / 3
        found.append(math.erf(half / math.sqrt(2)))
    beta, values = promise.coverage_law(), torch.tensor(found, dtype=torch.float64)
    assert float(beta.mean) == pytest.approx(promise.coverage)
    error = float(beta.stddev) / math.sqrt(400)
    assert abs(float(values.mean() - beta.mean)) < 4 * error
    assert float(values.std()) == pytest.approx(float(beta.stddev), rel=0.15)


def test_saved_intervals_are_the_same(tmp_path) -> None:
    network, (x, y) = perceptron(1, 1), noisy(60, 1)
    posterior = n2g.adapt(network, (x[:30], y[:30]), n2g.Gaussian(0.1), prior_var=1.0)
    groups = torch.arange(30) % 2
    promise = calibrate_intervals(
        posterior, (x[30:], y[30:]), groups=groups, score=Jointly(AbsoluteResidual())
    )
    promise.save(tmp_path / "promise.safetensors")
    again = conformal.load(tmp_path / "promise.safetensors", perceptron(1, 1))
    one, other = (p.intervals(x[:9], groups=torch.arange(9) % 2) for p in (promise, again))
    assert torch.equal(one.lower, other.lower)
    assert torch.equal(one.upper, other.upper)
    assert (again.coverage, again.score, str(again)) == (
        promise.coverage,
        promise.score,
        str(promise),
    )
    with pytest.raises(
        n2g.errors.FileFormatError, match=r"but SplitIntervals\. Read it with net2gp\.con"
    ):
        n2g.load(tmp_path / "promise.safetensors", network)
    with pytest.raises(InputError, match=r"SplitIntervals. It has a method save of its own"):
        n2g.save(promise, tmp_path / "other")
    posterior.save(tmp_path / "posterior.safetensors")
    with pytest.raises(
        n2g.errors.FileFormatError, match=r"a posterior alone. Read it with net2gp.load"
    ):
        conformal.load(tmp_path / "posterior.safetensors", network)


def test_a_likelihood_replaces_one_that_is_tied_to_training_points() -> None:
    x, y = noisy(40, 1)
    own = torch.full((20, 1), 0.1, dtype=torch.float64)
    posterior = n2g.condition(n2g.RBF(), (x[:20], y[:20]), n2g.Gaussian(own))
    held_out = (x[20:], y[20:])
    promise = calibrate_intervals(posterior, held_out, likelihood=n2g.Gaussian(0.1), alpha=0.2)
    plain = n2g.condition(n2g.RBF(), (x[:20], y[:20]), n2g.Gaussian(0.1))
    torch.testing.assert_close(
        promise.thresholds, calibrate_intervals(plain, held_out, alpha=0.2).thresholds
    )
    with pytest.raises(InputError, match=r"noise"):
        calibrate_intervals(posterior, held_out)


POSTERIOR = regression()
DATA = noisy(12, 1)


@pytest.mark.parametrize(
    "alpha", [0, 1, -0.1, 1.5, 90, "0.1", None, True, float("nan"), torch.ones(2)]
)
def test_alpha_lies_between_zero_and_one(alpha) -> None:
    with pytest.raises(
        InputError, match=r"alpha is the share of misses .* Pass alpha=0\.1 for a promise"
    ):
        calibrate_intervals(POSTERIOR, DATA, alpha=alpha)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((DATA[0], DATA[1].repeat(1, 2)), r"y must have shape \(12, 1\)"),
        ((DATA[0], DATA[1].long()), r"y must be a floating tensor for a regression"),
        ((DATA[0], DATA[1] * torch.nan), r"y must be finite"),
        ((DATA[0] * torch.nan, DATA[1]), r"x must be finite"),
        ((DATA[0].repeat(1, 2), DATA[1]), r"2"),
        ((DATA[0][:5], DATA[1]), r"x has 5 rows and y has 12"),
        ((DATA[0][:0], DATA[1][:0]), r"x is empty"),
        (DATA[0], r"data must be a pair \(x, y\)"),
        (POSTERIOR.data, r"are the data of the posterior.*conformal\.jackknife_plus\(posterior\)"),
    ],
)
def test_other_calibration_data_are_refused(data, message) -> None:
    with pytest.raises(InputError, match=message):
        calibrate_intervals(POSTERIOR, data, alpha=0.5)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (torch.zeros(12), r"one whole number per point.*Pass groups=groups\.long\(\)"),
        (torch.zeros(5).long(), r"a tensor of shape \(12,\), but is a tensor of shape \(5,\)"),
        (torch.zeros(12, 1).long(), r"a tensor of shape \(12,\)"),
        ([0] * 12, r"must hold one whole number per point.*but is a list"),
        ("region", r"groups must hold"),
    ],
)
def test_groups_are_whole_numbers_of_each_point(groups, message) -> None:
    with pytest.raises(InputError, match=message):
        calibrate_intervals(POSTERIOR, DATA, alpha=0.5, groups=groups)


def test_new_points_need_a_group_that_was_calibrated() -> None:
    new, groups = DATA[0][:2], torch.arange(12) % 2
    grouped = calibrate_intervals(POSTERIOR, DATA, alpha=0.5, groups=groups)
    plain = calibrate_intervals(POSTERIOR, DATA, alpha=0.5)
    with pytest.raises(
        InputError, match=r"group 9 has no calibration points.*are 0, 1\. Add points"
    ):
        grouped.intervals(new, groups=torch.tensor([0, 9]))
    with pytest.raises(InputError, match=r"group -1 has no calibration points"):
        grouped.intervals(new, groups=torch.tensor([0, -1]))
    with pytest.raises(
        InputError, match=r"within each of 2 groups.* pass groups=, a tensor of 2 labels"
    ):
        grouped.intervals(new)
    with pytest.raises(InputError, match=r"groups were given for new points, but none for the cal"):
        plain.intervals(new, groups=torch.tensor([0, 1]))


def test_other_posteriors_and_scores_are_refused() -> None:
    with pytest.raises(InputError, match=r"expected a posterior, but got an object of type Linear"):
        calibrate_intervals(nn.Linear(1, 1), DATA)
    with pytest.raises(InputError, match=r"predicts labels, .* Use conformal\.calibrate_sets"):
        calibrate_intervals(classification(), labeled(20, 1))
    for score in (AbsoluteResidual, "absolute", conformal.ClassProbability()):
        with pytest.raises(
            InputError, match=r"score must be StandardizedResidual\(\).* Pass score="
        ):
            calibrate_intervals(POSTERIOR, DATA, score=score)
    with pytest.raises(InputError, match=r"score must be StandardizedResidual\(\)"):
        Jointly(AbsoluteResidual)
    certain = n2g.condition(n2g.RBF(), (DATA[0][:1], DATA[1][:1]), n2g.Gaussian(0.0))
    same = (DATA[0][:1].repeat(2, 1), DATA[1][:1].repeat(2, 1))
    with pytest.raises(
        InputError, match=r"predicted variance is 0 at 2 of 2 points.*AbsoluteResidual"
    ):
        calibrate_intervals(certain, same, alpha=0.5)


def test_answers_check_what_they_are_compared_with() -> None:
    found = calibrate_intervals(POSTERIOR, DATA, alpha=0.5).intervals(DATA[0])
    with pytest.raises(InputError, match=r"y must have shape \(12, 1\)"):
        found.contains(torch.zeros(3))
    infinite = replace(found, lower=found.lower - torch.inf, upper=found.upper + torch.inf)
    assert bool(infinite.contains(DATA[1]).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", SCORES)
def test_rounding_loses_no_target_that_has_the_score_of_the_threshold(score, dtype) -> None:
    x, y = (v.to(dtype) for v in noisy(60, 1))
    posterior = n2g.condition(n2g.RBF(), (x[:20], y[:20]), n2g.Gaussian(0.05))
    for alpha in (0.1, 0.4):
        promise = calibrate_intervals(posterior, (x[20:], y[20:]), alpha=alpha, score=score)
        inside = [promise.intervals(x[n : n + 1]).contains(y[n : n + 1]) for n in range(20, 60)]
        assert int(torch.cat(inside).sum()) == math.ceil((1 - Fraction(repr(alpha))) * 41)
