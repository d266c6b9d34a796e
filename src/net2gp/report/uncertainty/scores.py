"""The scores that limits can be set on, by name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from net2gp.errors import InputError
from net2gp.report.uncertainty.outcomes import Labels, Numbers
from net2gp.report.uncertainty.pages.words import shown
from net2gp.report.uncertainty.statistics import Estimate, mean, root

LARGE = ("accuracy", "coverage", "confidence", "auroc", "novelty_auroc")
"""How the names of scores begin of which more is better; of all others less is."""


def scored(values: dict[str, Any], found: Labels | Numbers) -> dict[str, Estimate]:
    """Collect the scores of the posterior.

    Args:
        values: The values of a report.
        found: What the posterior says about held-out points.

    Returns:
        Estimates by name.
    """
    own = values["compared"]["posterior"]
    names = ("accuracy", "confidence", "nll", "brier", "ece", "smooth_ece")
    if isinstance(found, Labels):
        scores = {name: own[name] for name in names}
    else:
        scores = {n: own[n] for n in ("coverage50", "coverage90", "coverage95", "nll", "width90")}
        scores |= _errors(found, values["names"])
        if len(values["names"]) > 1:
            pairs = zip(values["names"], own["outputs"], strict=True)
            scores |= {f"coverage90_{name}": one for name, one in pairs}
    for name, kinds in values["others"].items():
        scores[f"auroc_{name}"] = kinds["uncertainty"]["auroc"]
        scores[f"fpr95_{name}"] = kinds["uncertainty"]["fpr95"]
        if "novelty" in kinds:
            scores[f"novelty_auroc_{name}"] = kinds["novelty"]["auroc"]
            scores[f"novelty_fpr95_{name}"] = kinds["novelty"]["fpr95"]
    return scores


def _errors(found: Numbers, names: list[str]) -> dict[str, Estimate]:
    assert found.y is not None
    squares = (found.y - found.mean) ** 2
    scores = {"rmse": root(mean(squares.mean(1))), "mae": mean(np.sqrt(squares).mean(1))}
    if len(names) > 1:
        scores |= {f"rmse_{name}": root(mean(squares[:, d])) for d, name in enumerate(names)}
        width = found.upper - found.lower
        scores |= {f"width90_{name}": mean(width[:, d]) for d, name in enumerate(names)}
    return scores


def broken(scores: Mapping[str, Estimate], limits: Mapping[str, float]) -> list[str]:
    """Compare scores with limits.

    Args:
        scores: Estimates by name.
        limits: Limits by name.

    Returns:
        A sentence for each limit that is missed.

    Raises:
        InputError: If a name is unknown, or if a limit is no number.

    >>> scores = {"nll": {"value": 0.5, "low": 0.4, "high": 0.6, "n": 9}}
    >>> broken(scores, {"nll": 0.45})
    ['nll is 0.5 (0.4–0.6, n\xa0=\xa09), above the limit 0.45.']
    """
    found = []
    for name, limit in limits.items():
        if name not in scores:
            near = difflib.get_close_matches(name, scores, 1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise InputError(
                f"the report has no score {name!r}. {hint}Known: {', '.join(scores)}. At least the limit "
                f"must be reached by those that begin with {', '.join(LARGE)}; others must not exceed it."
            )
        if isinstance(limit, bool) or not isinstance(limit, int | float) or math.isnan(limit):
            raise InputError(
                f"the limit of {name} must be a number, but is {limit!r}. Pass e.g. {name}=0.9."
            )
        value, large = scores[name]["value"], name.startswith(LARGE)
        if value is None:
            found.append(f"{name} has no finite value, so that it cannot keep the limit {limit:g}.")
        elif (value < limit) if large else (value > limit):
            side = "below" if large else "above"
            found.append(f"{name} is {shown(scores[name])}, {side} the limit {limit:g}.")
    return found
