"""Signal propagation through deep wide networks: fixed points, phases and depth scales.

In a wide fully connected network the variance q of the pre-activations and the correlation c of two
inputs go from layer to layer by

    q ← V(q) = σ_w² E[φ(√q z)²] + σ_b²,      c ← R(c) = (σ_w² E[φ(u) φ(v)] + σ_b²) / q*,

u, v ~ N(0, q*) with correlation c. Where both settle, and how fast, says how deep such a network can
be and still tell inputs apart. References: Poole et al. (2016), "Exponential expressivity in deep
neural networks through transient chaos"; Schoenholz et al. (2017), "Deep information propagation".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from net2gp.errors import InputError, check_positive
from net2gp.inputs import ordinary_tensors
from net2gp.limits.duals.activations import Activation, activation_of

SMALLEST, LARGEST = 1e-12, 1e12
"""A variance that leaves this range on its way to a fixed point counts as 0 or as infinite."""

MARGINAL = 1e-11
"""How near to one a slope, relative, counts as one: the accuracy of the expectations behind it."""


@dataclass(frozen=True)
class DepthScales:
    """Over how many layers deviations shrink by e; infinite where they do not shrink exponentially.

    `variance` is ξ_q, of deviations of q from q*; `correlation` is ξ_c, of c from c*.
    """

    variance: Tensor
    correlation: Tensor


@dataclass(frozen=True)
class PhaseDiagram:
    """Signal propagation over a grid: every tensor but the axes is (B, W), row by bias variance."""

    weight_vars: Tensor
    bias_vars: Tensor
    variance: Tensor
    slope: Tensor
    correlation: Tensor
    depth_scales: DepthScales
    phase: Tensor
    """−1 where ordered (χ₁ < 1: inputs grow alike), +1 where chaotic (χ₁ > 1), 0 where critical."""

    @property
    def labels(self) -> list[list[str]]:
        """`phase` in words: "ordered", "critical" or "chaotic"."""
        words = ("ordered", "critical", "chaotic")
        return [[words[int(value) + 1] for value in row] for row in self.phase]


def variance_map(
    activation: nn.Module | Activation,
    q: float | Tensor,
    weight_var: float | Tensor,
    bias_var: float | Tensor,
) -> Tensor:
    """V(q) = σ_w² E[φ(√q z)²] + σ_b²: the variance one layer on. Float64; arguments broadcast.

    >>> variance_map(nn.ReLU(), 3.0, weight_var=2.0, bias_var=0.5)
    tensor(3.5000, dtype=torch.float64)
    """
    phi = _activation(activation)
    q, weight, bias = _broadcast(q=q, weight_var=weight_var, bias_var=bias_var)
    return weight * phi.variance(q, False)[0] + bias


def slope(
    activation: nn.Module | Activation, q: float | Tensor, weight_var: float | Tensor
) -> Tensor:
    """χ₁ = σ_w² E[φ'(√q z)²]: by how much a layer stretches the squared distance of near inputs.

    It is R'(1), and the growth of the squared gradient from layer to layer: below one the network
    is ordered, above it chaotic. q = 0 and q = ∞ stand for the limits. Float64; arguments broadcast.

    >>> slope(nn.ReLU(), 1.0, weight_var=1.5)
    tensor(0.7500, dtype=torch.float64)
    """
    phi = _activation(activation)
    q, weight = _broadcast(q=q, weight_var=weight_var)
    return weight * _mean_square_slope(phi, q)


def variance_slope(
    activation: nn.Module | Activation, q: float | Tensor, weight_var: float | Tensor
) -> Tensor:
    """V'(q) = σ_w² (E[φ'²] + E[φ φ'']): by how much a layer stretches deviations of the variance.

    Taken as the derivative of E[φ²] in q, which stays right where φ has kinks and φ'' is a delta.
    Float64; arguments broadcast.

    >>> variance_slope(nn.ReLU(), 1.0, weight_var=1.5)
    tensor(0.7500, dtype=torch.float64)
    """
    phi = _activation(activation)
    q, weight = _broadcast(q=q, weight_var=weight_var)
    with ordinary_tensors(), torch.enable_grad():
        point = q.clamp(SMALLEST, LARGEST).detach().requires_grad_()
        (derivative,) = torch.autograd.grad(phi.variance(point, False)[0].sum(), point)
    return weight * derivative


def fixed_point(
    activation: nn.Module | Activation,
    weight_var: float | Tensor,
    bias_var: float | Tensor,
    *,
    start: float = 1.0,
) -> Tensor:
    """q* = V(q*), the variance in which iterating `variance_map` from `start` ends.

    It is the fixed point next to `start` on the side to which V moves it: the limit of the iteration
    whenever V grows with q, as it does for the activations in use. Infinite where the variance
    diverges, 0 where the signal dies out, `start` where V leaves it alone (a ReLU with σ_w² = 2 and no
    bias keeps any variance). Found by doubling or halving until V(q) − q changes sign, then
    bracketed interpolation; no slower near criticality, where the iteration itself crawls. Float64;
    arguments broadcast. Cost about 30 evaluations of E[φ²] an entry.

    >>> fixed_point(nn.ReLU(), torch.tensor([1.0, 1.9, 2.5]), bias_var=0.2)
    tensor([0.4000, 4.0000,    inf], dtype=torch.float64)
    """
    phi = _activation(activation)
    check_positive(start, "start")
    weight, bias = _hyperparameters(weight_var, bias_var)
    shape, w, b = weight.shape, weight.reshape(-1), bias.reshape(-1)

    def excess(q: Tensor, rows: Tensor) -> Tensor:
        return w[rows] * phi.variance(q, False)[0] + b[rows] - q

    near, far, result = _bracket(excess, torch.full_like(w, start), b)
    rows = result.isnan().nonzero()[:, 0]
    if len(rows):
        result[rows] = _root(lambda q: excess(q, rows), near[rows], far[rows])
    return result.reshape(shape)


def correlation_fixed_point(
    activation: nn.Module | Activation,
    weight_var: float | Tensor,
    bias_var: float | Tensor,
    *,
    q: float | Tensor | None = None,
) -> Tensor:
    """c* = R(c*), the correlation that two different inputs end with in a deep network.

    R is a power series with no negative coefficients, so it is convex on [0, 1] and R(1) = 1: if
    R'(1) ≤ 1 then c* = 1 and the network forgets how its inputs differed; else one c* < 1 is stable.
    Where q* is 0 or infinite R is the map of the limit, c ← E[φ(u) φ(v)] / E[φ²]. `q` is q* where it
    is known already. Newton's method from c = 0. Float64; arguments broadcast. Cost about 8 evaluations of
    E[φ(u) φ(v)] and E[φ'(u) φ'(v)] for an entry with c* < 1.

    >>> correlation_fixed_point(nn.ReLU(), 1.5, bias_var=0.1)
    tensor(1., dtype=torch.float64)
    """
    phi = _activation(activation)
    weight, bias = _hyperparameters(weight_var, bias_var)
    variance = (
        fixed_point(phi, weight, bias) if q is None else torch.as_tensor(q, dtype=torch.float64)
    )
    variance, weight, bias = torch.broadcast_tensors(variance, weight, bias)
    shape = weight.shape
    point, w, b = (t.reshape(-1) for t in (variance.clamp(SMALLEST, LARGEST), weight, bias))
    b = torch.where(_settled(variance.reshape(-1)), b, 0)
    total = w * phi.variance(point, False)[0] + b
    stretch = w * _mean_square_slope(phi, point) * point / total
    result = torch.where(stretch > 1 + MARGINAL, 0.0, 1.0).double()
    rows = (result == 0).nonzero()[:, 0]
    for _ in range(100):
        if not len(rows):
            break
        c, p = result[rows], point[rows]
        value, slopes = phi.dual(c * p, p, p, True)
        assert slopes is not None
        gap = (w[rows] * value + b[rows]) / total[rows] - c
        steep = 1 - w[rows] * slopes * p / total[rows]
        # convex and above the diagonal: Newton's steps go up to the root and never past it
        step = torch.where(steep > 0, gap / steep, 0.0)
        result[rows] = (c + step).clamp(0, 1)
        rows = rows[step > 1e-13]
    return result.reshape(shape)


def depth_scales(
    activation: nn.Module | Activation, weight_var: float | Tensor, bias_var: float | Tensor
) -> DepthScales:
    """ξ_q = −1 / log|V'(q*)| and ξ_c = −1 / log R'(c*), with R'(c) = σ_w² E[φ'(u) φ'(v)].

    Infinite where deviations do not shrink exponentially: at criticality, and for a q* that is
    infinite. Float64; arguments broadcast. Reference: Schoenholz et al. (2017), equations 9 and 14.

    >>> scales = depth_scales(nn.ReLU(), 1.0, bias_var=0.1)
    >>> round(float(scales.correlation), 4)  # 1 / log 2
    1.4427
    """
    phi = _activation(activation)
    weight, bias = _hyperparameters(weight_var, bias_var)
    q = fixed_point(phi, weight, bias)
    return _depth_scales(phi, weight, q, correlation_fixed_point(phi, weight, bias, q=q))


def _depth_scales(phi: Activation, weight: Tensor, q: Tensor, correlation: Tensor) -> DepthScales:
    point = q.clamp(SMALLEST, LARGEST)
    slopes = _mean_square_slope(phi, point)
    apart = correlation < 1
    if bool(apart.any()):
        q_apart = point[apart]
        found = phi.dual(correlation[apart] * q_apart, q_apart, q_apart, True)[1]
        assert found is not None
        slopes = slopes.masked_scatter(apart, found)
    # where q* is 0 or infinite it is the correlation, not the covariance, whose decay is meant
    growth = weight * phi.variance(point, False)[0] / point
    stretch = torch.where(_settled(q), weight * slopes, weight * slopes / growth)
    variance = torch.where(q.isinf(), torch.ones_like(q), variance_slope(phi, point, weight))
    return DepthScales(_depth_scale(variance), _depth_scale(stretch))


def critical_line(activation: nn.Module | Activation, bias_var: float | Tensor) -> Tensor:
    """The weight variance at which χ₁ = 1 for each bias variance: between order and chaos.

    On the line σ_w² = 1 / E[φ'²] and q = σ_w² E[φ²] + σ_b², so q is a root of
    q − E[φ²] / E[φ'²] = σ_b²; of several, the smallest that is stable (V'(q) ≤ 1). A positively
    homogeneous φ (ReLU, linear) has a critical point only at σ_b² = 0, where every q is a root: with a
    bias its variance diverges. Float64, shape of `bias_var`. Cost about 90 evaluations of E[φ²] and
    E[φ'²], then 15 for each bias variance.

    >>> critical_line(nn.ReLU(), 0.0)
    tensor(2., dtype=torch.float64)
    """
    phi = _activation(activation)
    check_positive(bias_var, "bias_var", zero=True)
    (bias,) = _broadcast(bias_var=bias_var)

    def excess(q: Tensor, target: Tensor) -> Tensor:
        return q - phi.variance(q, False)[0] / _mean_square_slope(phi, q) - target

    grid = torch.logspace(-9, 9, 91, dtype=torch.float64)
    on_grid = excess(grid, torch.zeros_like(grid))
    found = torch.full_like(bias, torch.nan).reshape(-1)
    for i, target in enumerate(bias.reshape(-1)):
        off = on_grid - target
        sign = torch.where(off.abs() <= 100 * MARGINAL * grid, 0, off.sign())
        if sign[0] == 0:
            found[i] = 0
            continue
        for j in (sign[:-1] * sign[1:] < 0).nonzero()[:, 0].tolist():
            ends = grid[j : j + 1], grid[j + 1 : j + 2]
            q = _root(partial(excess, target=target), *ends)
            if bool(variance_slope(phi, q, 1 / _mean_square_slope(phi, q)) <= 1 + 1e-6):
                found[i] = q[0]
                break
    if bool(found.isnan().any()):
        raise InputError(_no_critical_line(activation, float(bias.reshape(-1)[found.isnan()][0])))
    return (1 / _mean_square_slope(phi, found)).reshape(bias.shape)


def phase_diagram(
    activation: nn.Module | Activation, weight_vars: Tensor, bias_vars: Tensor
) -> PhaseDiagram:
    """q*, χ₁, c*, the depth scales and the phase at every pair of weight (W,) and bias variance (B,).

    A point counts as critical if χ₁ is one to within 1e-9. Cost O(B · W) times that of the parts.

    >>> grid = phase_diagram(nn.ReLU(), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0]))
    >>> grid.labels
    [['ordered', 'critical', 'chaotic']]
    """
    phi = _activation(activation)
    weights, biases = (torch.as_tensor(v, dtype=torch.float64) for v in (weight_vars, bias_vars))
    for values, name in ((weights, "weight_vars"), (biases, "bias_vars")):
        if values.dim() != 1:
            raise InputError(
                f"{name} must be a vector, but has shape {tuple(values.shape)}. "
                f"Pass for example {name}=torch.linspace(0.5, 4.0, 50)."
            )
    weight, bias = _hyperparameters(weights[None, :], biases[:, None])
    q = fixed_point(phi, weight, bias)
    correlation = correlation_fixed_point(phi, weight, bias, q=q)
    chi = slope(phi, q, weight)
    phase = torch.where((chi - 1).abs() <= 1e-9, 0, (chi - 1).sign()).to(torch.int8)
    scales = _depth_scales(phi, weight, q, correlation)
    return PhaseDiagram(weights, biases, q, chi, correlation, scales, phase)


def _activation(activation: nn.Module | Activation) -> Activation:
    return activation_of(activation) if isinstance(activation, nn.Module) else activation


def _broadcast(**values: float | Tensor) -> list[Tensor]:
    """The values in float64 and of one shape; every one zero or positive."""
    tensors = [torch.as_tensor(value, dtype=torch.float64).detach() for value in values.values()]
    for tensor, name in zip(tensors, values, strict=True):
        if bool((tensor.isnan() | (tensor < 0)).any()):
            raise InputError(
                f"{name} must be zero or positive, but has {tensor.min():g}. Variances, not standard "
                f"deviations, are meant: pass for example {name}=1.5."
            )
    return list(torch.broadcast_tensors(*tensors))


def _hyperparameters(weight_var: float | Tensor, bias_var: float | Tensor) -> tuple[Tensor, Tensor]:
    check_positive(weight_var, "weight_var")
    check_positive(bias_var, "bias_var", zero=True)
    weight, bias = _broadcast(weight_var=weight_var, bias_var=bias_var)
    return weight, bias


def _mean_square_slope(phi: Activation, q: Tensor) -> Tensor:
    slopes = phi.variance(q.clamp(SMALLEST, LARGEST), True)[1]
    assert slopes is not None
    return slopes


def _settled(q: Tensor) -> Tensor:
    return (q > 0) & q.isfinite()


def _depth_scale(stretch: Tensor) -> Tensor:
    decay = -stretch.abs().log()
    return torch.where(decay > MARGINAL, 1 / decay.clamp(min=MARGINAL), torch.inf)


def _bracket(
    excess: Callable[[Tensor, Tensor], Tensor], start: Tensor, floor: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Two variances between which `excess` changes sign, next to `start` on the side it points to.

    The third tensor has the answer (start, 0 or infinity) of rows that need no search, else NaN.
    """
    rows = torch.arange(len(start))
    first = excess(start, rows)
    result = torch.where(first.abs() <= MARGINAL * start, start, torch.nan)
    near, far, active = start.clone(), start.clone(), result.isnan()
    while bool(active.any()):
        rows = active.nonzero()[:, 0]
        up = first[rows] > 0
        near[rows] = far[rows]
        # V(q) ≥ σ_b², so no fixed point lies below it
        far[rows] = torch.where(up, far[rows] * 2, torch.maximum(far[rows] / 2, floor[rows]))
        value = excess(far[rows], rows) * first[rows].sign()
        crossed = (value < -1e-15 * far[rows]) | (~up & (far[rows] == floor[rows]))
        lost = ~crossed & ((far[rows] > LARGEST) | (far[rows] < SMALLEST))
        result[rows[lost]] = torch.where(up[lost], torch.inf, 0.0).double()
        active[rows[crossed | lost]] = False
    return near, far, result


