"""How much of a prediction's variance more data could take away, and how much stays."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import describe, follows
from net2gp.likelihoods.responses import response
from net2gp.posteriors.codes import ClassPosterior
from net2gp.posteriors.problem import predictive
from net2gp.types import Inputs, Likelihood, Posterior


@dataclass(frozen=True, eq=False)
class Split:
    """The variance of each target: `epistemic` from not knowing f, `aleatoric` from noise given f.

    Both (N, D), for D targets: classes, labels, or numbers.
    """

    epistemic: Tensor
    aleatoric: Tensor

    @property
    def total(self) -> Tensor:
        """The sum of both: (N, D)."""
        return self.epistemic + self.aleatoric


def split(posterior: Posterior, x: Inputs, *, likelihood: Likelihood | None = None) -> Split:
    """Epistemic and aleatoric variance of the targets at each point, by the delta method.

    With f ~ N(m, Σ) and G = ∂E[y | f]/∂f at m: epistemic diag(G Σ Gᵀ), aleatoric Var[y | f = m]. For
    classes G is the curvature Λ itself, so that these are diag(Λ Σ Λ) and p − p². For Gaussian noise
    G = I, and the sum is exactly the variance of y. The delta method follows the slope of p at m however
    far Σ reaches: the epistemic part of a very unsure classifier may exceed what a probability can vary.

    `posterior` is any posterior; `likelihood` replaces its own. Both parts are
    differentiable in `x` where it requires a gradient. Cost: posterior.marginal(x).

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
    if isinstance(posterior, ClassPosterior):
        raise InputError(
            "a ClassPosterior is of one-hot codes, whose variance is not split. Use condition("
            "linearize(network).trace_kernel(), data, Categorical()), which is of logits."
        )
    own = getattr(posterior, "likelihood", None)
    if own is None and likelihood is None:
        raise InputError(
            f"the posterior, {describe(posterior)}, has no likelihood. Pass likelihood=Categorical()."
        )
    chosen = likelihood if own is None else predictive(likelihood, own)
    law = posterior.marginal(x)
    mean, covariance = law.mean, law.covariance_matrix
    if not follows(x):
        mean, covariance = mean.detach(), covariance.detach()
    found = response(chosen, mean)
    epistemic = torch.einsum("ndc,nce,nde->nd", found.slope, covariance, found.slope)
    return Split(epistemic.clamp(min=0.0), found.variance)
