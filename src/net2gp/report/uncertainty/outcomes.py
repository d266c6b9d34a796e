"""What a posterior says about points, batch by batch, as arrays in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributions
from torch.distributions import Distribution

from net2gp.conformal import PredictiveQuantile
from net2gp.conformal.class_scores import class_probabilities
from net2gp.conformal.interval_scores import gaussian_parts
from net2gp.data.scaling import Scaling
from net2gp.errors import InputError, NotAvailable
from net2gp.inputs import num_rows, rows
from net2gp.likelihoods.targets import shape_targets
from net2gp.likelihoods.traits import has_one_class, is_classifier, scores
from net2gp.posteriors import Posterior
from net2gp.types import Inputs

BATCH = 500
"""Points that are predicted together."""

NUM_DRAWS = 999
"""Draws of a target whose law is no mixture of Gaussians."""

MISSES = 0.1
"""The share of targets that a 90 % interval leaves out."""

Advance = Callable[..., None]


@dataclass(frozen=True, eq=False)
class Answers:
    """What a posterior says about N points.

    Args:
        x: The points.
        novelty: The share of the prior variance that the data leave open, (N,), or None.
        spread: How unsure each prediction is: the entropy of classes, or standard deviations, (N, D).
    """

    x: Inputs = field(repr=False)
    novelty: np.ndarray | None
    spread: np.ndarray

    def __len__(self) -> int:
        return len(self.spread)


@dataclass(frozen=True, eq=False)
class Labels(Answers):
    """Answers about classes.

    Args:
        probs: The probabilities of K classes, (N, K).
        doubt: The probability that the most probable class is wrong, with all its digits, (N,).
        logits: The logits of the mean alone, (N, K), or None if the mean is no logits.
        y: The labels, (N,), or None if they are not known.
    """

    probs: np.ndarray
    doubt: np.ndarray
    logits: np.ndarray | None
    y: np.ndarray | None

    @property
    def said(self) -> np.ndarray:
        """The most probable class, (N,)."""
        return self.probs.argmax(1)

    @property
    def right(self) -> np.ndarray:
        """Whether it is the label, (N,), as numbers."""
        return (self.said == self.y).astype(float)


@dataclass(frozen=True, eq=False)
class Numbers(Answers):
    """Answers about D numbers per point; what needs targets is None without them.

    Args:
        mean: Means, (N, D).
        lower: The 5 % quantiles, (N, D).
        upper: The 95 % quantiles, (N, D).
        pit: The probability of a smaller target, (N, D).
        log_density: log p(y), (N,).
        y: Targets, (N, D).
        drawn: Whether quantiles come from draws, since the law is no mixture of Gaussians.
    """

    mean: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    pit: np.ndarray | None
    log_density: np.ndarray | None
    y: np.ndarray | None
    drawn: bool = False

    @property
    def inside(self) -> np.ndarray:
        """Whether targets lie in their 90 % intervals, (N, D), as numbers."""
        assert self.pit is not None
        return ((self.pit >= MISSES / 2) & (self.pit <= 1 - MISSES / 2)).astype(float)


@torch.no_grad()
def answers(
    posterior: Posterior, x: Inputs, y: Tensor | None, advance: Advance
) -> Labels | Numbers:
    """Predict points in batches of `BATCH`, whatever their number.

    Args:
        posterior: The posterior.
        x: N points.
        y: Their targets, or None.
        advance: Is called with the number of points after each batch.

    Returns:
        What the posterior says.

    Raises:
        InputError: If it says nothing about some points, since its numbers overflow there.
    """
    parts: list[dict[str, Any]] = []
    for start in range(0, num_rows(x), BATCH):
        piece = slice(start, start + BATCH)
        some = rows(x, piece)
        found = _parts(posterior, some, posterior.predict(some), None if y is None else y[piece])
        parts.append({**found, "novelty": _novelty(posterior, some)})
        advance(num_rows(some))
    whole = _joined(x, parts)
    says = whole.probs if isinstance(whole, Labels) else np.hstack([whole.lower, whole.upper])
    good = np.isfinite(says).all(1)
    if not good.all():
        raise InputError(
            f"the predictions of {int((~good).sum())} of {len(good)} points are not finite (first of x["
            f"{int(good.argmin())}]): these inputs are too large for the network. Leave them out."
        )
    return whole


def of_law(posterior: Posterior, x: Inputs, law: Distribution, y: Tensor) -> Labels | Numbers:
    """What a law says about points and their targets, without their novelty."""
    return _joined(x, [{**_parts(posterior, x, law, y), "novelty": None}])


def in_units(found: Labels | Numbers, scaling: Scaling) -> Labels | Numbers:
    """The same answers in the units that targets had before they were standardized.

    With y = m + s·z for the standardized z, means and quantiles become m + s·(…), deviations s·(…), and
    log p(y) = log p(z) − Σ log s. Probabilities and labels stay as they are, and so do the points.

    Args:
        found: What a posterior of standardized targets says.
        scaling: Their means m and standard deviations s.

    Returns:
        What it says about the targets themselves.
    """
    if isinstance(found, Labels) or scaling.y_std is None or scaling.y_mean is None:
        return found
    m, s = np.asarray(scaling.y_mean), np.asarray(scaling.y_std)
    log_density = None if found.log_density is None else found.log_density - np.log(s).sum()
    return replace(
        found,
        mean=m + s * found.mean,
        lower=m + s * found.lower,
        upper=m + s * found.upper,
        spread=s * found.spread,
        y=None if found.y is None else m + s * found.y,
        log_density=log_density,
    )


def _parts(posterior: Posterior, x: Inputs, law: Distribution, y: Tensor | None) -> dict[str, Any]:
    of_labels = isinstance(law, distributions.Categorical | distributions.Bernoulli)
    target = None if y is None else y.to(law.mean.device)
    return (_labels if of_labels else _numbers)(posterior, x, law, target)


def _joined(x: Inputs, parts: list[dict[str, Any]]) -> Labels | Numbers:
    joined: dict[str, Any] = {
        name: None if any(part[name] is None for part in parts) else _join(parts, name)
        for name in parts[0]
        if name != "drawn"
    }
    if "probs" in joined:
        return Labels(x=x, **joined)
    return Numbers(x=x, drawn=bool(parts[0]["drawn"]), **joined)


def _join(parts: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.concatenate([_array(part[name]) for part in parts])


def _array(value: Tensor | np.ndarray) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else value.detach().cpu().double().numpy()


def _novelty(posterior: Posterior, x: Inputs) -> Tensor | None:
    try:
        return posterior.novelty(x)
    except (NotAvailable, NotImplementedError):
        return None


def _labels(posterior: Posterior, x: Inputs, law: Distribution, y: Tensor | None) -> dict[str, Any]:
    probs = _array(class_probabilities(law))
    best = probs.argmax(1)[:, None]
    others = probs.copy()
    np.put_along_axis(others, best, 0.0, 1)
    logs = np.log(np.where(probs > 0, probs, 1.0))
    labels = None if y is None else y.reshape(-1).long().cpu().numpy()
    return {
        "probs": probs,
        "doubt": others.sum(1),  # 1 − max p would lose the digits of small numbers
        "spread": -(probs * logs).sum(1, keepdims=True),
        "logits": _logits(posterior, x, probs.shape[1]),
        "y": labels,
    }


def _logits(posterior: Posterior, x: Inputs, num_classes: int) -> Tensor | None:
    """The logits of the posterior's mean, which after `laplace` are the network's own."""
    mean = posterior.mean(x).double()
    if has_one_class(posterior.likelihood) and mean.shape[1] == num_classes:
        return mean
    if is_classifier(posterior.likelihood) and mean.shape[1] == 1 and num_classes == 2:
        return torch.cat([torch.zeros_like(mean), mean], 1)
    return None


def _numbers(
    posterior: Posterior, x: Inputs, law: Distribution, y: Tensor | None
) -> dict[str, Any]:
    mean = law.mean.double()
    target = None if y is None else shape_targets(law.mean, y).double()
    log_density = None
    if y is not None:
        log_density = scores(posterior.likelihood, law, y).double().reshape(len(mean), -1).sum(1)
    try:
        found = _by_parts(law, target)
    except NotAvailable:
        found = _by_draws(law, target)
    return {**found, "mean": mean, "log_density": log_density, "y": target}


def _by_parts(law: Distribution, y: Tensor | None) -> dict[str, Any]:
    """Quantiles of mixtures of Gaussians."""
    logs, means, stds = gaussian_parts(law)
    depth = torch.full_like(law.mean.double(), -math.log(MISSES))
    lower, upper = PredictiveQuantile().interval(law, depth)
    pit = None
    if y is not None:
        pit = (logs + torch.special.log_ndtr((y[..., None] - means) / stds)).logsumexp(-1).exp()
    spread = law.variance.double().sqrt()
    return {"lower": lower, "upper": upper, "pit": pit, "spread": spread, "drawn": False}


def _by_draws(law: Distribution, y: Tensor | None) -> dict[str, Any]:
    """Quantiles of any other law, from draws. Where draws equal the target, a random share counts as smaller.

    The rank of a target among draws of its own law is uniform, so that nothing is approximate in the
    probability of a smaller target but its steps of 1/1000.
    """
    devices = [law.mean.device] if law.mean.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        draws = law.sample(torch.Size([NUM_DRAWS])).double()
        share = torch.rand(law.mean.shape, dtype=torch.float64).to(draws.device)
    ends = torch.tensor([MISSES / 2, 1 - MISSES / 2], dtype=torch.float64).to(draws.device)
    lower, upper = torch.quantile(draws, ends, 0)
    pit = None
    if y is not None:
        below, equal = (draws < y).sum(0), (draws == y).sum(0)
        pit = (below + share * (equal + 1)) / (NUM_DRAWS + 1)
    std = law.variance.double().sqrt()
    spread = torch.where(std.isfinite(), std, (upper - lower) / 3.29)
    return {"lower": lower, "upper": upper, "pit": pit, "spread": spread, "drawn": True}
