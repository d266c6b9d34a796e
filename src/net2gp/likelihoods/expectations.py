"""Expectations of log density, residual and curvature under a Gaussian f, for variational inference."""

from __future__ import annotations

import math
from functools import singledispatch
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from net2gp.likelihoods.bernoulli import Bernoulli
from net2gp.likelihoods.categorical import Categorical, logit_samples
from net2gp.likelihoods.gaussian import Gaussian
from net2gp.likelihoods.heteroscedastic import HeteroscedasticGaussian, nodes_of_scale
from net2gp.likelihoods.integrals import by_points, expected_softplus, normal_rule, psd_root
from net2gp.likelihoods.links import MonteCarlo, Quadrature
from net2gp.likelihoods.targets import shape_targets
from net2gp.types import Likelihood


class ExpectedDerivatives(NamedTuple):
    """Expectations under Gaussian outputs.

    Args:
        log_prob: E log p(y_n | f_n), (N,).
        residual: The expected residual, (N, C).
        curvature: The expected curvature, (N, C, C).
    """

    log_prob: Tensor
    residual: Tensor
    curvature: Tensor


@singledispatch
def expected_derivatives(
    likelihood: Any, mean: Tensor, covariance: Tensor, y: Tensor
) -> ExpectedDerivatives:
    """Compute the expected log density, residual and curvature for f_n ~ N(mean_n, covariance_n).

    For Gaussian, Bernoulli and Categorical the expected residual is the gradient of E log p in the mean and
    the expected curvature is its negative Hessian (Bonnet, Price), exactly so for the rule in use. The
    expectations are exact for Gaussian. Gauss rules compute them for Bernoulli and for the raw scales of
    HeteroscedasticGaussian. A fixed quasi-random sample computes them for Categorical and for any other
    likelihood (the sample of its `link`, if that is a MonteCarlo). Results are always deterministic. The
    cost is S evaluations for S nodes or samples. Register a closed form for a class of your own with
    `@expected_derivatives.register`.

    Args:
        likelihood: The likelihood p(y | f).
        mean: Means of the outputs, (N, C).
        covariance: Covariances of the outputs, (N, C, C).
        y: Targets, in a shape that `likelihood.check` accepts.

    Returns:
        The three expectations.

    >>> mean, covariance = torch.zeros(1, 1), torch.ones(1, 1, 1)
    >>> expected_derivatives(Gaussian(0.5), mean, covariance, torch.ones(1)).residual
    tensor([[2.]])

    Reference: Opper & Archambeau (2009), The variational Gaussian approximation revisited.
    """
    rule = getattr(likelihood, "link", None)
    rule = rule if isinstance(rule, MonteCarlo) else MonteCarlo()
    z = rule.base_sample(mean.shape[-1], like=mean)
    root = psd_root(covariance.double()).to(mean)
    samples = (mean + root @ point for point in z)
    parts = (
        (likelihood.log_prob(f, y), likelihood.residual(f, y), likelihood.curvature(f))
        for f in samples
    )
    totals = next(parts)
    for part in parts:
        totals = tuple(a + b for a, b in zip(totals, part, strict=True))
    return ExpectedDerivatives(*(total / rule.num_samples for total in totals))


@expected_derivatives.register
def _(likelihood: Gaussian, mean: Tensor, covariance: Tensor, y: Tensor) -> ExpectedDerivatives:
    curvature = likelihood.curvature(mean)
    spread = (curvature * covariance).sum((-2, -1))
    return ExpectedDerivatives(
        likelihood.log_prob(mean, y) - spread / 2, likelihood.residual(mean, y), curvature
    )


@expected_derivatives.register
def _(likelihood: Bernoulli, mean: Tensor, covariance: Tensor, y: Tensor) -> ExpectedDerivatives:
    rule = likelihood.link if isinstance(likelihood.link, Quadrature) else Quadrature()
    variance = covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0)
    softplus, sigmoid, slope = expected_softplus(mean, variance, rule.num_points)
    y = shape_targets(mean, y).to(mean)
    return ExpectedDerivatives((y * mean - softplus).sum(-1), y - sigmoid, torch.diag_embed(slope))


@expected_derivatives.register
def _(likelihood: Categorical, mean: Tensor, covariance: Tensor, y: Tensor) -> ExpectedDerivatives:
    rule = likelihood.link if isinstance(likelihood.link, MonteCarlo) else MonteCarlo()
    num_samples, classes = rule.num_samples, mean.shape[-1]
    z = rule.base_sample(classes, like=mean.double())

    def average(m: Tensor, root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        f = logit_samples(m, root, z)
        p = f.softmax(-1)
        products = torch.einsum("snc,snd->ncd", p, p) / num_samples
        return f.logsumexp(-1).mean(0), p.mean(0), products

    arguments = (mean.double(), psd_root(covariance.double()))
    normalizer, probs, products = by_points(average, arguments, numbers=num_samples * classes)
    target = one_hot(y.long(), classes).to(probs)
    values = (
        (target * mean).sum(-1) - normalizer,
        target - probs,
        torch.diag_embed(probs) - products,
    )
    return ExpectedDerivatives(*(value.to(mean.dtype) for value in values))


@expected_derivatives.register
def _(
    likelihood: HeteroscedasticGaussian, mean: Tensor, covariance: Tensor, y: Tensor
) -> ExpectedDerivatives:
    scale, num_points = likelihood.scale, likelihood.quadrature.num_points
    raw, location, variance, weights = nodes_of_scale(mean, covariance, num_points)
    error = shape_targets(mean, y, mean.shape[1] // 2).double()[..., None] - location
    log_std, slope = scale.log_std(raw), scale.slope(raw)
    precision = (-2 * log_std).exp()
    squares = (error.square() + variance) * precision
    log_prob = -0.5 * (squares + 2 * log_std + math.log(2 * math.pi))
    residual = torch.cat([error * precision @ weights, (squares - 1) * slope @ weights], -1)
    information = torch.cat([precision @ weights, 2 * slope.square() @ weights], -1)
    values = ((log_prob @ weights).sum(-1), residual, torch.diag_embed(information))
    return ExpectedDerivatives(*(value.to(mean.dtype) for value in values))


def expected_by_outputs(
    likelihood: Likelihood, mean: Tensor, covariance: Tensor, y: Tensor, num_points: int = 32
) -> ExpectedDerivatives:
    """Compute the expectations with a Gauss rule per output, where each target depends on one output alone.

    Args:
        likelihood: A likelihood with one target per output.
        mean: Means of the outputs, (N, C).
        covariance: Covariances, (N, C, C). Only the variances are used.
        y: Targets.
        num_points: The number of nodes of the rule.

    Returns:
        The three expectations.

    >>> mean, covariance = torch.zeros(1, 1), torch.ones(1, 1, 1)
    >>> expected_by_outputs(Gaussian(0.5), mean, covariance, torch.ones(1)).residual
    tensor([[2.]])
    """
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    std = variance.clamp(min=torch.finfo(mean.dtype).tiny).double().sqrt()
    z, weights = normal_rule(num_points, like=std)
    nodes = ((mean.double() + std * node, weight) for node, weight in zip(z, weights, strict=True))
    parts = [
        (
            weight * likelihood.log_prob(f, y),
            weight * likelihood.residual(f, y),
            weight * likelihood.curvature(f),
        )
        for f, weight in nodes
    ]
    sums = (torch.stack(values).sum(0).to(mean.dtype) for values in zip(*parts, strict=True))
    return ExpectedDerivatives(*sums)
