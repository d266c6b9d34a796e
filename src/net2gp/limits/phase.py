"""Signal propagation through deep wide networks: fixed points, phases and depth scales.

In a wide fully connected network each layer maps the variance q of the pre-activations and the
correlation c of two inputs by

    q ← V(q) = σ_w² E[φ(√q z)²] + σ_b²,      c ← R(c) = (σ_w² E[φ(u) φ(v)] + σ_b²) / q*,

where u, v ~ N(0, q*) have correlation c. Where both settle, and how fast, determines how deep such a
network can be and still distinguish its inputs. References: Poole et al. (2016), "Exponential
expressivity in deep neural networks through transient chaos"; Schoenholz et al. (2017), "Deep
information propagation".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from net2gp.errors import InputError, check_positive
from net2gp.limits.duals.activations import Activation
from net2gp.limits.propagation.layer_maps import (
    broadcast,
    hyperparameters,
    mean_square_slope,
    resolved,
    slope,
    variance_slope,
)
from net2gp.limits.propagation.roots import LARGEST, MARGINAL, SMALLEST, bracket, root


@dataclass(frozen=True)
class DepthScales:
    """The number of layers over which deviations shrink by a factor e.

    A scale is infinite where deviations do not shrink exponentially.

    Args:
        variance: ξ_q, the scale for deviations of the variance q from q*.
        correlation: ξ_c, the scale for deviations of the correlation c from c*.
    """

    variance: Tensor
    correlation: Tensor


@dataclass(frozen=True)
class PhaseDiagram:
    """Signal propagation over a grid of W weight variances and B bias variances.

    Args:
        weight_vars: The weight variances, (W,).
        bias_vars: The bias variances, (B,).
        variance: The fixed point q* of the variance, (B, W).
        slope: χ₁ at q*, (B, W).
        correlation: The fixed point c* of the correlation, (B, W).
        depth_scales: ξ_q and ξ_c, (B, W) each.
        phase: −1 where ordered (χ₁ < 1, inputs become alike), +1 where chaotic (χ₁ > 1), 0 where
            critical: (B, W).
    """

    weight_vars: Tensor
    bias_vars: Tensor
    variance: Tensor
    slope: Tensor
    correlation: Tensor
    depth_scales: DepthScales
    phase: Tensor

    @property
    def labels(self) -> list[list[str]]:
        """Return `phase` in words: "ordered", "critical" or "chaotic", B lists of W words."""
        words = ("ordered", "critical", "chaotic")
        return [[words[int(value) + 1] for value in row] for row in self.phase]


def fixed_point(
    activation: nn.Module | Activation,
    weight_var: float | Tensor,
    bias_var: float | Tensor,
    *,
    start: float = 1.0,
) -> Tensor:
    """Return q* = V(q*), the variance to which iterating `variance_map` from `start` converges.

    It is the fixed point next to `start` on the side to which V moves it. This is the limit of the
    iteration whenever V grows with q, as it does for the activations in use. The search doubles or
    halves q until V(q) − q changes sign, then interpolates within the bracket; unlike the iteration, it
    does not slow down near criticality. It costs about 30 evaluations of E[φ²] per entry.

    Args:
        activation: φ, a module of torch or an activation that `activation_of` returns.
        weight_var: σ_w², positive.
        bias_var: σ_b², zero or positive.
        start: The variance at which the iteration starts.

    Returns:
        q* in float64, in the shape to which the variances broadcast: infinite where the variance
        diverges, 0 where the signal dies out, and `start` where V does not change it (a ReLU with
        σ_w² = 2 and no bias keeps any variance).

    Raises:
        InputError: If `weight_var` or `start` is not positive, or `bias_var` is negative.

    >>> fixed_point(nn.ReLU(), torch.tensor([1.0, 1.9, 2.5]), bias_var=0.2)
    tensor([0.4000, 4.0000,    inf], dtype=torch.float64)
    """
    phi = resolved(activation)
    check_positive(start, "start")
    weight, bias = hyperparameters(weight_var, bias_var)
    shape, w, b = weight.shape, weight.reshape(-1), bias.reshape(-1)

    def excess(q: Tensor, rows: Tensor) -> Tensor:
        return w[rows] * phi.variance(q, False)[0] + b[rows] - q

    near, far, result = bracket(excess, torch.full_like(w, start), b)
    rows = result.isnan().nonzero()[:, 0]
    if len(rows):
        result[rows] = root(lambda q: excess(q, rows), near[rows], far[rows])
    return result.reshape(shape)


def correlation_fixed_point(
    activation: nn.Module | Activation,
    weight_var: float | Tensor,
    bias_var: float | Tensor,
    *,
    q: float | Tensor | None = None,
) -> Tensor:
    """Return c* = R(c*), the correlation to which two different inputs converge in a deep network.

    R is a power series with no negative coefficients, so it is convex on [0, 1] and R(1) = 1: if
    R'(1) ≤ 1 then c* = 1 and the network forgets how its inputs differed; otherwise one c* < 1 is
    stable. Where q* is 0 or infinite, R is the limiting map c ← E[φ(u) φ(v)] / E[φ²]. Newton's method
    runs from c = 0 and costs about 8 evaluations of E[φ(u) φ(v)] and E[φ'(u) φ'(v)] per entry with c* < 1.

    Args:
        activation: φ, a module of torch or an activation that `activation_of` returns.
        weight_var: σ_w², positive.
        bias_var: σ_b², zero or positive.
        q: The fixed point q* of the variance, if it is known already; None computes it.

    Returns:
        c* in float64, in the shape to which the arguments broadcast.

    Raises:
        InputError: If `weight_var` is not positive, or `bias_var` is negative.

    >>> correlation_fixed_point(nn.ReLU(), 1.5, bias_var=0.1)
    tensor(1., dtype=torch.float64)
    """
    phi = resolved(activation)
    weight, bias = hyperparameters(weight_var, bias_var)
    variance = (
        fixed_point(phi, weight, bias) if q is None else torch.as_tensor(q, dtype=torch.float64)
    )
    variance, weight, bias = torch.broadcast_tensors(variance, weight, bias)
    shape = weight.shape
    point, w, b = (t.reshape(-1) for t in (variance.clamp(SMALLEST, LARGEST), weight, bias))
    b = torch.where(_settled(variance.reshape(-1)), b, 0)
    total = w * phi.variance(point, False)[0] + b
    stretch = w * mean_square_slope(phi, point) * point / total
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
    """Return ξ_q = −1 / log|V'(q*)| and ξ_c = −1 / log R'(c*), with R'(c) = σ_w² E[φ'(u) φ'(v)].

    Args:
        activation: φ, a module of torch or an activation that `activation_of` returns.
        weight_var: σ_w², positive.
        bias_var: σ_b², zero or positive.

    Returns:
        Both scales in float64, in the shape to which the variances broadcast; infinite where deviations
        do not shrink exponentially, which is at criticality and where q* is infinite.

    Raises:
        InputError: If `weight_var` is not positive, or `bias_var` is negative.

    Reference: Schoenholz et al. (2017), equations 9 and 14.

    >>> scales = depth_scales(nn.ReLU(), 1.0, bias_var=0.1)
    >>> round(float(scales.correlation), 4)  # 1 / log 2
    1.4427
    """
    phi = resolved(activation)
    weight, bias = hyperparameters(weight_var, bias_var)
    q = fixed_point(phi, weight, bias)
    return _depth_scales(phi, weight, q, correlation_fixed_point(phi, weight, bias, q=q))


def _depth_scales(phi: Activation, weight: Tensor, q: Tensor, correlation: Tensor) -> DepthScales:
    point = q.clamp(SMALLEST, LARGEST)
    slopes = mean_square_slope(phi, point)
    apart = correlation < 1
    if bool(apart.any()):
        q_apart = point[apart]
        found = phi.dual(correlation[apart] * q_apart, q_apart, q_apart, True)[1]
        assert found is not None
        slopes = slopes.masked_scatter(apart, found)
    # where q* is 0 or infinite the covariance has no fixed point, so the correlation's decay is taken
    growth = weight * phi.variance(point, False)[0] / point
    stretch = torch.where(_settled(q), weight * slopes, weight * slopes / growth)
    variance = torch.where(q.isinf(), torch.ones_like(q), variance_slope(phi, point, weight))
    return DepthScales(_depth_scale(variance), _depth_scale(stretch))


def critical_line(activation: nn.Module | Activation, bias_var: float | Tensor) -> Tensor:
    """Return the weight variance at which χ₁ = 1, between order and chaos, for each bias variance.

    On the line σ_w² = 1 / E[φ'²] and q = σ_w² E[φ²] + σ_b², so q is a root of
    q − E[φ²] / E[φ'²] = σ_b²; if there are several, the smallest stable one (V'(q) ≤ 1) counts. A
    positively homogeneous φ (ReLU, linear) has a critical point only at σ_b² = 0, where every q is a
    root: with a bias its variance diverges. The cost is about 90 evaluations of E[φ²] and E[φ'²], plus
    15 per bias variance.

    Args:
        activation: φ, a module of torch or an activation that `activation_of` returns.
        bias_var: σ_b², zero or positive.

    Returns:
        σ_w² in float64, in the shape of `bias_var`.

    Raises:
        InputError: If `bias_var` is negative, or no critical weight variance exists for it.

    >>> critical_line(nn.ReLU(), 0.0)
    tensor(2., dtype=torch.float64)
    """
    phi = resolved(activation)
    check_positive(bias_var, "bias_var", zero=True)
    (bias,) = broadcast(bias_var=bias_var)

    def excess(q: Tensor, target: Tensor) -> Tensor:
        return q - phi.variance(q, False)[0] / mean_square_slope(phi, q) - target

    grid = torch.logspace(-9, 9, 91, dtype=torch.float64)
    on_grid = excess(grid, torch.zeros_like(grid))
    found = torch.full_like(bias, torch.nan).reshape(-1)
    for i, target in enumerate(bias.reshape(-1)):
        off = on_grid - target
        # differences within the accuracy of the expectations are zeros, not changes of sign
        sign = torch.where(off.abs() <= 100 * MARGINAL * grid, 0, off.sign())
        if sign[0] == 0:  # a root at the smallest variance: the line starts at q = 0
            found[i] = 0
            continue
        for j in (sign[:-1] * sign[1:] < 0).nonzero()[:, 0].tolist():
            ends = grid[j : j + 1], grid[j + 1 : j + 2]
            q = root(partial(excess, target=target), *ends)
            if bool(variance_slope(phi, q, 1 / mean_square_slope(phi, q)) <= 1 + 1e-6):
                found[i] = q[0]
                break
    if bool(found.isnan().any()):
        raise InputError(_no_critical_line(activation, float(bias.reshape(-1)[found.isnan()][0])))
    return (1 / mean_square_slope(phi, found)).reshape(bias.shape)


def phase_diagram(
    activation: nn.Module | Activation, weight_vars: Tensor, bias_vars: Tensor
) -> PhaseDiagram:
    """Compute q*, χ₁, c*, the depth scales and the phase at every pair of weight and bias variance.

    A point counts as critical if χ₁ is one to within 1e-9. The cost is B · W times the cost of
    `fixed_point`, `correlation_fixed_point` and `depth_scales` at one point.

    Args:
        activation: φ, a module of torch or an activation that `activation_of` returns.
        weight_vars: Positive weight variances, (W,).
        bias_vars: Bias variances, (B,), zero or positive.

    Returns:
        The diagram, with tensors of shape (B, W) in float64.

    Raises:
        InputError: If one of the variances is not a vector, or has a value out of range.

    >>> grid = phase_diagram(nn.ReLU(), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0]))
    >>> grid.labels
    [['ordered', 'critical', 'chaotic']]
    """
    phi = resolved(activation)
    weights, biases = (torch.as_tensor(v, dtype=torch.float64) for v in (weight_vars, bias_vars))
    for values, name in ((weights, "weight_vars"), (biases, "bias_vars")):
        if values.dim() != 1:
            raise InputError(
                f"{name} must be a vector, but has shape {tuple(values.shape)}. "
                f"Pass for example {name}=torch.linspace(0.5, 4.0, 50)."
            )
    weight, bias = hyperparameters(weights[None, :], biases[:, None])
    q = fixed_point(phi, weight, bias)
    correlation = correlation_fixed_point(phi, weight, bias, q=q)
    chi = slope(phi, q, weight)
    phase = torch.where((chi - 1).abs() <= 1e-9, 0, (chi - 1).sign()).to(torch.int8)
    scales = _depth_scales(phi, weight, q, correlation)
    return PhaseDiagram(weights, biases, q, chi, correlation, scales, phase)


def _settled(q: Tensor) -> Tensor:
    return (q > 0) & q.isfinite()


def _depth_scale(stretch: Tensor) -> Tensor:
    decay = -stretch.abs().log()
    return torch.where(decay > MARGINAL, 1 / decay.clamp(min=MARGINAL), torch.inf)


def _no_critical_line(activation: nn.Module | Activation, bias_var: float) -> str:
    name = type(activation).__name__
    return (
        f"{name} has no critical weight variance at bias_var={bias_var:g}: no finite variance q solves "
        f"q = V(q) with slope one and is stable. A positively homogeneous activation (ReLU, "
        f"LeakyReLU, Identity) is critical only without a bias: critical_line({name}(), 0.0). "
        f"Otherwise choose another bias_var."
    )
