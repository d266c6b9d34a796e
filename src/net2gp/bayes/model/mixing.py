"""Laws of a variance, over which a scale mixture of Gaussians averages."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from net2gp.bayes.model.exponential_integral import log_scaled_exponential_integral
from net2gp.errors import check_positive
from net2gp.tags import savable

REACH = 100.0
"""Quadrature looks for the mass of a variance between e^−100 and e^100."""

DROP = 40.0
"""Where the integrand is e^−40 of its largest value, it counts for nothing."""

ROUNDS, SEARCHED, NODES = 4, 65, 257
"""Rounds and nodes of the search for the mass, and nodes of the rule itself."""

LARGEST_ORDER = 20
"""The largest order of a Bessel function that is taken as a polynomial."""

SMALLEST = 1e-30
"""The smallest square of a weight; some mixtures have an infinite density at zero."""


class Mixing(ABC):
    """The law of a variance v.

    A subclass writes `log_density` and `sample`. What a Gaussian N(0, v) becomes if v has this law follows
    by quadrature; a subclass with a closed form overrides `log_marginal` or `log_prob`.
    """

    @abstractmethod
    def log_density(self, log_variance: Tensor) -> Tensor:
        """Compute the log density of u = log v, which is the one of v plus u.

        Args:
            log_variance: Values of u, of any shape, float64.

        Returns:
            The log densities, of the same shape.
        """

    @abstractmethod
    def sample(
        self,
        shape: tuple[int, ...],
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Draw variances.

        Args:
            shape: The shape of the result.
            generator: Makes the draws repeatable. None uses torch's global random state.
            device: Where the result is.

        Returns:
            Variances, float64.
        """

    def log_marginal(self, squares: Tensor, count: int) -> Tensor:
        """Compute log ∫ Π_i N(w_i; 0, v) p(v) dv for weights that share one variance.

        The trapezoidal rule in log v converges faster than any power of its step, since the integrand is
        smooth and decays at both ends. A search finds the interval that holds the mass, which gets narrow for
        many weights. Cost: about 500 evaluations of `log_density` for each entry of `squares`.

        Args:
            squares: Σ_i w_i², of any shape, float64.
            count: The number of weights n behind each entry.

        Returns:
            The log densities, of the shape of `squares`.
        """
        squares = squares.clamp_min(SMALLEST)

        def integrand(u: Tensor, squares: Tensor) -> Tensor:
            gaussian = -0.5 * (count * u + squares[..., None] * (-u).exp())
            return gaussian + self.log_density(u)

        fixed = squares.detach()
        first, last = torch.full_like(fixed, -REACH), torch.full_like(fixed, REACH)
        for _ in range(ROUNDS):
            u, step = _grid(first, last, SEARCHED)
            values = integrand(u, fixed)
            inside = values > values.amax(-1, keepdim=True) - DROP
            first = u.where(inside, math.inf).amin(-1) - step
            last = u.where(inside, -math.inf).amax(-1) + step
        u, step = _grid(first, last, NODES)
        total = integrand(u, squares).logsumexp(-1) + step.log()
        return total - 0.5 * count * math.log(2 * math.pi)

    def log_prob(self, values: Tensor) -> Tensor:
        """Compute log ∫ N(w; 0, v) p(v) dv for weights that have a variance each.

        Args:
            values: Weights of any shape, float64.

        Returns:
            The log densities, of the shape of `values`.
        """
        return self.log_marginal(values.square(), 1)


