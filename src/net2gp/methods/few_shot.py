"""Adapt a trained network to new classes in closed form, from a few labeled points per class."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor, nn
from torch.nn.functional import one_hot

from net2gp.errors import EmptyClass, InputError, warn
from net2gp.inputs import describe, gather, num_rows
from net2gp.likelihoods import Categorical, Gaussian
from net2gp.likelihoods.targets import without_ignored
from net2gp.linear import Linearized, linearize
from net2gp.linear.linearized import PriorVar, example_of
from net2gp.memory import check_memory
from net2gp.posteriors.conditioning.conditioned import Conditioned, SpectralFactor
from net2gp.posteriors.conditioning.problem import make_problem
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.class_codes import ByCodes, OneHotCodes, Standardized
from net2gp.posteriors.spectrum import Spectrum, decompose, share_spectrum
from net2gp.types import Data, Inputs, Kernel

NOISE_SHARE, SPREAD = 0.1, 2.0
"""The prior median of the noise as a share of the codes' variance, and the prior standard deviation of the
logarithms of noise and scale."""

CAUTION = 0.5
"""The prior standard deviation of the logarithm of the temperature."""


def adapt_classes(
    network: nn.Module | Linearized | Kernel,
    data: Data,
    *,
    num_classes: int | None = None,
    prior_var: PriorVar = 1.0,
) -> Posterior[OneHotCodes]:
    """Return a classifier of new classes from a trained network and a few labeled points, without training.

    The network only gives the kernel, J diag(prior_var) Jᵀ averaged over its outputs, so the new classes need
    not be the network's own. The kernel is centered at the data and turned into a correlation
    (`Standardized`), and the one-hot codes of the labels are regressed on it in closed form.

    Scale and noise maximize the evidence of the codes under weak log-normal priors, centered at the codes'
    variance and a tenth of it, which matter for one or two points per class. Codes are not Gaussian, and the
    evidence finds too little noise if they can be fitted exactly. The temperature, which is at least one,
    corrects this: it maximizes the likelihood of each label given all others, also in closed form. Points
    that are alone in their class do not count there.

    Cost: the Gram matrix and one eigendecomposition, N³. Softmax with Laplace's method costs Newton steps of
    N³C or more, and its evidence prefers too small a scale if there are few points.

    Args:
        network: The trained network, `linearize(network, only=...)` to choose parameters, or any other kernel
            with one output.
        data: (x, y) with integer labels (N,), or a DataLoader.
        num_classes: The number of classes C. None is one more than the largest label.
        prior_var: The prior variance of the parameters, a number or a dict by name pattern. A single number
            has no effect, since the kernel becomes a correlation.

    Returns:
        The posterior of the codes, whose `predict(x).probs` are probabilities (N, C).

    Raises:
        InputError: If the labels are not integers from 0 on, if `num_classes` is too small, or if `prior_var`
            is given with a kernel.

    >>> _ = torch.manual_seed(0)
    >>> network = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 4)).eval()
    >>> y = torch.arange(3).repeat(5)
    >>> x = torch.randn(15, 2) + 3 * torch.nn.functional.one_hot(y, 3)[:, :2]
    >>> posterior = adapt_classes(network, (x, y))
    >>> posterior.predict(torch.tensor([[4.0, 0.0], [0.0, 4.0], [-1.0, -1.0]])).probs.argmax(1)
    tensor([0, 1, 2])

    References: Maddox et al., Fast adaptation with linearized neural networks, AISTATS 2021; Rasmussen and
    Williams, Gaussian Processes for Machine Learning, 2006, sections 5.4.2 (leaving one out) and 6.5
    (least squares).
    """
    x, y = gather(data, None if isinstance(network, Kernel) else example_of(network))
    classes = _check_labels(x, y, num_classes)
    if num_classes is None and len(torch.unique(y)) < classes:
        warn(
            f"labels go up to {classes - 1}, but only {len(torch.unique(y))} of these {classes} classes have "
            "any. Pass num_classes if that is meant, or torch.unique(y, return_inverse=True)[1] as y.",
            EmptyClass,
        )
    if isinstance(network, nn.Module):
        network = linearize(network)
    if not isinstance(network, Linearized) and prior_var != 1.0:
        raise InputError(
            "prior_var is of a network's parameters, but a kernel was given, which has its own. Leave "
            "prior_var out, or pass the network."
        )
    base = network.trace_kernel(prior_var) if isinstance(network, Linearized) else network
    kernel = Standardized.of(base, x)
    frequencies = (torch.bincount(y.long(), minlength=classes) + 1.0).double() / (len(y) + classes)
    codes = one_hot(y.long(), classes).double() - frequencies
    # The checks compare the dtypes of targets and kernel, but the codes keep their float64 digits.
    targets = codes.to(kernel.diag(x).dtype)
    problem = replace(make_problem(kernel, (x, targets), Gaussian(1.0), None), y=codes)
    fixed = decompose(problem)
    contrasts = codes @ _contrasts(classes).to(codes)
    offset = torch.zeros_like(contrasts)
    seen = share_spectrum(fixed, replace(problem, y=contrasts, offset=offset))
    noise, scale = _tune(seen)
    process = fixed.condition(noise, scale).process
    assert isinstance(process, Conditioned)
    temperature = _temperature(process, codes, frequencies)
    likelihood = OneHotCodes(noise, frequencies, temperature, len(y))
    evidence = seen.log_marginal_likelihood(noise, scale)
    return Posterior(process, likelihood, problem.x, y.long(), evidence, ByCodes())


def _check_labels(x: Inputs, y: Tensor, num_classes: int | None) -> int:
    """Check the labels and return the number of classes."""
    if y.dim() > 1 and y.shape[-1] > 1:
        raise InputError(
            f"y must be labels (N,), but is {describe(y)}. For one-hot codes pass y.argmax(1)."
        )
    if y.numel() and not y.is_floating_point() and int(y.min()) < 0:
        raise InputError(
            without_ignored(y)
            or f"labels must be 0, 1, …, but the smallest is {int(y.min())}. Renumber them: "
            "torch.unique(y, return_inverse=True)[1]."
        )
    least = max(2, int(y.max()) + 1) if y.numel() and not y.is_floating_point() else 2
    if num_classes is not None and (type(num_classes) is not int or num_classes < least):
        raise InputError(
            f"num_classes must be a whole number above the largest label, at least {least} here, but is "
            f"{num_classes!r}. Leave it out to count the classes of y."
        )
    classes = num_classes or least
    check_memory(
        8 * classes * (3 * classes + num_rows(x)),
        y.device,
        f"codes of {classes} classes",
        "labels from 0 on: torch.unique(y, return_inverse=True)[1]",
    )
    dtype = y.dtype if y.is_floating_point() else torch.get_default_dtype()
    Categorical().check(torch.zeros(num_rows(x), classes, dtype=dtype, device=y.device), y)
    return classes


def _contrasts(classes: int) -> Tensor:
    """Helmert's orthonormal basis of the vectors that sum to zero: (C, C − 1).

    Column k compares class k with the mean of the classes before it. The codes sum to zero, so they have C −
    1 coordinates; the evidence of all C columns would count a direction that is zero by construction.
    """
    k = torch.arange(1, classes, dtype=torch.float64)
    basis = (torch.arange(classes)[:, None] < k).double()
    basis[1:] -= torch.diag(k)
    return basis / (k * (k + 1)).sqrt()


def _tune(seen: Spectrum) -> tuple[float, float]:
    """The noise and scale that maximize evidence times prior; a grid finds the basin."""
    values, energies = (v.cpu().numpy() for v in (seen.eigenvalues, seen.energies.sum(1)))
    columns = seen.energies.shape[1]
    variance = 1.0 / (columns + 1)

    def loss(logs: np.ndarray) -> np.ndarray:
        """The negative log posterior at logarithms (..., 2) of noise and scale over the codes' variance."""
        noise, scale = (variance * np.exp(logs[..., i, None]) for i in (0, 1))
        total = scale * values + noise
        evidence = -0.5 * (energies / total + columns * np.log(total)).sum(-1)
        surprise = (logs - np.log([NOISE_SHARE, 1.0])) / SPREAD
        return 0.5 * (surprise**2).sum(-1) - evidence

    axis = np.arange(-9.0, 5.0, 0.5)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    start = grid[loss(grid).argmin()]
    best = minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-3, "fatol": 1e-6}).x
    noise, scale = variance * np.exp(best)
    return float(noise), float(scale)


def _temperature(process: Conditioned, codes: Tensor, frequencies: Tensor) -> float:
    """The temperature, at least one, that maximizes the likelihood of each label given all others.

    Predicted from the other points, the code of point n has mean t_n − α_n / d_n and, with noise, variance
    1 / d_n, where α = (K + σ²)⁻¹ t and d is the diagonal of (K + σ²)⁻¹.
    """
    factor = process.factor
    assert isinstance(factor, SpectralFactor)
    d = (factor.Q**2 / factor.eigenvalues).sum(1)[:, None]
    labels = codes.argmax(1)
    with_others = torch.bincount(labels, minlength=codes.shape[1])[labels] > 1
    if not bool(with_others.any()):
        return 1.0
    logits, labels = (v[with_others].cpu() for v in (d * codes - process.alpha, labels))
    prior = frequencies.log().cpu()

    def loss(log_temperature: float) -> float:
        tempered = (logits / np.exp(log_temperature) + prior).log_softmax(1)
        fit = float(tempered.gather(1, labels[:, None]).sum())
        return 0.5 * (log_temperature / CAUTION) ** 2 - fit

    return float(np.exp(minimize_scalar(loss, bounds=(0.0, 4.0), method="bounded").x))