def _root(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """The root between `low` and `high`, entry by entry, to rounding (Chandrupatla, 1997).

    Inverse quadratic interpolation where the last three points allow it, bisection elsewhere. An end
    that is itself a root, or ends of equal sign, give the end with the smaller value.
    """
    a, b, fa, fb = high, low, function(high), function(low)
    t, best = torch.full_like(a, 0.5), a
    done = torch.zeros_like(a, dtype=torch.bool)
    for _ in range(100):
        x = a + t * (b - a)
        fx = function(x)
        same = fx.sign() == fa.sign()
        c, fc = torch.where(same, a, b), torch.where(same, fa, fb)
        b, fb = torch.where(same, b, a), torch.where(same, fb, fa)
        a, fa = x, fx
        best = torch.where(done, best, torch.where(fa.abs() < fb.abs(), a, b))
        margin = (2e-16 * best.abs() + 1e-300) / (b - a).abs()
        done |= (margin > 0.5) | (torch.minimum(fa.abs(), fb.abs()) == 0)
        if bool(done.all()):
            break
        xi, ratio = (a - b) / (c - b), (fa - fb) / (fc - fb)
        smooth = (ratio.square() < xi) & ((1 - ratio).square() < 1 - xi)
        inverse = fa / (fb - fa) * fc / (fb - fc)
        inverse = inverse + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        t = torch.where(smooth & ~done, inverse, torch.full_like(t, 0.5))
        margin = margin.clamp(max=0.5)
        t = torch.minimum(torch.maximum(t, margin), 1 - margin)
        # a finished row has no interval left to interpolate in
        a, b = torch.where(done, best, a), torch.where(done, best, b)
    return best


def _no_critical_line(activation: nn.Module | Activation, bias_var: float) -> str:
    name = type(activation).__name__
    return (
        f"{name} has no critical weight variance at bias_var={bias_var:g}: no finite variance q solves "
        f"q = V(q) with slope one and is stable. A positively homogeneous activation (ReLU, "
        f"LeakyReLU, Identity) is critical only without a bias: critical_line({name}(), 0.0). "
        f"Otherwise choose another bias_var."
    )
