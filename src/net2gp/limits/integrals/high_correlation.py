"""Gaussian expectations E[f(u) g(v)] of pairs that are fully or nearly correlated.

With θ the angle between u and v, u = √var1·(c·a + s·b) and v = √var2·(c·a − s·b) for independent standard
normals a and b, c = cos(θ/2) and s = sin(θ/2). If s is small, b hardly moves the two functions against each
other: the integral over b is smooth except where a kink of f passes a kink of g, and the integral over a is
cut exactly at the kinks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.limits.integrals.plane_quadrature import CUTS, REACH, panel_nodes

_ORDER = 12  # nodes per panel of both integrals
_LINE_ORDER = 16
_BATCH = 1 << 17
_MAX_PANELS = 48  # of the integral over b; if more are needed, `plane_quadrature` takes over

Function = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True, eq=False)
class Side:
    """One factor of the integrands.

    Args:
        function: Returns the values of all functions at a tensor of places.
        breaks: The sorted places between which the functions are polynomials to rounding.
        kinks: The places where they are not smooth.
    """

    function: Function
    breaks: Tensor
    kinks: Tensor

    def turned(self) -> Side:
        """Return the factor as a function of −v."""
        return Side(lambda u: self.function(-u), -self.breaks.flip(0), -self.kinks.flip(0))


def full_means(
    sides: tuple[Side, Side], roots: tuple[Tensor, Tensor], sign: Tensor
) -> list[Tensor]:
    """Compute E[f(√var1·z) g(±√var2·z)] for each f and g in turn, with one integral per pair (B,)."""
    first, second = sides
    count = len(first.breaks) + len(second.breaks) + 2 * len(CUTS) + 3
    size = max(1, _BATCH // (count * _LINE_ORDER))
    parts = []
    for one, two, side in zip(*(x.split(size) for x in (*roots, sign)), strict=True):
        edges = [_fixed(one).expand(len(one), -1)]
        edges += [_over(first.breaks, one), _over(second.breaks, two) * side[:, None]]
        z, w = panel_nodes(torch.cat(edges, 1).clamp(-REACH, REACH).sort(1)[0], _LINE_ORDER)
        w = w * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        f, g = first.function(one[:, None] * z), second.function((side * two)[:, None] * z)
        parts.append([(a * b * w).sum(1) for a, b in zip(f, g, strict=True)])
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def near_means(
    sides: tuple[Side, Side], roots: tuple[Tensor, Tensor], rho: Tensor
) -> list[Tensor] | None:
    """Compute E[f(u) g(v)] for pairs (B,) whose correlations `rho` have one sign.

    The result is None if the correlations are too far from one. Per pair the cost is panels in a times
    panels in b times 144 evaluations, where a has a panel per break of both functions.
    """
    if float(rho[0]) < 0:
        sides, rho = (sides[0], sides[1].turned()), -rho
    half = torch.sqrt((1 - rho) / 2)
    shift = 2 * float((half * torch.maximum(*roots)).max()) * REACH
    panels = max(1, math.ceil(4 * shift / _gap(sides)))
    if panels > _MAX_PANELS:
        return None
    across = torch.cat([_fixed(rho), torch.linspace(-REACH, REACH, panels + 1).to(rho)]).unique()
    crossings = _crossings(sides, roots, half)
    count = len(sides[0].breaks) + len(sides[1].breaks) + 2 * len(CUTS) + 3
    size = max(1, _BATCH // (count * (len(across) + crossings.shape[1]) * _ORDER**2))
    columns = [x.split(size) for x in (*roots, half, crossings)]
    parts = [
        _near_means(sides, (one, two), s, torch.cat([across.expand(len(s), -1), cut], 1).sort(1)[0])
        for one, two, s, cut in zip(*columns, strict=True)
    ]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _near_means(
    sides: tuple[Side, Side], roots: tuple[Tensor, Tensor], half: Tensor, edges: Tensor
) -> list[Tensor]:
    b, weight = panel_nodes(edges, _ORDER)
    whole = torch.sqrt(1 - half * half)[:, None, None]
    moved = (half[:, None] * b)[..., None]
    places = [_fixed(b).expand(*b.shape, -1)]
    for side, root, sign in zip(sides, roots, (-1, 1), strict=True):
        places.append((_over(side.breaks, root)[:, None] + sign * moved) / whole)
    a, w = panel_nodes(torch.cat(places, -1).clamp(-REACH, REACH).sort(-1)[0], _ORDER)
    density = torch.exp(-0.5 * (a * a + (b * b)[..., None])) / (2 * math.pi)
    w = w * density * weight[..., None]
    f = sides[0].function(roots[0][:, None, None] * (whole * a + moved))
    g = sides[1].function(roots[1][:, None, None] * (whole * a - moved))
    return [(x * y * w).sum((1, 2)) for x, y in zip(f, g, strict=True)]


def _fixed(like: Tensor) -> Tensor:
    return torch.tensor([-REACH, *(-c for c in CUTS[::-1]), 0.0, *CUTS, REACH]).to(like)


def _over(places: Tensor, root: Tensor) -> Tensor:
    """Return `places` in standard deviations, (B, ·)."""
    return places / torch.where(root > 0, root, 1e-300)[:, None]


def _gap(sides: tuple[Side, Side]) -> float:
    """Return the length of the shortest piece of a function that needs breaks besides its kinks."""
    gaps = [
        float(torch.diff(side.breaks).min())
        for side in sides
        if len(side.breaks) > max(1, len(side.kinks))
    ]
    return min(gaps, default=math.inf)


def _crossings(sides: tuple[Side, Side], roots: tuple[Tensor, Tensor], half: Tensor) -> Tensor:
    """Return the values of b (B, ·) at which a kink of f meets a kink of g; fewer are padded with ±REACH."""
    one, two = (_over(side.kinks, root) for side, root in zip(sides, roots, strict=True))
    found = ((one[:, :, None] - two[:, None, :]) / (2 * half[:, None, None])).flatten(1)
    if not found.shape[1]:
        return found
    inside = found.abs() < REACH
    order = (~inside).to(torch.int8).argsort(dim=1, stable=True)[:, : int(inside.sum(1).max())]
    return found.gather(1, order).clamp(-REACH, REACH)
