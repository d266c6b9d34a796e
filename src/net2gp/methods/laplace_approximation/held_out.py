"""Links that predict labels best that were held out: a temperature, and what novelty takes away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from scipy.optimize import OptimizeResult, minimize, minimize_scalar
from torch import Tensor

from net2gp.likelihoods import Contrast, Probit
from net2gp.likelihoods.traits import Linked, has_open_link, scores, target_columns
from net2gp.linear.curvatures.kept_features import keeping_features
from net2gp.linear.linearized import example_of
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.around_network import AroundNetwork
from net2gp.posteriors.recipes.places import AroundPlaces
from net2gp.posteriors.weights import Task
from net2gp.streams import Passes, held_or_streamed
from net2gp.types import Data, Inputs, Likelihood, Stream

LOG_SCALES = (-6.0, 40.0)
"""The logarithms of the scales of a link that are looked through."""

LARGEST_SCALE, MISSED = float(np.exp(LOG_SCALES[1])), -1e6
"""The largest scale, and the log p(y | x) of a label there below which it is not the most probable one."""

WEIGHTS = (*(0.5**k for k in range(7)), 0.0)
"""Shares of the variance of novel points that are tried, the most cautious one first."""

LARGEST_VARIANCE = 10.0
"""The largest average variance of logits, with the spread of the link."""

Number = float | Tensor


class HeldOut:
    """The data of a validation, together or as a stream.

    Args:
        task: The network and the likelihood.
        data: What was held out.

    Its `missed` says whether some label is not the network's most probable one. If there is none,
    log p(y | x) grows with the scale of a link for ever.

    Raises:
        InputError: The targets do not fit the likelihood.
    """

    def __init__(self, task: Task, data: Data) -> None:
        like = example_of(task.linearized)
        given = held_or_streamed(data, like)
        self.task = task
        self.data = Passes(given, like) if isinstance(given, Stream) else given
        self.missed = False
        self.error = self._checked()

    @property
    def points(self) -> Inputs | None:
        """The inputs, if they are together."""
        return None if isinstance(self.data, Passes) else self.data[0]

    def pieces(self) -> Iterator[tuple[Inputs, Tensor]]:
        """The inputs and targets in pieces that fit into memory."""
        if not isinstance(self.data, Passes):
            yield self.data
            return
        for _, x, y in self.data.pieces("held-out data"):
            yield x, y

    def _checked(self) -> float:
        """Raise what is wrong with the targets; return the squared error and note missed labels if needed."""
        task, total, count = self.task, 0.0, 0
        for x, y in self.pieces():
            f = task.linearized(x)
            task.likelihood.check(f, y)
            if task.open_noise:
                columns = target_columns(task.likelihood, f, y).double()
                total += float((columns - f.double()).square().sum())
            elif has_open_link(task.likelihood):
                limit = task.likelihood.log_prob(LARGEST_SCALE * f.double(), y)
                self.missed |= bool((limit < MISSED).any())
            count += f.numel()
        return total / count

    def score(self, posterior: Posterior) -> float:
        """The average log p(y | x)."""
        total, count = 0.0, 0
        for x, y in self.pieces():
            log_prob = scores(posterior.likelihood, posterior.predict(x), y).double()
            total, count = total + float(log_prob.sum()), count + log_prob.numel()
        return total / count

    def laws(self, posterior: Posterior) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Means of f, the variances that the matched kind of link reads, excess novelty, and the targets."""
        # novelty first: of a large network it comes from features, which are kept beside the outputs
        parts = [(_excess(posterior, x), *_law(posterior, x), y) for x, y in self.pieces()]
        excess, mean, variances, y = (torch.cat(values) for values in zip(*parts, strict=True))
        return mean, variances, excess, y


def linked_to(posterior: Posterior, held_out: HeldOut) -> tuple[float, Likelihood]:
    """The largest average log p(y | x) over scale and spread of the matched kind of link, and this link."""
    likelihood = posterior.likelihood
    assert isinstance(likelihood, Linked)
    mean, variances, _, y = held_out.laws(posterior)
    link = likelihood.matched_link()

    def loss(scale: Number, spread: Number) -> Tensor:
        return -likelihood.log_prob(_shrunk(link, scale, mean, spread * variances), y).mean()

    scale, spread = _best_pair(loss, variances)
    return -float(loss(scale, spread)), likelihood.with_link(link.__class__(scale, spread=spread))


