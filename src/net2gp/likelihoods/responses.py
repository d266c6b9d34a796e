"""How targets respond to outputs: slope of E[y | f], variance given f, and divergence of two laws."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor, distributions
from torch.distributions import Distribution

from net2gp.errors import InputError
from net2gp.likelihoods.bernoulli import Bernoulli
from net2gp.likelihoods.categorical import Categorical
from net2gp.likelihoods.gaussian import Gaussian
from net2gp.likelihoods.heteroscedastic import HeteroscedasticGaussian
from net2gp.likelihoods.traits import law_of_targets
from net2gp.types import Likelihood


@dataclass(frozen=True, eq=False)
class Response:
    """How targets respond to outputs f.

    Args:
        slope: G = ∂E[y | f]/∂f, (N, D, C).
        variance: Var[y | f], (N, D).
    """

    slope: Tensor
    variance: Tensor


@singledispatch
def response(likelihood: Any, f: Tensor) -> Response:
    """Compute the slope of E[y | f] and Var[y | f].

    By default both come from the law of y given f, and the slope takes D backward passes. For a law of
    classes, E[y | f] are the probabilities of the classes.

    Args:
        likelihood: The likelihood p(y | f).
        f: Outputs, (N, C).

    Returns:
        Slope and variance.

    Raises:
        InputError: If `likelihood` is no likelihood, or its law has no gradient in f.

    >>> response(Bernoulli(), torch.zeros(1, 1)).slope
    tensor([[[0.2500]]])
    """
    if not isinstance(likelihood, Likelihood):
        raise InputError(
            f"no slope of E[y | f] is known for {type(likelihood).__name__}. Pass a likelihood, e.g. "
            "likelihood=Categorical()."
        )
    follows = f.requires_grad
    with torch.enable_grad():
        g = f if follows else f.detach().requires_grad_()
        mean, variance = law_moments(law_of_targets(likelihood, g))
        if not mean.requires_grad:
            raise InputError(
                f"the law that {type(likelihood).__name__} predicts has no gradient in f, so that no slope "
                "of E[y | f] is known. Compute it with torch alone, or register one with "
                "@net2gp.likelihoods.responses.response.register."
            )
        rows = [
            torch.autograd.grad(mean[:, d].sum(), g, create_graph=follows, retain_graph=True)[0]
            for d in range(mean.shape[1])
        ]
    slope = torch.stack(rows, 1)
    return Response(slope, variance) if follows else Response(slope, variance.detach())


def target_moments(likelihood: Likelihood, f: Tensor) -> tuple[Tensor, Tensor]:
    """Compute E[y | f] and Var[y | f]; for a law of classes, y are the indicators of the classes.

    Args:
        likelihood: The likelihood p(y | f).
        f: Outputs, (N, C).

    Returns:
        Both, (N, D) for D targets or classes.

    >>> target_moments(Bernoulli(), torch.zeros(1, 1))
    (tensor([[0.5000]]), tensor([[0.2500]]))
    """
    return law_moments(law_of_targets(likelihood, f))


def law_moments(law: Distribution) -> tuple[Tensor, Tensor]:
    """Compute E y and Var y of a law; for a law of classes, y are the indicators of the classes.

    Args:
        law: The law of N targets.

    Returns:
        Both, (N, D) for D targets or classes.
    """
    if isinstance(law, distributions.Categorical):
        return law.probs, law.probs * (1 - law.probs)
    mean = law.mean
    return mean.reshape(len(mean), -1), law.variance.reshape(len(mean), -1)


@response.register
def _(likelihood: Gaussian, f: Tensor) -> Response:
    identity = torch.eye(f.shape[1]).to(f).expand(f.shape[0], -1, -1)
    return Response(identity, likelihood.noise_variance(f))


@response.register(Bernoulli)
@response.register(Categorical)
def _(likelihood: Bernoulli | Categorical, f: Tensor) -> Response:
    slope = likelihood.curvature(f)
    return Response(slope, slope.diagonal(dim1=1, dim2=2))


@response.register
def _(likelihood: HeteroscedasticGaussian, f: Tensor) -> Response:
    num_targets = f.shape[1] // 2
    identity = torch.eye(f.shape[1])[:num_targets].to(f).expand(f.shape[0], -1, -1)
    return Response(identity, (2 * likelihood.scale.log_std(f[:, num_targets:])).exp())


@singledispatch
def divergence(likelihood: Any, f: Tensor, g: Tensor) -> Tensor:
    """Compute KL(p(y | f_n) ‖ p(y | g_n)) for each point.

    The default is the second-order expansion ½ (g − f)ᵀΛ(f)(g − f), since the Fisher information Λ is the
    Hessian of the divergence. Its error is of third order in g − f.

    Args:
        likelihood: The likelihood p(y | f).
        f: Outputs, (N, C).
        g: Other outputs, (N, C).

    Returns:
        The divergences, (N,).

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
