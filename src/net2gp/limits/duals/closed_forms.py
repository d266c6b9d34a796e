"""Smooth activations whose Gaussian expectations are elementary functions.

Each class is what an activation is in the limit of infinite width: for centered Gaussians u, v with
variances var1, var2 and covariance cov it computes E[φ(u)φ(v)] and E[φ'(u)φ'(v)] (`dual`), the same for
u = v (`variance`), E[φ(u)] (`mean`) and E[φ'(u)] (`mean_slope`). All of them work entry by entry, broadcast,
keep dtype and device, and can be differentiated in cov, var1 and var2. In formulas, φ and φ' without
arguments stand for the values at u and v: E[φφ'] is E[φ(u)φ(v)], and E[φ'φ''] is E[φ'(u)φ'(v)].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.limits.duals.correlation import correlation, determinant

Pair = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Erf:
    """The activation φ(x) = amplitude · erf(frequency · x) + shift.

    With b² = frequency²: E[erf erf'] = 2/π · asin(2b²cov / √((1 + 2b²var1)(1 + 2b²var2))). About 20 passes
    over memory.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> Erf().dual(one / 2, one, one, False)[0]
    tensor([0.2163], dtype=torch.float64)

    Reference: Williams (1996), Computing with infinite networks.
    """

    amplitude: float = 1.0
    frequency: float = 1.0
    shift: float = 0.0
    kinks: ClassVar[tuple[float, ...]] = ()
    formula: ClassVar[str] = "a²·2/π·asin(2b²k / √((1+2b²q)(1+2b²q'))) + c²"

    def __call__(self, u: Tensor) -> Tensor:
        """Apply φ to every entry of u."""
        return self.amplitude * torch.erf(self.frequency * u) + self.shift

    def mean(self, var: Tensor) -> Tensor:
        """Return E[φ], which is the shift, since the function is odd about it."""
        return torch.full_like(var, self.shift)

    def mean_slope(self, var: Tensor) -> Tensor:
        """Compute E[φ'] = 2ab / √(π(1 + 2b²var))."""
        return 2 * self.amplitude * self.frequency / math.sqrt(math.pi) * self._factor(var)

    def variance(self, var: Tensor, slope: bool) -> Pair:
        """Compute E[φ²] and E[φ'²], exact on the diagonal."""
        var = 2 * self.frequency**2 * var
        root = torch.sqrt(1 + 2 * var)
        value = self.amplitude**2 * 2 / math.pi * torch.atan2(var, root) + self.shift**2
        return value, self._gain / root if slope else None

    def dual(self, cov: Tensor, var1: Tensor, var2: Tensor, slope: bool) -> Pair:
        """Compute E[φ(u)φ(v)] and, if `slope`, E[φ'(u)φ'(v)]."""
        scale = self.amplitude**2 * 2 / math.pi
        one, two = self._factor(var1), self._factor(var2)
        sine = 2 * self.frequency**2 * (cov * one * two)
        # 1 − sine² as a sum without cancellation, since it is tiny for nearly equal points of large variance
        first, second = (
            2 * self.frequency**2 * var * f * f for var, f in ((var1, one), (var2, two))
        )
        rho = correlation(cov, var1, var2)
        rest = (one * two) ** 2 + first * two**2 + second * one**2
        root = torch.sqrt(rest + first * second * ((1 - rho) * (1 + rho)))
        value = scale * torch.atan2(sine, root)
        if self.shift:
            value = value + self.shift**2
        return value, self._gain * (one * two) / root if slope else None

    @property
    def _gain(self) -> float:
        return 4 / math.pi * (self.amplitude * self.frequency) ** 2

    def _factor(self, var: Tensor) -> Tensor:
        return torch.rsqrt(1 + 2 * self.frequency**2 * var)


@dataclass(frozen=True)
class Gelu:
    """The activation φ(x) = x·Φ(x), with Φ the standard normal distribution function.

    With Δ² = (1+var1)(1+var2) − cov²: E[φφ'] = cov/4 + (cov·atan2(cov, Δ) + (cov² + var1·var2·Δ²) /
    ((1+var1)(1+var2)Δ)) / 2π. About 20 passes over memory.

    >>> Gelu().variance(torch.ones(1, dtype=torch.float64), False)[0]
    tensor([0.4252], dtype=torch.float64)

    Reference: Tsuchida, Pearce, van der Heide, Roosta, Gallagher (2021), Avoiding kernel fixed points.
    """

    kinks: ClassVar[tuple[float, ...]] = ()
    formula: ClassVar[str] = (
        "k/4 + (k·atan2(k, Δ) + (k² + qq'Δ²)/((1+q)(1+q')Δ))/2π,  Δ² = (1+q)(1+q') − k²"
    )

    def __call__(self, u: Tensor) -> Tensor:
        """Apply φ to every entry of u."""
        return torch.nn.functional.gelu(u)

    def mean(self, var: Tensor) -> Tensor:
        """Compute E[φ] = var / √(2π(1 + var))."""
        return var * torch.rsqrt(2 * math.pi * (1 + var))

    def mean_slope(self, var: Tensor) -> Tensor:
        """Compute E[φ'] = 1/2."""
        return torch.full_like(var, 0.5)

    def variance(self, var: Tensor, slope: bool) -> Pair:
        """Compute E[φ²] and E[φ'²], exact on the diagonal."""
        root = torch.sqrt(1 + 2 * var)
        angle = torch.atan2(var, root) / (2 * math.pi) + 0.25
        value = var * (angle + var / ((1 + var) * root * math.pi))
        if not slope:
            return value, None
        bracket = 1 / (1 + 2 * var) + (1 - var) / (1 + var) + 1
        return value, angle + var / (2 * math.pi * root) * bracket

    def dual(self, cov: Tensor, var1: Tensor, var2: Tensor, slope: bool) -> Pair:
        """Compute E[φ(u)φ(v)] and, if `slope`, E[φ'(u)φ'(v)]."""
        prod, outer = var1 * var2, (1 + var1) * (1 + var2)
        square = 1 + var1 + var2 + determinant(cov, var1, var2)
        delta = torch.sqrt(square)
        angle = torch.atan2(cov, delta) / (2 * math.pi) + 0.25
        # (cov² + prod·Δ²)/(outer·Δ), written so that no term is larger than the sum
        value = cov * angle + (cov * cov / square + prod) * delta / (2 * math.pi * outer)
        if not slope:
            return value, None
        rate = (1 / square + (1 - prod) / outer + 1) * cov / (2 * math.pi * delta)
        return value, rate + angle


@dataclass(frozen=True)
class Sin:
    """The activation φ(x) = amplitude · sin(frequency · x + phase).

    With t = b²cov and S = b²(var1 + var2)/2: E[φφ'] = a² e^{−S}(cos²c·sinh t + sin²c·cosh t). About 14
    passes over memory; small variances lose no digits.

    >>> Sin().variance(torch.ones(1, dtype=torch.float64), False)[0]
    tensor([0.4323], dtype=torch.float64)

    Reference: Pearce, Tsuchida, Zaki, Brintrup, Neely (2019), Expressive priors in Bayesian networks.
    """

    amplitude: float = 1.0
    frequency: float = 1.0
    phase: float = 0.0
    kinks: ClassVar[tuple[float, ...]] = ()
    formula: ClassVar[str] = "a²·exp(−b²(q+q')/2)·(cos²c·sinh(b²k) + sin²c·cosh(b²k))"

    def __call__(self, u: Tensor) -> Tensor:
        """Apply φ to every entry of u."""
        return self.amplitude * torch.sin(self.frequency * u + self.phase)

    def mean(self, var: Tensor) -> Tensor:
        """Compute E[φ] = a sin(c) exp(−b²var/2)."""
        return self.amplitude * math.sin(self.phase) * self._damping(var)

    def mean_slope(self, var: Tensor) -> Tensor:
        """Compute E[φ'] = a b cos(c) exp(−b²var/2)."""
        return self.amplitude * self.frequency * math.cos(self.phase) * self._damping(var)

    def variance(self, var: Tensor, slope: bool) -> Pair:
        """Compute E[φ²] and E[φ'²], exact on the diagonal."""
        sinh = -torch.expm1(-2 * self.frequency**2 * var) / 2
        return self._mix(sinh, 1 - sinh, slope)

    def dual(self, cov: Tensor, var1: Tensor, var2: Tensor, slope: bool) -> Pair:
        """Compute E[φ(u)φ(v)] and, if `slope`, E[φ'(u)φ'(v)]."""
        square = self.frequency**2
        sign = torch.where(cov >= 0, 1.0, -1.0).to(cov)
        size = square * cov * sign
        growth = torch.exp(size - square / 2 * (var1 + var2))
        fall = torch.expm1(-2 * size)
        return self._mix(growth * fall * (-0.5 * sign), growth * (1 + fall / 2), slope)

    def _mix(self, sinh: Tensor, cosh: Tensor, slope: bool) -> Pair:
        cos2, sin2 = math.cos(self.phase) ** 2, math.sin(self.phase) ** 2
        value = self.amplitude**2 * (cos2 * sinh + sin2 * cosh)
        rate = (self.amplitude * self.frequency) ** 2 * (cos2 * cosh + sin2 * sinh)
        return value, rate if slope else None

    def _damping(self, var: Tensor) -> Tensor:
        return torch.exp(-0.5 * self.frequency**2 * var)


@dataclass(frozen=True)
class Rbf:
    """The activation φ(x) = √2 sin(√(2γ)·x + π/4).

    Its dual is the squared exponential exp(−γ(var1 + var2 − 2cov)).

    For a first layer with weight_var 1 and inputs of dimension d that is exp(−γ|x − x'|²/d). About 4 passes.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> Rbf(0.5).dual(one / 2, one, one, True)
    (tensor([0.6065], dtype=torch.float64), tensor([0.6065], dtype=torch.float64))

    Reference: Rahimi, Recht (2007), Random features for large-scale kernel machines.
    """

    gamma: float = 1.0
    kinks: ClassVar[tuple[float, ...]] = ()
    formula: ClassVar[str] = "exp(−γ(q + q' − 2k))"

    def __call__(self, u: Tensor) -> Tensor:
        """Apply φ to every entry of u."""
        return math.sqrt(2) * torch.sin(math.sqrt(2 * self.gamma) * u + math.pi / 4)

    def mean(self, var: Tensor) -> Tensor:
        """Compute E[φ] = exp(−γ·var)."""
        return torch.exp(-self.gamma * var)

    def mean_slope(self, var: Tensor) -> Tensor:
        """Compute E[φ'] = √(2γ) exp(−γ·var)."""
        return math.sqrt(2 * self.gamma) * torch.exp(-self.gamma * var)

    def variance(self, var: Tensor, slope: bool) -> Pair:
        """Return E[φ²] = 1 and, if `slope`, E[φ'²] = 2γ."""
        value = torch.ones_like(var)
        return value, 2 * self.gamma * value if slope else None

    def dual(self, cov: Tensor, var1: Tensor, var2: Tensor, slope: bool) -> Pair:
        """Compute exp(−γ(var1 + var2 − 2cov)), and 2γ times that."""
        value = torch.exp(-self.gamma * (var1 + var2 - 2 * cov))
        return value, 2 * self.gamma * value if slope else None


@dataclass(frozen=True)
class Exp:
    """The activation φ(x) = amplitude · exp(rate · x).

    E[φφ'] = a² exp(b²(var1 + var2 + 2cov)/2). About 5 passes over memory.

    >>> Exp().mean(torch.tensor([2.0]))
    tensor([2.7183])

    Reference: Daniely, Frostig, Singer (2016), Toward deeper understanding of neural networks.
    """

    amplitude: float = 1.0
    rate: float = 1.0
    kinks: ClassVar[tuple[float, ...]] = ()
    formula: ClassVar[str] = "a²·exp(b²(q + q' + 2k)/2)"

    def __call__(self, u: Tensor) -> Tensor:
        """Apply φ to every entry of u."""
        return self.amplitude * torch.exp(self.rate * u)

    def mean(self, var: Tensor) -> Tensor:
        """Compute E[φ] = a exp(b²var/2)."""
        return self.amplitude * torch.exp(0.5 * self.rate**2 * var)

    def mean_slope(self, var: Tensor) -> Tensor:
        """Compute E[φ'] = b E[φ]."""
        return self.rate * self.mean(var)

    def variance(self, var: Tensor, slope: bool) -> Pair:
        """Compute E[φ²] = a² exp(2b²var), and b² times that."""
        return self.dual(var, var, var, slope)

    def dual(self, cov: Tensor, var1: Tensor, var2: Tensor, slope: bool) -> Pair:
        """Compute E[φ(u)φ(v)] and, if `slope`, b² times it."""
        value = self.amplitude**2 * torch.exp(0.5 * self.rate**2 * (var1 + var2 + 2 * cov))
        return value, self.rate**2 * value if slope else None


@dataclass(frozen=True)
class GaussianBump:
    """The activation φ(x) = amplitude · exp(−rate · x²).

    With Δ = (1+2b·var1)(1+2b·var2) − 4b²cov²: E[φφ'] = a²/√Δ and E[φ'φ''] = 4a²b²cov/Δ^{3/2}. About 8 passes.

    >>> GaussianBump().mean(torch.tensor([1.5]))
    tensor([0.5000])

    Reference: Williams (1996), Computing with infinite networks.
    """

    amplitude: float = 1.0
    rate: float = 1.0
    kinks: ClassVar[tuple[float, ...]] = ()
    formula: ClassVar[str] = "a² / √((1+2bq)(1+2bq') − 4b²k²)"

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise InputError(
                f"rate must be positive, but {self.rate:g} was given: exp(−rate·x²) must not grow. "
                "Pass for example rate=1.0."
            )

    def __call__(self, u: Tensor) -> Tensor:
        """Apply φ to every entry of u."""
        return self.amplitude * torch.exp(-self.rate * u * u)

    def mean(self, var: Tensor) -> Tensor:
        """Compute E[φ] = a / √(1 + 2b·var)."""
        return self.amplitude * torch.rsqrt(1 + 2 * self.rate * var)

    def mean_slope(self, var: Tensor) -> Tensor:
        """Return zero, since the function is even."""
        return torch.zeros_like(var)

    def variance(self, var: Tensor, slope: bool) -> Pair:
        """Compute E[φ²] and E[φ'²], exact on the diagonal."""
        return self._moments(1 + 4 * self.rate * var, var, slope)

    def dual(self, cov: Tensor, var1: Tensor, var2: Tensor, slope: bool) -> Pair:
        """Compute E[φ(u)φ(v)] and, if `slope`, E[φ'(u)φ'(v)]."""
        b = self.rate
        delta = 1 + 2 * b * (var1 + var2) + 4 * b**2 * determinant(cov, var1, var2)
        return self._moments(delta, cov, slope)

    def _moments(self, delta: Tensor, cov: Tensor, slope: bool) -> Pair:
        value = self.amplitude**2 * torch.rsqrt(delta)
        return value, 4 * self.rate**2 * cov * value / delta if slope else None


@dataclass(frozen=True)
class Gabor:
    """The activation φ(x) = exp(−x²) sin(x).

    With D = 4(var1·var2 − cov²), n = 1 + 2(var1 + var2) + D: E[φφ'] = exp(−(var1+var2+D)/2n) sinh(cov/n)/√n.
    About 16 passes over memory.

    >>> Gabor().variance(torch.ones(1, dtype=torch.float64), False)[0]
    tensor([0.0737], dtype=torch.float64)

    Reference: Novak et al. (2022), Fast neural kernel embeddings for general activations.
    """

    kinks: ClassVar[tuple[float, ...]] = ()
    formula: ClassVar[str] = (
        "exp(−(q+q'+D)/2n)·sinh(k/n)/√n,  D = 4(qq' − k²),  n = 1 + 2(q+q') + D"
    )

    def __call__(self, u: Tensor) -> Tensor:
        """Apply φ to every entry of u."""
        return torch.exp(-u * u) * torch.sin(u)

    def mean(self, var: Tensor) -> Tensor:
        """Return zero, since the function is odd."""
        return torch.zeros_like(var)

    def mean_slope(self, var: Tensor) -> Tensor:
        """Compute E[φ'] = (1 + 2var)^{−3/2} exp(−var / (2 + 4var))."""
        wide = 1 + 2 * var
        return torch.exp(-0.5 * var / wide) * wide**-1.5

    def variance(self, var: Tensor, slope: bool) -> Pair:
        """Compute E[φ²] and E[φ'²], exact on the diagonal."""
        return self._moments(var, 2 * var, torch.zeros_like(var), slope)

    def dual(self, cov: Tensor, var1: Tensor, var2: Tensor, slope: bool) -> Pair:
        """Compute E[φ(u)φ(v)] and, if `slope`, E[φ'(u)φ'(v)]."""
        return self._moments(cov, var1 + var2, 4 * determinant(cov, var1, var2), slope)

    @staticmethod
    def _moments(cov: Tensor, total: Tensor, gap: Tensor, slope: bool) -> Pair:
        wide = 1 + 2 * total + gap
        decay = torch.exp(-0.5 * (total + gap) / wide) * torch.rsqrt(wide)
        ratio = cov / wide
        value = decay * torch.sinh(ratio)
        if not slope:
            return value, None
        even = 1 + 2 * total + gap + 8 * cov * cov
        odd = 4 * cov * (gap + 3 * total + 2)
        return value, decay * (even * torch.cosh(ratio) + odd * torch.sinh(ratio)) / (wide * wide)
