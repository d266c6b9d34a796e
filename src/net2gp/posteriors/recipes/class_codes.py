"""Classes from regression of their one-hot codes, with a kernel taken as a correlation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor, distributions
from torch.nn.functional import one_hot

from net2gp.errors import InputError, NotAvailable, one_number
from net2gp.inputs import describe, follows, map_inputs, num_rows, same_inputs, tensors
from net2gp.kernels import BaseKernel
from net2gp.likelihoods import Categorical
from net2gp.likelihoods.responses import Response, response
from net2gp.memory import check_memory
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipe import Recipe
from net2gp.show import number
from net2gp.types import Data, Inputs, Kernel, Likelihood

SMALLEST = 1e-12
"""Of the variance, less is rounding: such a point is at the mean, and correlated with none."""


@dataclass(frozen=True, eq=False)
class Standardized(BaseKernel):
    """The correlations of a kernel's features, counted from their mean over some points X.

    With c(x, x') = k(x, x') − m(x) − m(x') + m̄, m(x) = mean_n k(x, X_n) and m̄ = mean_n m(X_n), it is
    variance · c(x, x') / √(c(x, x) c(x', x')). Centering takes away what all points have in common, which
    cannot tell classes apart but counts as prior variance; correlations do not depend on how bright an
    image is.

    Cost: k(x, X) and the diagonal of k, and between other points k itself.

    Args:
        kernel: The kernel k of one output.
        points: The points X.
        means: m(X), of shape (N,).
        gram: The correlations of X, (N, N), which are never computed again.
        variance: A factor of the kernel.
        product_dtype: The dtype of results, or None for the dtype of the points.
    """

    kernel: Kernel
    points: Inputs = field(repr=False)
    means: Tensor = field(repr=False)
    gram: Tensor = field(repr=False)
    variance: float | Tensor = 1.0
    product_dtype: torch.dtype | None = None

    @staticmethod
    def of(kernel: Kernel, points: Inputs) -> Standardized:
        """Standardize a kernel of one output at some points.

        Args:
            kernel: The kernel k.
            points: The points X.

        Returns:
            The standardized kernel.

        Raises:
            InputError: It is no kernel, its outputs are coupled, or it does not tell the points apart.
        """
        if not _has_one_output(kernel, points):
            raise InputError(
                f"expected a network or a kernel of one output, but got {describe(kernel)}. "
                "Pass the network, or linearize(network).trace_kernel(), or RBF()."
            )
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

    def check(self, x: Inputs) -> None:
        """As the kernel itself."""
        self.kernel.check(x)

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """variance · c(x, y) / √(c(x, x) c(y, y)): (N, M)."""
        return (self.variance * self._correlations(x, x if y is None else y)).to(
            self.result_dtype(x)
        )

    def diag(self, x: Inputs) -> Tensor:
        """The variance: (N,)."""
        dtype = self.result_dtype(x)
        return (self.means.new_ones(num_rows(x), dtype=dtype) * self.variance).to(dtype)

    def scaled(self, variance: float | Tensor) -> Standardized:
        """variance · k."""
        return replace(self, variance=self.variance * one_number(variance, "variance"))

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
        # at points that are to be differentiated the stored numbers would count as constants
        known, other_known = (same_inputs(v, self.points) and not follows(v) for v in (x, y))
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

    def result_dtype(self, x: Inputs) -> torch.dtype:
        """The dtype of the points if it has enough digits, or float64 if precise."""
        own = tensors(x)[0].dtype
        full = own in (torch.float32, torch.float64)
        return self.product_dtype or (own if full else torch.get_default_dtype())


def _has_one_output(kernel: Kernel, points: Inputs) -> bool:
    if not isinstance(kernel, Kernel) or isinstance(kernel, type):
        return False
    kernel.check(points)
    return kernel.outputs(points) is None


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
class OneHotCodes:
    """The likelihood of labels whose one-hot codes, minus the class frequencies π, are f plus noise.

    If f has mean μ(x), (N, C), and variance v(x), the likelihood ratio of class c at x is

        N(e_c; π + μ, s²) / N(e_c; π, s²) ∝ exp(μ_c / s²),  s² = v(x) + σ²,

    and q(c | x) ∝ π_c exp(μ_c / (temperature · s²)), which is the frequency π_c if nothing is known about x.
    N labels are no evidence that errors are rarer than about one in N. Therefore p = (1 − ε) q + ε π with
    ε = 1/(N + 2), which is Laplace's rule of succession for no error in N labels.

    Args:
        noise_var: The variance σ² of the Gaussian noise of the codes.
        frequencies: The class frequencies π: (C,).
        temperature: Divides the evidence of each class; above 1 makes predictions less certain.
        num_points: The number of labels N.

    >>> codes = OneHotCodes(0.1, torch.tensor([0.5, 0.5], dtype=torch.float64), 1.0, num_points=8)
    >>> codes.residual(torch.zeros(1, 2, dtype=torch.float64), torch.tensor([1]))
    tensor([[-5.,  5.]], dtype=torch.float64)
    """

    noise_var: float
    frequencies: Tensor = field(repr=False)
    temperature: float
    num_points: int

    def codes(self, y: Tensor) -> Tensor:
        """Return the one-hot codes of labels, minus the frequencies.

        Args:
            y: Labels: (N,).

        Returns:
            The codes: (N, C), float64.
        """
        return one_hot(y.long(), len(self.frequencies)).double() - self.frequencies

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise `InputError` unless `y` are labels of the classes.

        Args:
            f: Values of f: (N, C).
            y: Labels: (N,).
        """
        Categorical().check(f, y)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Return log N(code_n | f_n, σ²I).

        Args:
            f: Values of f: (N, C).
            y: Labels: (N,).

        Returns:
            The log densities: (N,).
        """
        squares = (self.codes(y).to(f) - f).square().sum(1) / self.noise_var
        return -0.5 * (squares + f.shape[1] * math.log(2 * math.pi * self.noise_var))

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient (code_n − f_n)/σ² of the log density.

        Args:
            f: Values of f: (N, C).
            y: Labels: (N,).

        Returns:
            The gradients: (N, C).
        """
        return (self.codes(y).to(f) - f) / self.noise_var

    def curvature(self, f: Tensor) -> Tensor:
        """Return the curvature I/σ² of the log density.

        Args:
            f: Values of f: (N, C).

        Returns:
            The curvatures: (N, C, C).
        """
        return (torch.eye(f.shape[1]).to(f) / self.noise_var).expand(f.shape[0], -1, -1)

    def predict(self, f: MultivariateNormal) -> distributions.Categorical:
        """Return the probabilities p(y_n = c).

        Args:
            f: The law of f at N points, with batch shape N and event shape C.

        Returns:
            A categorical distribution, with `.probs` of shape (N, C).
        """
        mean, total = f.mean.double(), f.variance.double() + self.noise_var
        logits = mean / (self.temperature * total) + self.frequencies.log()
        doubt = 1.0 / (self.num_points + 2)
        probs = (1 - doubt) * logits.softmax(-1) + doubt * self.frequencies
        return distributions.Categorical(probs=probs.to(f.mean.dtype))


@response.register
def _(likelihood: OneHotCodes, f: Tensor) -> Response:
    raise NotAvailable(
        "this posterior is of one-hot codes, whose variance is not split. Use condition("
        "linearize(network).trace_kernel(), data, Categorical()), which is of logits."
    )


@dataclass(frozen=True)
class ByCodes(Recipe):
    """The recipe of `adapt_classes`, which chooses noise, scale and temperature on all labels together."""

    def extend(self, posterior: Posterior, data: Data, likelihood: Likelihood | None) -> Posterior:
        """Raise, since more data would change the frequencies and the center of the kernel."""
        raise NotAvailable(
            "the kernel of adapt_classes is centered at its data, and the noise was chosen on them, so that "
            "more data change everything. Call adapt_classes with all data, which is one decomposition."
        )

    def predictive(self, own: Likelihood, given: Likelihood | None) -> Likelihood:
        """The posterior's own likelihood; raise if another is given, since none fits codes."""
        if given is not None:
            raise InputError(
                "this posterior is of one-hot codes, not of logits, and has its own likelihood: leave "
                "likelihood out, or use condition(kernel, data, Categorical())."
            )
        return own

    def facts(self, posterior: Posterior) -> dict[str, str]:
        """The noise and the temperature of the codes."""
        codes = posterior.likelihood
        assert isinstance(codes, OneHotCodes)
        return {"noise_var": number(codes.noise_var), "temperature": number(codes.temperature)}
