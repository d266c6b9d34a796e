"""Whether probabilities and intervals are right, beside the mean alone and a correction of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import optimize, special, stats

from net2gp.report.uncertainty.outcomes import MISSES, Labels, Numbers
from net2gp.report.uncertainty.smooth_error import binned_error, consistent_below, smooth_error
from net2gp.report.uncertainty.statistics import (
    LEVEL,
    Estimate,
    count_band,
    estimate,
    mean,
    share,
)

NUM_BINS = 15
LEVELS = np.arange(0.05, 0.96, 0.05)
TINY = 1e-30
Values = dict[str, Any]


def folds(n: int) -> np.ndarray:
    """Give each of n points one of five folds, or of fewer if there are few points: the same every time."""
    return np.random.default_rng(0).permutation(np.arange(n) % max(2, min(5, n)))


def calibration(found: Labels | Numbers) -> Values:
    """Score the posterior, its mean alone, and that mean with one number chosen on other folds.

    Args:
        found: What the posterior says about held-out points.

    Returns:
        Scores and curves by the name of the prediction.
    """
    return _of_labels(found) if isinstance(found, Labels) else _of_numbers(found)


def _of_labels(found: Labels) -> Values:
    assert found.y is not None
    values = {"posterior": _label_scores(found.probs, found.y)}
    if found.logits is not None:
        values["mean alone"] = _label_scores(special.softmax(found.logits, 1), found.y)
        probs, temperatures = cooled(found.logits, found.y)
        values["mean with a temperature"] = _label_scores(probs, found.y)
        values["mean with a temperature"]["chosen"] = temperatures
    return values


def cooled(logits: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """Divide logits by the temperature that is best for the labels of the other folds.

    No label takes part in the choice of its own temperature, so that its score is as fair as that of a
    posterior that has not seen any of them.

    Args:
        logits: Logits, (N, K).
        y: Labels, (N,).

    Returns:
        The probabilities, (N, K), and the temperature of each fold.

    >>> probs, chosen = cooled(np.array([[4.0, 0.0]] * 40), np.array([0, 0, 0, 1] * 10))
    >>> bool(abs(probs[:, 0].mean() - 0.75) < 0.05)
    True
    """
    probs, chosen, place = np.empty_like(logits), [], folds(len(y))
    for fold in np.unique(place):
        others = np.flatnonzero(place != fold)

        def loss(log_t: float, others: np.ndarray = others) -> float:
            logs = special.log_softmax(logits[others] / np.exp(log_t), 1)
            return -float(logs[np.arange(len(others)), y[others]].mean())

        best = optimize.minimize_scalar(loss, bounds=(np.log(0.05), np.log(20)), method="bounded")
        chosen.append(float(np.exp(best.x)))
        probs[place == fold] = special.softmax(logits[place == fold] / chosen[-1], 1)
    return probs, chosen


def differences(found: Labels | Numbers) -> dict[str, Estimate]:
    """Estimate how much more log loss each other prediction has per point than the posterior.

    The differences are taken point by point, which leaves out what is hard for all of them.

    Args:
        found: What the posterior says about held-out points.

    Returns:
        The mean differences by name, positive where the posterior is better.
    """
    if isinstance(found, Labels):
        assert found.y is not None
        n = np.arange(len(found))
        own = -np.log(np.maximum(found.probs[n, found.y], TINY))
        if found.logits is None:
            return {}
        rest = {
            "mean alone": special.softmax(found.logits, 1),
            "mean with a temperature": cooled(found.logits, found.y)[0],
        }
        return {
            name: mean(-np.log(np.maximum(probs[n, found.y], TINY)) - own)
            for name, probs in rest.items()
        }
    assert found.log_density is not None
    own = -found.log_density
    return {
        name: mean(_loss(off, std).sum(1) - own) for name, (off, std) in _spreads(found).items()
    }


def _label_scores(probs: np.ndarray, y: np.ndarray) -> Values:
    n, K = probs.shape
    best, own = probs.max(1), probs[np.arange(n), y]
    right = (probs.argmax(1) == y).astype(float)
    squares = ((probs - np.eye(K)[y]) ** 2).sum(1)
    return {
        "accuracy": share(int(right.sum()), n),
        "confidence": mean(best),
        "nll": mean(-np.log(np.maximum(own, TINY))),
        "brier": mean(squares),
        "ece": binned_error(best, right, NUM_BINS),
        "ece_if_right": consistent_below(best, NUM_BINS),
        "smooth_ece": smooth_error(best, right),
        "bins": _bins(best, right),
    }


def _bins(best: np.ndarray, right: np.ndarray) -> list[Values]:
    """Confidence and accuracy per bin, with the range that accuracy has if the confidence is right."""
    cell = np.clip(np.ceil(best * NUM_BINS).astype(int) - 1, 0, NUM_BINS - 1)
    lines = []
    for number in np.unique(cell):
        some = cell == number
        low, high = count_band(best[some])
        lines.append(
            {
                "confidence": float(best[some].mean()),
                "accuracy": share(int(right[some].sum()), int(some.sum())),
                "band": [low, high],
            }
        )
    return lines


def _of_numbers(found: Numbers) -> Values:
    assert found.pit is not None
    assert found.y is not None
    assert found.log_density is not None
    values = {"posterior": _number_scores(found.pit, -found.log_density, found.upper - found.lower)}
    for name, (off, std) in _spreads(found).items():
        width = 2 * stats.norm.ppf(1 - MISSES / 2) * std
        values[name] = _number_scores(stats.norm.cdf(off / std), _loss(off, std).sum(1), width)
    return values


def _spreads(found: Numbers) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The errors of the mean, and standard deviations that other folds have chosen, (N, D) each, by name."""
    assert found.y is not None
    off = found.y - found.mean
    others = {"mean with one spread": (off, _by_folds(off, np.ones_like(off)))}
    if not found.drawn and bool((found.spread > 0).all()):
        others["posterior with a factor"] = (off, _by_folds(off, found.spread) * found.spread)
    return others


