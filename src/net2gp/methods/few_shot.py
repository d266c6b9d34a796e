"""Adapt a trained network to new classes in closed form, from a few labeled points of each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor, distributions, nn
from torch.nn.functional import one_hot

from net2gp.errors import InputError, check_memory
from net2gp.inputs import chunks, describe, gather, map_inputs, num_rows, tensors
from net2gp.likelihoods import Categorical, Gaussian
from net2gp.linear import Linearized, linearize
from net2gp.linear.linearized import PriorVar
from net2gp.posteriors.function_space import FunctionPosterior, SpectralFactor
from net2gp.posteriors.problem import make_problem
from net2gp.posteriors.spectrum import Spectrum, decompose, same_inputs, share_spectrum
from net2gp.types import Data, Inputs, Kernel, Likelihood

NOISE_SHARE, SPREAD = 0.1, 2.0
"""The noise as a share of the codes' variance, and the standard deviation of its logarithm, a priori."""

CAUTION = 0.5
"""The standard deviation, a priori, of the logarithm of the temperature."""

SMALLEST = 1e-12
"""Of the variance, less is rounding: such a point is at the mean, and correlated with none."""

TILE_BYTES = 2**27


@dataclass(frozen=True, eq=False)
class Standardized:
    """The correlations of a kernel's features, counted from their mean over some points X.

    With c(x, x') = k(x, x') − m(x) − m(x') + m̄, m(x) = mean_n k(x, X_n) and m̄ = mean_n m(X_n), it is
    variance · c(x, x') / √(c(x, x) c(x', x')). Centering takes away what all points have in common, which
    cannot tell classes apart but counts as prior variance; correlations do not depend on how bright an
    image is.

    `means` are m(X), and `gram` are the correlations of X, which are never computed again. Cost: k(x, X) and
    the diagonal of k, and between other points k itself.
    """

    kernel: Kernel
    points: Inputs = field(repr=False)
    means: Tensor = field(repr=False)
    gram: Tensor = field(repr=False)
    variance: float | Tensor = 1.0
    product_dtype: torch.dtype | None = None

    @staticmethod
    def at(kernel: Kernel, points: Inputs) -> Standardized:
        """The kernel of one output, standardized at the points."""
        if not isinstance(kernel, Kernel) or isinstance(kernel, type) or kernel.joint:
            raise InputError(
                f"expected a network or a kernel of one output, but got {describe(kernel)}. "
                "Pass the network, or linearize(network).trace_kernel(), or RBF()."
            )
        kernel.check(points)
        check_memory(
            6 * 8 * num_rows(points) ** 2,
            tensors(points)[0].device,
            f"the correlations of {num_rows(points)} points",
            "fewer labeled points",
        )
        K = kernel.precise()(points).detach()
        spread = K.diagonal().mean() - K.mean()
        if not float(spread) > 1e-12 * float(K.diagonal().mean()):
            raise InputError(
                f"the kernel does not tell the {num_rows(points)} points of x apart. Pass two "
                "different points or more, and parameters that have an effect."
            )
        means = K.mean(0)
        # a kernel is a value: editing the data in place later must not change it
        own = map_inputs(points, lambda v: v.detach().clone())
        return Standardized(kernel, own, means, _correlations(K, means, means.mean()))

    @property
    def joint(self) -> bool:
        """False: outputs are independent copies."""
        return False

    def check(self, x: Inputs) -> None:
        """As the kernel itself."""
        self.kernel.check(x)

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """variance · c(x, y) / √(c(x, x) c(y, y)): (N, M)."""
        return (self.variance * self._correlations(x, x if y is None else y)).to(self._dtype(x))

    def blocks(self, x: Inputs) -> Tensor:
        """The variance: (N, 1, 1)."""
        return self.diag(x)[:, None, None]

    def diag(self, x: Inputs) -> Tensor:
        """The variance: (N,)."""
        dtype = self._dtype(x)
        return (self.means.new_ones(num_rows(x), dtype=dtype) * self.variance).to(dtype)

    def matmul(self, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """k(x, y) @ v, a tile of rows of k(x, y) at a time."""
        size = max(1, TILE_BYTES // (8 * num_rows(y)))
        return torch.cat(
            [tile @ v.to(tile.dtype) for tile in (self(p, y) for p in chunks(x, size))]
        )

    def precise(self) -> Standardized:
        """The same kernel, its results in float64 (it computes in float64 anyway)."""
        return replace(self, product_dtype=torch.float64)

    def scaled(self, variance: float | Tensor) -> Standardized:
        """variance · k."""
        return replace(self, variance=self.variance * variance)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Standardized:
        """The same kernel with its tensors on another device or in another dtype; means stay float64."""
        move = lambda v: v.to(device=device, dtype=dtype if v.is_floating_point() else None)
        return replace(
            self,
            kernel=self.kernel.to(device, dtype),
            points=map_inputs(self.points, move),
            means=self.means.to(device),
            gram=self.gram.to(device),
        )

    def _correlations(self, x: Inputs, y: Inputs) -> Tensor:
        known, other_known = (same_inputs(v, self.points) for v in (x, y))
        if known and other_known:
            return self.gram
        if other_known:
            return self._correlations(y, x).mT
        kernel, level = self.kernel.precise(), self.means.mean()
        if x is y:
            return _correlations(kernel(x), kernel(self.points, x).mean(0), level)
        K = kernel(x, y)
        means = self.means if known else kernel(self.points, x).mean(0)
        other = K.mean(0) if known else kernel(self.points, y).mean(0)
        left, right = (_roots(kernel.diag(v), m, level) for v, m in ((x, means), (y, other)))
        return (K - means[:, None] - other + level) / (left[:, None] * right)

    def _dtype(self, x: Inputs) -> torch.dtype:
        own = tensors(x)[0].dtype
        return self.product_dtype or (own if own.is_floating_point else torch.get_default_dtype())


def _correlations(K: Tensor, means: Tensor, level: Tensor) -> Tensor:
    """Of a Gram matrix and its points' means, with ones on the diagonal whatever rounding does."""
    C = K - means[:, None] - means + level
    root = _roots(K.diagonal(), means, level)
    C = C / (root[:, None] * root)
    return C - torch.diag(C.diagonal() - 1.0)


def _roots(diagonal: Tensor, means: Tensor, level: Tensor) -> Tensor:
    """√c(x, x), or what rounding may leave of it: (N,)."""
    least = SMALLEST * diagonal + torch.finfo(diagonal.dtype).tiny
    return torch.maximum(diagonal - 2 * means + level, least).sqrt()


@dataclass(frozen=True, eq=False)
class ClassPosterior:
    """Classes from Gaussian process regression of their one-hot codes.

    `process` is f | y of the codes less the classes' frequencies π: mean μ(x), (N, C), and one variance v(x)
    for all outputs. A label's code e_c is seen with noise σ², so that what x says of class c is

        N(e_c; π + μ, s²) / N(e_c; π, s²) ∝ exp(μ_c / s²),  s² = v(x) + σ²,

    and q(c | x) ∝ π_c exp(μ_c / (temperature · s²)): the frequencies where nothing is known. N labels cannot
    tell that errors are rarer than about one in N, whatever the codes say: p = (1 − ε) q + ε π with
    ε = 1/(N + 2), which is Laplace's rule of succession for no error in N.
    """

    process: FunctionPosterior
    frequencies: Tensor = field(repr=False)
    temperature: float
    evidence: Tensor

    @property
    def noise_var(self) -> float:
        """σ²."""
        return float(self.process.likelihood.noise_var)  # type: ignore[attr-defined]

    def marginal(self, x: Inputs) -> MultivariateNormal:
        """Codes less frequencies at each point: batch N, event C."""
        return self.process.marginal(x)

    def joint(self, x: Inputs) -> MultivariateNormal:
        """Codes less frequencies at all points together: event N·C, index n·C + c."""
        return self.process.joint(x)

    def predict(
        self, x: Inputs, *, likelihood: Likelihood | None = None
    ) -> distributions.Categorical:
        """p(y_n = c), as `.probs` (N, C)."""
        if likelihood is not None:
            raise InputError(
                "this posterior is of one-hot codes, not of logits, and has its own likelihood: leave "
                "likelihood out, or use condition(kernel, data, Categorical())."
            )
        law = self.marginal(x)
        mean, total = law.mean.double(), law.variance.double() + self.noise_var
        logits = mean / (self.temperature * total) + self.frequencies.log()
        doubt = 1.0 / (num_rows(self.process.x) + 2)
        probs = (1 - doubt) * logits.softmax(-1) + doubt * self.frequencies
        return distributions.Categorical(probs=probs.to(law.mean.dtype))

    def sample(
        self, x: Inputs, num_samples: int, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """(S, N, C) codes less frequencies, of functions drawn from the posterior."""
        return self.process.sample(x, num_samples, generator=generator)

    def log_marginal_likelihood(self) -> Tensor:
        """log p(codes): a density in the C − 1 directions in which codes differ."""
        return self.evidence


def adapt_classes(
    network: nn.Module | Linearized | Kernel,
    data: Data,
    *,
    num_classes: int | None = None,
    prior_var: PriorVar = 1.0,
) -> ClassPosterior:
    """A classifier of new classes from a trained network and a few labeled points, without training.

    The network gives the kernel alone: J diag(prior_var) Jᵀ averaged over its outputs, so that the classes
    may be others and of any number. It is centered at the data and taken as a correlation
    (`Standardized`). With it the one-hot codes of the labels are regressed in closed form. Labels are
    integers below `num_classes`, which is one more than the largest if left out. Pass a `Linearized` to
    choose parameters, or any other kernel of one output.

    Scale and noise maximize the evidence of the codes, under weak log-normal priors around the codes'
    variance and a tenth of it, which matter for one or two points of each class. Codes are not Gaussian,
    and the evidence finds too little noise where they can be fitted; the temperature, at least one,
    corrects that by the likelihood of each label given all others, which is closed-form too (points
    without another of their class are left out).

    Cost: the Gram matrix once, and one eigendecomposition, N³. Softmax with Laplace's method costs Newton
    steps of N³C or more, and its evidence asks for too small a scale if points are few.

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
    x, y = gather(data)
    classes = _check_labels(x, y, num_classes)
    if isinstance(network, nn.Module):
        network = linearize(network)
    if not isinstance(network, Linearized) and prior_var != 1.0:
        raise InputError(
            "prior_var is of a network's parameters, but a kernel was given, which has its own. Leave "
            "prior_var out, or pass the network."
        )
    base = network.trace_kernel(prior_var) if isinstance(network, Linearized) else network
    kernel = Standardized.at(base, x)
    frequencies = (torch.bincount(y.long(), minlength=classes) + 1.0).double() / (len(y) + classes)
    codes = one_hot(y.long(), classes).double() - frequencies
    targets = codes.to(kernel.diag(x).dtype)
    problem = replace(make_problem(kernel, (x, targets), Gaussian(1.0), None), y=codes)
    fixed = decompose(problem)
    contrasts = codes @ _contrasts(classes).to(codes)
    offset = torch.zeros_like(contrasts)
    seen = share_spectrum(fixed, replace(problem, y=contrasts, offset=offset))
    noise, scale = _tune(seen)
    process = fixed.condition(noise, scale)
    assert isinstance(process, FunctionPosterior)
    temperature = _temperature(process, codes, frequencies)
    evidence = seen.log_marginal_likelihood(noise, scale)
    return ClassPosterior(process, frequencies, temperature, evidence)


def _check_labels(x: Inputs, y: Tensor, num_classes: int | None) -> int:
    """The number of classes."""
    if y.dim() > 1 and y.shape[-1] > 1:
        raise InputError(
            f"y must be labels (N,), but is {describe(y)}. For one-hot codes pass y.argmax(1)."
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
    """An orthonormal basis of what sums to zero, in which differences of codes live: (C, C − 1).

    Helmert's: each class against the mean of those before it.
    """
    k = torch.arange(1, classes, dtype=torch.float64)
    basis = (torch.arange(classes)[:, None] < k).double()
    basis[1:] -= torch.diag(k)
    return basis / (k * (k + 1)).sqrt()


def _tune(seen: Spectrum) -> tuple[float, float]:
    """Noise and scale of the largest evidence times prior: a grid finds the basin."""
    values, energies = (v.cpu().numpy() for v in (seen.eigenvalues, seen.energies.sum(1)))
    columns = seen.energies.shape[1]
    variance = 1.0 / (columns + 1)

    def loss(logs: np.ndarray) -> np.ndarray:
        """Of logarithms (..., 2) of noise and scale, as shares of the codes' variance."""
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


def _temperature(process: FunctionPosterior, codes: Tensor, frequencies: Tensor) -> float:
    """At least one, of the largest likelihood of each label given all others.

    Without point n, the mean of its code is t_n − α_n / d_n and the variance with noise 1 / d_n, where α
    and d are (K + σ²)⁻¹ t and the diagonal of (K + σ²)⁻¹.
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
