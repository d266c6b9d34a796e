"""Networks of infinite width: Gaussian processes with the kernel of a module as it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.nn.functional import one_hot

from net2gp.errors import InputError, check_positive
from net2gp.inputs import describe, num_rows, rows
from net2gp.interop.sklearn.estimator import Array, Classifier, Regressor
from net2gp.interop.sklearn.perceptron import moments
from net2gp.interop.sklearn.softmax import softmax_mode
from net2gp.interop.sklearn.weighting import weighted
from net2gp.likelihoods import Categorical, Gaussian
from net2gp.limits import nngp, ntk
from net2gp.limits.prior import Variances
from net2gp.linalg.chance import fixed_choice
from net2gp.posteriors import condition
from net2gp.posteriors.conditioning.gaussian import as_rows
from net2gp.posteriors.conditioning.problem import make_problem
from net2gp.posteriors.spectrum import Spectrum
from net2gp.posteriors.tune import tune_spectra
from net2gp.types import Kernel

WEIGHT_VAR, BIAS_VAR = 2.0, 0.1
"""The variances of the default network."""

TUNING_ROWS, NEWTON_COST = 6000, 2e9
"""Rows that hyper-parameters are tuned on by an eigendecomposition, and the largest C·N³ of a Newton step for
classes: all points, or a fixed random choice where there are more."""

LEVELS = 10.0 ** np.arange(-3, 5)
"""Average prior variances of a logit that are tried, before Brent's method between the best ones."""


def kernel_of(
    limit: Callable[..., Kernel],
    network: nn.Module | Kernel | None,
    weight_var: Variances | None,
    bias_var: Variances | None,
    num_features: int,
) -> Kernel:
    """Return the kernel of an estimator.

    Args:
        limit: `nngp` or `ntk`.
        network: A module, a kernel that is returned as it is, or None for two hidden layers of ReLUs.
        weight_var: The variance of weights times their fan-in.
        bias_var: The variance of biases.
        num_features: The columns D of the inputs.

    Returns:
        The kernel.

    Raises:
        InputError: If `network` is something else, or if variances are given with a kernel.
    """
    if network is None:
        layers = (
            nn.Linear(num_features, 1),
            nn.ReLU(),
            nn.Linear(1, 1),
            nn.ReLU(),
            nn.Linear(1, 1),
        )
        weight_var = WEIGHT_VAR if weight_var is None else weight_var
        bias_var = BIAS_VAR if bias_var is None else bias_var
        return limit(nn.Sequential(*layers), weight_var=weight_var, bias_var=bias_var)
    if isinstance(network, nn.Module):
        return limit(network, weight_var=weight_var, bias_var=bias_var)
    if not isinstance(network, Kernel) or isinstance(network, type):
        raise InputError(
            f"network must be a torch module, a kernel of net2gp or None, but is {describe(network)}."
        )
    if weight_var is not None or bias_var is not None:
        raise InputError(
            "weight_var and bias_var are for modules, but a kernel was given, which has its own. Leave them "
            "out, or pass nngp(module, weight_var=..., bias_var=...)."
        )
    return network


class _WidthRegressor(Regressor):
    """A regression with the kernel of a network of infinite width."""

    _limit: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        network: nn.Module | Kernel | None = None,
        *,
        weight_var: Variances | None = None,
        bias_var: Variances | None = None,
        scale: float | None = None,
        noise_var: float | None = None,
        normalize_y: bool = True,
    ) -> None:
        self.network = network
        self.weight_var = weight_var
        self.bias_var = bias_var
        self.scale = scale
        self.noise_var = noise_var
        self.normalize_y = normalize_y

    def _fit(self, X: Array, y: Array, weights: Array | None) -> None:
        x, columns = self._tensor(X), torch.from_numpy(y)
        w = None if weights is None else torch.from_numpy(weights)
        self._center, self._spread = 0.0, 1.0
        if self.normalize_y:
            center, spread = moments(columns, w)
            columns = (columns - center) / spread
            self._center, self._spread = center.numpy(), spread.numpy()
        limit = type(self)._limit
        kernel = kernel_of(limit, self.network, self.weight_var, self.bias_var, x.shape[1])
        noise_var, scale = self.noise_var, self.scale
        if noise_var is None or scale is None:
            noise_var, scale = _tuned(kernel, (x, columns), w, noise_var, scale)
        check_positive(scale, "scale", single=True)
        likelihood = Gaussian(noise_var)
        posterior = condition(kernel.scaled(scale), (x, columns), weighted(likelihood, w))
        self._keep(posterior, likelihood, w)


