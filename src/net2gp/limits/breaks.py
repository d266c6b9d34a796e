"""Where a function of one number has to be cut so that each piece is a polynomial to rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

Jet = Callable[[Tensor], list[Tensor]]

_POINTS = 20
_TOLERANCE = 1e-12
_NODES = np.cos((np.arange(_POINTS) + 0.5) * np.pi / _POINTS)
_TO_COEFFICIENTS = np.linalg.inv(np.polynomial.chebyshev.chebvander(_NODES, _POINTS - 1))


def resolved(jet: Jet, low: float, high: float, floor: Sequence[float]) -> bool:
    """Whether the Chebyshev coefficients of φ and its derivative between low and high fall below rounding.

    `floor` gives sizes of φ and φ' under which nothing matters.
    """
    u = torch.from_numpy(low + (high - low) * (_NODES + 1) / 2)
    for values, least in zip(jet(u), floor, strict=True):
        size = np.abs(_TO_COEFFICIENTS @ values.double().numpy())
        if not np.isfinite(size).all() or size[-3:].max() > _TOLERANCE * max(size.max(), least):
            return False
    return True


def _floor(jet: Jet) -> list[float]:
    near = torch.linspace(-1, 1, 32, dtype=torch.float64)
    return [float(value.abs().max()) + 1e-30 for value in jet(near)]


def find_breaks(jet: Jet, kinks: Sequence[float], reach: float) -> tuple[float, ...]:
    """Places of both signs, the kinks among them, between which φ and φ' are resolved up to ±reach.

    From each place on, the next panel is the longest that is resolved, by halving.

    >>> find_breaks(lambda u: [u * u, 2 * u], (), 64.0)
    ()
    """
    floor = _floor(jet)
    places = {float(k) for k in kinks if abs(k) < reach}
    for sign in (1.0, -1.0):
        stops = sorted({abs(k) for k in places if k * sign > 0} | {reach})
        start = 0.0
        for stop in stops:
            while start < stop:
                width = stop - start
                while width > 1e-6 * stop and not resolved(
                    jet, sign * start, sign * (start + width), floor
                ):
                    width /= 2
                start = start + width if width < stop - start else stop
                if start < stop:
                    places.add(sign * start)
    return tuple(sorted(places))


def find_kinks(jet: Jet, reach: float) -> tuple[float, ...]:
    """Places within ±reach where φ or φ' is not smooth, by bisection down to rounding.

    >>> find_kinks(lambda u: [u.abs(), u.sign()], 64.0)
    (0.0,)
    """
    floor = _floor(jet)
    # an odd number of uneven pieces keeps the usual places, such as 0 and 1, off their edges
    edges = reach * np.array([-1.0, -0.3137, -0.0731, -0.0119, 0.0107, 0.0719, 0.3119, 1.0])
    stack = list(pairwise(edges))
    found: list[float] = []
    while stack:
        low, high = stack.pop()
        if resolved(jet, low, high, floor):
            continue
        middle = low + 0.4831 * (high - low)
        if high - low < 1e-12 * reach or len(stack) > 10_000:
            found.append((low + high) / 2)
        else:
            stack += [(low, middle), (middle, high)]
    return _merged(sorted(found), 1e-9 * reach)


def _merged(places: list[float], gap: float) -> tuple[float, ...]:
    result: list[float] = []
    for place in places:
        if not result or place - result[-1] > gap:
            result.append(0.0 if abs(place) < gap else place)
    return tuple(result)