def with_weight(posterior: Posterior, held_out: HeldOut) -> Posterior:
    """The posterior that takes as much certainty from novel points as the held-out labels allow.

    For each share of `novelty_var`, scale and spread of the link have the largest log p(y | x). The largest
    share is taken that predicts the labels at least as well as the network at its best temperature, a link
    without variances, or as no share, if that is worse. If no label was missed, the link stays as it is.
    """
    if not held_out.missed:
        return posterior
    likelihood = posterior.likelihood
    assert isinstance(likelihood, Linked)
    with keeping_features(held_out.points):
        mean, variances, excess, y = held_out.laws(posterior)
    link = likelihood.link
    twice = 2.0 if likelihood.matched_link.needs == "contrasts" else 1.0
    relative = link.novelty_var / link.scale**2

    def loss(weight: float, scale: Number, spread: Number) -> Tensor:
        both = spread * variances + twice * weight * relative * scale**2 * excess
        return -likelihood.log_prob(_shrunk(link, scale, mean, both), y).mean()

    alone = _best(lambda scale: loss(0.0, scale, 0.0))
    least = loss(0.0, alone, 0.0).maximum(loss(0.0, *_best_pair(partial(loss, 0.0), variances)))
    for weight in WEIGHTS:
        scale, spread = _best_pair(partial(loss, weight), variances)
        if bool(loss(weight, scale, spread) <= least):
            break
    most = weight * relative * scale**2 / spread
    chosen = link.__class__(scale, novelty_var=most, spread=spread)
    return replace(posterior, likelihood=likelihood.with_link(chosen))


def _shrunk(link: Probit | Contrast, scale: Number, mean: Tensor, variances: Tensor) -> Tensor:
    """The logits of this kind of link with another scale, which may be differentiated."""
    return scale * link.__class__().shrink(mean, variances)


def _best_pair(loss: Callable[[Number, Number], Tensor], variances: Tensor) -> tuple[float, float]:
    """The scale and the spread of a link with the smallest loss, for such variances.

    The spread is at least 1, since smaller variances are those of smaller priors, and no larger than where
    only its ratio to the squared scale matters. L-BFGS in logarithms starts at both ends of this range.
    """
    top = max(0.0, float(np.log(LARGEST_VARIANCE / max(float(variances.mean()), 1e-300))))

    def objective(logs: np.ndarray) -> tuple[float, np.ndarray]:
        with torch.enable_grad():
            point = torch.tensor(logs).requires_grad_()
            value = loss(*point.exp())
            (gradient,) = torch.autograd.grad(value, point)
        return float(value.detach()), gradient.numpy()

    def search(log: float) -> OptimizeResult:
        begin = np.array([np.log(_best(lambda scale: loss(scale, float(np.exp(log))))), log])
        tight = {"ftol": 1e-13, "gtol": 1e-8}
        bounds = [LOG_SCALES, (0.0, top)]
        return minimize(objective, begin, jac=True, method="L-BFGS-B", bounds=bounds, options=tight)

    found = [search(log) for log in sorted({0.0, top})]
    scale, spread = np.exp(min(found, key=lambda one: one.fun).x).tolist()
    return scale, spread


def _law(posterior: Posterior, x: Inputs) -> tuple[Tensor, Tensor]:
    """The means of f and the variances that the matched kind of link reads, (N, C) each."""
    likelihood = posterior.likelihood
    assert isinstance(likelihood, Linked)
    if likelihood.matched_link.needs == "contrasts":
        return posterior.mean(x).double(), posterior.contrast(x).double()
    mean, variances = posterior.process.diagonal(x)
    return mean.double(), variances.double()


def _best(loss: Callable[[float], Tensor]) -> float:
    """The scale of the smallest loss, which is convex in the scale."""
    found = minimize_scalar(
        lambda log: float(loss(float(np.exp(log)))),
        bounds=LOG_SCALES,
        method="bounded",
        options={"xatol": 1e-4},
    )
    return float(np.exp(found.x))


def _excess(posterior: Posterior, x: Inputs) -> Tensor:
    """By how much points, or places, are more novel than ordinary ones: (N, 1), (N, …, 1)."""
    process = posterior.process
    assert isinstance(process, AroundNetwork | AroundPlaces)
    return process.excess(x)[..., None].double()