def _tuned(
    kernel: Kernel,
    data: tuple[Tensor, Tensor],
    weights: Tensor | None,
    noise_var: float | None,
    scale: float | None,
) -> tuple[float, float]:
    """The noise and the scale of the largest evidence, with `tune_spectra`, which says how.

    With W = diag(w), the evidence of weighted points is that of W^{1/2}y with W^{1/2}KW^{1/2} as Gram matrix,
    and of Σw − N zeros at which the Gram matrix is zero as well.
    """
    for name, value in (("noise_var", noise_var), ("scale", scale)):
        if value is not None:
            check_positive(value, name, single=True)
    problem = make_problem(kernel, data, Gaussian(1.0), None)
    counts = torch.ones(num_rows(data[0]), dtype=torch.float64) if weights is None else weights
    most = TUNING_ROWS // problem.rows_per_point
    if len(counts) > most:
        chosen = fixed_choice(len(counts), most)
        some = (rows(data[0], chosen), data[1][chosen])
        problem, counts = make_problem(kernel, some, Gaussian(1.0), None), counts[chosen]
    by_row = counts.repeat_interleave(problem.rows_per_point)
    root = by_row.sqrt()[:, None]
    values, Q = torch.linalg.eigh(root * problem.gram().detach() * root.mT)
    energies = (Q.mT @ (root * as_rows(problem, problem.target))).square()
    more = cast(int, float(by_row.sum()) - len(by_row))
    nothing = torch.zeros_like(energies[0])
    spectrum = Spectrum(problem, values.clamp(min=0.0), energies, nothing, more, Q)
    return tune_spectra([spectrum], noise_var, scale)


class NNGPRegressor(_WidthRegressor):
    """Regression with the Gaussian process that a network is at initialization, at infinite width.

    f ~ GP(0, scale · K) and y = f + ε with ε ~ N(0, noise_var), where K is the kernel of `net2gp.nngp`. What
    is left open of `scale` and `noise_var` maximizes the evidence, with the weak prior on the noise that
    `net2gp.adapt` has. Cost: one eigendecomposition, N³, if
    something is open, and one Cholesky factor. Standard deviations are those of targets, noise included, as
    those of `sklearn.gaussian_process.GaussianProcessRegressor` with a `WhiteKernel`.

    Args:
        network: A module, whose hidden widths are ignored; or a kernel of the library, such as
            `net2gp.RBF()`, which is used as it is. None is a network of two hidden layers with ReLUs.
        weight_var: The variance of weights times their fan-in, as in `net2gp.nngp`; for the default
            network 2.
        bias_var: The variance of biases, as in `net2gp.nngp`; for the default network 0.1.
        scale: The factor of the kernel. None chooses it.
        noise_var: The variance of the noise, of standardized targets if `normalize_y`. None chooses it.
        normalize_y: Whether each column of targets is standardized for the fit. Posterior and evidence are
            then those of standardized targets.

    After `fit`: `posterior_`, `likelihood_`, `log_marginal_likelihood_value_`, `n_features_in_`, and
    `feature_names_in_` of tables.

    >>> from sklearn.datasets import make_friedman1
    >>> X, y = make_friedman1(80, n_features=5, noise=0.5, random_state=0)
    >>> model = NNGPRegressor().fit(X[:60], y[:60])
    >>> mean, std = model.predict(X[60:], return_std=True)
    >>> mean.shape, bool(model.score(X[60:], y[60:]) > 0.8)
    ((20,), True)

    References: Lee et al., Deep neural networks as Gaussian processes, ICLR 2018; Rasmussen and Williams,
    Gaussian Processes for Machine Learning, 2006, ch. 2 and 5.
    """

    _limit = nngp


class NTKRegressor(_WidthRegressor):
    """Regression with the tangent kernel of a network at infinite width, where training does not change it.

    The posterior mean is what gradient descent from a mean of zero ends at with the weight decay that belongs
    to `noise_var`; the variance is that of the Gaussian process with this kernel. All else is as in
    `NNGPRegressor`.

    Args:
        network: A module, whose hidden widths are ignored; or a kernel of the library, which is used as it
            is. None is a network of two hidden layers with ReLUs.
        weight_var: The variance of weights times their fan-in, as in `net2gp.ntk`; for the default network 2.
        bias_var: The variance of biases, as in `net2gp.ntk`; for the default network 0.1.
        scale: The factor of the kernel. None chooses it.
        noise_var: The variance of the noise, of standardized targets if `normalize_y`. None chooses it.
        normalize_y: Whether each column of targets is standardized for the fit.

    >>> X = np.linspace(-2, 2, 20)[:, None]
    >>> bool(NTKRegressor().fit(X, np.sin(2 * X[:, 0])).score(X, np.sin(2 * X[:, 0])) > 0.95)
    True

    Reference: Jacot, Gabriel and Hongler, Neural tangent kernel, NeurIPS 2018.
    """

    _limit = ntk


