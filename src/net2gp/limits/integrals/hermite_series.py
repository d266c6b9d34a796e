"""Gaussian expectations of products as sums over Hermite polynomials: E[f(u) g(v)] = Σ_k ρ^k a_k b_k.

a_k = E[f(√var1·z) h_k(z)] with h_k orthonormal, and b_k likewise for g. The error of K terms is at most
|ρ|^K √(E[f²] − Σ a_k²) √(E[g²] − Σ b_k²) for any functions. The bound decides for every pair whether K terms
are enough, and integrals in one dimension replace an integral in two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from net2gp.limits.integrals.plane_quadrature import REACH, panel_nodes

DEGREES = (48, 192, 768)
"""The numbers of terms that are tried in turn."""

TOLERANCE = 1e-13
"""The fraction of √(E[f²]E[g²]) that may be left out."""

_ORDER = 20  # nodes per panel
_CHUNK = 1 << 16
_COST = 1e-6  # seconds for one variance and term, per 7 cells
_DIRECT = 5e-3  # seconds for one pair by quadrature, with which the series competes

Function = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True, eq=False)
class Coefficients:
    """The first K Hermite coefficients of F functions for N variances.

    Args:
        values: The coefficients a_k, (F, K, N).
        norm: The norms E[f²], (F, N).
        rest: What the coefficients leave of the norms, E[f²] − Σ a_k², (F, N).
    """

    values: Tensor
    norm: Tensor
    rest: Tensor


def coefficients(
    function: Function, var: Tensor, breaks: Tensor, kinks: Tensor, count: int
) -> Coefficients:
    """Return the first `count` Hermite coefficients of what `function` returns, for rising variances.

    The functions are polynomials to rounding between the sorted `breaks`, which include their `kinks`.

    Per variance, the cost is `count` times 20 nodes for each of about √count · 19/8 cells, as a matrix
    product, and the same for each break, one by one.

    >>> var, none = torch.tensor([4.0]).double(), torch.zeros(0).double()
    >>> linear = coefficients(lambda u: [u], var, none, none, 3)
    >>> round(float(linear.values[0, 1, 0]), 12)
    2.0
    """
    z, weight, waves = (t.to(var.device) for t in _shared(count))
    cells = len(z) // _ORDER
    steps = torch.diff(breaks)
    gaps = torch.full_like(breaks, math.inf)
    gaps[1:] = steps
    gaps[:-1] = torch.minimum(gaps[:-1], steps)
    size = max(1, _CHUNK // (len(z) + 3 * len(breaks) * _ORDER))
    parts = []
    for q in var.split(size):
        root = torch.where(q > 0, q, 1e-300).sqrt()[:, None]
        # breaks between pieces longer than two cells need no cut, unless they are kinks: the cells resolve
        # what is smooth there
        long = gaps > 4 * REACH / cells * float(root.max())
        kept = breaks[~long | torch.isin(breaks, kinks)]
        places = (kept / root).clamp(-REACH, REACH)
        cell = ((places + REACH) * (cells / (2 * REACH))).long().clamp(0, cells - 1)
        broken = torch.zeros(len(q), cells, dtype=torch.bool, device=q.device).scatter_(
            1, cell, True
        )
        f = torch.stack(list(function(q.sqrt()[:, None] * z)))
        weighted = f * weight * ~broken.repeat_interleave(_ORDER, 1)
        values, norm = (weighted @ waves).mT, (weighted * f).sum(-1)
        if len(kept):
            more = _around_breaks(function, q, places, cell, broken, count)
            values, norm = values + more[0], norm + more[1]
        parts.append((values, norm))
    values, norm = (torch.cat(column, -1) for column in zip(*parts, strict=True))
    return Coefficients(values, norm, (norm - values.square().sum(1)).clamp_min(0))


@lru_cache(maxsize=8)
def _shared(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return nodes on equal cells, weights with the density in them, and h_k (nodes, K) there."""
    cells = math.ceil(2 * REACH / min(1.0, 8 / math.sqrt(count)))
    z, weight = panel_nodes(torch.linspace(-REACH, REACH, cells + 1, dtype=torch.float64), _ORDER)
    waves = torch.empty(count, len(z), dtype=torch.float64)
    for k, wave in enumerate(_waves(z, count)):
        waves[k] = wave
    return z, weight * _bell(z), waves.mT.contiguous()


