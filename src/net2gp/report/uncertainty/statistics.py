"""Intervals and tests that hold for small numbers of points as well."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import fft, stats

Estimate = dict[str, Any]
"""A number with its interval and the number of points behind it: value, low, high, n."""

LEVEL = 0.95
"""The probability with which an interval contains what it is for."""

RESAMPLES = 999
MOST_RESAMPLED = 5000
"""Up to so many points a mean has an interval by resampling; for more the law of its error is known."""


def estimate(value: float, low: float, high: float, n: int) -> Estimate:
    """Put a number and its interval together; what is not finite becomes None.

    >>> estimate(0.5, 0.25, float("inf"), 10)
    {'value': 0.5, 'low': 0.25, 'high': None, 'n': 10}
    """
    found = {"value": value, "low": low, "high": high}
    clean = {key: float(v) if np.isfinite(v) else None for key, v in found.items()}
    return {**clean, "n": int(n)}


def share(count: int, n: int, level: float = LEVEL) -> Estimate:
    """Estimate a probability from `count` of n points by Clopper and Pearson's interval, which is exact.

    Args:
        count: The number of points for which something holds.
        n: The number of points.
        level: The least probability of the interval.

    Returns:
        The share with its interval; no numbers if there are no points.

    >>> found = share(0, 20)
    >>> found["value"], found["low"], round(found["high"], 3)
    (0.0, 0.0, 0.168)

    Reference: Clopper & Pearson, The use of confidence or fiducial limits, Biometrika 1934.
    """
    if n == 0:
        return estimate(np.nan, np.nan, np.nan, 0)
    tail = (1 - level) / 2
    low = stats.beta.ppf(tail, count, n - count + 1) if count else 0.0
    high = stats.beta.ppf(1 - tail, count + 1, n - count) if count < n else 1.0
    return estimate(count / n, low, high, n)


def mean(values: np.ndarray, level: float = LEVEL) -> Estimate:
    """Estimate a mean by the bootstrap-t interval, which follows the skewness of the values.

    With t* = (m* − m)/s* over resamples, the interval is m − s·t*, for the outer quantiles of t*. Above
    `MOST_RESAMPLED` values t* is taken from Student's law. The cost is `RESAMPLES`·n.

    Args:
        values: One number per point, (n,).
        level: The probability of the interval.

    Returns:
        The mean with its interval; no interval for a single value.

    >>> found = mean(np.arange(10.0))
    >>> found["value"], found["low"] < 4.5 < found["high"]
    (4.5, True)

    Reference: Efron & Tibshirani, An introduction to the bootstrap, 1993, section 12.5.
    """
    values = np.asarray(values, dtype=float)
    n = len(values)
    if n < 2 or not np.isfinite(values).all():
        return estimate(values.mean() if n else np.nan, np.nan, np.nan, n)
    center, error = values.mean(), values.std(ddof=1) / np.sqrt(n)
    tails = np.array([(1 + level) / 2, (1 - level) / 2])
    if n > MOST_RESAMPLED or error == 0:
        low, high = center - error * stats.t.ppf(tails, n - 1)
    else:
        low, high = center - error * np.quantile(_studentized(values), tails, method="nearest")
    return estimate(center, low, high, n)


def _studentized(values: np.ndarray) -> np.ndarray:
    """(m* − m)/s* of resamples; one that repeats a single value lies infinitely far out."""
    rng, n, center = np.random.default_rng(0), len(values), values.mean()
    found = np.empty(RESAMPLES)
    for start in range(0, RESAMPLES, 111):
        drawn = values[rng.integers(0, n, (111, n))]
        off, error = drawn.mean(1) - center, drawn.std(1, ddof=1) / np.sqrt(n)
        flat = error <= 1e-12 * (np.abs(values).max() + 1e-300)
        with np.errstate(divide="ignore", invalid="ignore"):
            found[start : start + 111] = np.where(flat, np.sign(off) * np.inf, off / error)
    return np.nan_to_num(found, nan=0.0)


def root(one: Estimate) -> Estimate:
    """Take the square root of a number and of the ends of its interval.

    >>> root({"value": 4.0, "low": 1.0, "high": None, "n": 3})
    {'value': 2.0, 'low': 1.0, 'high': None, 'n': 3}
    """
    value, low, high = (
        np.nan if one[name] is None else max(one[name], 0.0) ** 0.5
        for name in ("value", "low", "high")
    )
    return estimate(value, low, high, one["n"])


def area(inside: np.ndarray, outside: np.ndarray, value: float) -> Estimate:
    """Estimate the area under a ROC curve by Newcombe's interval, which also holds near 1.

    It contains each θ with |A − θ| ≤ z √V(θ), where V is Hanley and McNeil's variance with
    (n_in + n_out)/2 − 1 in place of both numbers of points, solved by bisection.

    Args:
        inside: Scores of inliers.
        outside: Scores of outliers.
        value: The area A itself.

    Returns:
        The area with its interval; n counts both kinds.

    >>> found = area(np.zeros(50), np.ones(50), 1.0)
    >>> 0.9 < found["low"] < found["high"] == 1.0
    True

    Reference: Newcombe, Confidence intervals for an effect size measure based on the Mann–Whitney
    statistic, part 2, Statistics in Medicine 2006.
    """
    n, m = len(inside), len(outside)
    z, star = stats.norm.ppf((1 + LEVEL) / 2), (n + m) / 2 - 1

    def off(theta: float) -> float:
        shape = 1 + star * (1 - theta) / (2 - theta) + star * theta / (1 + theta)
        return abs(value - theta) - z * np.sqrt(max(theta * (1 - theta), 0.0) * shape / (n * m))

    ends = []
    for end in (0.0, 1.0):
        near, far = value, end
        for _ in range(60):
            middle = (near + far) / 2
            near, far = (near, middle) if off(middle) > 0 else (middle, far)
        ends.append(near if off(end) > 0 else end)
    return estimate(value, ends[0], ends[1], n + m)


def passing(inside: np.ndarray, outside: np.ndarray, value: float) -> Estimate:
    """Estimate the share of outliers below the 95 % quantile of inliers by an interval of two steps.

    The quantile lies between two order statistics of the inliers with probability 97.5 %, and Clopper and
    Pearson's intervals at both ends hold with 97.5 %, so that together they hold with 95 % or more.

    Args:
        inside: Scores of inliers.
        outside: Scores of outliers.
        value: The share itself.

    Returns:
        The share with its interval; n counts the outliers.

    >>> found = passing(np.arange(100.0), np.array([94.0, 200.0]), 0.5)
    >>> found["low"] < 0.5 < found["high"]
    True
    """
    ordered, n = np.sort(inside), len(inside)
    half = 1 - (1 - LEVEL) / 2
    lowest = int(stats.binom.ppf((1 - half) / 2, n, 0.95))
    highest = int(stats.binom.ppf((1 + half) / 2, n, 0.95)) + 1
    below = int((outside <= ordered[lowest - 1]).sum()) if lowest >= 1 else 0
    above = int((outside <= ordered[highest - 1]).sum()) if highest <= n else len(outside)
    low, high = (share(count, len(outside), half) for count in (below, above))
    return estimate(value, low["low"], high["high"], len(outside))


def holm(p: np.ndarray) -> np.ndarray:
    """Adjust p-values of several tests, so that rejecting below α errs once or more with at most α.

    Args:
        p: The p-values, (m,).

    Returns:
        The adjusted p-values: max over the k smaller ones of (m − k)·p, at most 1.

    >>> holm(np.array([0.01, 0.04, 0.03])).round(3).tolist()
    [0.03, 0.06, 0.06]

    Reference: Holm, A simple sequentially rejective multiple test procedure, 1979.
    """
    order = np.argsort(p)
    scaled = (len(p) - np.arange(len(p))) * p[order]
    found = np.empty(len(p))
    found[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return found


def count_law(p: np.ndarray) -> np.ndarray:
    """Compute the law of the number of successes of independent trials with unequal probabilities.

    Pairs of laws are convolved, level by level, in O(n log² n).

    Args:
        p: The probability of each trial, (n,).

    Returns:
        The probabilities of 0, …, n successes, (n + 1,), right to about 1e-15.

    >>> count_law(np.array([0.5, 0.5])).round(3).tolist()
    [0.25, 0.5, 0.25]
    """
    n = len(p)
    if n == 0:
        return np.ones(1)
    size = 1 << (n - 1).bit_length()
    laws = np.zeros((size, 2))
    laws[:, 0], laws[:n, 0], laws[:n, 1] = 1.0, 1 - p, p
    while len(laws) > 1:
        width = 2 * laws.shape[1] - 1
        padded = fft.next_fast_len(width, real=True)
        product = fft.rfft(laws[::2], padded) * fft.rfft(laws[1::2], padded)
        laws = fft.irfft(product, padded)[:, :width].clip(min=0.0)
    return laws[0, : n + 1] / laws[0, : n + 1].sum()


def count_test(p: np.ndarray, count: int) -> float:
    """Test whether a number of successes fits the probabilities of the trials, on both sides.

    Args:
        p: The probability of each trial, (n,).
        count: The number of successes.

    Returns:
        Twice the smaller tail, at most 1.

    >>> round(count_test(np.full(10, 0.5), 0), 5)
    0.00195
    """
    law = count_law(p)
    below, above = law[: count + 1].sum(), law[count:].sum()
    return float(min(1.0, 2 * min(below, above)))


def count_band(p: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """Compute the central range of the share of successes, as the probabilities of the trials have it.

    >>> count_band(np.full(100, 0.5))
    (0.4, 0.6)
    """
    whole = np.cumsum(count_law(p))
    tail = (1 - level) / 2
    low, high = np.searchsorted(whole, [tail, 1 - tail])
    return float(low) / len(p), float(min(high, len(p))) / len(p)