class NNGPClassifier(Classifier):
    """Classification with the Gaussian process that a network is at infinite width.

    One f ~ GP(0, scale · K) for each class and p(y = c | f) = softmax(f)_c, by Laplace's approximation. An
    open `scale` maximizes its evidence. Cost: some Newton steps of C·N³ for each of about 20 scales, with up
    to 1000 points (600 for ten classes, a fixed random choice where there are more), and then some of
    (N·C)³/3.

    Args:
        network: A module, whose hidden widths are ignored; or a kernel of the library, which is used as it
            is. None is a network of two hidden layers with ReLUs.
        weight_var: The variance of weights times their fan-in, as in `net2gp.nngp`; for the default
            network 2.
        bias_var: The variance of biases, as in `net2gp.nngp`; for the default network 0.1.
        scale: The factor of the kernel. None chooses it.

    After `fit`: `classes_` and all that `NNGPRegressor` has.

    >>> X = np.repeat([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0]], 5, 0) + np.linspace(-0.5, 0.5, 15)[:, None]
    >>> model = NNGPClassifier().fit(X, np.repeat(["a", "b", "c"], 5))
    >>> model.predict([[0.1, 0.1], [2.8, 0.3], [0.0, 2.6]])
    array(['a', 'b', 'c'], dtype='<U1')

    Reference: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, sections 3.5 and 5.5.
    """

    def __init__(
        self,
        network: nn.Module | Kernel | None = None,
        *,
        weight_var: Variances | None = None,
        bias_var: Variances | None = None,
        scale: float | None = None,
    ) -> None:
        self.network = network
        self.weight_var = weight_var
        self.bias_var = bias_var
        self.scale = scale

    def _fit(self, X: Array, labels: Array, weights: Array | None) -> None:
        x, y = self._tensor(X), torch.from_numpy(labels).long()
        w = None if weights is None else torch.from_numpy(weights)
        kernel = kernel_of(nngp, self.network, self.weight_var, self.bias_var, x.shape[1])
        likelihood = Categorical()
        own = weighted(likelihood, w)
        scale = self.scale
        if scale is None:
            codes = one_hot(y, len(self.classes_)).double()
            scale = _tuned_scale(kernel, x, codes, w)
        check_positive(scale, "scale", single=True)
        self._keep(condition(kernel.scaled(scale), (x, y), own), likelihood, w)


def _tuned_scale(kernel: Kernel, x: Tensor, codes: Tensor, weights: Tensor | None) -> float:
    """The scale of the largest Laplace evidence: the best of a grid, and Brent's method around it."""
    if kernel.outputs(x) is not None:
        raise InputError(
            "the kernel couples its outputs, as that of a network that keeps positions. Pass scale=1.0, or "
            "a network with a vector of logits for each point."
        )
    counts = torch.ones(len(x), dtype=torch.float64) if weights is None else weights
    most = int((NEWTON_COST / codes.shape[1]) ** (1 / 3))
    if len(x) > most:
        some = fixed_choice(len(x), most)
        x, codes, counts = x[some], codes[some], counts[some]
    K = kernel.precise()(x).detach()
    level = float((counts @ K.diagonal()) / counts.sum())
    if not level > 0:
        raise InputError(
            "the kernel is zero at the data. Pass a bias_var, or inputs that are not zero."
        )
    mean = torch.zeros_like(codes)  # scale · α, which stays nearly the same from scale to scale

    def loss(log_scale: float) -> float:
        nonlocal mean
        scale = float(np.exp(log_scale))
        mode = softmax_mode(scale * K, codes, counts, mean / scale)
        mean = scale * mode.alpha
        return -mode.evidence

    grid = np.log(LEVELS / level)
    values = [loss(point) for point in grid]
    best = int(np.argmin(values))
    ends = (grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)])
    found = minimize_scalar(loss, bounds=ends, method="bounded", options={"xatol": 0.02})
    return float(np.exp(found.x if found.fun <= values[best] else grid[best]))
