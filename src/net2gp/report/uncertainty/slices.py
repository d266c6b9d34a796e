"""Parts of the held-out data on which a posterior is surer than it is right, or the reverse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from net2gp.report.uncertainty.abstaining import doubts
from net2gp.report.uncertainty.outcomes import MISSES, Labels, Numbers
from net2gp.report.uncertainty.pages.words import number
from net2gp.report.uncertainty.statistics import count_test, holm, share

DEPTH = 3
FEWEST = 10
"""Points that a slice needs on the half that tests it."""

MOST_COLUMNS = 50
SIGNIFICANT = 0.05
Values = dict[str, Any]


@dataclass(frozen=True)
class Slice:
    """A part of the data.

    Args:
        name: The condition in words.
        kind: How it came up: "class", "column" or "tree".
        member: Whether each point belongs to it, (N,).
    """

    name: str
    kind: str
    member: np.ndarray = field(repr=False)


def slices(
    found: Labels | Numbers, columns: Sequence[str] | None, names: Sequence[str], images: bool
) -> Values:
    """Find the weakest parts on one random half of the data, and test them on the other.

    The tested parts are the predicted classes, quarters of each column, and the leaves of a shallow tree
    that was grown on the first half to predict the calibration residual: confidence minus being right, or
    the misses of 90 % intervals minus a tenth. If probabilities are right, the number of right answers in a
    part follows the sum of independent trials with these probabilities, whose law is exact. Holm's
    correction takes care of the number of tests. The labels of the second half play no part in the choice.

    Args:
        found: What the posterior says about held-out points.
        columns: The names of the columns of x, or None.
        names: The names of the classes or outputs.
        images: Whether points are images.

    Returns:
        The rows of the tested slices, weakest first, and of each true class.
    """
    order = np.random.default_rng(0).permutation(len(found))
    look, test = order[: len(order) // 2], order[len(order) // 2 :]
    features, labels = describing(found, columns, images)
    parts, grown = [], True
    if isinstance(found, Labels):
        parts += [
            Slice(f"it says {name}", "class", found.said == c) for c, name in enumerate(names)
        ]
    if columns is not None:
        parts += _quarters(features[:, : len(columns)], columns, look)
    try:
        parts += _tree(features, labels, _residual(found), look)
    except ImportError:
        grown = False
    rows = _tested(found, parts, test, names)
    truth = _true_classes(found, names) if isinstance(found, Labels) else []
    counts = {"looked_at": len(look), "tested_on": len(test), "tests": len(rows)}
    return {"rows": rows, "classes": truth, "tree": grown, **counts}


def describing(
    found: Labels | Numbers, columns: Sequence[str] | None, images: bool
) -> tuple[np.ndarray, list[str]]:
    """Collect numbers that describe points: columns, brightness and contrast, novelty, uncertainty.

    Args:
        found: What the posterior says about points.
        columns: The names of the columns of x, or None.
        images: Whether points are images.

    Returns:
        The numbers, (N, F), and their names.
    """
    blocks, names = [], []
    x = found.x
    if columns is not None:
        assert isinstance(x, Tensor)
        blocks.append(x.detach().cpu().double().reshape(len(found), -1).numpy())
        names += list(columns)
    elif images and isinstance(x, Tensor):
        flat = x.detach().cpu().flatten(1)
        pair = torch.stack([flat.mean(1), flat.std(1)], 1).double().numpy()
        blocks.append(pair)
        names += ["brightness", "contrast"]
    if found.novelty is not None:
        blocks.append(found.novelty.reshape(-1, 1))
        names.append("novelty")
    blocks.append(doubts(found)[:, None])
    names.append("P(wrong)" if isinstance(found, Labels) else "predicted spread")
    return np.concatenate(blocks, 1), names


def _residual(found: Labels | Numbers) -> np.ndarray:
    """How much surer than right a prediction was, (N,)."""
    if isinstance(found, Labels):
        return (1 - found.doubt) - found.right
    return (1 - found.inside).mean(1) - MISSES


def _quarters(values: np.ndarray, columns: Sequence[str], look: np.ndarray) -> list[Slice]:
    parts = []
    for c in range(min(values.shape[1], MOST_COLUMNS)):
        column = values[:, c]
        edges = np.unique(np.quantile(column[look], (0.25, 0.5, 0.75)))
        bounds = [-np.inf, *edges, np.inf]
        for low, high in pairwise(bounds):
            member = (column > low) & (column <= high)
            if 0 < member.sum() < len(member):
                parts.append(Slice(_between(columns[c], low, high), "column", member))
    return parts


def _between(name: str, low: float, high: float) -> str:
    ends = [number(end, 4) for end in (low, high)]
    if np.isinf(low):
        return f"{name} ≤ {ends[1]}"
    return f"{name} > {ends[0]}" if np.isinf(high) else f"{ends[0]} < {name} ≤ {ends[1]}"


def _tree(
    features: np.ndarray, names: Sequence[str], residual: np.ndarray, look: np.ndarray
) -> list[Slice]:
    """The leaves of a shallow tree of the residual on the first half of the data."""
    from sklearn.tree import DecisionTreeRegressor

    fewest = max(2 * FEWEST, len(look) // 50)
    if len(look) < 2 * fewest:
        return []
    tree = DecisionTreeRegressor(max_depth=DEPTH, min_samples_leaf=fewest, random_state=0)
    tree.fit(features[look].astype(np.float32), residual[look])
    leaves = tree.apply(features.astype(np.float32))
    if tree.get_n_leaves() == 1:
        return []
    return [
        Slice(_path(tree.tree_, leaf, names), "tree", leaves == leaf) for leaf in np.unique(leaves)
    ]


def _path(tree: Any, leaf: int, names: Sequence[str]) -> str:
    """The conditions on the way to a leaf, those on one feature joined."""
    bounds: dict[int, list[float]] = {}
    node = int(leaf)
    while node:
        parent = int(
            np.flatnonzero((tree.children_left == node) | (tree.children_right == node))[0]
        )
        low, high = bounds.setdefault(int(tree.feature[parent]), [-np.inf, np.inf])
        cut = float(tree.threshold[parent])
        left = tree.children_left[parent] == node
        bounds[int(tree.feature[parent])] = [low, min(high, cut)] if left else [max(low, cut), high]
        node = parent
    return " and ".join(_between(names[f], *ends) for f, ends in sorted(bounds.items()))


def _tested(
    found: Labels | Numbers, parts: list[Slice], test: np.ndarray, names: Sequence[str]
) -> list[Values]:
    """A row for each slice (and output) with enough points, the smallest p-value first."""
    rows = []
    for part in parts:
        some = test[part.member[test]]
        if len(some) < FEWEST:
            continue
        if isinstance(found, Labels):
            rows.append(_row(part.name, part, 1 - found.doubt[some], found.right[some]))
            continue
        for d, name in enumerate(names):
            where = part.name if len(names) == 1 else f"{name} where {part.name}"
            rows.append(_row(where, part, np.full(len(some), 1 - MISSES), found.inside[some, d]))
    for row, p in zip(rows, holm(np.array([row["p"] for row in rows])), strict=True):
        row["p_holm"] = float(p)
        row["found"] = bool(p < SIGNIFICANT)
    return sorted(rows, key=lambda row: row["p"])


def _row(name: str, part: Slice, said: np.ndarray, good: np.ndarray) -> Values:
    count = int(good.sum())
    return {
        "name": name,
        "kind": part.kind,
        "said": float(said.mean()),
        "is": share(count, len(good)),
        "p": count_test(said, count),
        "too_sure": bool(good.mean() < said.mean()),
    }


def _true_classes(found: Labels, names: Sequence[str]) -> list[Values]:
    assert found.y is not None
    lines = []
    for c, name in enumerate(names):
        some = found.right[found.y == c]
        lines.append({"name": name, "found": share(int(some.sum()), len(some))})
    return lines
