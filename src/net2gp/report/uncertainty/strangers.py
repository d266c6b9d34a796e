"""Whether a posterior notices data of another kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from net2gp import metrics
from net2gp.report.uncertainty.abstaining import doubts
from net2gp.report.uncertainty.outcomes import Labels, Numbers
from net2gp.report.uncertainty.statistics import area, mean, passing

NUM_BINS = 24
Values = dict[str, Any]


def strangers(found: Labels | Numbers, others: dict[str, Labels | Numbers]) -> dict[str, Values]:
    """Compare the uncertainty and the novelty of other data with those of the held-out points.

    Args:
        found: What the posterior says about held-out points.
        others: What it says about each other kind of points.

    Returns:
        For each kind and score the area under the ROC curve, the share of other points that pass where 95 %
        of held-out points do, and histograms.
    """
    values: dict[str, Values] = {}
    for name, other in others.items():
        scored = {"uncertainty": (unsure(found, found), unsure(other, found))}
        if found.novelty is not None and other.novelty is not None:
            scored["novelty"] = (found.novelty, other.novelty)
        values[name] = {"n": len(other)}
        values[name] |= {kind: _compared(*pair) for kind, pair in scored.items()}
        if isinstance(other, Labels):
            values[name]["confidence"] = mean(other.probs.max(1))
    return values


def unsure(one: Labels | Numbers, like: Labels | Numbers) -> np.ndarray:
    """The entropy of predicted classes, or the standard deviation as `doubts` has it: (N,)."""
    if isinstance(one, Numbers):
        assert isinstance(like, Numbers)
        return doubts(one, like)
    return one.spread[:, 0]


def _compared(inside: np.ndarray, outside: np.ndarray) -> Values:
    pair = torch.from_numpy(inside), torch.from_numpy(outside)
    both = np.concatenate([inside, outside])
    low, high = np.quantile(both, (0.0, 0.995))
    edges = np.linspace(low, high if high > low else low + 1, NUM_BINS + 1)
    hists = [np.histogram(v.clip(max=edges[-1]), edges)[0] / len(v) for v in (inside, outside)]
    return {
        "auroc": area(inside, outside, float(metrics.auroc(*pair))),
        "fpr95": passing(inside, outside, float(metrics.fpr95(*pair))),
        "means": [mean(inside), mean(outside)],
        "edges": edges.tolist(),
        "shares": [h.tolist() for h in hists],
    }
