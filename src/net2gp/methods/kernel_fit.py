"""Fit a kernel to data: length scales, variances and noise that are most probable given the targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from net2gp.errors import InputError, check_count
from net2gp.inputs import describe, gather
from net2gp.kernels.constant_mean import ConstantMean
from net2gp.kernels.stretched import Stretched
from net2gp.kernels.values import is_kernel
from net2gp.likelihoods import Gaussian
from net2gp.likelihoods.traits import has_gaussian_noise
from net2gp.limits import LimitKernel, nngp, ntk
from net2gp.limits.other_variances import with_variances
from net2gp.linalg.chance import fixed_choice
from net2gp.methods.laplace_approximation.regression import warn_of_scales
from net2gp.methods.most_probable import LogNormal, most_probable
from net2gp.posteriors.condition import condition
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.mixed import mixture
from net2gp.posteriors.weights.tasks.sums import Moments
from net2gp.types import Data, Inputs, Kernel

LENGTHSCALE = LogNormal(0.4, 1.0)
"""The prior of length scales, in units of the inputs; a layer divides squared distances by d beside."""

WEIGHTS, BIASES = LogNormal(1.0, 1.0), LogNormal(0.3, 1.0)
"""The priors of the variances of weights (or of the whole kernel) and biases."""

NOISE = LogNormal(0.01, 2.3, lower=1e-6)
"""The prior of the noise, as a share of the variance of the targets: within a factor of ten, most likely."""

SMALLER, LARGER = 2.0, 9.0
"""How much smaller or larger, in logarithms, the noise of all points may be than the noise of a few."""


@dataclass(frozen=True)
class Family:
    """Kernels by their hyper-parameters.

    Args:
        kernel: The kernel for values of the hyper-parameters, by keyword.
        priors: The priors of the hyper-parameters, by keyword.
    """

    kernel: Callable[..., Kernel]
    priors: Mapping[str, LogNormal]


def family_of(kernel: Kernel | nn.Module, num_scales: int | None) -> Family:
    """Return the kernels that are searched.

    Args:
        kernel: A network or a kernel.
        num_scales: How many length scales there are. None is one for all inputs.

    Returns:
        The kernels with stretched inputs and variances of their own.

    Raises:
        InputError: If it is neither.
    """
    if isinstance(kernel, nn.Module):
        kernel = nngp(kernel)
    if not is_kernel(kernel):
        raise InputError(
            f"kernel must be a network or a kernel, but is {type(kernel).__name__}. Pass for example "
            "n2g.ntk(network), or torch.nn.Sequential(...), whose limit is taken."
        )
    scales = replace(LENGTHSCALE, count=num_scales)
    if isinstance(kernel, LimitKernel):
        return Family(
            lambda lengthscale, center=None, **values: Stretched(
                with_variances(kernel, **values), lengthscale, center
            ),
            {"lengthscale": scales, "weight_var": WEIGHTS, "bias_var": BIASES},
        )
    return Family(
        lambda lengthscale, output_var, center=None: Stretched(
            kernel.scaled(output_var), lengthscale, center
        ),
        {"lengthscale": scales, "output_var": WEIGHTS},
    )


def fit_kernel(
    kernel: Kernel | nn.Module,
    data: Data,
    *,
    num_tuned: int = 300,
    num_points: int = 4000,
) -> Posterior[Gaussian]:
    """Return the posterior of a Gaussian process whose hyper-parameters are chosen for the data.

    Targets are y = m + f(x) + ε. The hyper-parameters θ maximize log p(y | θ) + log p(log θ) on some of the
    points, all under log-normal priors: a length scale for each column of a table (or one for inputs of
    another shape), the variances of weights and biases of a network's limit, or the variance of another
    kernel, and the noise. Inputs are measured from their averages in standard deviations. m is the average of
    each target, and several targets share one scale and one noise. The noise is chosen once more on all
    points that the process is conditioned on. Limits without length scales take every column for equally
    important, which tables seldom bear out. Cost: some fifty evaluations of the kernel at `num_tuned` points,
    which take minutes for activations without a closed form, such as tanh, and a dozen factorizations, M³/3
    each, for M points that it is conditioned on.

    Args:
        kernel: `ntk(network)`, `nngp(network)`, any other kernel, or a network, whose NNGP is taken.
        data: (x, y) with inputs of one tensor and real targets, or a DataLoader, which is joined in memory.
        num_tuned: The most points that hyper-parameters are chosen on, a fixed random choice.
        num_points: The most points that the process is conditioned on, likewise.

    Returns:
        The posterior, with its Gaussian likelihood.

    Raises:
        InputError: If the kernel is none, the inputs are not one tensor, or the targets are classes.

    >>> from net2gp.limits import ntk
    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(80, 3, dtype=torch.float64, generator=generator)
    >>> network = nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 1)).double()
    >>> posterior = fit_kernel(ntk(network), (x, x[:, :1].abs()))  # the other columns do not matter
    >>> lengthscale = posterior.process.kernel.lengthscale
    >>> bool(lengthscale[1:].min() > 3 * lengthscale[0])
    True

    References: Neal, Bayesian Learning for Neural Networks, 1996, section 1.2.2; Rasmussen and Williams,
    Gaussian Processes for Machine Learning, 2006, ch. 5.
    """
    x, y = gather(data)
    check_count(num_tuned, "num_tuned", example=300)
    check_count(num_points, "num_points", example=4000)
    _check(x, y)
    assert isinstance(x, Tensor)
    chosen = fixed_choice(len(x), num_points)
    known, targets = x[chosen.to(x.device)], y.reshape(len(y), -1)[chosen.to(y.device)]
    mean = ConstantMean(targets.mean(0))
    variance = float((targets - mean.value).double().square().mean()) or 1.0
    table = x.dim() == 2
    middle, units = _middle(known, table), _deviations(known, table)
    warn_of_scales(Moments.of(targets.double()))
    family = family_of(kernel, x.shape[1] if table else None)
    family.kernel(**{name: torch.ones(prior.shape) for name, prior in family.priors.items()}).check(
        known
    )
    some = fixed_choice(len(known), num_tuned).to(x.device)
    few = (known[some].double(), targets[some.to(y.device)].double())
    center = ConstantMean(mean.value.double())

    def prior(lengthscale: Tensor, **values: Tensor) -> Kernel:
        return family.kernel(lengthscale=lengthscale * units, center=middle, **values)

    def process(
        data: tuple[Tensor, Tensor], mean: ConstantMean, noise_var: Tensor, **values: Tensor
    ) -> Posterior[Gaussian]:
        kernel = prior(**values).scaled(variance)
        return condition(kernel, data, Gaussian(variance * noise_var), mean=mean)

    found, _ = most_probable(
        lambda **values: process(few, center, **values), {**family.priors, "noise_var": NOISE}
    )
    found = {name: value.detach() for name, value in found.items()}
    if len(known) > len(some):
        K = prior(**{name: found[name] for name in family.priors})(known).detach()
        found["noise_var"] = _noise(K, (targets - mean.value) / variance**0.5, found["noise_var"])
    return process((known, targets), mean, **found)


def with_limits(
    posterior: Posterior, network: nn.Module | None = None, *, num_points: int = 4000
) -> Posterior:
    """Return the mixture of a network's posterior with networks of infinite width.

    A trained network and its posterior follow one explanation of the data. Where data are few or missing, the
    Gaussian process of a wide network at initialization (NNGP) and the one that training moves in (tangent
    kernel), both fitted by `fit_kernel`, are two more. Each of the three has a third of the probability, so
    that the density is nowhere less than a third of the best of them. The mean moves: it is the average of
    the three. Cost: that of two calls of `fit_kernel`, and their predictions.

    Args:
        posterior: A regression of a network on a table, such as from `laplace`, which keeps its data.
        network: The wide network; its widths do not matter. None takes two hidden layers of ReLUs.
        num_points: The most points that the wide networks are conditioned on.

    Returns:
        The mixture.

    Raises:
        InputError: If the noise is not Gaussian, or the inputs are not one tensor.
        NotAvailable: If the posterior did not keep its data.

    >>> from net2gp.kernels import RBF
    >>> x = torch.randn(30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> posterior = with_limits(condition(RBF(), (x, x[:, :1]), Gaussian(0.01)))
    >>> len(posterior.process.members)
    3

    References: Lee et al., Deep neural networks as Gaussian processes, ICLR 2018; Jacot, Gabriel, Hongler,
    Neural tangent kernel, NeurIPS 2018; Hoeting et al., Bayesian model averaging, Statistical Science 1999.
    """
    if not isinstance(posterior, Posterior):
        raise InputError(
            f"with_limits takes a posterior, but got {describe(posterior)}. Pass laplace(network, data, "
            "Gaussian())."
        )
    if not has_gaussian_noise(posterior.likelihood):
        raise InputError(
            f"with_limits is for regression, but the likelihood is {type(posterior.likelihood).__name__}. "
            "Pass a posterior with Gaussian noise; for classes, mixture([...]) of several networks."
        )
    x, y = posterior.data
    _check(x, y)
    if network is None:
        network = _two_layers(x)
    fitted = [fit_kernel(limit(network), (x, y), num_points=num_points) for limit in (nngp, ntk)]
    return mixture([posterior, *fitted])


def _two_layers(x: Inputs) -> nn.Module:
    """Two hidden layers of ReLUs for the columns of a table."""
    assert isinstance(x, Tensor)
    layers = (
        *(nn.Flatten(), nn.Linear(x[0].numel(), 1), nn.ReLU()),
        *(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)),
    )
    return nn.Sequential(*layers).to(x)


def _noise(K: Tensor, residuals: Tensor, start: Tensor) -> Tensor:
    """The most probable noise of all points, from the one of a few: equal points with other targets are rare.

    Brent's method over log σ² up to e⁹ times as large, a Cholesky factorization for each of a dozen values.
    """
    K, residuals = K.double(), residuals.double()
    middle = float(start.log())

    def loss(log: float) -> float:
        noisy = K.clone()
        noisy.diagonal().add_(math.exp(log))
        L, failed = torch.linalg.cholesky_ex(noisy)
        if int(failed):
            return math.inf
        white = torch.linalg.solve_triangular(L, residuals, upper=False)
        log_det = residuals.shape[1] * float(L.diagonal().log().sum())
        prior = float(NOISE.log_density(torch.tensor(log, dtype=torch.float64)))
        return 0.5 * float(white.square().sum()) + log_det - prior

    ends = (max(middle - SMALLER, math.log(NOISE.lower)), middle + LARGER)
    found = minimize_scalar(loss, bounds=ends, method="bounded", options={"xatol": 0.05})
    return start.new_tensor(math.exp(found.x))


def _middle(x: Tensor, table: bool) -> Tensor:
    """The average of each column, or of all entries."""
    return x.double().mean(0) if table else x.double().mean()


def _deviations(x: Tensor, table: bool) -> Tensor:
    """The standard deviation of each column, or of all entries: one where there is none."""
    found = x.double().std(0, correction=0) if table else x.double().std(correction=0)
    return torch.where(found > 0, found, 1.0)


def _check(x: object, y: Tensor) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise InputError(
            f"fit_kernel stretches one floating tensor of points, but x is {describe(x)}. Pass "
            "condition(kernel, data, Gaussian(noise_var)) for other inputs."
        )
    if not y.is_floating_point():
        raise InputError(
            f"fit_kernel is for real targets, but y is {describe(y)}. Pass y.double() if they are numbers, "
            "or condition(kernel, data, Categorical()) for classes."
        )
    if len(x) < 2 or not bool(x.isfinite().all()) or not bool(y.isfinite().all()):
        raise InputError(
            f"fit_kernel needs at least two points, and finite numbers, but x is {describe(x)} and y is "
            f"{describe(y)}. Pass more points, and leave out rows with missing entries."
        )
