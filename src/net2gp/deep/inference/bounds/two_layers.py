"""The bound of two fitted layers without draws, by ψ-statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from net2gp.deep.inference.inducing import InducingLayer, divergence
from net2gp.deep.inference.process import Deep, InnerDraws
from net2gp.deep.latent.layer import LatentLayer, Targets
from net2gp.deep.latent.psi import GaussianRows
from net2gp.errors import InputError
from net2gp.kernels import RBF
from net2gp.likelihoods.traits import has_gaussian_noise
from net2gp.posteriors.posterior import Posterior


def two_layer_bound(posterior: Posterior) -> Tensor:
    """Compute the bound of a fitted two-layer process without draws, with its last layer at the optimum.

    The inner layer gives each row a Gaussian h_n ~ N(m_n, diag s_n), under which ψ-statistics close all
    expectations of the outer layer. It is at least the bound of the fit up to the error of its draws, and
    equal to it where the last layer has converged. The cost is N·M²·D.

    Args:
        posterior: What `deep.fit` returned for two layers, the last one with an `RBF`, and Gaussian noise.

    Returns:
        The bound, a number in float64.

    Raises:
        InputError: If the posterior is of another kind.

    >>> from net2gp.deep.inference.fit import fit
    >>> from net2gp.deep.inference.settings import Ascent
    >>> from net2gp.likelihoods import Gaussian
    >>> x = torch.linspace(-1, 1, 6, dtype=torch.float64)[:, None]
    >>> two_layer_bound(fit(2, (x, x), Gaussian(0.1), ascent=Ascent(num_steps=5))).shape
    torch.Size([])

    Reference: Damianou & Lawrence, "Deep Gaussian processes", AISTATS 2013.
    """
    process, likelihood = posterior.process, posterior.likelihood
    fits = isinstance(process, Deep) and isinstance(process.inner, InnerDraws)
    if not fits or len(process.layers) != 2 or not has_gaussian_noise(likelihood):  # type: ignore[attr-defined]
        raise InputError(
            "two_layer_bound is for two layers that deep.fit found by its bound, with Gaussian noise. Use "
            "posterior.log_marginal_likelihood() for other fits."
        )
    assert isinstance(process, Deep)
    assert has_gaussian_noise(likelihood)
    x, y = posterior.data
    assert isinstance(x, Tensor)
    inner, last = process.layers
    if last.mean.weight is not None:
        raise InputError(
            'two_layer_bound needs a last layer with mean="constant" or mean="zero", but its mean is linear.'
        )
    mean, variance = _outputs(inner, x.double())
    targets = y.reshape(len(y), -1).double() - last.mean(mean)
    noise = likelihood.noise_variance(targets)
    if not bool((noise == noise[:1]).all()):
        raise InputError("two_layer_bound needs the same noise at all rows, but each has its own.")
    closed = _latent(last, noise[0]).bound(GaussianRows(mean, variance), Targets(targets))
    return closed - divergence(inner.center, inner.root)


def _latent(layer: InducingLayer, noise_var: Tensor) -> LatentLayer:
    """The same layer with its values at inducing points still open."""
    kernel = layer.kernel
    if not isinstance(kernel, RBF):
        raise InputError(
            "two_layer_bound has closed forms for the squared-exponential kernel, n2g.RBF(...), but the last "
            f"layer has a {type(kernel).__name__}. Use posterior.log_marginal_likelihood()."
        )
    scale = torch.as_tensor(kernel.lengthscale).to(noise_var).reshape(-1)
    variance = torch.as_tensor(kernel.output_var).to(noise_var).reshape(1)
    return LatentLayer(scale.expand(layer.points.shape[1]), variance, noise_var, layer.points)


def _outputs(layer: InducingLayer, inputs: Tensor) -> tuple[Tensor, Tensor]:
    found = layer.project(inputs)
    return found.mean(layer.center), found.variance(layer.root)