def _grid(first: Tensor, last: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Nodes with equal steps from `first` to `last`, along a new last axis, and the steps."""
    step = (last - first) / (count - 1)
    steps = torch.arange(count, dtype=first.dtype, device=first.device)
    return first[..., None] + step[..., None] * steps, step


@savable("bayes.InverseGamma")
@dataclass(frozen=True)
class InverseGamma(Mixing):
    """A variance with the density b^a/Γ(a) v^{−a−1} e^{−b/v}; the mixture is Student's t.

    InverseGamma(ν/2, ν s²/2) gives Student's law with ν degrees of freedom and the scale s, and for
    weights with a common variance the multivariate one. Both are closed forms.

    Args:
        shape: a > 0. The mean of v is b/(a − 1) if a > 1.
        rate: b > 0.

    >>> InverseGamma(2.5, 2.5).log_prob(torch.ones(1, dtype=torch.float64)).exp()
    tensor([0.2197], dtype=torch.float64)
    """

    shape: float
    rate: float

    def __post_init__(self) -> None:
        check_positive(self.shape, "shape", single=True)
        check_positive(self.rate, "rate", single=True)

    def log_density(self, log_variance: Tensor) -> Tensor:
        """a log b − log Γ(a) − a u − b e^{−u}."""
        constant = self.shape * math.log(self.rate) - math.lgamma(self.shape)
        return constant - self.shape * log_variance - self.rate * (-log_variance).exp()

    def sample(
        self,
        shape: tuple[int, ...],
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Reciprocals of gamma variables."""
        return self.rate / _gamma(self.shape, shape, generator, device)

    def log_marginal(self, squares: Tensor, count: int) -> Tensor:
        """The multivariate Student law in closed form."""
        posterior_shape = self.shape + 0.5 * count
        constant = math.lgamma(posterior_shape) - math.lgamma(self.shape)
        constant -= 0.5 * count * math.log(2 * math.pi * self.rate)
        return constant - posterior_shape * (0.5 * squares / self.rate).log1p()


class _GammaLaw(Mixing):
    """What `Gamma` and `Exponential` share: the density b^a/Γ(a) v^{a−1} e^{−bv}."""

    shape: float
    rate: float

    def log_density(self, log_variance: Tensor) -> Tensor:
        """a log b − log Γ(a) + a u − b e^u."""
        constant = self.shape * math.log(self.rate) - math.lgamma(self.shape)
        return constant + self.shape * log_variance - self.rate * log_variance.exp()

    def sample(
        self,
        shape: tuple[int, ...],
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Gamma variables."""
        return _gamma(self.shape, shape, generator, device) / self.rate

    def log_prob(self, values: Tensor) -> Tensor:
        """For a = n + 1: b^a (2b)^{½−a}/n! · e^{−z} Σ_k (n+k)!/(k! (n−k)! 2^k) z^{n−k} with z = √(2b) |w|."""
        n = round(self.shape) - 1
        if self.shape != n + 1 or n > LARGEST_ORDER:
            return super().log_prob(values)
        z, total = (2 * self.rate) ** 0.5 * values.abs(), torch.zeros_like(values)
        for k in range(n + 1):
            total = total * z + math.comb(n, k) * math.perm(n + k, k) / 2**k
        constant = self.shape * math.log(self.rate) - math.lgamma(self.shape)
        constant += (0.5 - self.shape) * math.log(2 * self.rate)
        return constant - z + total.log()


@savable("bayes.Gamma")
@dataclass(frozen=True)
class Gamma(_GammaLaw):
    """A variance with the density b^a/Γ(a) v^{a−1} e^{−bv}; the mixture is the variance-gamma law.

    Its density has a Bessel function of the order a − ½, which is elementary for whole numbers a; otherwise
    quadrature serves. It is infinite at zero if a ≤ ½.

    Args:
        shape: a > 0. The mean of v is a/b.
        rate: b > 0.

    >>> Gamma(2.0, 1.0).log_prob(torch.ones(1, dtype=torch.float64)).exp()
    tensor([0.2075], dtype=torch.float64)
    """

    shape: float
    rate: float

    def __post_init__(self) -> None:
        check_positive(self.shape, "shape", single=True)
        check_positive(self.rate, "rate", single=True)


@savable("bayes.Exponential")
@dataclass(frozen=True)
class Exponential(_GammaLaw):
    """A variance with the density b e^{−bv}; the mixture is Laplace's law.

    Exponential(1/(2 s²)) gives Laplace's law with the scale s, in closed form for one weight. Weights with
    a common variance take quadrature.

    Args:
        rate: b > 0. The mean of v is 1/b.

    >>> Exponential(0.5).log_prob(torch.ones(1, dtype=torch.float64)).exp()
    tensor([0.1839], dtype=torch.float64)

    Reference: Andrews and Mallows, Scale mixtures of normal distributions, 1974.
    """

    rate: float
    shape: ClassVar[float] = 1.0  # type: ignore[misc]

    def __post_init__(self) -> None:
        check_positive(self.rate, "rate", single=True)


@savable("bayes.HalfCauchy")
@dataclass(frozen=True)
class HalfCauchy(Mixing):
    """A variance v = s² whose root s has the half-Cauchy law of scale τ; the mixture is the horseshoe.

    The density of s is 2/(π τ (1 + s²/τ²)). For one weight, p(w) = (2π³τ²)^{−½} e^z E₁(z) with z = w²/(2τ²),
    which is infinite at zero. Weights with a common variance take quadrature.

    Args:
        scale_var: τ², the square of the median of s.

    >>> HalfCauchy(1.0).log_prob(torch.ones(1, dtype=torch.float64)).exp()
    tensor([0.1172], dtype=torch.float64)
    """

    scale_var: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self.scale_var, "scale_var", single=True)

    def log_density(self, log_variance: Tensor) -> Tensor:
        """½ d − log(1 + e^d) − log π with d = u − log τ²."""
        shifted = log_variance - math.log(self.scale_var)
        return 0.5 * shifted - torch.nn.functional.softplus(shifted) - math.log(math.pi)

    def sample(
        self,
        shape: tuple[int, ...],
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """τ² tan²(π U / 2) for uniform U."""
        source = generator.device if generator is not None else device
        uniform = torch.rand(shape, dtype=torch.float64, device=source, generator=generator)
        return self.scale_var * (0.5 * math.pi * uniform).tan().square().to(device)

    def log_prob(self, values: Tensor) -> Tensor:
        """The horseshoe's density by the exponential integral."""
        squares = values.square().clamp_min(SMALLEST) / (2 * self.scale_var)
        constant = 0.5 * math.log(2 * math.pi**3 * self.scale_var)
        return log_scaled_exponential_integral(squares) - constant


def _gamma(
    concentration: float,
    shape: tuple[int, ...],
    generator: torch.Generator | None,
    device: torch.device | str,
) -> Tensor:
    """Gamma variables of rate 1."""
    # torch.distributions takes no generator, so this calls the function behind it.
    source = generator.device if generator is not None else device
    alpha = torch.full(shape, concentration, dtype=torch.float64, device=source)
    drawn: Tensor = torch._standard_gamma(alpha, generator=generator)
    return drawn.clamp_min(torch.finfo(torch.float64).tiny).to(device)
