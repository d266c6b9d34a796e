"""Single points: where a posterior was sure and wrong, which data pull it there, and labels to look at."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from net2gp.data.scaling import Scaling
from net2gp.errors import Net2GPError
from net2gp.inputs import num_rows, rows
from net2gp.likelihoods.traits import is_classifier, of_points
from net2gp.methods import contributions, leave_one_out
from net2gp.posteriors import Posterior
from net2gp.report.uncertainty.outcomes import BATCH, Labels, Numbers, in_units, of_law
from net2gp.types import Inputs

NUM_CASES = 6
NUM_PULLS = 3
MOST_PULLING = 1000
"""Training points whose pull is computed: those with the largest residuals."""

MOST_LEFT_OUT = 300
"""Training points that are left out in turn: those that fit the worst."""

UNLIKELY = 0.01
AS_IT_IS = Scaling()
Values = dict[str, Any]


def cases(posterior: Posterior, found: Labels | Numbers, scaling: Scaling = AS_IT_IS) -> Values:
    """Pick the points where the posterior was sure and wrong, and those where it was unsure and right.

    Each has the training points that pull its output the most: by the representer theorem the mean is the
    sum over training points of k(x, x_n) α_n, where α_n is the residual of point n. Around a network that is
    at a minimum of its loss, this is the sum for its linear model.

    Args:
        posterior: The posterior.
        found: What it says about held-out points, in their own units.
        scaling: The units of the posterior's data, which are those of the points of `found` as well.

    Returns:
        The points by kind, and why there are no pulls if there are none.

    Reference: Khan et al., Approximate inference turns deep networks into Gaussian processes, NeurIPS 2019.
    """
    chosen = _of_labels(found) if isinstance(found, Labels) else _of_numbers(found)
    index = [case["index"] for kind in chosen.values() for case in kind]
    outputs = [case["output"] for kind in chosen.values() for case in kind]
    why = None
    try:
        some = rows(found.x, torch.tensor(index, dtype=torch.long))
        pulled = _pulls(posterior, some, outputs, scaling)
    except Net2GPError as error:
        pulled, why = [[] for _ in index], str(error)
    for case, pull in zip((c for kind in chosen.values() for c in kind), pulled, strict=True):
        case["pulls"] = pull
    return {**chosen, "without_pulls": why}


def _of_labels(found: Labels) -> dict[str, list[Values]]:
    assert found.y is not None
    wrong, right = np.flatnonzero(found.right == 0), np.flatnonzero(found.right == 1)
    picked = {
        "sure_and_wrong": wrong[np.argsort(found.doubt[wrong], kind="stable")][:NUM_CASES],
        "unsure_and_right": right[np.argsort(-found.doubt[right], kind="stable")][:NUM_CASES],
    }
    return {
        kind: [
            {
                "index": int(n),
                "said": int(found.said[n]),
                "is": int(found.y[n]),
                "probability": float(1 - found.doubt[n]),
                "output": int(found.said[n]),
            }
            for n in index
        ]
        for kind, index in picked.items()
    }


def _of_numbers(found: Numbers) -> dict[str, list[Values]]:
    assert found.y is not None
    off = (found.y - found.mean) / np.maximum(found.spread, 1e-300)
    output = np.abs(off).argmax(1)
    most, doubt = np.abs(off).max(1), found.spread.mean(1)
    close = np.flatnonzero(most < 0.5)
    picked = {
        "sure_and_wrong": np.argsort(-most, kind="stable")[:NUM_CASES],
        "unsure_and_right": close[np.argsort(-doubt[close], kind="stable")][:NUM_CASES],
    }
    return {
        kind: [
            {
                "index": int(n),
                "said": float(found.mean[n, output[n]]),
                "spread": float(found.spread[n, output[n]]),
                "is": float(found.y[n, output[n]]),
                "off": float(off[n, output[n]]),
                "output": int(output[n]),
            }
            for n in index
        ]
        for kind, index in picked.items()
    }


@torch.no_grad()
def _pulls(
    posterior: Posterior, x: Inputs, outputs: list[int], scaling: Scaling
) -> list[list[Values]]:
    """The training points with the largest terms of the mean's sum at each of M points."""
    known, y = posterior.data
    if not num_rows(x):
        return []
    if hasattr(posterior.process, "covariance"):
        pull, index = _around_network(posterior, x, known, y)
    else:
        pull, index = contributions(posterior, x), torch.arange(num_rows(known))
    C = pull.shape[2]
    y = scaling.back(y.double()) if y.is_floating_point() else y
    found = []
    for m, c in enumerate(outputs):
        one = pull[m, :, min(c, C - 1)].double()
        size = one if C > 1 and is_classifier(posterior.likelihood) else one.abs()
        top = size.topk(min(NUM_PULLS, len(one))).indices
        whole = max(float(one.abs().sum()), 1e-300)
        found.append([_pull(one[n], whole, int(index[n]), y[index[n]]) for n in top])
    return found


