"""Piecewise linear activations: expectations by Owen's function, at any variances and correlation.

The kinks of hard activations lie away from zero. There the duals of different variances are no smooth
functions of the angle, so that tables cannot hold them, but the bivariate normal distribution function can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import ClassVar

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.limits.duals.interpolation import table_for
from net2gp.limits.duals.quadrature import Quadrature
from net2gp.limits.integrals.expectations import Expectation
from net2gp.limits.integrals.plane_quadrature import gauss_legendre

_NODES = 20
_CHUNK = 1 << 15
_TINY = 1e-150
_NEAR_ZERO = 1e-100  # where a knot at zero is put, since every knot has a side
_FLOOR = 1e-10  # derivatives in a variance divide by it, so smaller variances are raised to this


@dataclass(frozen=True)
class PiecewiseLinear:
    """A continuous, piecewise linear function φ.

    With Δ_j the jump of φ' at knot k_j = σ_j|k_j|: φ(u) = φ(0) + g·u + Σ Δ_j (σ_j u − |k_j|)₊, so that the
    duals are sums of P(σu > |k|, τv > |l|) and E[(σu − |k|)₊(τv − |l|)₊]. They are computed in float64 with
    about 40 exponentials per pair and pair of knots, and right to 1e-13 of the largest term.

    Args:
        knots: The places where the slope changes, in rising order.
        slopes: slopes[0] before the first knot, and slopes[j] after knots[j−1].
        offset: The value φ(0).
        name: What messages call the function.

    Raises:
        InputError: If the knots do not rise, or there is not one slope more than knots.

    >>> hardtanh = PiecewiseLinear((-1.0, 1.0), (0.0, 1.0, 0.0))
    >>> hardtanh.variance(torch.ones(1, dtype=torch.float64), True)
    (tensor([0.5161], dtype=torch.float64), tensor([0.6827], dtype=torch.float64))

    Reference: Owen (1956), Tables for computing bivariate normal probabilities; Rosenbaum (1961), Moments of
    a truncated bivariate normal distribution.
    """

    knots: tuple[float, ...]
    slopes: tuple[float, ...]
    offset: float = 0.0
    name: str = field(default="φ", compare=False)
    formula: ClassVar[str] = (
        "Σ_jl Δ_jΔ_l·E[(σ_j u − |k_j|)₊(σ_l v − |k_l|)₊] + linear terms, by Owen's T"
    )

    def __post_init__(self) -> None:
        if len(self.slopes) != len(self.knots) + 1 or list(self.knots) != sorted(set(self.knots)):
            raise InputError(
                f"knots must rise and slopes be one more, but knots are {self.knots} and slopes "
                f"{self.slopes}. Pass for example knots=(-1.0, 1.0), slopes=(0.0, 1.0, 0.0)."
            )

    @property
    def kinks(self) -> tuple[float, ...]:
        """Return the places where φ' jumps."""
        return self.knots

    def __call__(self, u: Tensor) -> Tensor:
        """Apply φ to every entry of u.

        Values are computed from the nearest knot on the left: far out, a sum over all knots would cancel.
        """
        if not self.knots:
            return self.offset + self.slopes[0] * u
        knots, slopes, values = (
            torch.tensor(row, dtype=u.dtype, device=u.device)
            for row in (self.knots, self.slopes, self._values)
        )
        piece = torch.bucketize(u.detach(), knots)
        anchor = (piece - 1).clamp_min(0)
        return values[anchor] + slopes[piece] * (u - knots[anchor])

    def mean(self, var: Tensor) -> Tensor:
        """Compute E[φ]; its derivative is Σ Δ_j p(k_j)/2."""
        if self._cancels(var):
            return self._integrated.mean(var)
        return _expect(
            lambda q: [self._mean(torch.zeros_like(q), q.sqrt())],
            lambda q: [[0.5 * self._at_knots(q, torch.ones_like)]],
            var,
        )[0]

    def mean_slope(self, var: Tensor) -> Tensor:
        """Compute E[φ']; its derivative is Σ Δ_j k_j p(k_j)/(2var)."""
        if self._cancels(var):
            return self._integrated.mean_slope(var)
        return _expect(
            lambda q: [self._mean_slope(torch.zeros_like(q), q.sqrt())],
            lambda q: [[self._at_knots(q, lambda k: k) / (2 * q)]],
            var,
        )[0]

    def variance(self, var: Tensor, slope: bool) -> tuple[Tensor, Tensor | None]:
        """Compute E[φ²] and, if `slope`, E[φ'²].

        Their derivatives are E[φ'²] + Σ Δ_j φ(k_j) p(k_j), and the derivative of a mean slope.
        """
        if self._cancels(var):
            return self._integrated.variance(var, slope)
        squares = PiecewiseLinear(self.knots, tuple(g * g for g in self.slopes))
        count = 2 if slope else 1

        def derive(q: Tensor) -> list[list[Tensor]]:
            rate = squares._mean_slope(torch.zeros_like(q), q.sqrt()) + self._at_knots(q, self)
            return [[rate], [squares._at_knots(q, lambda k: k) / (2 * q)]]

        result = _expect(lambda q: self.pairs(q, q, q)[:count], derive, var)
        return result[0], result[1] if slope else None

    def dual(
        self, cov: Tensor, var1: Tensor, var2: Tensor, slope: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute E[φ(u)φ(v)] and, if `slope`, E[φ'(u)φ'(v)]."""
        if self._cancels(var1, var2):
            return self._integrated.dual(cov, var1, var2, slope)
        table = table_for(self, cov, var1, var2)  # there is one if all variances are equal
        if table is not None:
            return table.dual(cov, var1, var2, slope)
        inputs = torch.broadcast_tensors(cov, var1, var2)
        count = 2 if slope else 1
        result = _expect(lambda *x: self.pairs(*x)[:count], self._derivatives, *inputs)
        return result[0], result[1] if slope else None

    @property
    def _integrated(self) -> Quadrature:
        return Quadrature(self, self.knots, self.name)

    def _cancels(self, *variances: Tensor) -> bool:
        """Whether the terms of the sums are much larger than the sums, so that quadrature is needed.

        This happens for bounded functions far beyond their knots, and if all knots lie in the tails.
        """
        if not self.knots or not all(var.numel() for var in variances):
            return False
        far, near = max(abs(k) for k in self.knots), min(abs(k) for k in self.knots)
        low = min(float(var.detach().min()) for var in variances)
        high = max(float(var.detach().max()) for var in variances)
        bounded = self.slopes[0] == 0 == self.slopes[-1]
        return (bounded and high > 3 * far**2) or (self._middle == 0 and low < near**2 / 9)

    @property
    def _bends(self) -> list[tuple[float, float, float]]:
        """Return the side, the distance from zero and the jump of φ' of each knot; zero is on the right."""
        jumps = [after - before for before, after in pairwise(self.slopes)]
        return [
            (1.0 if k >= 0 else -1.0, abs(k) or _NEAR_ZERO, jump)
            for k, jump in zip(self.knots, jumps, strict=True)
        ]

    @property
    def _values(self) -> list[float]:
        """Compute φ at the knots, step by step from zero."""
        after = sum(k < 0 for k in self.knots)
        values = [0.0] * len(self.knots)
        for places in (range(after, len(self.knots)), range(after - 1, -1, -1)):
            value, place = self.offset, 0.0
            for j in places:
                slope = self.slopes[j] if j >= after else self.slopes[j + 1]
                value, place = value + slope * (self.knots[j] - place), self.knots[j]
                values[j] = value
        return values

    @property
    def _middle(self) -> float:
        """Return the slope at zero, or just left of zero if there is a knot."""
        return self.slopes[sum(k < 0 for k in self.knots)]

    def _mean(self, mean: Tensor, root: Tensor) -> Tensor:
        """Compute E[φ] for N(mean, root²)."""
        total = self.offset + self._middle * mean
        for side, k, bend in self._bends:
            x = (k - side * mean) / root.clamp_min(_TINY)
            total = total + bend * (root * _bell(x) + (side * mean - k) * _tail(x))
        return total

    def _mean_slope(self, mean: Tensor, root: Tensor) -> Tensor:
        """Compute E[φ'] for N(mean, root²)."""
        total = torch.full_like(mean, self._middle)
        for side, k, bend in self._bends:
            total = total + side * bend * _tail((k - side * mean) / root.clamp_min(_TINY))
        return total

    def _at_knots(self, var: Tensor, weight: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute Σ Δ_j p(k_j) weight(k_j), where p is the density of N(0, var)."""
        total, root = torch.zeros_like(var), var.sqrt().clamp_min(_TINY)
        for side, k, bend in self._bends:
            total = total + bend * _bell(k / root) / root * weight(torch.full_like(var, side * k))
        return total

    def pairs(self, cov: Tensor, var1: Tensor, var2: Tensor) -> list[Tensor]:
        """Compute E[φ(u)φ(v)] and E[φ'(u)φ'(v)] of flat float64 inputs, without table or derivatives."""
        pieces = (x.split(_CHUNK) for x in (cov, var1, var2))
        parts = [self._chunk(*part) for part in zip(*pieces, strict=True)]
        return [torch.cat(column) for column in zip(*parts, strict=True)]

    def _chunk(self, cov: Tensor, var1: Tensor, var2: Tensor) -> list[Tensor]:
        root1, root2, rho, sine = _geometry(cov, var1, var2)
        zero = torch.zeros_like(cov)
        # φ(0) and the middle slope times all of φ, from both sides, minus what is counted twice
        first, second = self._mean(zero, root1), self._mean(zero, root2)
        value = self.offset * (first + second - self.offset)
        first, second = self._mean_slope(zero, root1), self._mean_slope(zero, root2)
        slope = self._middle * (first + second - self._middle)
        value = value + slope * cov
        for (one, k, bend), (two, l, other) in product(self._bends, repeat=2):
            x, y, side = k / root1, l / root2, one * two
            q, p = (y - side * rho * x) / sine, (x - side * rho * y) / sine
            both = orthant(x, y, q, p)
            slope = slope + bend * other * side * both
            pair = (side * cov + k * l) * both - l * root1 * _bell(x) * _tail(q)
            pair = pair - k * root2 * _bell(y) * _tail(p)
            pair = pair + root1 * root2 * sine * _bell(x) * _bell(q)
            value = value + bend * other * pair
        return [value, slope]

    def _derivatives(self, cov: Tensor, var1: Tensor, var2: Tensor) -> list[list[Tensor]]:
        """Compute ∂/∂(cov, var1, var2) of both duals by Price's theorem, where φ'' is deltas at the knots."""
        root1, root2, rho, sine = _geometry(cov, var1, var2)
        density = torch.zeros_like(cov)
        for (one, k, bend), (two, l, other) in product(self._bends, repeat=2):
            x = k / root1
            q = (l / root2 - one * two * rho * x) / sine
            density = density + bend * other * _bell(x) * _bell(q) / (root1 * root2 * sine)
        density = torch.where(sine > _TINY, density, 0.0)
        rates: list[list[Tensor]] = [[self.pairs(cov, var1, var2)[1]], [density]]
        for given, root in ((var1, root2), (var2, root1)):
            ratio = cov / given
            spread = root * sine

            def level(k: Tensor, ratio: Tensor = ratio, spread: Tensor = spread) -> Tensor:
                return self._mean(k * ratio, spread)

            def steep(k: Tensor, ratio: Tensor = ratio, spread: Tensor = spread) -> Tensor:
                return k * self._mean_slope(k * ratio, spread)

            rates[0].append(0.5 * self._at_knots(given, level))
            rates[1].append((self._at_knots(given, steep) - cov * density) / (2 * given))
        return rates


def _geometry(cov: Tensor, var1: Tensor, var2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return both roots, the correlation and the sine of the angle; none of those that divide is zero."""
    root1, root2 = var1.sqrt().clamp_min(_TINY), var2.sqrt().clamp_min(_TINY)
    rho = (cov / (root1 * root2)).clamp(-1, 1)
    rho = torch.where(rho.abs() > 1 - 1e-15, torch.sign(rho), rho)
    return root1, root2, rho, torch.sqrt((1 - rho) * (1 + rho)).clamp_min(_TINY)


def _expect(evaluate: Callable, derive: Callable, *inputs: Tensor) -> Sequence[Tensor]:
    def rows(needed: Sequence[int], *flat: Tensor) -> list[list[Tensor]]:
        cov = flat[: len(flat) // 2]  # (var,) or (cov, var1, var2)
        values = derive(*cov, *(var.clamp_min(_FLOOR) for var in flat[len(cov) :]))
        return [values[i] for i in needed]

    return Expectation.apply(evaluate, rows, *inputs)


def _bell(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _tail(x: Tensor) -> Tensor:
    return 0.5 * torch.special.erfc(x / math.sqrt(2))


def orthant(x: Tensor, y: Tensor, q: Tensor, p: Tensor) -> Tensor:
    """Compute P(X > x, Y > y) for x, y > 0 and standard normals X and Y with correlation ρ.

    The caller passes q = (y − ρx)/√(1−ρ²) and p = (x − ρy)/√(1−ρ²), which it can compute exactly as ρ tends
    to one.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> orthant(one, one, one, one).sqrt()
    tensor([0.1587], dtype=torch.float64)

    Reference: Owen (1956), Tables for computing bivariate normal probabilities.
    """
    return 0.5 * (_tail(x) + _tail(y)) - _owen(x, q) - _owen(y, p)


def _owen(h: Tensor, q: Tensor) -> Tensor:
    """Compute Owen's T(h, q/h); its symmetries reduce the second argument to at most one."""
    sign = torch.where((h >= 0) == (q >= 0), 1.0, -1.0)
    h, q = h.abs(), q.abs()
    large, small = torch.maximum(h, q), torch.minimum(h, q)
    direct = _owen_core(large, small / large.clamp_min(_TINY))
    first, second = _tail(h), _tail(q)
    turned = 0.5 * (first + second) - first * second - direct
    return sign * torch.where(q <= h, direct, turned)


def _owen_core(h: Tensor, a: Tensor) -> Tensor:
    """Compute T(h, a) = ∫_0^a exp(−h²(1 + x²)/2)/(1 + x²) dx / 2π for 0 ≤ a ≤ 1."""
    nodes, weights = gauss_legendre(_NODES)
    rate = -0.5 * h * h
    total = torch.zeros_like(h)
    for node, weight in zip(nodes.tolist(), weights.tolist(), strict=True):
        x = a * (0.5 * (1 + node))
        wide = x.square_().add_(1)
        total.add_(torch.exp(rate * wide).div_(wide), alpha=weight)
    return total.mul_(a).mul_(0.25 / math.pi)
