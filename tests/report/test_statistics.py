"""Intervals contain what they are for as often as they say, and tests err as rarely."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score

from net2gp import metrics
from net2gp.report.uncertainty.outcomes import Labels
from net2gp.report.uncertainty.slices import slices
from net2gp.report.uncertainty.smooth_error import binned_error, consistent_below, smooth_error
from net2gp.report.uncertainty.statistics import (
    area,
    count_band,
    count_law,
    count_test,
    holm,
    mean,
    passing,
    share,
)

REPETITIONS = 400


def enough(hits: int, level: float = 0.95, n: int = REPETITIONS) -> bool:
    """Whether so many hits of n agree with a probability of `level` or more (one in 10,000 by chance)."""
    return stats.binom.cdf(hits, n, level) > 1e-4


def contains(found: dict, value: float) -> bool:
    return found["low"] <= value <= found["high"]


@pytest.mark.parametrize("p", [0.02, 0.5, 0.97])
@pytest.mark.parametrize("n", [20, 150])
def test_shares_contain_the_probability(p, n):
    law = stats.binom(n, p)
    counts = np.arange(n + 1)
    hit = np.array([contains(share(int(k), n), p) for k in counts])
    assert law.pmf(counts)[hit].sum() >= 0.95  # exactly, over all outcomes


def test_shares_are_the_intervals_of_scipy():
    for count, n in ((0, 7), (3, 9), (9, 9)):
        expected = stats.binomtest(count, n).proportion_ci(0.95, "exact")
        found = share(count, n)
        assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize(
    ("name", "law", "least"),
    [
        ("normal", stats.norm(1, 2), 0.95),
        ("skewed", stats.expon(), 0.93),
        ("log loss", stats.lognorm(1.0), 0.90),
    ],
)
def test_means_contain_the_mean(name, law, least):
    # the bootstrap-t interval is right to second order: a few percent are missing for long tails
    rng = np.random.default_rng(0)
    hits = sum(
        contains(mean(law.rvs(60, random_state=rng)), law.mean()) for _ in range(REPETITIONS)
    )
    assert enough(hits, least), hits


def test_means_of_many_values_take_the_law_of_large_numbers():
    values = np.random.default_rng(0).normal(size=6000)
    found = mean(values)
    assert found["high"] - found["low"] == pytest.approx(
        2 * 1.96 * values.std() / 6000**0.5, rel=0.01
    )


@pytest.mark.parametrize(("shift", "n"), [(0.0, 40), (1.0, 60), (2.5, 60)])
def test_areas_contain_the_probability_of_a_higher_score(shift, n):
    rng = np.random.default_rng(0)
    truth = stats.norm.cdf(shift / 2**0.5)
    hits = 0
    for _ in range(REPETITIONS):
        inside, outside = rng.normal(size=n), rng.normal(shift, size=n + 20)
        value = float(metrics.auroc(torch.from_numpy(inside), torch.from_numpy(outside)))
        hits += contains(area(inside, outside, value), truth)
    assert enough(hits), hits


def test_areas_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    inside, outside = rng.integers(0, 9, 50), rng.integers(3, 12, 70)  # with ties
    labels = np.repeat([0, 1], (50, 70))
    expected = roc_auc_score(labels, np.concatenate([inside, outside]))
    found = metrics.auroc(torch.from_numpy(inside).double(), torch.from_numpy(outside).double())
    assert float(found) == pytest.approx(expected, abs=1e-12)


def test_shares_that_pass_contain_the_probability_below_the_true_quantile():
    rng = np.random.default_rng(0)
    truth = stats.norm.cdf(stats.norm.ppf(0.95) - 2.0)
    hits = 0
    for _ in range(REPETITIONS):
        inside, outside = rng.normal(size=80), rng.normal(2.0, size=80)
        value = float(metrics.fpr95(torch.from_numpy(inside), torch.from_numpy(outside)))
        hits += contains(passing(inside, outside, value), truth)
    assert enough(hits), hits


def brute_force_law(p: np.ndarray) -> np.ndarray:
    """The law of a count by going through all outcomes."""
    found = np.zeros(len(p) + 1)
    for outcome in product((0, 1), repeat=len(p)):
        found[sum(outcome)] += np.prod(np.where(outcome, p, 1 - p))
    return found


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_laws_of_counts_are_sums_over_all_outcomes(n):
    p = np.random.default_rng(n).random(n)
    np.testing.assert_allclose(count_law(p), brute_force_law(p), atol=1e-14)


def test_laws_of_many_equal_trials_are_binomial():
    expected = stats.binom.pmf(np.arange(3001), 3000, 0.99)
    np.testing.assert_allclose(count_law(np.full(3000, 0.99)), expected, atol=1e-13)
    assert count_test(np.full(50, 0.5), 25) == 1.0
    low, high = count_band(np.full(400, 0.25))
    assert (low, high) == (
        stats.binom.ppf(0.025, 400, 0.25) / 400,
        stats.binom.ppf(0.975, 400, 0.25) / 400,
    )


def test_holm_is_its_definition():
    p = np.random.default_rng(0).random(12) ** 3
    order = np.argsort(p)
    for alpha in (0.01, 0.05, 0.2):
        rejected = set()
        for k, n in enumerate(order):
            if p[n] > alpha / (12 - k):
                break
            rejected.add(n)
        assert rejected == set(np.flatnonzero(holm(p) <= alpha + 1e-15))


def test_holm_errs_at_most_as_often_as_it_says():
    rng = np.random.default_rng(0)
    errors = sum(bool((holm(rng.random(15)) < 0.05).any()) for _ in range(2000))
    assert stats.binom.sf(errors - 1, 2000, 0.05) > 1e-4


def smooth_by_points(probs: np.ndarray, right: np.ndarray) -> float:
    """The smooth calibration error by its definition: images of each point, an integral on a fine grid."""
    t = (np.arange(500) + 0.5) / 500

    def size(width: float) -> float:
        kernel = 0.0
        for turn in range(-2, 3):
            for image in (probs + 2 * turn, -probs + 2 * turn):
                kernel = kernel + np.exp(-0.5 * ((t[:, None] - image) / width) ** 2)
        kernel = kernel / (width * (2 * np.pi) ** 0.5)
        return float(np.abs(kernel @ (right - probs)).mean() / len(probs))

    low, high = 1e-4, 1.0
    for _ in range(15):
        middle = (low + high) / 2
        low, high = (middle, high) if size(middle) > middle else (low, middle)
    return low


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_smooth_error_is_its_definition(seed):
    rng = np.random.default_rng(seed)
    probs = rng.beta(4, 1.0 + seed, 150)
    right = (rng.random(150) < probs ** (1 + seed)).astype(float)
    assert smooth_error(probs, right)["value"] == pytest.approx(
        smooth_by_points(probs, right), abs=1e-3
    )


@pytest.mark.parametrize("error", [binned_error, smooth_error])
@pytest.mark.parametrize("gap", [0.0, 0.1])
def test_calibration_errors_contain_that_of_the_law(error, gap):
    rng = np.random.default_rng(0)
    # the law itself, as a large sample without noise: a share of probs − gap of each is right
    probs = np.repeat([0.55, 0.75, 0.95], 2000)
    right = np.tile((np.arange(2000) + 0.5) / 2000, 3) < probs - gap
    truth = error(probs, right.astype(float))["value"]
    hits = 0
    for _ in range(40):
        some = rng.choice([0.55, 0.75, 0.95], 200)
        found = error(some, (rng.random(200) < some - gap).astype(float))
        hits += found["low"] - 2e-3 <= truth <= found["high"] + 2e-3  # the grid of widths
    assert enough(hits, n=40), hits


def test_the_error_of_right_probabilities_stays_below_what_is_said():
    rng = np.random.default_rng(0)
    probs = rng.beta(5, 1, 300)
    limit = consistent_below(probs)
    drawn = [
        binned_error(probs, (rng.random(300) < probs).astype(float))["value"] for _ in range(200)
    ]
    assert 0.90 < np.mean(np.array(drawn) <= limit) < 0.99


def labels(rng: np.random.Generator, n: int, wrong_where: float) -> Labels:
    """Two classes with probability 0.8, right everywhere but where the first column is above a limit."""
    x = torch.from_numpy(rng.random((n, 3)))
    said = rng.integers(0, 2, n)
    p = np.where(x[:, 0].numpy() > wrong_where, 0.5, 0.8)
    y = np.where(rng.random(n) < p, said, 1 - said)
    probs = np.where(np.eye(2)[said] == 1, 0.8, 0.2)
    return Labels(x, None, np.ones((n, 1)), probs, np.full(n, 0.2), None, y)


def test_slices_find_the_part_that_is_wrong_and_name_it():
    found = slices(
        labels(np.random.default_rng(0), 1200, 0.8), ["a", "b", "c"], ["no", "yes"], False
    )
    first = found["rows"][0]
    assert first["found"]
    assert first["too_sure"]
    assert "a >" in first["name"]
    assert first["is"]["high"] < first["said"] == pytest.approx(0.8)


def test_slices_of_right_probabilities_are_rarely_found():
    rng = np.random.default_rng(0)
    hits = sum(
        any(
            row["found"]
            for row in slices(labels(rng, 300, 2.0), ["a", "b", "c"], ["0", "1"], False)["rows"]
        )
        for _ in range(100)
    )
    assert stats.binom.sf(hits - 1, 100, 0.05) > 1e-4, hits
