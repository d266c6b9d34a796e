"""What a guarantee of coverage costs: intervals and sets that held-out points have made as wide as needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from net2gp.conformal.ranks import kth_smallest, rank
from net2gp.report.uncertainty.outcomes import MISSES, Labels, Numbers
from net2gp.report.uncertainty.statistics import mean, share


def guarantee(found: Labels | Numbers, names: list[str]) -> dict[str, Any]:
    """Calibrate on one random half of the held-out points, and measure on the other.

    Intervals are mean ± q·spread, as by `conformal.calibrate_intervals`; sets hold the classes above one
    threshold of probability, as by `conformal.calibrate_sets`. Both cover a new target with the promised
    probability or more, whatever the posterior. Intervals have 90 %; sets have 90 % and, if there are enough
    points, 99 %, since many classifiers are right more often than 90 %.

    Args:
        found: What the posterior says about held-out points.
        names: The names of the outputs.

    Returns:
        Coverage and size of both, per output.
    """
    order = np.random.default_rng(1).permutation(len(found))
    fit, test = order[: len(order) // 2], order[len(order) // 2 :]
    values: dict[str, Any] = {"calibrated_on": len(fit)}
    if rank(MISSES, len(fit)) > len(fit):
        return values
    if isinstance(found, Labels):
        levels = [alpha for alpha in (MISSES, 0.01) if rank(alpha, len(fit)) <= len(fit)]
        return {**values, "sets": [_sets(found, fit, test, alpha) for alpha in levels]}
    return {**values, "outputs": [_widths(found, d, fit, test, n) for d, n in enumerate(names)]}


def _threshold(scores: np.ndarray, alpha: float) -> float:
    return float(kth_smallest(torch.from_numpy(scores), rank(alpha, len(scores)), 0))


def _sets(found: Labels, fit: np.ndarray, test: np.ndarray, alpha: float) -> dict[str, Any]:
    assert found.y is not None
    own = found.probs[np.arange(len(found)), found.y]
    least = -_threshold(-own[fit], alpha)
    promised = found.probs[test] >= least
    plain = _credible(found.probs[test], 1 - alpha)
    row = np.arange(len(test)), found.y[test]
    return {
        "level": 1 - alpha,
        "least": least,
        "coverage": share(int(promised[row].sum()), len(test)),
        "size": mean(promised.sum(1)),
        "empty": share(int((promised.sum(1) == 0).sum()), len(test)),
        "plain_coverage": share(int(plain[row].sum()), len(test)),
        "plain_size": mean(plain.sum(1)),
    }


def _credible(probs: np.ndarray, level: float) -> np.ndarray:
    """The most probable classes that have the level together: (N, K)."""
    order = np.argsort(-probs, 1)
    ranked = np.take_along_axis(probs, order, 1)
    needed = ranked.cumsum(1) - ranked < level
    found = np.zeros_like(needed)
    np.put_along_axis(found, order, needed, 1)
    return found


def _widths(found: Numbers, d: int, fit: np.ndarray, test: np.ndarray, name: str) -> dict[str, Any]:
    assert found.y is not None
    off, spread = np.abs(found.y - found.mean)[:, d], found.spread[:, d].clip(min=1e-300)
    q = _threshold((off / spread)[fit], MISSES)
    plain = (found.upper - found.lower)[test, d]
    inside = found.inside[test, d]
    return {
        "name": name,
        "coverage": share(int((off[test] <= q * spread[test]).sum()), len(test)),
        "width": mean(2 * q * spread[test]),
        "plain_coverage": share(int(inside.sum()), len(test)),
        "plain_width": mean(plain),
        "ratio": float(2 * q * spread[test].mean() / max(plain.mean(), 1e-300)),
    }
