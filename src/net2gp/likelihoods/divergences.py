"""How far the law of y at some outputs is from its law at others."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch
from torch import Tensor, distributions

from net2gp.likelihoods.bernoulli import Bernoulli
from net2gp.likelihoods.categorical import Categorical
from net2gp.likelihoods.gaussian import Gaussian
from net2gp.likelihoods.heteroscedastic import HeteroscedasticGaussian


@singledispatch
def divergence(likelihood: Any, f: Tensor, g: Tensor) -> Tensor:
    """KL(p(y | f_n) ‖ p(y | g_n)) for each point: (N,).

    By default it is its second-order expansion ½ (g − f)ᵀΛ(f)(g − f), whose error is of third order in g − f:
    the Fisher information Λ is the Hessian of the divergence.

    >>> divergence(Gaussian(0.5), torch.zeros(1, 1), torch.ones(1, 1))
    tensor([1.])
    """
    step = g - f
    return 0.5 * torch.einsum("nc,ncd,nd->n", step, likelihood.curvature(f), step)


@divergence.register
def _(likelihood: Gaussian, f: Tensor, g: Tensor) -> Tensor:
    return ((f - g) ** 2 / likelihood.noise_variance(f)).sum(1) / 2


@divergence.register
def _(likelihood: Bernoulli, f: Tensor, g: Tensor) -> Tensor:
    laws = distributions.Bernoulli(logits=f), distributions.Bernoulli(logits=g)
    return distributions.kl_divergence(*laws).sum(1)


@divergence.register
def _(likelihood: Categorical, f: Tensor, g: Tensor) -> Tensor:
    laws = distributions.Categorical(logits=f), distributions.Categorical(logits=g)
    return distributions.kl_divergence(*laws)


@divergence.register
def _(likelihood: HeteroscedasticGaussian, f: Tensor, g: Tensor) -> Tensor:
    laws = []
    for outputs in (f, g):
        mean, raw = outputs.chunk(2, -1)
        laws.append(distributions.Normal(mean, likelihood.scale.log_std(raw).exp()))
    return distributions.kl_divergence(*laws).sum(1)
