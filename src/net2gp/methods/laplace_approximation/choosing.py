"""Choose what is left open of Laplace's approximation: prior variance, noise, link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy.optimize import minimize_scalar

from net2gp.errors import InputError, TuningAtEdge, warn
from net2gp.likelihoods.traits import has_open_link
from net2gp.linear.curvatures.kept_features import keeping_features
from net2gp.methods.laplace_approximation.held_out import HeldOut, linked_to
from net2gp.methods.laplace_approximation.matching import linked, match
from net2gp.methods.laplace_approximation.noise import regressed
from net2gp.methods.laplace_approximation.regression import is_regression
from net2gp.methods.laplace_approximation.search import Search, Tuned
from net2gp.methods.laplace_approximation.tuning import Evidence, Matched, Tuning, Validation
from net2gp.posteriors.weights import Task
from net2gp.progress import progress

NOISE_STEPS, NOISE_RANGE = 10, 9.0
"""Noises that are tried for each prior on held-out rows, and how far, in logarithms, below their error."""


def checked(task: Task, tuning: Tuning | None) -> Tuning:
    """The tuning that was asked for, or the default; raise if it is none, or has nothing to choose."""
    chosen = Matched() if tuning is None else tuning
    if not isinstance(chosen, Evidence | Validation | Matched):
        raise InputError(
            f"tuning must be Matched(), Evidence() or Validation(data), but is {chosen!r}."
        )
    if tuning is not None and task.prior_var is not None:
        _check_used(task, tuning)
    return chosen


def tuned(search: Search) -> Tuned:
    """Everything that is open chosen: prior variances, noise, link."""
    task, tuning = search.task, search.tuning
    if isinstance(tuning, Matched) and is_regression(task):
        return regressed(search)
    by = search.stand_in()
    if isinstance(tuning, Validation) and task.prior_var is None:
        return _validated(search, by, tuning)
    best = by.at(by.maximize())
    if not isinstance(tuning, Matched) or not has_open_link(task.likelihood):
        return best
    own = by.curvature is search.curvature
    if task.prior_var is None and search.structure.traits().all_weights:
        best = match(by, best)
        if own:
            return best
    # the link belongs to the covariance that predicts, whatever chose the prior
    return linked(replace(search, task=search.curvature.task), replace(best, solved=None))


def _check_used(task: Task, tuning: Tuning) -> None:
    """Raise if a prior variance that is given leaves nothing for `tuning` to choose."""
    if isinstance(tuning, Validation) or (isinstance(tuning, Evidence) and tuning.per_layer):
        raise InputError(
            f"{type(tuning).__name__} chooses prior variances, but prior_var is given. Leave out tuning= or "
            "prior_var=."
        )
    if not task.open_noise and not has_open_link(task.likelihood):
        raise InputError(
            "prior_var is given, and the likelihood leaves neither noise nor link open: nothing is left for "
            "tuning= to choose. Leave out tuning= or prior_var=."
        )


def _validated(search: Search, by: Search, validation: Validation) -> Tuned:
    """The prior variance of the grid, and an open noise or link, that predict the held-out data best."""
    held_out = HeldOut(by.task, validation.data)
    open_link = has_open_link(by.task.likelihood)
    if open_link and not held_out.missed:
        warn(
            "all held-out labels are the network's most probable ones, so that they do not say how certain "
            "predictions may be. The link is matched on the training data. Hold out more data.",
            TuningAtEdge,
        )

    def scored(logs: list[float]) -> tuple[float, Tuned]:
        one = by.at(np.array(logs))
        if open_link and held_out.missed:
            score, likelihood = linked_to(by.posterior(one), held_out)
            return score, replace(one, likelihood=likelihood)
        if open_link:
            one = linked(replace(by, tuning=Matched()), one)
        return held_out.score(by.posterior(one)), one

    def chosen(log: float) -> tuple[float, Tuned]:
        if not by.task.open_noise:
            return scored([log])
        return _best_noise(lambda noise: scored([log, noise]), held_out.error)

    choices: list[tuple[float, Tuned]] = []
    bar = progress("prior variance", len(validation.grid))
    with keeping_features(held_out.points), bar as advance:
        for value in validation.grid:
            choices.append(chosen(float(np.log(float(value)))))
            advance(note=f"log p(y) {choices[-1][0]:.4f}")
    best = max(choices, key=lambda choice: choice[0])[1]
    if not open_link or held_out.missed:
        return best
    own = replace(search, task=search.curvature.task, tuning=Matched())
    return linked(own, replace(best, solved=None))


def _best_noise(
    scored: Callable[[float], tuple[float, Tuned]], error: float
) -> tuple[float, Tuned]:
    """The best noise at one prior: at most the squared error of the held-out rows, which it is a part of."""
    tried: list[tuple[float, Tuned]] = []

    def loss(log: float) -> float:
        tried.append(scored(log))
        return -tried[-1][0]

    top = float(np.log(max(error, 1e-12)))
    loss(top)
    options = {"maxiter": NOISE_STEPS, "xatol": 0.02}
    minimize_scalar(loss, bounds=(top - NOISE_RANGE, top), method="bounded", options=options)
    return max(tried, key=lambda one: one[0])