def _bell(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def _waves(z: Tensor, count: int) -> Iterator[Tensor]:
    """Yield h_0(z), …, h_{count−1}(z); each must be used before the next, which overwrites its buffer."""
    now, before = torch.ones_like(z), torch.zeros_like(z)
    for k in range(count):
        yield now
        # √(k+1) h_{k+1} = z h_k − √k h_{k−1}
        before.mul_(-math.sqrt(k / (k + 1))).addcmul_(z, now, value=1 / math.sqrt(k + 1))
        now, before = before, now


def _around_breaks(
    function: Function, var: Tensor, places: Tensor, cell: Tensor, broken: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Return what cells with breaks add to coefficients (F, K, N) and norms (F, N); they are cut there."""
    cells = broken.shape[1]
    width = 2 * REACH / cells
    low = torch.linspace(-REACH, REACH, cells + 1, dtype=var.dtype, device=var.device)
    edges = torch.cat([places, low[cell], low[cell + 1]], 1).sort(1)[0]
    middle = (edges[:, 1:] + edges[:, :-1]) / 2
    inside = broken.gather(1, ((middle + REACH) / width).long().clamp(0, cells - 1))
    z, weight = panel_nodes(edges, _ORDER)
    weight = weight * _bell(z) * inside.repeat_interleave(_ORDER, 1)
    f = torch.stack(list(function(var.sqrt()[:, None] * z)))
    weighted = f * weight
    result = f.new_empty(f.shape[0], count, f.shape[1])
    for k, wave in enumerate(_waves(z, count)):
        result[:, k] = (weighted * wave).sum(-1)
    return result, (weighted * f).sum(-1)


def series_means(
    sides: tuple[Function, Function],
    variances: tuple[Tensor, Tensor],
    rho: Tensor,
    cuts: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> tuple[list[Tensor], Tensor]:
    """Compute E[f(u) g(v)] for each f, g that the two `sides` return in turn, and which pairs (B,) are done.

    u and v have `variances` (B,) each and correlation `rho` (B,); `cuts` are the breaks and kinks of both
    sides. The results of pairs that are not done are NaN.
    """
    results: list[Tensor] = []
    finished = torch.zeros_like(rho, dtype=torch.bool)
    left = torch.ones_like(rho)
    for count in DEGREES:
        # a pair is tried again if the bound promises success, or if the terms fall fast
        hope = ~finished & ((left * rho.abs() ** count <= TOLERANCE) | (left < 1e-6))
        pairs = torch.arange(len(rho), device=rho.device)
        if results:
            pairs = pairs[hope]
        sides_of = [torch.unique(var[pairs], return_inverse=True) for var in variances]
        cost = _COST * count * math.sqrt(count) / 7 * sum(len(unique) for unique, _ in sides_of)
        if results and cost >= _DIRECT * len(pairs):
            break
        one, two = (
            coefficients(side, unique, *places, count)
            for side, (unique, _), places in zip(sides, sides_of, cuts, strict=True)
        )
        first, second = (index for _, index in sides_of)
        scale = torch.sqrt(one.norm[:, first] * two.norm[:, second])
        rest = torch.sqrt(one.rest[:, first] * two.rest[:, second]) / scale.clamp_min(1e-300)
        left[pairs] = rest.amax(0)
        done = left[pairs] * rho[pairs].abs() ** count <= TOLERANCE
        if not results:
            results = [torch.full_like(rho, math.nan) for _ in range(len(one.norm))]
        for result, a, b in zip(results, one.values, two.values, strict=True):
            result[pairs[done]] = _summed(a, b, first[done], second[done], rho[pairs[done]])
        finished[pairs[done]] = True
    return results, finished


def _summed(a: Tensor, b: Tensor, first: Tensor, second: Tensor, rho: Tensor) -> Tensor:
    """Compute Σ_k ρ^k a_k b_k by Horner's rule, for the variances `first` and `second` of each pair."""
    total = torch.zeros_like(rho)
    for k in range(len(a) - 1, -1, -1):
        total.mul_(rho).addcmul_(a[k][first], b[k][second])
    return total
