"""Regressions whose predictions are wide where their inputs are novel."""

from __future__ import annotations

from dataclasses import replace

from net2gp.inputs import num_rows
from net2gp.likelihoods.traits import rows_per_point
from net2gp.linear.forward.evaluation import evaluating
from net2gp.methods.laplace_approximation.noise import VARIANCE_POINTS
from net2gp.methods.laplace_approximation.regression import is_regression
from net2gp.methods.laplace_approximation.search import Search, Tuned
from net2gp.methods.laplace_approximation.tuning import Matched
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.around_network import AroundNetwork
from net2gp.posteriors.recipes.seen import FEW_SHARES, Widening, edge, seen_by


def widens(search: Search) -> bool:
    """Whether predictions are to be wider where inputs are novel: where `Matched` chose prior or noise."""
    task = search.task
    chosen = task.open_noise or task.prior_var is None
    places = rows_per_point(task.likelihood) is not None
    return chosen and isinstance(search.tuning, Matched) and is_regression(task) and not places


def with_widening(search: Search, found: Tuned, posterior: Posterior) -> Posterior:
    """The posterior whose predictions gain the variance of `Widening` at novel inputs.

    A structure that keeps a part of the covariance does not know which directions the data leave open, and
    where a network goes on otherwise than the data would have, the whole linear model is too sure as well.
    The size of the variance is that of f at the training inputs, and nothing is fitted. Cost: the tangent
    kernel of 400 points, or one pass over the training data, and the variances at 500 of them.
    """
    task, process = search.task, posterior.process
    assert isinstance(process, AroundNetwork)
    with evaluating(process.linearized.network):
        some = task.some(FEW_SHARES)
        seen = seen_by(task, some, ordinary=edge, at_random=True)
    if seen is None:
        return posterior
    few = some.some(min(VARIANCE_POINTS, num_rows(some.x)))
    variances = process.diagonal(few.x)[1].double()
    widening = Widening(seen, variances.mean(0), found.narrowed)
    return replace(posterior, process=replace(process, widening=widening))
