"""Piecewise powers and polynomials: arc-cosine kernels, and Hermite sums.

The interface is the same as in `closed_forms`. Where φ has a kink, E[φ'φ''] as a function of the angle θ
between u and v has an infinite slope at θ = 0 and π; autograd gives 0 for this one-sided derivative, and the
exact derivative for E[φφ'].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.limits.duals.closed_forms import Pair
from net2gp.limits.duals.correlation import correlation, recording
from net2gp.limits.integrals.polynomials import hermite_coefficients, horner


def square_root(x: Tensor) -> Tensor:
    """Compute √x, with derivative zero instead of infinity at x = 0."""
    if not recording(x):
        return x.clamp_min(0).sqrt_()
    positive = x > 0
    return torch.where(positive, torch.sqrt(torch.where(positive, x, 1.0)), 0.0)


def angle_and_sine(rho: Tensor) -> tuple[Tensor, Tensor]:
    """Compute θ = acos(rho) and sin θ; where sin θ = 0 both have derivative zero."""
    if recording(rho):
        sine = square_root((1 - rho) * (1 + rho))
        # atan2 and sine share one rounding error, which cancels in the derivative of their sum
        return torch.atan2(sine, rho), sine
    sine = (1 - rho).mul_(1 + rho).sqrt_()
    return torch.acos(rho), sine


def power(var: Tensor, degree: int) -> Tensor:
    """Compute var^{degree/2}, differentiable at zero where the degree is even."""
    whole = var ** (degree // 2)
    return whole * square_root(var) if degree % 2 else whole


@dataclass(frozen=True)
class ABReLU:
    """The activation φ(x) = negative · min(x, 0) + positive · max(x, 0).

    ReLU is (0, 1), and the absolute value is (−1, 1). With f = (a − b)²/2π and θ the angle between u and v:
    E[φ'φ''] = (a² + b²)/2 − fθ, and E[φφ'] = f √(var1·var2) sin θ + cov · E[φ'φ'']. About 12 passes over
    memory.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> ABReLU(0.0, 1.0).dual(0 * one, one, one, True)
    (tensor([0.1592], dtype=torch.float64), tensor([0.2500], dtype=torch.float64))

    Reference: Cho, Saul (2009), Kernel methods for deep learning; Tsuchida et al. (2018), Invariance of
    weight distributions in rectified MLPs.
    """

    negative: float = 0.0
    positive: float = 1.0
    kinks: ClassVar[tuple[float, ...]] = (0.0,)
    formula: ClassVar[str] = "(a−b)²/2π·(√(qq')·sin θ − kθ) + (a²+b²)/2·k"

    def __call__(self, u: Tensor) -> Tensor:
        """Apply φ to every entry of u."""
        return self.negative * u.clamp_max(0) + self.positive * u.clamp_min(0)

    def mean(self, var: Tensor) -> Tensor:
        """Compute E[φ] = (b − a)√(var/2π)."""
        return (self.positive - self.negative) / math.sqrt(2 * math.pi) * square_root(var)

    def mean_slope(self, var: Tensor) -> Tensor:
        """Compute E[φ'] = (a + b)/2."""
        return torch.full_like(var, (self.positive + self.negative) / 2)

    def variance(self, var: Tensor, slope: bool) -> Pair:
        """Compute (a² + b²)/2 · var, and (a² + b²)/2."""
        value = self._level * var
        return value, torch.full_like(value, self._level) if slope else None

    def dual(self, cov: Tensor, var1: Tensor, var2: Tensor, slope: bool) -> Pair:
        """Compute E[φ(u)φ(v)] and, if `slope`, E[φ'(u)φ'(v)]."""
        bend = (self.positive - self.negative) ** 2 / (2 * math.pi)
        rho = correlation(cov, var1, var2)
        angle, sine = angle_and_sine(rho)
        if recording(rho):
            rate = self._level - bend * angle
            value = bend * sine * square_root(var1) * square_root(var2) + rate * cov
        else:
            if angle.is_cuda:
                rate = angle.mul_(-bend).add_(self._level)  # compilers fuse these two operations
            else:
                level = torch.tensor(self._level, dtype=angle.dtype)
                rate = torch.add(level, angle, alpha=-bend, out=angle)
            value = sine.mul_(bend * square_root(var1)).mul_(square_root(var2))
            value.addcmul_(rate, cov)
        return value, rate if slope else None

    @property
    def _level(self) -> float:
        return (self.negative**2 + self.positive**2) / 2


def snapped(rho: Tensor) -> Tensor:
    """Round correlations that are ±1 up to rounding, since their angle is the square root of the error."""
    return torch.where(rho.abs() > 1 - 4 * torch.finfo(rho.dtype).eps, torch.sign(rho), rho)


@dataclass(frozen=True)
class Step:
    """The activation φ(x) = height · [x > 0] + base, and the mean of both sides at x = 0.

    `Step()` is 0 or 1, and `Step(2, -1)` is the sign. E[φφ'] = base² + base·height + height²(π − θ)/2π. The
    derivative is zero except at the jump, which gradients do not see: E[φ'φ''] = 0, and nothing before the
    function is trained. About 8 passes over memory.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> Step().dual(0 * one, one, one, True)
    (tensor([0.2500], dtype=torch.float64), tensor([0.], dtype=torch.float64))

    Reference: Cho, Saul (2009), Kernel methods for deep learning.
    """

    height: float = 1.0
    base: float = 0.0
    kinks: ClassVar[tuple[float, ...]] = (0.0,)
    formula: ClassVar[str] = "b² + bh + h²(π − θ)/2π"

    def __call__(self, u: Tensor) -> Tensor:
        """Apply φ to every entry of u."""
        return (self.height / 2) * torch.sign(u) + (self.base + self.height / 2)

    def mean(self, var: Tensor) -> Tensor:
        """Compute E[φ] = base + height/2."""
        return torch.full_like(var, self.base + self.height / 2)

    def mean_slope(self, var: Tensor) -> Tensor:
        """Compute E[φ'] = height · E[δ] = height/√(2π·var)."""
        return self.height / math.sqrt(2 * math.pi) * torch.rsqrt(var)

    def mean_gradient(self, var: Tensor) -> Tensor:
        """Return E[φ'] without the jump, which gradients do not see: zero."""
        return torch.zeros_like(var)

    def variance(self, var: Tensor, slope: bool) -> Pair:
        """Compute E[φ²] = ((base + height)² + base²)/2, and zero."""
        spread = ((self.base + self.height) ** 2 + self.base**2) / 2
        value = torch.where(var > 0, spread, (self.base + self.height / 2) ** 2).to(var)
        return value, torch.zeros_like(var) if slope else None

    def dual(self, cov: Tensor, var1: Tensor, var2: Tensor, slope: bool) -> Pair:
        """Compute E[φ(u)φ(v)]; E[φ'(u)φ'(v)] is zero."""
        rho = snapped(correlation(cov, var1, var2))
        angle, _ = angle_and_sine(rho)
        level = self.base**2 + self.base * self.height + self.height**2 / 2
        value = level - self.height**2 / (2 * math.pi) * angle
        return value, torch.zeros_like(value) if slope else None


@lru_cache
def arc_cosine_polynomials(degree: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute P and Q with J_n(θ) = (π − θ) P(cos θ) + sin θ Q(cos θ), lowest power first.

    From dJ_n/d cos θ = n² J_{n−1}: P_n' = n² P_{n−1}, P_n − cQ_n + (1 − c²)Q_n' = n²(1 − c²)Q_{n−1}.

    >>> arc_cosine_polynomials(2)
    ((1.0, 0.0, 2.0), (0.0, 3.0))
    """
    if degree == 0:
        return (1.0,), ()
    before, below = arc_cosine_polynomials(degree - 1)
    start = float(math.prod(range(degree - 1, 0, -2)) ** 2) if degree % 2 == 0 else 0.0
    p = [start, *(degree**2 * value / (i + 1) for i, value in enumerate(before))]
    q = [0.0] * (degree + 2)
    for i in range(degree, 0, -1):
        known = below[i] if i < len(below) else 0.0
        lower = below[i - 2] if 2 <= i < len(below) + 2 else 0.0
        q[i - 1] = (p[i] + (i + 1) * q[i + 1] - degree**2 * (known - lower)) / i
    return tuple(p), tuple(q[:degree])


@dataclass(frozen=True)
class RectifiedPower:
    """The activation φ(x) = max(x, 0)^degree for degree ≥ 1: the arc-cosine kernels.

    E[φφ'] = (var1·var2)^{n/2} J_n(θ)/2π, E[φ'φ''] = n² (var1·var2)^{(n−1)/2} J_{n−1}(θ)/2π. J_n has no
    division by sin θ here, so no accuracy is lost on the diagonal; errors are relative to the value at θ = 0.
    About 6 + 4·degree passes over memory.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> RectifiedPower(2).dual(one, one, one, True)
    (tensor([1.5000], dtype=torch.float64), tensor([2.], dtype=torch.float64))

    Reference: Cho, Saul (2009), Kernel methods for deep learning.
    """

    degree: int = 1
    kinks: ClassVar[tuple[float, ...]] = (0.0,)
    formula: ClassVar[str] = "(qq')^{n/2}·J_n(θ)/2π"

    def __post_init__(self) -> None:
        if self.degree < 1:
            raise InputError(
                f"degree must be at least 1, but {self.degree} was given. Use Step() for max(x, 0)^0."
            )

    def __call__(self, u: Tensor) -> Tensor:
        """Apply φ to every entry of u."""
        return u.clamp_min(0) ** self.degree

    def mean(self, var: Tensor) -> Tensor:
        """Compute E[φ] = (2var)^{n/2} Γ((n+1)/2) / 2√π."""
        return self._mean(var, self.degree)

    def mean_slope(self, var: Tensor) -> Tensor:
        """Compute E[φ'] = n E[max(u, 0)^{n−1}]."""
        return self.degree * self._mean(var, self.degree - 1)

    def variance(self, var: Tensor, slope: bool) -> Pair:
        """Compute (2n−1)!!/2 · var^n, and n²(2n−3)!!/2 · var^{n−1}."""
        n = self.degree
        value = math.prod(range(2 * n - 1, 0, -2)) / 2 * var**n
        rate = n**2 * math.prod(range(2 * n - 3, 0, -2)) / 2 * var ** (n - 1)
        return value, rate if slope else None

    def dual(self, cov: Tensor, var1: Tensor, var2: Tensor, slope: bool) -> Pair:
        """Compute E[φ(u)φ(v)] and, if `slope`, E[φ'(u)φ'(v)]."""
        rho = correlation(cov, var1, var2)
        angle, sine = angle_and_sine(rho)
        rest = (math.pi - angle) / (2 * math.pi)

        def order(n: int) -> Tensor:
            p, q = arc_cosine_polynomials(n)
            value = rest * horner(p, rho)
            if q:
                value = value + sine / (2 * math.pi) * horner(q, rho)
            return value * power(var1, n) * power(var2, n)

        return order(self.degree), self.degree**2 * order(self.degree - 1) if slope else None

    @staticmethod
    def _mean(var: Tensor, degree: int) -> Tensor:
        factor = 2 ** (degree / 2) * math.gamma((degree + 1) / 2) / (2 * math.sqrt(math.pi))
        return factor * power(var, degree)


@dataclass(frozen=True)
class HermiteSum:
    """A polynomial with φ(√var·z) = Σ_l var^{l/2} R_l(var) He_l(z)/l!.

    E[φφ'] = Σ_l R_l(var1) R_l(var2) cov^l/l!.
    He_l are the probabilists' Hermite polynomials, and R_l(var) = E[φ^{(l)}] are polynomials in
    var − `origin` with coefficients `terms[l]`, lowest power first. `polynomial` and `hermite` make them.
    About 2·degree passes over memory.

    >>> two = torch.full((1,), 2.0, dtype=torch.float64)
    >>> polynomial([0, 0, 1]).dual(two / 2, two, two, True)
    (tensor([6.], dtype=torch.float64), tensor([4.], dtype=torch.float64))

    Reference: Daniely, Frostig, Singer (2016), Toward deeper understanding of neural networks.
    """

    coefficients: tuple[float, ...]
    terms: tuple[tuple[float, ...], ...]
    origin: float = 0.0
    kinks: ClassVar[tuple[float, ...]] = ()
    formula: ClassVar[str] = "Σ_l R_l(q)·R_l(q')·k^l / l!,  R_l(q) = E[φ^{(l)}(√q z)]"

    def __call__(self, u: Tensor) -> Tensor:
        """Apply φ to every entry of u."""
        return horner(self.coefficients, u)

    def mean(self, var: Tensor) -> Tensor:
        """Compute E[φ] = R_0(var)."""
        return self._term(0, var)

    def mean_slope(self, var: Tensor) -> Tensor:
        """Compute E[φ'] = R_1(var)."""
        return self._term(1, var)

    def variance(self, var: Tensor, slope: bool) -> Pair:
        """Compute E[φ²] and E[φ'²]."""
        return self.dual(var, var, var, slope)

    def dual(self, cov: Tensor, var1: Tensor, var2: Tensor, slope: bool) -> Pair:
        """Compute E[φ(u)φ(v)] and, if `slope`, E[φ'(u)φ'(v)]."""
        zero = torch.zeros_like(cov) + 0 * (var1 + var2)
        value, rate = zero, zero
        for l in reversed(range(len(self.terms))):
            if slope:
                rate = rate * cov + value
            value = value * cov
            if any(self.terms[l]):
                first = self._term(l, var1) / math.factorial(l)
                value = value + first * self._term(l, var2)
        return value, rate if slope else None

    def _term(self, l: int, var: Tensor) -> Tensor:
        return horner(self.terms[l] if l < len(self.terms) else (), var - self.origin)


def polynomial(coefficients: Sequence[float]) -> HermiteSum:
    """Return the dual of Σ_n coefficients[n] xⁿ; R_l(q) = Σ_i coefficients[l+2i] (l+2i)! / (2^i i!) q^i.

    >>> polynomial([1.0, 2.0]).mean_slope(torch.ones(1))
    tensor([2.])
    """
    size = len(coefficients)
    if not size:
        raise InputError("coefficients must have at least one entry. Pass for example [0.0, 1.0].")
    terms = [
        tuple(
            float(coefficients[n])
            * math.factorial(n)
            / (2 ** ((n - l) // 2) * math.factorial((n - l) // 2))
            for n in range(l, size, 2)
        )
        for l in range(size)
    ]
    return HermiteSum(tuple(float(value) for value in coefficients), tuple(terms))


def hermite(degree: int) -> HermiteSum:
    """Return the dual of h_n = He_n/√n!: at variance one it is cov^n; R_{n−2i}(q) = √n! ((q−1)/2)^i/i!.

    >>> one = torch.ones(1)
    >>> hermite(3).dual(one / 2, one, one, False)[0]
    tensor([0.1250])
    """
    coefficients = hermite_coefficients(degree)
    root = math.sqrt(math.factorial(degree))
    terms: list[tuple[float, ...]] = [()] * (degree + 1)
    for i in range(degree // 2 + 1):
        terms[degree - 2 * i] = (*(0.0,) * i, root / (2**i * math.factorial(i)))
    return HermiteSum(coefficients, tuple(terms), 1.0)


@dataclass(frozen=True)
class ExpNormalized:
    """The activation φ(u) = √var · g(u/√var) with g(x) = exp(√γ·x − γ/2 + γ·shift/2).

    E[φφ'] = √(var1·var2) exp(γ(ρ + shift)) and E[φ'φ''] = γ exp(γ(ρ + shift)), with ρ the correlation. The
    variance is held fixed in φ'. About 7 passes over memory.

    >>> one = torch.ones(1)
    >>> ExpNormalized().dual(one, one, 4 * one, False)[0]
    tensor([1.2131])

    Reference: Shankar et al. (2020), Neural kernels without tangents.
    """

    gamma: float = 1.0
    shift: float = -1.0
    kinks: ClassVar[tuple[float, ...]] = ()
    formula: ClassVar[str] = "√(qq')·exp(γ(ρ + s))"

    def __call__(self, u: Tensor) -> Tensor:
        """Apply φ to every entry of u at variance one."""
        return torch.exp(math.sqrt(self.gamma) * u + self.gamma / 2 * (self.shift - 1))

    def mean(self, var: Tensor) -> Tensor:
        """Compute E[φ] = √var exp(γ·shift/2)."""
        return math.exp(self.gamma * self.shift / 2) * square_root(var)

    def mean_slope(self, var: Tensor) -> Tensor:
        """Compute E[φ'] = √γ exp(γ·shift/2)."""
        return torch.full_like(var, math.sqrt(self.gamma) * math.exp(self.gamma * self.shift / 2))

    def variance(self, var: Tensor, slope: bool) -> Pair:
        """Compute var · exp(γ(1 + shift)), and γ exp(γ(1 + shift))."""
        level = math.exp(self.gamma * (1 + self.shift))
        return level * var, torch.full_like(var, self.gamma * level) if slope else None

    def dual(self, cov: Tensor, var1: Tensor, var2: Tensor, slope: bool) -> Pair:
        """Compute √(var1·var2) exp(γ(ρ + shift)), and γ exp(γ(ρ + shift))."""
        decay = torch.exp(self.gamma * (correlation(cov, var1, var2) + self.shift))
        value = decay * square_root(var1) * square_root(var2)
        return value, self.gamma * decay if slope else None
