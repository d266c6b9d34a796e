"""Links whose predictions on the training data are as sure as the network's own."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from net2gp.inputs import num_rows, rows
from net2gp.likelihoods import Bernoulli, Categorical, Contrast, MonteCarlo, Probit, Quadrature
from net2gp.posteriors.function_space import FunctionPosterior
from net2gp.posteriors.weight_gaussian import WeightGaussian
from net2gp.types import Inputs, Likelihood

P = TypeVar("P", WeightGaussian, FunctionPosterior)

NUM_POINTS = 500
"""Training points that a link is matched on."""


def matches(likelihood: Likelihood) -> bool:
    """Whether the likelihood is of classes and leaves its link at the default, to be chosen."""
    if isinstance(likelihood, Categorical):
        return likelihood.link == MonteCarlo()
    return isinstance(likelihood, Bernoulli) and likelihood.link == Quadrature()


def match_link(posterior: P, x: Inputs) -> P:
    """The posterior with the link whose scale minimizes KL(network ‖ prediction) on training inputs.

    Softmax(f) and the prediction are compared at up to 500 of the points `x`; labels are not needed. The
    network's average certainty was found by its training, and the data hardly say more about it: what the
    covariance adds is where to be less sure than on average, and where more. Cost: one `marginal`.
    """
    count = num_rows(x)
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:NUM_POINTS].sort()
    part = rows(x, chosen.values.to(posterior.y.device))
    likelihood = posterior.likelihood
    if isinstance(likelihood, Categorical):
        mean, variance = _contrast(posterior, part)
        scale = _best_scale(lambda s: _softmax_loss(mean, Contrast(s).shrink(mean, variance)))
        return replace(posterior, likelihood=replace(likelihood, link=Contrast(scale)))
    assert isinstance(likelihood, Bernoulli)
    law = posterior.marginal(part)
    mean = law.mean.double()
    variance = law.covariance_matrix.diagonal(dim1=1, dim2=2).double()
    scale = _best_scale(lambda s: _sigmoid_loss(mean, Probit(s).shrink(mean, variance)))
    return replace(posterior, likelihood=replace(likelihood, link=Probit(scale)))


def _contrast(posterior: WeightGaussian | FunctionPosterior, x: Inputs) -> tuple[Tensor, Tensor]:
    if isinstance(posterior, WeightGaussian):
        return posterior.linearized(x).double(), posterior.contrast(x).double()
    law = posterior.marginal(x)
    return law.mean.double(), Contrast.variance(law.mean, law.covariance_matrix).double()


def _softmax_loss(f: Tensor, logits: Tensor) -> float:
    """The cross-entropy of softmax(logits) under softmax(f): the divergence, but for a constant."""
    return float(-(f.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean())


def _sigmoid_loss(f: Tensor, logits: Tensor) -> float:
    return float(binary_cross_entropy_with_logits(logits, f.sigmoid()))


def _best_scale(loss: object) -> float:
    """The scale of the smallest loss, which is convex in it."""
    found = minimize_scalar(
        lambda log: loss(float(torch.tensor(log).exp())),  # type: ignore[operator]
        bounds=(-1.0, 12.0),
        method="bounded",
        options={"xatol": 1e-4},
    )
    return float(torch.tensor(found.x).exp())
