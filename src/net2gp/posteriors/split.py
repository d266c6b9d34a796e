"""How much of the variance of a prediction more data could remove, and how much stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import describe, follows
from net2gp.likelihoods.responses import response
from net2gp.posteriors.conditioning.problem import predictive
from net2gp.types import Inputs, Likelihood


@dataclass(frozen=True, eq=False)
class Split:
    """The two parts of the variance of each target.

    Args:
        epistemic: The variance that comes from not knowing f: (N, D), for D targets or classes.
        aleatoric: The variance of the noise given f: (N, D).
        between: The part of the epistemic variance that lies between the members of a mixture: (N, D); None
            for other posteriors.
    """

    epistemic: Tensor
    aleatoric: Tensor
    between: Tensor | None = None

    @property
    def within(self) -> Tensor:
        """The part of the epistemic variance within the members of a mixture: (N, D)."""
        return self.epistemic if self.between is None else self.epistemic - self.between

    @property
    def total(self) -> Tensor:
        """The sum of both: (N, D)."""
        return self.epistemic + self.aleatoric


class HasMarginal(Protocol):
    """A posterior, or any other object that gives the law of f at points."""

    def marginal(self, x: Inputs) -> MultivariateNormal:
        """f(x_n) for each point by itself: batch N, event C."""


def split(posterior: HasMarginal, x: Inputs, *, likelihood: Likelihood | None = None) -> Split:
    """Return the epistemic and aleatoric variance of the targets at each point, by the delta method.

    With f ~ N(m, Σ) and G = ∂E[y | f]/∂f at m, the epistemic variance is diag(G Σ Gᵀ) and the aleatoric
    variance is Var[y | f = m]. For classes G is the curvature Λ itself, which gives diag(Λ Σ Λ) and p − p².
    For Gaussian noise G = I, and the sum is exactly the variance of y. The delta method follows the slope of
    p at m however wide Σ is, so the epistemic part of a very uncertain classifier may exceed the largest
    variance that a probability can have. Both parts are differentiable in `x` if it requires a gradient.
    Cost: `posterior.marginal(x)`.

    Args:
        posterior: Any posterior, or another object with `marginal(x)`.
        x: N points.
        likelihood: Replaces the posterior's own likelihood; needed if it has none.

    Returns:
        Both parts of the variance.

    Raises:
        InputError: If there is no likelihood, or it holds the noise of each training point.
        NotAvailable: If the variance of the likelihood cannot be split, as after `adapt_classes`.

    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Gaussian
    >>> from net2gp.posteriors.condition import condition
    >>> x = torch.zeros(1, 1, dtype=torch.float64)
    >>> parts = split(condition(RBF(), (x, x), Gaussian(noise_var=1.0)), x)
    >>> parts.epistemic, parts.aleatoric
    (tensor([[0.5000]], dtype=torch.float64), tensor([[1.]], dtype=torch.float64))

    References: Kendall and Gal, What uncertainties do we need in Bayesian deep learning, NeurIPS 2017;
    Khan et al., Approximate inference turns deep networks into Gaussian processes, NeurIPS 2019.
    """
    own_way = getattr(posterior, "split", None)
    if own_way is not None:
        found: Split = own_way(x, likelihood=likelihood)
        return found
    own = getattr(posterior, "likelihood", None)
    if own is None and likelihood is None:
        raise InputError(
            f"the posterior, {describe(posterior)}, has no likelihood. Pass likelihood=Categorical()."
        )
    chosen = predictive(likelihood, own) if isinstance(own, Likelihood) else likelihood
    assert chosen is not None
    return split_law(posterior.marginal(x), chosen, x)


def split_law(law: MultivariateNormal, likelihood: Likelihood, x: Inputs) -> Split:
    """The two parts of the variance of the targets, if f has this law at the points x."""
    mean, covariance = law.mean, law.covariance_matrix
    if not follows(x):  # nothing asks for gradients in x, so the graph of the law need not be kept
        mean, covariance = mean.detach(), covariance.detach()
    found = response(likelihood, mean)
    epistemic = torch.einsum("ndc,nce,nde->nd", found.slope, covariance, found.slope)
    return Split(epistemic.clamp(min=0.0), found.variance)
