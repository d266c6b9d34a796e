"""Expectations of piecewise smooth functions, their derivatives and jumps, under Gaussians."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from typing import Any, cast

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import ordinary_tensors
from net2gp.limits.integrals.hermite_series import series_means
from net2gp.limits.integrals.high_correlation import Side, full_means, near_means
from net2gp.limits.integrals.kinks import find_breaks, find_kinks
from net2gp.limits.integrals.plane_quadrature import REACH, Cuts, line_means, plane_means
from net2gp.linalg.once import once

Term = tuple[int, int]
"""A factor of an integrand: (m, p) stands for u^p · φ^{(m)}(u)."""

ORDER = 16
"""Nodes per panel in float64, for errors of about 1e-11 of √(E[φ²]E[φ'²])."""

COARSE = 10
"""Nodes per panel for lower precisions, for errors of about 1e-8."""

_GROUP = 128  # the most pairs of similar variances that share their panels

_EPS = torch.finfo(torch.float64).eps

_LARGEST = 1e7  # beyond this standard deviation, rounding hides how nearly equal points differ

_OVERFLOW = 1e20  # the largest value of a signal

_STEP = 1e-7  # distance from a kink at which its two sides are read

PointFunction = Callable[[Tensor], Tensor]
"""A function φ of one number, on tensors; it may have an attribute `kinks`, where it is not smooth."""


class Expectation(torch.autograd.Function):
    """Tensors that `evaluate` computes in float64, with derivatives that `derive` computes when needed.

    `derive(needed, *inputs)` returns, per index of a result in `needed`, its derivatives in all inputs.
    """

    @staticmethod
    def forward(ctx: Any, evaluate: Callable, derive: Callable, *inputs: Tensor) -> Any:
        """Return the results of `evaluate` at the flattened inputs."""
        ctx.derive = derive
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        flat = [x.detach().reshape(-1).double() for x in inputs]
        return tuple(y.to(inputs[0].dtype).reshape(inputs[0].shape) for y in evaluate(*flat))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return the derivatives of the results that were used, which cannot be differentiated again."""
        inputs = ctx.saved_tensors
        flat = [x.detach().reshape(-1).double() for x in inputs]
        totals = [torch.zeros_like(x) for x in flat]
        needed = [i for i, grad in enumerate(grads) if grad is not None]
        for i, row in zip(needed, ctx.derive(needed, *flat), strict=True):
            grad = cast(Tensor, grads[i]).detach().reshape(-1).double()
            for total, entry in zip(totals, row, strict=True):
                # infinite one-sided derivatives at |correlation| = 1 count as zero, as in `power_forms`
                total += grad * entry.nan_to_num(0.0, 0.0, 0.0)
        found = [t.to(x.dtype).reshape(x.shape) for t, x in zip(totals, inputs, strict=True)]
        return None, None, *once(found, [*inputs, *grads], "a limit that is integrated numerically")


def jet(function: Callable[[Tensor], Tensor], u: Tensor, order: int) -> list[Tensor]:
    """Compute φ, φ', …, φ^{(order)} at u by autograd, which ignores deltas at the kinks."""
    if order == 0:
        return [function(u)]
    with ordinary_tensors(), torch.enable_grad():
        point = u.detach().clone().requires_grad_()
        result = [function(point)]
        for m in range(order):
            if not result[-1].requires_grad:
                result.append(torch.zeros_like(u))
                continue
            (slope,) = torch.autograd.grad(
                result[-1].sum(), point, create_graph=m + 1 < order, materialize_grads=True
            )
            result.append(slope)
    return [value.detach() for value in result]


def _evaluator(act: PointFunction, terms: Sequence[Term]) -> Callable[[Tensor], list[Tensor]]:
    order = max(m for m, _ in terms)

    def evaluate(u: Tensor) -> list[Tensor]:
        values = jet(act, u, order)
        return [values[m] * u**p if p else values[m] for m, p in terms]

    return evaluate


def kinks_of(act: PointFunction, reach: float) -> tuple[float, ...]:
    """Return the places within ±reach where φ or φ' jumps, as declared or else found by a search."""
    declared = getattr(act, "kinks", None)
    if declared is not None:
        return tuple(declared)
    return tuple(k for k in _searched(act, _rounded(reach)) if abs(k) < reach)


def _rounded(reach: float) -> float:
    """Return the next power of two, so that one search serves variances of similar size."""
    return 2.0 ** math.ceil(math.log2(reach))


@lru_cache(maxsize=256)
def _searched(act: PointFunction, reach: float) -> tuple[float, ...]:
    return find_kinks(lambda u: jet(act, u, 1), reach)


@lru_cache(maxsize=256)
def _breaks(act: PointFunction, reach: float) -> tuple[float, ...]:
    return find_breaks(lambda u: jet(act, u, 1), kinks_of(act, reach), reach)


def _top(var: Tensor) -> float:
    """Return the largest value that N(0, var) takes, up to a negligible probability."""
    top = REACH * math.sqrt(max(float(var.max()), 1e-4))
    if not top < _OVERFLOW:
        raise InputError(
            f"the variance of a signal is {float(var.max()):.1e}, beyond what is integrated: the inputs, or "
            "weight_var, are too large. Divide x by its standard deviation."
        )
    return top


def breaks_of(act: PointFunction, var: Tensor) -> Tensor:
    """Return sorted places between which φ is a polynomial to rounding, as far as N(0, var) reaches."""
    top = _top(var)
    places = _breaks(act, _rounded(top))
    return torch.tensor([b for b in places if abs(b) < top], dtype=var.dtype, device=var.device)


def cuts_of(act: PointFunction, var: Tensor) -> Cuts:
    """Return the cuts of φ as far as N(0, var) reaches."""
    sizes = breaks_of(act, var).abs().unique()
    top = _top(var)
    kinks = [k for k in kinks_of(act, top) if 0 < abs(k) < top]
    return Cuts(sizes[sizes > 0], torch.tensor(kinks, dtype=var.dtype, device=var.device))


@lru_cache(maxsize=1024)
def jump(act: PointFunction, place: float, m: int) -> tuple[float, float]:
    """Return the jump of φ^{(m)} at `place` and the mean of its two sides."""
    # each side is extrapolated linearly to the place from one and two steps away
    step = _STEP * max(1.0, abs(place))
    offsets = torch.tensor([1, 2, -1, -2], dtype=torch.float64) * step
    v = jet(act, place + offsets, m)[m]
    right, left = float(2 * v[0] - v[1]), float(2 * v[2] - v[3])
    size = right - left
    return size if abs(size) > 1e-8 * (1 + abs(right)) else 0.0, (right + left) / 2


def has_jumps(act: PointFunction, reach: float) -> bool:
    """Whether φ itself jumps within ±reach."""
    return any(jump(act, k, 0)[0] for k in kinks_of(act, reach))


def _atoms(act: PointFunction, term: Term, reach: float) -> list[tuple[float, float]]:
    """Return the places and weights of the deltas in u^p φ^{(m)}."""
    m, p = term
    if m == 0:
        return []
    found = ((k, jump(act, k, m - 1)[0] * k**p) for k in kinks_of(act, reach))
    return [(k, weight) for k, weight in found if weight]


def _density(place: float, var: Tensor) -> Tensor:
    """Return the density of N(0, var) at `place`; at zero it is infinite where var = 0."""
    safe = torch.where(var > 0, var, 1.0)
    density = torch.exp(-0.5 * place**2 / safe) / torch.sqrt(2 * math.pi * safe)
    return torch.where(var > 0, density, math.inf if place == 0 else 0.0)


def moments(
    act1: PointFunction,
    act2: PointFunction,
    triple: tuple[Tensor, Tensor, Tensor],
    pairs: Sequence[tuple[Term, Term]],
    order: int = ORDER,
    deltas: bool = True,
) -> list[Tensor]:
    """Compute E[u^p φ1^{(m)}(u) · v^q φ2^{(n)}(v)] for each pair ((m, p), (n, q)).

    `triple` is cov, var1, var2, flat and in float64. Jumps of φ^{(m−1)} are deltas in φ^{(m)}: they add line
    integrals and, where both functions jump, densities. Without `deltas` they are ignored, as in autograd.
    """
    cov, var1, var2 = triple
    scale = torch.sqrt(var1) * torch.sqrt(var2)
    rho = (cov / torch.where(scale > 0, scale, 1.0)).clamp(-1, 1) * (scale > 0)
    # a full correlation up to rounding counts as full: the angle would be the square root of the rounding
    rho = torch.where(rho.abs() > 1 - 8 * _EPS, torch.sign(rho), rho)
    if not len(cov):
        return [cov for _ in pairs]
    firsts, seconds = zip(*pairs, strict=True)
    functions = (_evaluator(act1, firsts), _evaluator(act2, seconds))
    first, second = _side(act1, functions[0], var1), _side(act2, functions[1], var2)
    places = ((first.breaks, first.kinks), (second.breaks, second.kinks))
    full = rho.abs() == 1
    result, done = series_means(functions, (var1, var2), torch.where(full, 0.0, rho), places)
    done &= ~full
    rest = torch.nonzero(~done)[:, 0]
    groups = _groups(rest, torch.maximum(var1, var2), rho)
    for group in groups:
        roots = (var1[group].sqrt(), var2[group].sqrt())
        sides = (_side(act1, functions[0], var1[group]), _side(act2, functions[1], var2[group]))
        for column, values in zip(result, _direct(sides, roots, rho[group], order), strict=True):
            column[group] = values
    if deltas:
        _add_atoms(result, (act1, act2), triple, rho, pairs)
    return result


def _groups(pairs: Tensor, var: Tensor, rho: Tensor) -> list[Tensor]:
    """Group pairs of similar variances and one kind of correlation: full, positive or negative."""
    kind = torch.where(rho.abs() == 1, 0, torch.where(rho > 0, 1, 2))
    groups: list[Tensor] = []
    for number in range(3):
        chosen = pairs[kind[pairs] == number]
        if len(chosen):
            groups += chosen[var[chosen].argsort()].split(_GROUP)
    return groups


def _direct(
    sides: tuple[Side, Side], roots: tuple[Tensor, Tensor], rho: Tensor, order: int
) -> list[Tensor]:
    """Compute E[f(u) g(v)] for each f and g by quadrature, for pairs of one kind of correlation."""
    if float(rho[0].abs()) == 1:
        return full_means(sides, roots, rho)
    # near full correlation both functions can be cut exactly at their kinks
    found = near_means(sides, roots, rho) if float(rho.abs().min()) > 0.9 else None
    if found is not None:
        return found
    largest = max(float(root.max()) for root in roots)
    if largest > _LARGEST and any(len(side.breaks) for side in sides):
        raise InputError(
            f"a signal has the variance {largest**2:.1e}, at which rounding hides how its points differ. "
            "Divide x by its standard deviation, or lower weight_var."
        )
    cuts = []
    for side in sides:
        sizes = side.breaks.abs().unique()
        cuts.append(Cuts(sizes[sizes > 0], side.kinks[side.kinks != 0]))
    if len(cuts[0].kinks) + len(cuts[1].kinks):
        order = order * 3 // 2  # a kink away from zero lies in a sector that is harder to resolve
    angle = torch.atan2(torch.sqrt((1 - rho) * (1 + rho)), rho)
    return plane_means(
        (sides[0].function, sides[1].function), roots, angle, (cuts[0], cuts[1]), order
    )


def _side(act: PointFunction, function: Callable[[Tensor], list[Tensor]], var: Tensor) -> Side:
    top = _top(var)
    kinks = [k for k in kinks_of(act, top) if abs(k) < top]
    return Side(
        function, breaks_of(act, var), torch.tensor(kinks, dtype=var.dtype, device=var.device)
    )


def _add_atoms(
    result: list[Tensor],
    acts: tuple[PointFunction, PointFunction],
    triple: tuple[Tensor, Tensor, Tensor],
    rho: Tensor,
    pairs: Sequence[tuple[Term, Term]],
) -> None:
    """Add the contributions of deltas in one factor or in both."""
    cov, var1, var2 = triple
    act1, act2 = acts
    sine = torch.sqrt((1 - rho) * (1 + rho))
    reach = max(_top(var1), _top(var2))
    for i, (one, two) in enumerate(pairs):
        atoms1, atoms2 = _atoms(act1, one, reach), _atoms(act2, two, reach)
        for k, weight in atoms1:
            result[i] = result[i] + weight * _conditional(act2, two, k, cov, var1, var2, sine)
        for k, weight in atoms2:
            result[i] = result[i] + weight * _conditional(act1, one, k, cov, var2, var1, sine)
        for k, a in atoms1:
            for l, b in atoms2:
                result[i] = result[i] + a * b * _density_pair(k, l, rho, sine, var1, var2)


def _conditional(
    act: PointFunction,
    term: Term,
    place: float,
    cov: Tensor,
    given: Tensor,
    var: Tensor,
    sine: Tensor,
) -> Tensor:
    """Compute p(u = place) E[f(v) | u = place], where f is the regular part of `term`.

    u has the variance `given`, v the variance `var`, and `sine` is the sine of the angle between them.
    """
    mean = place * cov / torch.where(given > 0, given, 1.0)
    breaks = breaks_of(act, var)
    value = line_means(_evaluator(act, [term]), mean, var * sine * sine, breaks, ORDER)[0]
    weight = _density(place, given)
    return torch.where(weight == 0, 0.0, weight * value)


def _density_pair(
    k: float, l: float, rho: Tensor, sine: Tensor, var1: Tensor, var2: Tensor
) -> Tensor:
    """Return the joint density at (k, l), which is infinite where |rho| = 1 and both are the same event."""
    x, y = k / torch.sqrt(var1), l / torch.sqrt(var2)
    gap = y - rho * x
    safe = torch.where(sine > 0, sine, 1.0)
    inner = torch.exp(-0.5 * (gap / safe) ** 2) / (safe * math.sqrt(2 * math.pi))
    same = gap.abs() <= 1e-12 * (1 + x.abs())
    inner = torch.where(sine > 0, inner, torch.where(same, math.inf, 0.0))
    return _density(k, var1) * torch.where(inner == 0, 0.0, inner / torch.sqrt(var2))


def line_moments(
    act: PointFunction, var: Tensor, products: Sequence[tuple[Term, ...]], deltas: bool = True
) -> list[Tensor]:
    """Compute the expectation of each product of terms at one u ~ N(0, var), for flat float64 `var`.

    Where the last term of a product has a delta, the other term takes the mean of its two sides; a delta
    squared is infinite. Without `deltas` they are ignored.
    """
    order = max(m for product in products for m, _ in product)

    def evaluate(u: Tensor) -> list[Tensor]:
        values = jet(act, u, order)
        factors = (
            [values[m] * u**p if p else values[m] for m, p in product] for product in products
        )
        return [reduce(torch.mul, product) for product in factors]

    result = line_means(evaluate, torch.zeros_like(var), var, breaks_of(act, var), ORDER)
    reach = _top(var)
    for i, product in enumerate(products if deltas else ()):
        *others, last = product
        for k, weight in _atoms(act, last, reach):
            if others and others[0][0] == last[0]:
                result[i] = torch.full_like(var, math.inf)
                break
            for m, p in others:
                weight *= jump(act, k, m)[1] * k**p
            result[i] = result[i] + weight * _density(k, var)
    return result
