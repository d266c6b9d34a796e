"""How the prior variance, the noise and the link of Laplace's approximation are chosen: values that steer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from net2gp.errors import InputError, check_positive
from net2gp.inputs import describe
from net2gp.types import Data

GRID = tuple(float(v) for v in np.logspace(-6, 4, 21))
"""Prior variances that a validation set chooses from."""


@dataclass(frozen=True)
class Evidence:
    """Maximize Laplace's marginal likelihood over the prior variance (and the noise), by L-BFGS.

    Args:
        per_layer: Whether each layer has a prior variance of its own; by default all parameters share one.

    Reference: MacKay, Bayesian interpolation, 1992; Immer et al., Scalable marginal likelihood estimation
    for model selection in deep learning, ICML 2021.
    """

    per_layer: bool = False


@dataclass(frozen=True, eq=False)
class Validation:
    """The prior variance of `grid` with the largest log p(y | x) on data that were held out.

    For classes scale and spread of the link are chosen with it, which are a temperature where variances are
    small, and then how much certainty novel points lose: as much as these data allow without being predicted
    worse than by a temperature alone. If the network is right about all
    of them, they allow any certainty: then the link is the one of `Matched()`, and `TuningAtEdge` warns. A
    link of your own stays as it is.
    An open noise of `Gaussian()` is chosen likewise: for each prior variance the noise with the largest
    log p(y | x), at most the squared error of the held-out data, by some ten posteriors each.

    Args:
        data: The data that were held out, a pair (x, y) or a `DataLoader`.
        grid: The prior variances to choose from; by default 21 from 1e-6 to 1e4.

    Raises:
        InputError: The grid is empty, or has a number that is not positive.
    """

    data: Data = field(repr=False)
    grid: Sequence[float] = GRID

    def __post_init__(self) -> None:
        if not np.ndim(self.grid) or not len(self.grid):
            raise InputError(
                f"grid must be some prior variances, but is {describe(self.grid)}. Pass for example "
                "grid=(0.01, 0.1, 1.0)."
            )
        for value in self.grid:
            check_positive(value, "grid", single=True)


@dataclass(frozen=True)
class Matched:
    """The default: on the training data, predictions are as sure as the network has reason to be.

    **Gaussian noise.** Prior and noise have the largest evidence of the linear model
    y = f(x; θ*) + J(x)(θ − θ*) + ε with θ ~ N(0, prior_var) *at its own mode*, log N(y − f + Jθ* | 0,
    prior_var·JJᵀ + noise_var·I). Laplace's evidence takes the mode to be θ*, which is not one after early
    stopping, dropout or many steps, and makes up for it by noise. The mean of the posterior stays
    the network's. So an open noise is only possible if the average variance of the predictions at the
    training rows, noise_var·(1 + γ/N) with γ effective parameters, is no less than the squared error that
    the network makes there. It is at most the variance of y. Among a few points log-normal priors, a
    factor of 100 wide, decide: of the noise around 1 % of the variance of y, of the prior variance around
    the mean of θ*². Structures that are not exact take the noise of the exact one, and the prior variance
    at which they are as unsure of the data, on average, as it is of a row that was left out,
    noise_var·γ/(N − γ); what they fall short of counts as noise. Up to 1500 rows are used, or all, if the
    parameters are fewer. Predictions gain a variance where inputs are novel, min(v (u/u₀)², w): for the
    share u of the prior variance w that training inputs leave open, the share u₀ that nine in ten of them
    stay below (or the root mean square, if that is larger), and the average variance v of f there. Where each
    point or output has a noise of its own, `Evidence()` is used.

    **Classes.** The evidence at θ* pairs the logits where training stopped with a variance that belongs to
    larger ones, so that predictions come out too unsure everywhere. Here the link scales the mean by α, the
    number with the smallest KL(network ‖ prediction) on `num_points` training inputs, up to where a
    prediction would be surer than the network's own (`Contrast` says why); and the prior variance
    is the one whose evidence is largest at the scaled parameters: prior_var = α²‖θ*‖²/γ with γ effective
    parameters. A `LastLayer` keeps the prior variance of the evidence at θ*. Exact structures compare each
    point without its own information, unless there are 50 points or fewer.

    For likelihoods with a link of their own it is `Evidence()`.

    Args:
        num_points: How many training inputs the link is matched at. None means 500, or for many classes as
            many as have 20,000 logits, but at least 20.

    Raises:
        InputError: `num_points` is below 1.
    """

    num_points: int | None = None

    def __post_init__(self) -> None:
        if self.num_points is not None and self.num_points < 1:
            raise InputError(f"num_points must be at least 1, but is {self.num_points}.")

    def count(self, num_outputs: int) -> int:
        """How many points are compared.

        Args:
            num_outputs: The number C of classes.

        Returns:
            The number of points.
        """
        return self.num_points or max(20, min(500, 20_000 // num_outputs))


Tuning = Evidence | Validation | Matched