def _loss(off: np.ndarray, std: np.ndarray) -> np.ndarray:
    """−log N(off | 0, std²)."""
    return 0.5 * np.log(2 * np.pi * std**2) + 0.5 * (off / std) ** 2


def _by_folds(off: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """The root mean square of off/spread on the other folds, per output: (N, D), in steps by fold."""
    place, found = folds(len(off)), np.empty_like(off)
    least = 1e-9 * max(float(np.abs(off).max()), TINY)
    for fold in np.unique(place):
        ratio = (off / spread)[place != fold]
        found[place == fold] = np.sqrt((ratio**2).mean(0)).clip(min=least)
    return found


def _number_scores(pit: np.ndarray, loss: np.ndarray, width: np.ndarray) -> Values:
    outputs = pit.T
    curves = [[covered(one, level) for level in LEVELS] for one in outputs]
    gaps = [abs(e["value"] - v) for c in curves for e, v in zip(c, LEVELS, strict=True)]
    at = np.linspace(0.02, 0.98, 49)
    return {
        "nll": mean(loss),
        "width90": mean(width.mean(1)),
        "coverage50": joint(pit, 0.5),
        "coverage90": joint(pit, 0.9),
        "coverage95": joint(pit, 0.95),
        "coverage_error": float(np.mean(gaps)),
        "curves": curves,
        "outputs": [covered(one, 1 - MISSES) for one in outputs],
        "histograms": [np.histogram(one, 10, (0, 1))[0].tolist() for one in outputs],
        "quantiles": [np.quantile(one, at).tolist() for one in outputs],
    }


def covered(pit: np.ndarray, level: float, confidence: float = LEVEL) -> Estimate:
    """Estimate how often the central interval of a level contains the target of one output."""
    inside = (pit >= (1 - level) / 2) & (pit <= (1 + level) / 2)
    return share(int(inside.sum()), len(pit), confidence)


def joint(pit: np.ndarray, level: float) -> Estimate:
    """Estimate the coverage averaged over outputs, whose errors may depend on each other.

    Each output has an interval of the level 1 − 0.05/D, which hold together with 95 %.
    """
    D = pit.shape[1]
    parts = [covered(pit[:, d], level, 1 - (1 - LEVEL) / D) for d in range(D)]
    value, low, high = (float(np.mean([p[k] for p in parts])) for k in ("value", "low", "high"))
    return estimate(value, low, high, len(pit))
