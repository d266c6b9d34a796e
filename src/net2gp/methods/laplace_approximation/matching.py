"""Links whose predictions on the training data are as sure as the network's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from net2gp.calling import picked
from net2gp.inputs import map_inputs, num_rows
from net2gp.likelihoods.traits import Linked, of_any_points, rows_per_point
from net2gp.linalg import psd_root
from net2gp.linear.forward.evaluation import evaluating
from net2gp.linear.forward.places import num_places
from net2gp.linear.precision import HALF
from net2gp.methods.laplace_approximation.search import Search, Tuned
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.around_network import AroundNetwork
from net2gp.posteriors.recipes.places import AroundPlaces
from net2gp.posteriors.recipes.seen import FEW_SHARES, seen_by
from net2gp.posteriors.weights import Structure, Task, Traits
from net2gp.progress import progress
from net2gp.types import Inputs, Likelihood

STEPS = 12
"""The most prior variances that are tried."""

LARGEST_MOVE = 8.0
"""How far, in logarithms, the prior variance may end from the one with the largest evidence."""

MANY_CLASSES = 32
"""Classes up to which a link is matched on all of them."""

LARGEST_LOG_SCALE = 40.0
"""The logarithm of the largest scale of a link: logits of 1e17 would need more."""

FEWEST_POINTS = 20
"""Points whose places are looked at, if they have many."""

LINK_DRAWS = 16
"""Draws that estimate the variances at places for a link: one number is sought, and averages over places."""

FEW_POINTS = 50
"""Up to that many points each keeps its own information: what few other points leave is nearly the prior."""


def linked(search: Search, found: Tuned) -> Tuned:
    """What was chosen, with the link that is as sure as the network, at some of the points of the task."""
    points, (index, some) = search.task.sums.count, search.linking
    if rows_per_point(some.likelihood) is not None:
        return _linked_at_places(search, found, some)
    covariance = search.curvature.at_data(found.prior_var, found.scale, index)
    if covariance is None:
        found = search.solve(found)
        posterior = match_link(search.posterior(found), some.x, points)
        return replace(found, likelihood=posterior.likelihood)
    if points > FEW_POINTS:
        covariance = without_own(covariance, found.likelihood.curvature(some.f) * found.scale)
    return replace(found, likelihood=_linked(found.likelihood, some.f, covariance))


def _linked_at_places(search: Search, found: Tuned, some: Task) -> Tuned:
    """The same from the variances at places, of some points, that count."""
    found = search.solve(found)
    process, likelihood = search.posterior(found).process, some.likelihood
    assert isinstance(process, AroundPlaces)
    assert isinstance(likelihood, Linked)
    process = replace(process, num_draws=LINK_DRAWS)
    by_contrast = likelihood.matched_link.needs == "contrasts"
    mean, variances = (process.contrast if by_contrast else process.diagonal)(some.x)
    linked = _scaled(likelihood, mean.double(), variances.double())
    return replace(found, likelihood=of_any_points(linked))


def match(search: Search, best: Tuned) -> Tuned:
    """The prior variance and the link that belong together, from the one of the largest evidence.

    With t = log prior_var, the root of log(α(t)² ‖θ*‖²/γ(t)) − t by the secant method: the scaled
    parameters αθ* have the size that the prior expects of those that the data determine. It is for structures
    over all weights, whose effective parameters γ say what the data determine; the variance of a last layer
    often does not grow away from the data, so that a wider prior would only add noise.
    """
    theta = search.task.linearized.flatten(search.task.params).double()
    size = float(theta @ theta)
    assert isinstance(best.prior_var, float)

    def excess(log: float) -> tuple[float, Tuned]:
        one = linked(search, search.at(np.array([log])))
        gamma = search.effective_parameters(float(np.exp(log)), one.scale)
        alpha = one.likelihood.link.scale  # type: ignore[attr-defined]
        expected = max(alpha**2 * size / max(gamma, 1e-12), 1e-300)  # parameters may all be zero
        return float(np.log(expected)) - log, one

    start = before = float(np.log(best.prior_var))
    with progress("prior variance", STEPS) as advance:
        value, own = excess(before)
        # one Σ is kept at a time: it may be as large as the curvature
        own = result = replace(own, solved=None)
        log, new = before + 1.5 * value, value
        for _ in range(STEPS):
            if abs(log - start) > 2 * LARGEST_MOVE:  # too far to come back, perhaps beyond float32
                break
            result = replace(result, solved=None)
            new, result = excess(log)
            advance(note=f"prior_var {np.exp(log):.3g}")
            if abs(new) < 0.02 or log == before:
                break
            slope = min((new - value) / (log - before), -0.1)
            before, value, log = log, new, float(np.clip(log - new / slope, log - 5, log + 5))
    # few points of an interpolating network leave the scale open: then the evidence has the last word
    settled = abs(new) < 0.1 and abs(log - start) < LARGEST_MOVE
    return result if settled else own


def match_link(posterior: Posterior, x: Inputs, num_points: int | None = None) -> Posterior:
    """The posterior with the link whose scale minimizes KL(network ‖ prediction) at the points `x`.

    Labels are not needed: the network's average certainty was found by its training, and the data say
    little more about it. What the covariance adds is where to be less sure than on average, and where
    more. Where the covariance is exact, each point's own information is taken out of it, as it would be
    absent at a new point; but not of few points, where the scale would then belong to one point less, and
    predictions surer than the network even where it was trained. `num_points` of the data are known to the
    posterior; None counts them. Cost: one `marginal`.
    """
    likelihood = posterior.likelihood
    count = num_rows(posterior.data[0]) if num_points is None else num_points
    assert isinstance(likelihood, Linked)
    if likelihood.matched_link.needs == "contrasts" and not _traits(posterior).exact:
        mean, variances = _contrasts(posterior, x)
        return replace(posterior, likelihood=_scaled(likelihood, mean, variances))
    return replace(posterior, likelihood=_linked(likelihood, *_moments(posterior, x, count)))


def _contrasts(posterior: Posterior, x: Inputs) -> tuple[Tensor, Tensor]:
    """f_c less the output of the most probable class, and its variance: (N, C); of many classes for some.

    Some are the most probable ones and as many others: one number, the scale of the link, is sought, and
    each class would cost a backward pass for each prior variance that is tried.
    """
    linearized = posterior.linearized
    if _traits(posterior).one_layer or posterior.num_outputs <= MANY_CLASSES:
        return linearized(x).double(), posterior.contrast(x).double()
    generator = torch.Generator().manual_seed(0)
    others = torch.randperm(posterior.num_outputs, generator=generator)[: MANY_CLASSES // 2]

    def some(out: Any) -> Tensor:
        f = picked(out, linearized.output)
        likely = f.topk(MANY_CLASSES // 2, dim=1).indices
        chosen = torch.cat([likely, others.to(f.device).expand(len(f), -1)], 1)
        return f.gather(1, chosen) - f.gather(1, likely[:, :1])

    few = replace(linearized, output=some)
    with evaluating(linearized.network):
        return few(x).double(), posterior.covariance.variances(few, x).double()


def _linked(likelihood: Likelihood, mean: Tensor, covariance: Tensor) -> Likelihood:
    """The likelihood with the link that fits these means (N, C) and covariances (N, C, C) of f."""
    assert isinstance(likelihood, Linked)
    return _scaled(likelihood, mean, likelihood.matched_link.variances(mean, covariance))


def _scaled(likelihood: Linked, mean: Tensor, variances: Tensor) -> Likelihood:
    """The likelihood with the link of the scale at which it is as sure as the network."""
    link = likelihood.matched_link

    def loss(scale: float) -> float:
        return float(likelihood.cross_entropy(mean, link(scale).shrink(mean, variances)))

    return likelihood.with_link(link(_best_scale(loss)))


def _moments(posterior: Posterior, x: Inputs, count: int) -> tuple[Tensor, Tensor]:
    exact = _traits(posterior).exact
    assert isinstance(posterior.process, AroundNetwork)
    if exact and posterior.process.linearized.rounding not in HALF:
        # float32 keeps no digit of what is left without a point's own information; a network of half
        # precision has a covariance of its own roundings, which are others in float64
        posterior = posterior.to(dtype=torch.float64)
        x = map_inputs(x, lambda v: v.double() if v.is_floating_point() else v)
    mean, covariance = (value.double() for value in posterior.process.moments(x))
    if exact and count > FEW_POINTS:
        own = posterior.likelihood.curvature(mean) / posterior.temperature
        covariance = without_own(covariance, own)
    return mean, covariance


def with_novelty(posterior: Posterior, task: Task) -> Posterior:
    """The posterior whose matched link is cautious, and sees how novel a point is beside the training inputs.

    A logit, or the difference of two, gains a quarter of the variance of the scaled logits on the training
    data, α²·mean f²/4 with f centered over classes, times the excess of the share of the prior variance that
    is left open over that of four in five training inputs, or all but one in a thousand of their places.
    Ordinary points keep their predictions, which `match` has found, up to where they would be surer than
    the network.
    Cost: the tangent kernel of 400 points, or one pass over the training data.
    """
    process, likelihood = posterior.process, posterior.likelihood
    assert isinstance(process, AroundNetwork | AroundPlaces)
    assert isinstance(likelihood, Linked)
    link = replace(likelihood.link, cautious=True)
    as_rows = rows_per_point(likelihood) or (lambda f: f)
    with evaluating(process.linearized.network):
        places = num_places(process.linearized, task.few())
        some = task.some(max(FEWEST_POINTS, FEW_SHARES // places))
        seen = seen_by(task, some)
    if seen is None:
        return replace(posterior, likelihood=likelihood.with_link(link))
    f = as_rows(some.f)
    f = f - f.mean(1, keepdim=True) if f.shape[1] > 1 else f
    size = link.scale**2 * float(f.square().mean())
    # a difference of two logits gains the variance of both
    link = replace(link, novelty_var=size / 8 if link.needs == "contrasts" else size / 4)
    return replace(
        posterior, process=process.with_seen(seen), likelihood=likelihood.with_link(link)
    )


def without_own(covariance: Tensor, curvature: Tensor) -> Tensor:
    """S (I − ΛS)⁻¹ for each point: the covariance (N, C, C) without the point's own curvature Λ.

    As S + S R (I − RᵀSR)⁻¹ Rᵀ S with Λ = RRᵀ. Where a point alone determines its own output, RᵀSR → 1, the
    factor is kept below 1000.

    >>> rest = without_own(torch.full((1, 1, 1), 0.5), torch.ones(1, 1, 1))
    >>> round(float(rest), 9)  # 1/(1/0.5 − 1)
    1.0
    """
    R = psd_root(curvature)
    S = covariance.double()
    own, Q = torch.linalg.eigh(R.mT @ S @ R)
    sides = S @ R @ Q
    return S + (sides / (1 - own.clamp(0, 0.999))[:, None, :]) @ sides.mT


def _traits(posterior: Posterior) -> Traits:
    """Those of the structure of a posterior; the default ones if it has none."""
    structure = getattr(posterior.recipe, "structure", None)
    return structure.traits() if isinstance(structure, Structure) else Traits()


def _best_scale(loss: Callable[[float], float]) -> float:
    """The scale of the smallest loss, which is convex in it."""
    found = minimize_scalar(
        lambda log: loss(float(np.exp(log))),
        bounds=(-1.0, LARGEST_LOG_SCALE),
        method="bounded",
        options={"xatol": 1e-4},
    )
    return float(np.exp(found.x))
