"""Gaussian expectations of piecewise smooth functions, over a line and over the plane.

The plane is cut in polar coordinates: u = √var1·r·cos α, v = √var2·r·cos(α − θ). The lines u = 0 and v = 0,
where kinks usually lie, are then edges of panels at every correlation, and no panel is thinner than what it
has to resolve. So no accuracy is lost as |correlation| tends to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from net2gp.errors import NetworkError

REACH = 9.5
"""The number of standard deviations that are integrated over; beyond lies less than 1e-19 of the mass."""

_RADIUS = 2.5  # a typical radius, at which the angular panels resolve the function
CUTS = (2.2, 5.0)
"""Panels between these standard deviations resolve the density itself."""

_BATCH = 1 << 17

MAX_WORK = 1 << 26
"""The most evaluations that one pair may cost."""

Values = Sequence[Tensor]
Function = Callable[[Tensor], Values]


@lru_cache
def gauss_legendre(order: int) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of Gauss-Legendre quadrature on [−1, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(order)
    return torch.from_numpy(nodes), torch.from_numpy(weights)


def panel_nodes(edges: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of the panels between sorted `edges` (…, E): (…, (E−1)·order) each."""
    x, w = (t.to(edges.device) for t in gauss_legendre(order))
    low, half = edges[..., :-1, None], torch.diff(edges)[..., None] / 2
    return (low + half * (x + 1)).flatten(-2), (half * w).flatten(-2)


