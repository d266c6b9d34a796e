"""Prior and noise of a regression, found in its linear model and fitted to what a structure can represent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq
from torch import Tensor

from net2gp.linear.forward.evaluation import evaluating
from net2gp.methods.laplace_approximation.regression import Regression, regression, warn_of_scales
from net2gp.methods.laplace_approximation.search import Search, Tuned
from net2gp.methods.laplace_approximation.some_rows import SomeRows
from net2gp.types import Inputs

VARIANCE_POINTS = 500
"""Points at which the variances of a structure and of the whole linear model are compared."""

VARIANCE_TOL, VARIANCE_RANGE = 0.02, 20.0
"""How well, and within which logarithms, a structure's prior and noise meet the variance that is wanted."""


def regressed(search: Search) -> Tuned:
    """Prior and noise of a regression, by the evidence of the linear model at its own mode."""
    task, given = search.task, search.task.prior_var
    noise = None if task.open_noise else float(task.likelihood.noise_var)  # type: ignore[attr-defined]
    if given is not None and noise is not None:
        return search.at(np.array([]))
    if task.open_noise:
        assert task.sums.targets is not None
        warn_of_scales(task.sums.targets)
    model = regression(task, search.structure.traits())
    noise, scale = model.best(noise, None if given is None else 1.0)
    model.warn_at_edges(noise if task.open_noise else None, scale if given is None else None)
    some = task.some(VARIANCE_POINTS)
    chosen = SomeRows.of(task, VARIANCE_POINTS)
    tried = _Tried(search, model, chosen, some.x)
    if given is not None:
        return tried.at(noise, None)
    whole = scale
    noise, scale = tried.with_variance(noise, scale)
    if task.open_noise and not search.structure.traits().solved_once:
        f, y = chosen.values(some)
        squares = (y - f).square()
        most = max(model.spread, model.error)
        noise = likely_noise(noise, tried.variances(noise, scale), squares, most)
    return replace(tried.at(noise, scale), narrowed=whole / scale)


@dataclass(frozen=True, eq=False)
class _Tried:
    """A structure at several noises and prior variances, compared with the linear model at some rows."""

    search: Search
    model: Regression
    rows: SomeRows
    x: Inputs

    def at(self, noise_var: float, prior_var: float | None) -> Tuned:
        """What is chosen with these; each counts where it is open."""
        logs = [] if prior_var is None else [np.log(prior_var)]
        logs = [*logs, np.log(noise_var)] if self.search.task.open_noise else logs
        return self.search.at(np.array(logs))

    def variances(self, noise_var: float, prior_var: float) -> Tensor:
        """The variances of f at the rows."""
        solved = self.search.solve(self.at(noise_var, prior_var)).solved
        assert solved is not None
        linearized = self.search.curvature.task.linearized
        with evaluating(linearized.network):
            return self.rows.variances(solved.covariance, linearized, self.x)

    def variance(self, noise_var: float, prior_var: float) -> float:
        """Their average."""
        return float(self.variances(noise_var, prior_var).mean())

    def with_variance(self, noise: float, prior_var: float) -> tuple[float, float]:
        """Noise and prior variance at which the structure is as unsure of left-out rows as the whole model.

        Those of the model go in. Kronecker factors and diagonals let parameters vary together where the data
        forbid it: then they take a narrower prior. Where they, or some weights or layers alone, vary too
        little, the rest counts as noise, as it is an error that the structure does not explain, up to the
        variance of y. A structure that has the whole covariance keeps what was found.
        """
        model, traits = self.model, self.search.structure.traits()
        left_out = model.left_out(noise, prior_var)
        if traits.whole or left_out <= 0:
            return noise, prior_var
        if self.variance(noise, prior_var) > left_out:
            narrower = lambda log: self.variance(noise, math.exp(log)) - left_out
            log = _root(narrower, math.log(prior_var) - VARIANCE_RANGE, math.log(prior_var))
            return noise, math.exp(log)
        if traits.keeps_prior or not self.search.task.open_noise:
            return noise, prior_var
        total = min(noise + left_out, max(model.spread, model.error, noise))
        louder = lambda log: math.exp(log) + self.variance(math.exp(log), prior_var) - total
        return math.exp(_root(louder, math.log(noise), math.log(total))), prior_var


def likely_noise(noise_var: float, variances: Tensor, squares: Tensor, most: float) -> float:
    """The noise from `noise_var` to `most` at which the network's residuals are the most probable.

    There ∂/∂σ² Σ_n log N(r_n | 0, σ² + s_n) = 0, for squared residuals r_n² and variances s_n of f at some
    training rows. Averages alone can match where few rows of large s_n make up for too little noise at all
    others.
    """

    def slope(log: float) -> float:
        total = math.exp(log) + variances
        return float(((total - squares) / total.square()).mean())

    return math.exp(_root(slope, math.log(noise_var), math.log(max(most, noise_var))))


def _root(increasing: Callable[[float], float], low: float, high: float) -> float:
    """Where an increasing function is zero, or the end of the range that is next to it."""
    if increasing(low) >= 0:
        return low
    if increasing(high) <= 0:
        return high
    return float(brentq(increasing, low, high, xtol=VARIANCE_TOL))
