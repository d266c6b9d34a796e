"""Interpolation of the duals of an activation: the fast path for many pairs.

E[φφ'] and E[φ'φ''] are Chebyshev series Σ_k T_k(t) C_k(var1, var2), whose coefficients are Chebyshev
interpolants in log var1 and log var2. For smooth φ the variable t is the correlation itself: with the
Fourier modes a_k(var, r) of α ↦ φ(√var·r·cos α), C_k = ∫ a_k(var1, r) a_k(var2, r) r e^{−r²/2} dr, so that
all of them come from one table of function values and a Fourier transform. If φ has kinks, t = 1 − 2θ/π, and
the values come from quadrature.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from net2gp.limits.duals.chebyshev import (
    Layout,
    layout_of,
    series,
    to_coefficients,
    unit_nodes,
    vandermonde,
)
from net2gp.limits.duals.correlation import recording
from net2gp.limits.duals.power_forms import angle_and_sine, snapped
from net2gp.limits.integrals.expectations import (
    COARSE,
    ORDER,
    PointFunction,
    breaks_of,
    cuts_of,
    has_jumps,
    jet,
    kinks_of,
    line_moments,
    moments,
)
from net2gp.limits.integrals.plane_quadrature import REACH, plane_grid, radial_rule

_VALUE, _SLOPE = ((0, 0), (0, 0)), ((1, 0), (1, 0))
_MIN_PAIRS = 1 << 15  # for fewer pairs, series are faster than building a table
_MIN_PAIRS_WITH_GRADIENTS = 128  # the same limit if derivatives are needed
_MIN_PAIRS_WITH_KINKS = 1 << 20  # the same limit for kinks and a range of variances
_MAX_SPAN = 24  # the most factors of two between the largest and the smallest variance
_MIN_PAIRS_TO_KEEP = (
    512  # from this many pairs on, a table is built that serves later, smaller calls
)
_KEPT: deque[tuple[PointFunction, Table]] = deque(maxlen=32)  # tables for calls of few pairs
_FINE = 1e-12  # the tolerance of kept tables, which replace series of this accuracy
_VALUES_PER_PAIR = 8000  # function values of a table that take as long as one pair without it
_MIN_VALUES = 1 << 23  # as many function values may always be taken: about a second
_MAX_BYTES = 1 << 30  # what the coefficients of one refinement may take
_CHECKS = 16  # the number of random pairs at which the error is measured


@dataclass(frozen=True)
class Table:
    """Chebyshev coefficients of both duals for variances between e^low and e^high.

    `coefficients[o][k, i, j]` belongs to T_{degrees[o][k]}(t)·T_i(x1)·T_j(x2), with o = 0 for E[φφ'] and 1
    for E[φ'φ''] and x the log variance scaled to [−1, 1]. `error` is the largest error at off-grid pairs,
    relative to √(E[φ(u)²]E[φ(v)²]). Evaluation costs one small matrix product and one pass per degree.

    >>> from net2gp.limits.duals.quadrature import Quadrature
    >>> table = build(Quadrature(torch.tanh, ()), 0.0, 1.0, 1e-10)
    >>> table.error < 1e-10
    True

    Reference: Trefethen (2013), Approximation theory and approximation practice.
    """

    low: float
    high: float
    angular: bool
    degrees: tuple[tuple[int, ...], tuple[int, ...]]
    coefficients: tuple[Tensor, Tensor]
    error: float

    def dual(
        self, cov: Tensor, var1: Tensor, var2: Tensor, slope: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute E[φφ'] and E[φ'φ''] entry by entry, with broadcasting and autograd."""
        layout = layout_of(cov, var1, var2)
        t = self._variable(layout)
        if self.low == self.high:
            first = second = torch.ones(1).to(t)
        else:
            first, second = self._basis(layout.var1), self._basis(layout.var2)
        outputs = []
        for degrees, coefficients in list(zip(self.degrees, self.coefficients, strict=True))[
            : 2 if slope else 1
        ]:
            coefficients = coefficients.to(t)
            outputs.append(layout.restore(series(t, degrees, coefficients, first, second)))
        return outputs[0], outputs[1] if slope else None

    def _variable(self, layout: Layout) -> Tensor:
        rho = layout.correlation()
        return 1 - 2 / math.pi * angle_and_sine(snapped(rho))[0] if self.angular else rho

    def _basis(self, var: Tensor) -> Tensor:
        x = (torch.log(var) - self.low) * (2 / (self.high - self.low)) - 1
        return vandermonde(x, self.coefficients[0].shape[1])


def table_for(act: PointFunction, cov: Tensor, var1: Tensor, var2: Tensor) -> Table | None:
    """Return a table for these variances, or None if it does not pay or cannot meet its tolerance.

    Tables are kept per activation, range of variances and tolerance.
    """
    count = math.prod(torch.broadcast_shapes(cov.shape, var1.shape, var2.shape))
    if count < (_MIN_PAIRS_WITH_GRADIENTS if recording(cov, var1, var2) else _MIN_PAIRS):
        return None
    low, high = _log_range(var1, var2)
    if not math.isfinite(high - low):
        return None
    exact = cov.dtype == torch.float64
    if high - low <= (1e-12 if exact else 2e-6) and not recording(var1, var2):
        low = high = (low + high) / 2
    else:
        step = math.log(2)
        first, last = math.floor(low / step), math.ceil(high / step)
        low, high = step * first, step * max(last, first + 1)
        if last - first > _MAX_SPAN:
            return None
        if count < _MIN_PAIRS_WITH_KINKS and kinks_of(act, REACH * math.exp(high / 2)):
            return None
    # A second refinement is usually needed and takes three times as long.
    if not _pays(act, low, high, level=0, count=count / 4):
        return None
    table = build(act, low, high, 1e-10 if exact else 1e-6)
    return table if table.error <= (1e-10 if exact else 1e-6) else None


def kept_table_for(act: PointFunction, cov: Tensor, var1: Tensor, var2: Tensor) -> Table | None:
    """Return a table for few pairs of a smooth function that a larger call has built, or None.

    Calls of some hundred pairs, such as the Gram matrix of a few dozen points, build a table with room for
    variances half as large and twice as large. It is right to 1e-12, like the series that is used without a
    table. So the first prediction after conditioning is as quick as later ones, and results depend on
    earlier calls only by rounding. The last 32 tables are kept.
    """
    if recording(cov, var1, var2):
        return None
    low, high = _log_range(var1, var2)
    if not math.isfinite(high - low):
        return None
    for known, table in tuple(_KEPT):
        if table.low <= low and high <= table.high and known == act:
            return table
    count = math.prod(torch.broadcast_shapes(cov.shape, var1.shape, var2.shape))
    if count < _MIN_PAIRS_TO_KEEP:
        return None
    step = math.log(2)
    first, last = math.floor(low / step), math.ceil(high / step)
    for room in (1, 0):
        bounds = step * (first - room), step * (last + room)
        if last - first > _MAX_SPAN or kinks_of(act, REACH * math.exp(bounds[1] / 2)):
            continue
        if not _pays(act, *bounds, level=1, count=count):
            continue
        table = build(act, *bounds, _FINE)
        if table.error <= _FINE:
            _KEPT.append((act, table))
            return table
    return None


def _pays(act: PointFunction, low: float, high: float, *, level: int, count: float) -> bool:
    """Whether a table of a smooth function is built in less time than `count` pairs take without it.

    The function values of a table grow with the largest variance, since they resolve the narrowest feature
    of the function at the width of the widest Gaussian.
    """
    if kinks_of(act, REACH * math.exp(high / 2)):
        return True
    return _num_values(act, low, high, level) <= max(_MIN_VALUES, _VALUES_PER_PAIR * count)


@lru_cache(maxsize=64)
def _num_values(act: PointFunction, low: float, high: float, level: int) -> int:
    return _Grid.of(act, _variances(low, high, _size(low, high, level)), level).num_values


def _log_range(var1: Tensor, var2: Tensor) -> tuple[float, float]:
    """Return the logarithms of the smallest and the largest variance, not finite if one is zero."""
    ends = torch.stack([*torch.aminmax(var1.detach()), *torch.aminmax(var2.detach())]).double()
    low, high = torch.stack([ends.min(), ends.max()]).log().tolist()
    return low, high


@lru_cache(maxsize=64)
def build(act: PointFunction, low: float, high: float, tolerance: float) -> Table:
    """Return a table for variances from e^low to e^high, refined up to four times to meet the tolerance."""
    kinks = kinks_of(act, REACH * math.exp(high / 2))
    smooth = not kinks
    if (any(kinks) and high > low) or has_jumps(act, REACH * math.exp(high / 2)):
        # kinks away from zero, whose lines cross near θ = 0, and deltas in φ' have no fast series in θ
        return _NONE
    checks = _checks(act, low, high, tolerance)
    best: Table | None = None
    for level in range(1 if tolerance <= _FINE else 0, 4):
        var = _variances(low, high, _size(low, high, level))
        if smooth:
            grid = _Grid.of(act, var, level)
            if best is not None and grid.num_bytes > _MAX_BYTES:
                break
            values = _fourier_values(act, grid)
        else:
            values = _quadrature_values(act, var, 24 * 2**level, tolerance)
        table = _fit(values, low, high, not smooth, tolerance)
        table = _measured(table, checks)
        if best is None or table.error < best.error:
            best = table
        if table.error <= tolerance:
            break
    assert best is not None
    return best


_NONE = Table(0.0, 0.0, False, ((), ()), (torch.zeros(0), torch.zeros(0)), math.inf)


def _size(low: float, high: float, level: int) -> int:
    """The number of variances of a table, one refinement denser per level."""
    return 1 if high == low else round((6 + 2 * (high - low)) * 1.5**level)


def _variances(low: float, high: float, size: int) -> Tensor:
    return torch.exp(low + (high - low) * (unit_nodes(size) + 1) / 2)


@dataclass(frozen=True)
class _Grid:
    """Where `_fourier_values` takes function values: √var · r · cos α for `count` angles α."""

    var: Tensor
    r: Tensor
    weight: Tensor
    count: int

    @staticmethod
    def of(act: PointFunction, var: Tensor, level: int) -> _Grid:
        """The grid that resolves the breaks of a function for the largest of the variances."""
        breaks = breaks_of(act, var).abs()
        narrow = float(breaks.min()) if len(breaks) else 1e9
        top = math.sqrt(float(var.max()))
        count = 32 * 2 ** (level + max(0, math.ceil(math.log2(4 * top / narrow))))
        return _Grid(var, *radial_rule(breaks.unique() / top, ORDER), count)

    @property
    def num_values(self) -> int:
        """The number of function values."""
        return len(self.var) * len(self.r) * self.count

    @property
    def num_bytes(self) -> int:
        """What the coefficients of both duals take."""
        return 8 * self.count * len(self.var) ** 2


def _fourier_values(act: PointFunction, grid: _Grid) -> tuple[Tensor, Tensor]:
    """Return the coefficients in T_k(correlation), (K, n, n) each, of both duals at pairs of variances."""
    var, r, weight, count = grid.var, grid.r, grid.weight, grid.count
    alpha = 2 * math.pi / count * torch.arange(count, dtype=torch.float64)
    sums = [torch.zeros(count // 2 + 1, len(var), len(var), dtype=torch.float64) for _ in range(2)]
    # a block of radii at a time, since all function values would be len(var) · len(r) · count numbers
    block = max(1, (1 << 21) // (count * len(var)))
    for part_r, part_w in zip(r.split(block), weight.split(block), strict=True):
        u = torch.sqrt(var)[:, None, None] * part_r[:, None] * torch.cos(alpha)
        for total, values in zip(sums, jet(act, u, 1), strict=True):
            modes = torch.fft.rfft(values, norm="forward").real.permute(2, 0, 1)
            total += (modes * part_w) @ modes.mT
    factor = torch.full((count // 2 + 1, 1, 1), 2.0, dtype=torch.float64)
    factor[0] = 1.0
    return sums[0] * factor, sums[1] * factor


def _quadrature_values(
    act: PointFunction, var: Tensor, count: int, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Return the coefficients in T_k(1 − 2θ/π), (K, n, n) each, of both duals at all pairs of `var`."""
    theta = math.pi / 2 * (1 - unit_nodes(count))
    order = ORDER if tolerance < 1e-8 else COARSE
    if len(var) == 1:
        cov = torch.cos(theta) * var
        flat = _pairs(act, (cov, var.expand_as(cov), var.expand_as(cov)), order)
        values = [x.reshape(-1, 1, 1) for x in flat]
    else:
        cuts = cuts_of(act, var)
        grids = [
            plane_grid(lambda u: jet(act, u, 1), var, float(angle), cuts, order) for angle in theta
        ]
        values = [torch.stack(column) for column in zip(*grids, strict=True)]
    first, second = (torch.einsum("km,mij->kij", to_coefficients(count), x) for x in values)
    return first, second


def _pairs(act: PointFunction, triple: tuple[Tensor, Tensor, Tensor], order: int) -> list[Tensor]:
    """Compute both duals by the activation's own method `pairs` if it has one, else by quadrature."""
    own = getattr(act, "pairs", None)
    return moments(act, act, triple, [_VALUE, _SLOPE], order) if own is None else own(*triple)


def _fit(
    values: tuple[Tensor, Tensor], low: float, high: float, angular: bool, tolerance: float
) -> Table:
    """Return the table with all coefficients that matter at `tolerance`."""
    transform = to_coefficients(values[0].shape[1])
    kept, degrees, size = [], [], 1
    for value in values:
        root = torch.diagonal(value.sum(0).abs()).clamp_min(1e-300).sqrt()
        relative = (value.abs() / (root[:, None] * root)).amax((1, 2))
        # At large variances coefficients fall slowly, so the sum of what is left out counts.
        order = relative.argsort()
        left_out = relative[order].cumsum(0) <= 0.3 * tolerance
        keep = order[~left_out].sort().values if not left_out.all() else order[-1:]
        degrees.append(tuple(int(k) for k in keep))
        kept.append(transform @ value[keep] @ transform.mT)
        needed = kept[-1].abs().amax((0, 1)) > 0.1 * tolerance * float(root.min()) ** 2
        size = max(size, int(torch.nonzero(needed).max()) + 1)
    kept = [value[:, :size, :size].contiguous() for value in kept]
    return Table(low, high, angular, (degrees[0], degrees[1]), (kept[0], kept[1]), math.inf)


def _checks(
    act: PointFunction, low: float, high: float, tolerance: float
) -> tuple[tuple[Tensor, ...], list[Tensor], list[Tensor]]:
    """Return random pairs in the range, both duals there by quadrature, and their natural sizes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(3, _CHECKS, generator=generator, dtype=torch.float64)
    var1, var2 = torch.exp(low + (high - low) * x[0]), torch.exp(low + (high - low) * x[1])
    theta = math.pi * x[2] ** 2
    theta[:2] = torch.tensor([0.0, 1e-3])
    if tolerance <= _FINE:  # near full correlation the reference itself is only right to 1e-11
        theta[1:] = theta[1:].clamp(0.6, math.pi - 0.6)
    var2[:1] = var1[:1]
    cov = torch.cos(theta) * torch.sqrt(var1 * var2)
    order = ORDER if tolerance < 1e-8 else COARSE
    exact = _pairs(act, (cov, var1, var2), order)
    first, second = (line_moments(act, var, [_VALUE, _SLOPE]) for var in (var1, var2))
    sizes = [torch.sqrt(a * b) for a, b in zip(first, second, strict=True)]
    return (cov, var1, var2), exact, sizes


def _measured(table: Table, checks: tuple[tuple[Tensor, ...], list[Tensor], list[Tensor]]) -> Table:
    (cov, var1, var2), exact, sizes = checks
    found = table.dual(cov, var1, var2, True)
    errors = [
        float(((got - want).abs() / size).nan_to_num(math.inf).max())
        for got, want, size in zip(found, exact, sizes, strict=True)
        if got is not None
    ]
    return Table(
        table.low, table.high, table.angular, table.degrees, table.coefficients, max(errors)
    )
