"""The law of y if f is given by draws: the average of p(y | f) over the draws."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch
from torch import Tensor, distributions

from net2gp.likelihoods.bernoulli import Bernoulli
from net2gp.likelihoods.categorical import Categorical
from net2gp.likelihoods.gaussian import Gaussian
from net2gp.likelihoods.heteroscedastic import HeteroscedasticGaussian
from net2gp.likelihoods.laws import average
from net2gp.likelihoods.traits import law_of_targets


@singledispatch
def mixture(likelihood: Any, f: Tensor) -> distributions.Distribution:
    """Compute (1/S) Σ_s p(y | f_s). By default it is the `average` of S laws.

    Args:
        likelihood: The likelihood p(y | f).
        f: Draws of the outputs, (S, N, C).

    Returns:
        The law of y, with batch N.

    >>> f = torch.tensor([[[0.0, 0.0]], [[0.0, 100.0]]])
    >>> mixture(Categorical(), f).probs
    tensor([[0.2500, 0.7500]])
    """
    return average([law_of_targets(likelihood, one) for one in f])


@mixture.register
def _(likelihood: Categorical, f: Tensor) -> distributions.Categorical:
    return distributions.Categorical(probs=f.double().softmax(-1).mean(0).to(f.dtype))


@mixture.register
def _(likelihood: Bernoulli, f: Tensor) -> distributions.Bernoulli:
    return distributions.Bernoulli(probs=f.double().sigmoid().mean(0).to(f.dtype))


@mixture.register
def _(likelihood: Gaussian, f: Tensor) -> distributions.Independent:
    std = torch.stack([likelihood.noise_variance(one).sqrt() for one in f])
    return _normals(f, std)


@mixture.register
def _(likelihood: HeteroscedasticGaussian, f: Tensor) -> distributions.Independent:
    half = f.shape[-1] // 2
    return _normals(f[..., :half], likelihood.scale.log_std(f[..., half:]).exp())


def _normals(mean: Tensor, std: Tensor) -> distributions.Independent:
    parts = distributions.Normal(mean.movedim(0, -1), std.movedim(0, -1))
    weights = distributions.Categorical(logits=torch.zeros_like(parts.mean))
    return distributions.Independent(distributions.MixtureSameFamily(weights, parts), 1)