def _around_network(
    posterior: Posterior, x: Inputs, known: Inputs, y: Tensor
) -> tuple[Tensor, Tensor]:
    """The pulls (M, n, C) of the n training points with the largest residuals, and their indices."""
    parts = []
    for start in range(0, len(y), BATCH):
        piece = slice(start, start + BATCH)
        f = posterior.mean(rows(known, piece))
        parts.append(of_points(posterior.likelihood, piece).residual(f, y[piece]))
    residual = torch.cat(parts).double()
    index = residual.abs().sum(1).topk(min(MOST_PULLING, len(residual))).indices.sort().values
    C, M = residual.shape[1], num_rows(x)
    cross = posterior.kernel(x, rows(known, index)).double()
    if cross.shape[0] == M:
        return cross[..., None] * residual[index], index
    return torch.einsum("mcnd,nd->mnc", cross.reshape(M, C, -1, C), residual[index]), index


def _pull(pull: Tensor, whole: float, index: int, y: Tensor) -> Values:
    return {"index": index, "pull": float(pull), "share": float(pull) / whole, "y": _plain(y)}


def _plain(y: Tensor) -> float | int | list[float]:
    flat = y.reshape(-1).tolist()
    return flat[0] if len(flat) == 1 else flat


@torch.no_grad()
def label_errors(posterior: Posterior, scaling: Scaling = AS_IT_IS) -> Values:
    """Look for targets of the training data that all others speak against, each left out itself.

    A label is suspected if its probability is below 1 %, a number if it lies so far out that a single such
    number is to be expected in one of twenty data sets of this size (Bonferroni's correction). Only the
    `MOST_LEFT_OUT` points that fit the worst are left out.

    Args:
        posterior: The posterior.
        scaling: The units of its targets.

    Returns:
        The suspected points, the least probable first; or the reason why points cannot be left out.
    """
    try:
        known, y = posterior.data
        index = _worst_fits(posterior, known, y)
        law = leave_one_out(posterior, points=index)
        likelihood = of_points(posterior.likelihood, index)
        predicted = likelihood.predict(law)
    except Net2GPError as error:
        return {"reason": str(error)}
    found = in_units(of_law(posterior, rows(known, index), predicted, y[index]), scaling)
    lines = _label_lines(found) if isinstance(found, Labels) else _number_lines(found, len(y))
    for line in lines:
        line["index"] = int(index[line["index"]])
    counts = {"looked_at": len(index), "n": len(y), "suspected": len(lines)}
    return {**counts, "rows": lines[: 2 * NUM_CASES]}


def _worst_fits(posterior: Posterior, known: Inputs, y: Tensor) -> Tensor:
    """The training points with the smallest log p(y | E f)."""
    parts = []
    for start in range(0, len(y), BATCH):
        piece = slice(start, start + BATCH)
        f = posterior.mean(rows(known, piece))
        parts.append(of_points(posterior.likelihood, piece).log_prob(f, y[piece]))
    fit = torch.cat(parts).reshape(len(y), -1).sum(1)
    return fit.topk(min(MOST_LEFT_OUT, len(y)), largest=False).indices


def _label_lines(found: Labels) -> list[Values]:
    probs, y = found.probs, found.y
    assert y is not None
    own = probs[np.arange(len(y)), y]
    return [
        {
            "index": int(n),
            "is": int(y[n]),
            "p": float(own[n]),
            "said": int(probs[n].argmax()),
            "probability": float(probs[n].max()),
        }
        for n in np.argsort(own, kind="stable")
        if own[n] < UNLIKELY
    ]


def _number_lines(found: Numbers, n: int) -> list[Values]:
    pit, y = found.pit, found.y
    assert pit is not None
    assert y is not None
    tails = 2 * np.minimum(pit, 1 - pit)
    p = np.minimum(tails.min(1) * pit.shape[1] * n, 1.0)
    output = tails.argmin(1)
    return [
        {
            "index": int(i),
            "is": float(y[i, output[i]]),
            "p": float(p[i]),
            "said": float(found.mean[i, output[i]]),
            "spread": float(found.spread[i, output[i]]),
            "output": int(output[i]),
        }
        for i in np.argsort(p, kind="stable")
        if p[i] < 0.05
    ]