def line_means(
    function: Function, mean: Tensor, var: Tensor, breaks: Tensor, order: int
) -> list[Tensor]:
    """Compute E[f(u)] for u ~ N(mean, var), both of shape (B,), for each f that `function` returns.

    Each f is smooth between the sorted `breaks`. The cost is B · (6 + len(breaks)) · order evaluations.
    """
    parts = []
    size = max(1, _BATCH // ((len(breaks) + 7) * order))
    for m, q in zip(mean.split(size), var.split(size), strict=True):
        root = q.sqrt()[:, None]
        cuts = torch.tensor([-REACH, *(-c for c in CUTS[::-1]), 0.0, *CUTS, REACH]).to(m)
        places = (breaks - m[:, None]) / torch.where(root > 0, root, 1.0)
        edges = torch.cat([cuts.expand(len(m), -1), places.clamp(-REACH, REACH)], 1).sort(1)[0]
        z, w = panel_nodes(edges, order)
        w = w * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        parts.append([(f * w).sum(1) for f in function(m[:, None] + root * z)])
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def radial_rule(sizes: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """Return radii and weights for ∫ f(κr) r e^{−r²/2} dr for all κ ≤ 1, with f resolved between `sizes`."""
    # for a small κ the cuts of f lie further out, so the smallest is repeated at doubling distances
    sizes = sizes[(sizes > 0) & (sizes < REACH)]
    if len(sizes):
        first = float(sizes.min())
        count = math.ceil(math.log2(REACH / first))
        sizes = torch.cat([sizes, first * 2.0 ** torch.arange(count).to(sizes)])
    edges = torch.cat([torch.tensor([0.0, *CUTS, REACH]).to(sizes), sizes]).unique()
    r, w = panel_nodes(edges, order)
    return r, w * r * torch.exp(-0.5 * r * r)


@dataclass(frozen=True)
class Cuts:
    """The sorted sizes |u| > 0 between which a function is resolved, and its kinks other than zero."""

    sizes: Tensor
    kinks: Tensor


def plane_means(
    functions: tuple[Function, Function],
    roots: tuple[Tensor, Tensor],
    angle: Tensor,
    cuts: tuple[Cuts, Cuts],
    order: int,
) -> list[Tensor]:
    """Compute E[f(u) g(v)] for each f, g that the two `functions` return in turn.

    u and v have standard deviations `roots` (B,) each and correlation cos θ, where θ is the `angle` between
    them. f is smooth between `cuts[0]`, with a kink at zero at most, and g likewise. The cost is B · angular
    panels · radial panels · order² evaluations, about 2e4 per pair for tanh at variance one.
    """
    count = len(cuts[0].sizes) + len(cuts[1].sizes)
    angular = 8 + 4 * count + len(cuts[0].kinks) * len(cuts[1].kinks)
    work = angular * (count + 3) * order * order
    if work > MAX_WORK:
        raise NetworkError(
            f"an activation has {count} pieces within the reach of its Gaussian inputs, too many for an "
            "integral over the plane. Use inputs of a smaller variance, a smoother function, or "
            "monte_carlo_kernel(network); Pointwise(function, kinks=(...)) names its kinks."
        )
    size = max(1, _BATCH // work)
    parts = []
    for start in range(0, len(angle), size):
        part = slice(start, start + size)
        pair = (roots[0][part], roots[1][part])
        parts.append(_plane_means(functions, pair, angle[part], cuts, order))
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def plane_grid(
    function: Function, var: Tensor, angle: float, cuts: Cuts, order: int
) -> list[Tensor]:
    """Compute E[f(u) f(v)] for all pairs of the variances `var` (n,) at one angle: (n, n) per f.

    f has no kink except at zero. All pairs share their nodes, so f is evaluated 2n times at each node rather
    than n² times, and the pairs are matrix products.
    """
    theta = torch.full((1,), angle).to(var)
    top = var.max().sqrt()[None]
    alpha, weight = panel_nodes(_angular_edges((top, top), theta, (cuts, cuts)), order)
    r, w = radial_rule(cuts.sizes / top, order)
    totals: list[Tensor] | None = None
    size = max(1, _BATCH // (len(r) * len(var)))
    for a, part in zip(alpha[0].split(size), weight[0].split(size), strict=True):
        along = torch.sqrt(var)[:, None, None] * r
        sides = [function(along * torch.cos(x)[:, None]) for x in (a, a - angle)]
        both = (part / (2 * math.pi))[:, None] * w
        found = [(f * both).flatten(1) @ g.flatten(1).mT for f, g in zip(*sides, strict=True)]
        totals = found if totals is None else [x + y for x, y in zip(totals, found, strict=True)]
    assert totals is not None
    return totals


def _plane_means(
    functions: tuple[Function, Function],
    roots: tuple[Tensor, Tensor],
    angle: Tensor,
    cuts: tuple[Cuts, Cuts],
    order: int,
) -> list[Tensor]:
    alpha, weight = panel_nodes(_angular_edges(roots, angle, cuts), order)
    along = (
        roots[0][:, None] * torch.cos(alpha),
        roots[1][:, None] * torch.cos(alpha - angle[:, None]),
    )
    edges = [torch.tensor([0.0, *CUTS, REACH]).to(alpha).expand(*alpha.shape, -1)]
    for direction, cut in zip(along, cuts, strict=True):
        slope = direction.abs()[..., None]
        edges.append((cut.sizes / torch.where(slope > 0, slope, 1e-300)).clamp_max(REACH))
    r, w = panel_nodes(torch.cat(edges, -1).sort(-1)[0], order)
    w = w * (r * torch.exp(-0.5 * r * r)) * (weight / (2 * math.pi))[..., None]
    first, second = (
        f(direction[..., None] * r) for f, direction in zip(functions, along, strict=True)
    )
    return [(f * g * w).sum((1, 2)) for f, g in zip(first, second, strict=True)]


def _angular_edges(roots: tuple[Tensor, Tensor], angle: Tensor, cuts: tuple[Cuts, Cuts]) -> Tensor:
    """Return sorted angles (B, E) over one full turn, between which the radial means are smooth."""
    pi = math.pi
    edges = []
    for root, cut, shift in zip(roots, cuts, (torch.zeros_like(angle), angle), strict=True):
        safe = torch.where(root > 0, root, 1e-300)[:, None]
        sizes = _graded(cut.sizes, _RADIUS * float(root.max()))
        tilt = torch.acos((sizes / (_RADIUS * safe)).clamp_max(1))
        # a kink far out is only met in a narrow sector around the shortest way to it
        near = cut.kinks.abs() / safe
        sector = torch.acos((near / torch.clamp(near + 1.0 / near, min=_RADIUS)).clamp_max(1))
        tilt = torch.cat([tilt, sector.nan_to_num(0.0)], 1)
        lines = (pi / 2 * torch.arange(4).to(angle)).expand(len(angle), -1)
        fan = torch.cat([lines, tilt, -tilt, pi + tilt, pi - tilt], 1)
        edges.append(fan + shift[:, None])
    edges.append(_crossings(roots, angle, cuts))
    turn = torch.cat(edges, 1).remainder(2 * pi).sort(1)[0]
    return torch.cat([turn, turn[:, :1] + 2 * pi], 1)


def _graded(sizes: Tensor, top: float) -> Tensor:
    """Return the `sizes` below `top`, and above the largest of them further ones that grow threefold.

    Beyond all cuts the radial means still fall off like a power of the distance to the line u = 0.
    """
    sizes = sizes[sizes < top]
    if not len(sizes):
        return sizes
    last = float(sizes.max())
    count = max(0, math.ceil(math.log(top / last, 3)) - 1)
    return torch.cat([sizes, last * 3.0 ** torch.arange(1, count + 1).to(sizes)])


def _crossings(roots: tuple[Tensor, Tensor], angle: Tensor, cuts: tuple[Cuts, Cuts]) -> Tensor:
    """Return the directions (B, ·) of the points where a line u = k crosses a line v = l."""
    first, second = cuts[0].kinks, cuts[1].kinks
    safe = [torch.where(root > 0, root, 1e-300)[:, None, None] for root in roots]
    x = first[:, None] / safe[0]
    y = (second[None, :] / safe[1] - x * angle.cos()[:, None, None]) / angle.sin().clamp_min(
        1e-300
    )[:, None, None]
    return torch.atan2(y, x.expand_as(y)).nan_to_num(0.0).flatten(1)
