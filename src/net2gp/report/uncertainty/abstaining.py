"""What is gained by refusing the least certain points."""

from __future__ import annotations

from typing import Any

import numpy as np

from net2gp.report.uncertainty.outcomes import Labels, Numbers
from net2gp.report.uncertainty.statistics import Estimate, mean, root, share

SHARES = tuple(range(96))
"""The shares of points that the slider refuses, in percent."""

SHOWN = (0, 5, 10, 20, 30, 50)


def abstaining(found: Labels | Numbers) -> dict[str, Any]:
    """Measure the error of the points that are kept if a share of the least certain is refused.

    The error is the share of wrong labels, or the root mean squared error: of one target in its own unit, of
    several in units of each one's standard deviation. Where points are equally certain at the threshold, the
    average over them counts.

    Args:
        found: What the posterior says about held-out points.

    Returns:
        The error for each share refused, and estimates with intervals for some of them.
    """
    loss, doubt = losses(found), doubts(found)
    n = len(loss)
    order = np.lexsort((np.random.default_rng(0).random(n), doubt))  # ties in no order of the data
    ordered = _shared(doubt[order], loss[order])
    labels = isinstance(found, Labels)
    curve = []
    for percent in SHARES:
        kept = max(1, round(n * (1 - percent / 100)))
        risk = ordered[:kept].mean()
        limit = doubt[order][kept - 1]
        curve.append([percent, float(risk if labels else np.sqrt(risk)), float(limit), kept])
    rows = {str(p): _kept(loss[order], p, labels) for p in SHOWN}
    values = {"curve": curve, "rows": rows, "removed": _removed(loss[order], labels)}
    return {**values, "gain": _gain(loss[order])}


def losses(found: Labels | Numbers) -> np.ndarray:
    """Whether a label is wrong, or the squared error, of several targets the mean over their `scale`."""
    if isinstance(found, Labels):
        return 1 - found.right
    assert found.y is not None
    return (((found.y - found.mean) / scale(found)) ** 2).mean(1)


def doubts(found: Labels | Numbers, like: Numbers | None = None) -> np.ndarray:
    """How uncertain each point is, (N,): P(wrong), or the standard deviation, likewise."""
    if isinstance(found, Labels):
        return found.doubt
    return (found.spread / scale(like or found)).mean(1)


def scale(found: Numbers) -> np.ndarray:
    """What makes several targets comparable, the standard deviation of each, or 1 if it is constant: (D,).

    A single target keeps its unit.
    """
    assert found.y is not None
    if found.y.shape[1] == 1:
        return np.ones(1)
    std = found.y.std(0)
    return np.where(std > 1e-12 * (np.abs(found.y).max(0) + 1e-300), std, 1.0)


def constant(found: Labels | Numbers, names: list[str]) -> list[str]:
    """Name the outputs whose targets are all equal, or the only class there is."""
    assert found.y is not None
    if isinstance(found, Labels):
        return [names[c] for c in np.unique(found.y)] if len(np.unique(found.y)) == 1 else []
    return [name for name, y in zip(names, found.y.T, strict=True) if np.ptp(y) == 0]


def _shared(doubt: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Give points of equal doubt their mean loss, since their order says nothing."""
    _, group, size = np.unique(doubt, return_inverse=True, return_counts=True)
    return (np.bincount(group, loss) / size)[group]


def _kept(loss: np.ndarray, percent: int, labels: bool) -> Estimate:
    kept = max(1, round(len(loss) * (1 - percent / 100)))
    return share(int(loss[:kept].sum()), kept) if labels else root(mean(loss[:kept]))


def _removed(loss: np.ndarray, labels: bool) -> Estimate | None:
    """The share of all errors that are among the tenth of least certain points, given how many there are."""
    return share(int(loss[_tenth(loss) :].sum()), int(loss.sum())) if labels else None


def _gain(loss: np.ndarray) -> Estimate:
    """By how much the loss of the tenth of least certain points exceeds its share of the whole loss."""
    n, kept = len(loss), _tenth(loss)
    return mean(loss * ((np.arange(n) >= kept) - (n - kept) / n))


def _tenth(loss: np.ndarray) -> int:
    return max(1, round(0.9 * len(loss)))
