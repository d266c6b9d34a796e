"""Bounds on the evidence of a fitted deep Gaussian process by importance weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from net2gp.deep.inference.inducing import InducingLayer
from net2gp.deep.inference.process import Deep
from net2gp.errors import InputError, check_count
from net2gp.likelihoods.traits import has_gaussian_noise
from net2gp.linalg import cholesky, symmetric_root
from net2gp.linalg.chance import random_normal
from net2gp.posteriors.posterior import Posterior


def importance_bound(
    posterior: Posterior,
    num_weights: int = 64,
    *,
    num_estimates: int = 16,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Estimate a tighter bound on the evidence from weighted draws of the inner layers.

    Draws of the inner layers come from the fit, for all rows together, and the last layer is integrated out
    without inducing points. With the whitened values v of the inner layers and what they lead to, h,

        log p(y) ≥ E log (1/K) Σ_k p(y | h_k) p(v_k) / q(v_k),      p(y | h) = N(y | m, k_L(h, h) + σ² I).

    The bound grows with K and tends to log p(y). With K = 1 it is at least the bound of the fit, whose last
    layer is sparse. For one layer it is the evidence itself. The cost is K·(N³ + N M²) per estimate.

    Args:
        posterior: What `deep.fit` returned, with Gaussian noise and its data.
        num_weights: The number K of draws in each average.
        num_estimates: The number of averages, each with draws of its own.
        generator: The source of random numbers. None means torch's global one.

    Returns:
        The estimates, (num_estimates,). Their mean is the bound, and their spread shows its error.

    Raises:
        InputError: If the posterior is not from `deep.fit`, or its likelihood is not Gaussian noise.

    >>> from net2gp.deep.inference.fit import fit
    >>> from net2gp.deep.inference.settings import Ascent
    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.linspace(-1, 1, 6, dtype=torch.float64)[:, None]
    >>> found = fit(1, (x, x), Gaussian(0.1), ascent=Ascent(num_steps=5))
    >>> importance_bound(found, 2, num_estimates=3).shape
    torch.Size([3])

    Reference: Burda, Grosse & Salakhutdinov, "Importance weighted autoencoders", ICLR 2016; Salimbeni et
    al., "Deep Gaussian processes with importance-weighted variational inference", ICML 2019.
    """
    check_count(num_weights, "num_weights")
    check_count(num_estimates, "num_estimates")
    process, likelihood = posterior.process, posterior.likelihood
    if not isinstance(process, Deep):
        raise InputError(
            "importance_bound is for posteriors that deep.fit returned, but this one is from another method. "
            "Use posterior.log_marginal_likelihood()."
        )
    if not has_gaussian_noise(likelihood):
        raise InputError(
            "importance_bound integrates the last layer out under Gaussian noise, but the likelihood is "
            f"{type(likelihood).__name__}. Use posterior.log_marginal_likelihood()."
        )
    x, y = posterior.data
    assert isinstance(x, Tensor)
    targets = y.reshape(len(y), -1).double()
    noise = likelihood.noise_variance(targets)
    with torch.no_grad():
        estimates = []
        for _ in range(num_estimates):
            logs = [
                _log_weight(process, x.double(), targets, noise, generator)
                for _ in range(num_weights)
            ]
            estimates.append(torch.stack(logs).logsumexp(0) - math.log(num_weights))
    return torch.stack(estimates)


def _log_weight(
    process: Deep, x: Tensor, y: Tensor, noise: Tensor, generator: torch.Generator | None
) -> Tensor:
    """log p(y | h) + log p(v) − log q(v) for one draw of the inner layers."""
    current, total = x, x.new_zeros(())
    for layer in process.inner.layers:
        current, log_ratio = draw_layer(layer, current, generator)
        total = total + log_ratio
    last = process.last
    K = last.kernel.precise()(current)
    residual = y - last.mean(current)
    for r, v in zip(residual.mT, noise.mT, strict=True):
        L = cholesky(K + torch.diag(v), what="the covariance of the targets")
        fit = L.half_solve(r[:, None]).square().sum()
        total = total - 0.5 * (fit + L.log_det() + len(r) * math.log(2 * math.pi))
    return total


def draw_layer(
    layer: InducingLayer, inputs: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Draw the outputs of a layer at all inputs together, and log p(v) − log q(v) of its whitened values.

    Args:
        layer: The layer.
        inputs: N inputs.
        generator: The source of random numbers.

    Returns:
        The outputs, (N, C), and a number.
    """
    count, width = layer.center.shape
    z = random_normal((width, count, 1), generator=generator, device=inputs.device)
    v = layer.center.mT + (layer.root @ z)[..., 0]
    logs = layer.root.diagonal(dim1=-2, dim2=-1).log().sum()
    log_ratio = 0.5 * (z.square().sum() - v.square().sum()) + logs
    mean = layer.project(inputs).given(v.mT[None], len(inputs))[0][0]
    roots = symmetric_root(layer.open_covariance(inputs))
    e = random_normal((width, len(inputs), 1), generator=generator, device=inputs.device)
    around = (roots @ e)[..., 0].mT
    return mean + (around if layer.scale is None else around * layer.scale), log_ratio
