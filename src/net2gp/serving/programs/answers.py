"""From the law of f to what a program returns: the law of the targets, by its likelihood and link."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from net2gp.errors import NotAvailable
from net2gp.likelihoods import Bernoulli, Categorical, Gaussian
from net2gp.likelihoods.integrals import log_expected_sigmoid
from net2gp.likelihoods.links import Contrast, LaplaceBridge, Probit, Quadrature
from net2gp.serving.programs.moments import Moments

Answers = dict[str, Tensor]
"""The named outputs of a program, with a row for each point."""

BISECTIONS = 40
"""Steps that find a quantile of a mixture: each halves the interval that it is in."""


def answering(likelihood: Any, levels: tuple[float, ...]) -> Callable[[Moments], Answers]:
    """Return the function from the law of f to the answers.

    Args:
        likelihood: Gaussian noise of one size for all points, Categorical or Bernoulli.
        levels: Levels of the quantiles, for Gaussian noise.

    Raises:
        NotAvailable: For another likelihood, or a link that averages over draws of f.
    """
    if isinstance(likelihood, Gaussian) and likelihood.tied_points is None:
        normal = torch.special.ndtri(torch.tensor(levels, dtype=torch.float64))
        return lambda law: _regression(likelihood, levels, normal, law)
    if isinstance(likelihood, Categorical):
        _check_link(likelihood, (Contrast, Probit, LaplaceBridge))
        return lambda law: _classes(likelihood, law, partial(_softmax, likelihood))
    if isinstance(likelihood, Bernoulli):
        _check_link(likelihood, (Probit, Quadrature))
        return lambda law: _classes(likelihood, law, partial(_labels, likelihood))
    raise NotAvailable(
        f"targets under {type(likelihood).__name__} cannot be exported. Programs answer for Gaussian noise "
        "of one size, Categorical and Bernoulli; draws of f for other laws are posterior.sample(x, 100)."
    )


def _check_link(likelihood: Categorical | Bernoulli, known: tuple[type, ...]) -> None:
    if not isinstance(likelihood.link, known):
        kind = type(likelihood).__name__
        names = " or ".join(f"net2gp.links.{one.__name__}()" for one in known)
        raise NotAvailable(
            f"the link {type(likelihood.link).__name__} factors a covariance for each point, which a program "
            f"cannot. Make the posterior with {kind}({names}), or pass draws=32."
        )


def _finished(law: Moments, dtype: torch.dtype, answers: Answers) -> Answers:
    if law.novelty is not None:
        answers["novelty"] = law.novelty
    return {name: value.to(dtype) for name, value in answers.items()}


def _regression(
    likelihood: Gaussian, levels: tuple[float, ...], normal: Tensor, law: Moments
) -> Answers:
    mean, epistemic = law.mean.double(), law.blocks.diagonal(dim1=1, dim2=2).clamp(min=0)
    if law.gained is not None:
        epistemic = epistemic + law.gained
    noise = torch.as_tensor(likelihood.noise_var, dtype=torch.float64, device=mean.device).detach()
    variance = epistemic + noise
    std = variance.sqrt()
    quantiles = mean[..., None] + std[..., None] * normal.to(mean.device)
    if law.draws is not None:
        quantiles = _mixture_quantiles(law.draws.double(), noise.sqrt(), mean, std, levels)
    answers = {"mean": mean, "std": std, "quantiles": quantiles, "epistemic": epistemic}
    return _finished(law, law.mean.dtype, answers | {"aleatoric": noise.expand_as(mean)})


def _mixture_quantiles(
    draws: Tensor, noise: Tensor, mean: Tensor, std: Tensor, levels: tuple[float, ...]
) -> Tensor:
    """Quantiles (B, C, Q) of the mixture of N(f_s, noise²) by bisection.

    By Cantelli's inequality the quantile of level q is within std·√max(q/(1−q), (1−q)/q) of the mean.
    """
    at = torch.tensor(levels, dtype=torch.float64, device=mean.device)
    reach = std[..., None] * torch.maximum(at / (1 - at), (1 - at) / at).sqrt()
    low, high = mean[..., None] - reach, mean[..., None] + reach
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        gaps = (middle - draws[..., None]) / (noise * 2**0.5)
        below = (1 + torch.erf(gaps)).mean(0) / 2 < at
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def _classes(
    likelihood: Categorical | Bernoulli, law: Moments, linked: Callable[[Tensor, Tensor], Tensor]
) -> Answers:
    mean, blocks = law.mean.double(), law.blocks
    variance = blocks.diagonal(dim1=1, dim2=2).clamp(min=0)
    wide, most = blocks, float(getattr(likelihood.link, "novelty_var", 0.0))
    if most and law.excess is not None:
        eye = torch.eye(mean.shape[1], dtype=torch.float64, device=mean.device)
        wide = blocks + (most * law.excess)[:, None, None] * eye
    binary = isinstance(likelihood, Bernoulli)
    probabilities = linked(mean, wide)
    if law.draws is not None:
        draws = law.draws.double()
        each = draws.sigmoid() if binary else draws.softmax(-1)
        probabilities, own = each.mean(0), (each * (1 - each)).mean(0)
        epistemic = each.square().mean(0) - probabilities.square()
        parts = {"epistemic": epistemic.clamp(min=0), "aleatoric": own}
    else:
        parts = _split(mean, wide, binary)
    answers = {"probabilities": probabilities, "mean": mean, "std": variance.sqrt(), **parts}
    return _finished(law, law.mean.dtype, answers)


def _split(mean: Tensor, blocks: Tensor, binary: bool) -> Answers:
    """diag(Λ Σ Λ) and p − p², with the curvature Λ at the mean: diag(p − p²), or diag(p) − p pᵀ."""
    p = mean.sigmoid() if binary else mean.softmax(-1)
    own = blocks.diagonal(dim1=1, dim2=2)
    if binary:
        epistemic = (p - p.square()).square() * own
    else:
        moved = (blocks * p[:, None]).sum(-1)  # Σ p
        epistemic = p.square() * (own - 2 * moved + (moved * p).sum(-1, keepdim=True))
    return {"epistemic": epistemic.clamp(min=0), "aleatoric": p - p.square()}


def _softmax(likelihood: Categorical, mean: Tensor, blocks: Tensor) -> Tensor:
    link = likelihood.link
    if isinstance(link, LaplaceBridge):
        alpha = link.concentration(mean, blocks)
        return alpha / alpha.sum(-1, keepdim=True)
    if isinstance(link, Contrast):
        return link.shrink(mean, _contrasts(mean, blocks)).softmax(-1)
    assert isinstance(link, Probit)
    return link.shrink(mean, Probit.variances(mean, blocks)).softmax(-1)


def _contrasts(mean: Tensor, blocks: Tensor) -> Tensor:
    """Var[f_c − f_t] for the class t of the largest mean, picked by a product with its unit vector."""
    C = mean.shape[1]
    top = torch.arange(C, device=mean.device) == mean.argmax(-1, keepdim=True)
    unit = top.to(blocks)
    own = blocks.diagonal(dim1=1, dim2=2)
    cross = (unit[:, :, None] * blocks).sum(1)
    return ((own * unit).sum(-1, keepdim=True) + own - 2 * cross).clamp(min=0)


def _labels(likelihood: Bernoulli, mean: Tensor, blocks: Tensor) -> Tensor:
    variance = Probit.variances(mean, blocks)
    link = likelihood.link
    if isinstance(link, Probit):
        return link.shrink(mean, variance).sigmoid()
    assert isinstance(link, Quadrature)
    num = link.num_points
    up, down = (log_expected_sigmoid(m, variance, num) for m in (mean, -mean))
    return (up - down).sigmoid()
