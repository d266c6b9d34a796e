"""Where a function of one number has to be cut so that each piece is a polynomial to rounding.

A survey looks at φ and φ' on panels that grow with the distance from zero. Each panel is a little wider than
its share of the line, so that no place falls between two of them, and panels that a polynomial does not
resolve are halved. A place that stays unresolved however narrow the panel is a kink or a jump.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from net2gp.errors import NetworkError

Jet = Callable[[Tensor], list[Tensor]]

MAX_PIECES = 2000
"""The search gives up when more panels than this are unresolved at once."""

_POINTS = 20
_TOLERANCE = 1e-12
_NODES = np.cos((np.arange(_POINTS) + 0.5) * np.pi / _POINTS)
_TO_COEFFICIENTS = np.linalg.inv(np.polynomial.chebyshev.chebvander(_NODES, _POINTS - 1))
_STEP = 0.02  # width of the first panels near zero, and their growth
_MARGIN = 0.03  # how far a panel looks into its neighbors, in widths
_SPLIT = 0.4831  # not a half, so that kinks at round places do not lie on edges
_NARROW = 1e-13  # the width at which halving ends, relative to the place
_HINT = (
    "Name the places where it or its derivative jumps: Pointwise(function, kinks=(...)), or kinks=() if "
    "there are none; or use monte_carlo_kernel(network)."
)


@dataclass(frozen=True, eq=False)
class Panels:
    """The values of φ and φ' at Chebyshev nodes of panels, and how well a polynomial fits there.

    `tail` is the size of the last coefficients, divided by the size of all coefficients or by `floor`,
    whichever is larger.
    """

    low: np.ndarray
    high: np.ndarray
    nodes: np.ndarray
    values: np.ndarray
    floor: np.ndarray
    tail: np.ndarray

    def __getitem__(self, which: np.ndarray) -> Panels:
        arrays = (self.low, self.high, self.nodes, self.tail)
        low, high, nodes, tail = (array[which] for array in arrays)
        return Panels(low, high, nodes, self.values[:, which], self.floor[:, which], tail)


def _coefficients(values: np.ndarray) -> np.ndarray:
    return np.abs(values @ _TO_COEFFICIENTS.T)


def _seen(
    jet: Jet, low: np.ndarray, high: np.ndarray, floor: np.ndarray | None, walls: np.ndarray
) -> Panels:
    """Return panels from low to high and a margin beyond, but not beyond `walls`.

    Without a `floor` a first one is computed.
    """
    width = high - low
    place = np.searchsorted(walls, (low + high) / 2)
    left = np.maximum(low - _MARGIN * width, walls[place - 1])
    right = np.minimum(high + _MARGIN * width, walls[place])
    nodes = left[:, None] + (right - left)[:, None] * (_NODES + 1) / 2
    found = jet(torch.from_numpy(nodes.reshape(-1)))
    values = np.stack([v.double().numpy().reshape(nodes.shape) for v in found])
    _check_finite(nodes, values)
    if floor is None:
        # errors count relative to the largest value between zero and here
        order = np.argsort(np.abs(low + high))
        floor = np.empty(values.shape[:2])
        largest = np.abs(values).max(-1)
        floor[:, order] = np.maximum.accumulate(largest[:, order], 1) + 1e-30
        # derivatives such as 1 − tanh² carry the rounding of φ itself
        floor[1] = np.maximum(floor[1], 1e-3 * floor[0] / (1 + np.abs(low)))
    size = _coefficients(values)
    tail = (size[..., -3:].max(-1) / np.maximum(size.max(-1), floor)).max(0)
    return Panels(low, high, nodes, values, floor, tail)


def _check_finite(nodes: np.ndarray, values: np.ndarray) -> None:
    bad = ~np.isfinite(values)
    if not bad.any():
        return
    which = 0 if bad[0].any() else 1
    place = nodes[bad[which]][np.argmin(np.abs(nodes[bad[which]]))]
    what = "an activation" if which == 0 else "the derivative of an activation"
    raise NetworkError(
        f"{what} is not a finite number at {place:.6g}, a value that its Gaussian inputs take. Use a "
        "function that is finite, with its derivative, wherever its inputs reach, such as "
        "Pointwise(lambda u: u.clamp_min(1e-3).log(), kinks=(1e-3,)), or inputs of a smaller variance."
    )


def _too_many(reach: float) -> NetworkError:
    return NetworkError(
        f"an activation is not integrated: within ±{reach:.3g}, where its Gaussian inputs lie, it has more "
        f"than {MAX_PIECES} pieces, or grows without bound. {_HINT}"
    )


def _check_bounded(jet: Jet, kinks: Sequence[float]) -> None:
    """Refuse functions that grow without bound at a kink, or whose derivative does."""
    for kink in kinks:
        scale = max(1.0, abs(kink))
        near, far = (kink + scale * np.array([-d, d]) for d in (1e-11, 1e-6))
        values = [v.double().abs() for v in jet(torch.from_numpy(np.stack([near, far])))]
        if any(float(v[0].max()) > 30 * (1 + float(v[1].max())) for v in values):
            raise NetworkError(
                f"an activation or its derivative grows without bound at {kink:g}, so that its expectations "
                "are infinite or not integrated. Use a function with bounded derivatives, such as "
                "Pointwise(lambda u: (u * u + 0.01) ** 0.25, kinks=()), or monte_carlo_kernel(network)."
            )


def _first_edges(reach: float) -> np.ndarray:
    """Return edges that are _STEP apart near zero and then grow by that factor, never at round places."""
    unit = min(1.0, reach / 4)
    count = int(np.arcsinh(reach / unit) / _STEP) + 1
    edges = unit * np.sinh((np.arange(-count, count) + 0.381966) * _STEP)
    return np.concatenate([[-reach], edges[np.abs(edges) < reach], [reach]])


Place = tuple[float, float]


def _survey(jet: Jet, kinks: Sequence[float], reach: float) -> tuple[list[Place], Panels]:
    """Return further kinks, each with its uncertainty, and the panels that resolve φ up to ±reach."""
    walls = np.array([-np.inf, *sorted(kinks), np.inf])
    edges = np.unique(np.concatenate([_first_edges(reach), [k for k in kinks if abs(k) < reach]]))
    now = _seen(jet, edges[:-1], edges[1:], None, walls)
    found: list[Place] = []
    done: list[Panels] = []
    above = np.full(len(now.low), np.inf)  # the tail of the panel from which each was halved
    while True:
        fine = now.tail <= _TOLERANCE
        done.append(now[fine])
        now, above = now[~fine], above[~fine]
        if not len(now.low):
            break
        if len(now.low) > MAX_PIECES:
            raise _too_many(reach)
        narrow = now.high - now.low < _NARROW * np.maximum(1.0, np.abs(now.low))
        found += _places(now.low[narrow], now.high[narrow])
        now, above = now[~narrow], above[~narrow]
        middle = now.low + _SPLIT * (now.high - now.low)
        halves = _seen(
            jet,
            np.stack([now.low, middle], 1).reshape(-1),
            np.stack([middle, now.high], 1).reshape(-1),
            np.repeat(now.floor, 2, 1),
            walls,
        )
        pair = halves.tail.reshape(-1, 2)
        larger = pair.max(1)
        # halving shrinks the tail of a smooth function a millionfold, but of a kink by a small power of two
        rounding = 2e-13 * np.maximum(1.0, np.abs(now.low) / 30)
        weak = (larger <= _TOLERANCE) & (larger > np.maximum(now.tail / 100, rounding))
        found += _places(now.low[weak], now.high[weak])
        # rounding errors stay the same from a panel to its halves and their halves; a kink's tail shrinks
        noise = (now.tail < 1e-9) & (larger > 0.6 * above) & (pair.min(1) > 0.1 * above)
        done.append(halves[np.repeat(noise, 2)])
        now, above = halves[np.repeat(~noise, 2)], np.repeat(now.tail[~noise], 2)
    return found, _joined(done)


def _joined(parts: list[Panels]) -> Panels:
    names = ("low", "high", "nodes", "tail")
    low, high, nodes, tail = (np.concatenate([getattr(p, n) for p in parts]) for n in names)
    values, floor = (np.concatenate([getattr(p, n) for p in parts], 1) for n in ("values", "floor"))
    return Panels(low, high, nodes, values, floor, tail)


def find_kinks(jet: Jet, reach: float) -> tuple[float, ...]:
    """Find the places within ±reach where φ, φ' or a higher derivative jumps, down to rounding.

    >>> find_kinks(lambda u: [u.abs(), u.sign()], 64.0)
    (0.0,)
    """
    found, _ = _survey(jet, (), reach)
    return _merged(found)


def _places(low: np.ndarray, high: np.ndarray) -> list[Place]:
    return list(zip(((low + high) / 2).tolist(), (high - low).tolist(), strict=True))


def _merged(places: list[Place]) -> tuple[float, ...]:
    """Return one place per cluster."""
    result: list[float] = []
    for place, width in sorted(places):
        place = _roundest(place, width)
        if not result or place - result[-1] > max(width, 1e-8 * max(1.0, abs(place))):
            result.append(place)
    return tuple(result)


def _roundest(place: float, width: float) -> float:
    """Return the number with the fewest digits that the search cannot distinguish from `place`."""
    digits = (float(f"{place:.{count}g}") for count in range(1, 16))
    return next((x for x in (0.0, *digits) if abs(x - place) <= 2 * width), place)


def find_breaks(jet: Jet, kinks: Sequence[float], reach: float) -> tuple[float, ...]:
    """Find places up to ±reach, including the kinks, between which φ and φ' are polynomials to rounding.

    From each place on, the next panel is the longest that a polynomial resolves, at its own nodes and at
    the nodes of the survey, which sees every transition.

    >>> find_breaks(lambda u: [u * u, 2 * u], (), 64.0)
    ()
    """
    kinks = [float(k) for k in kinks if abs(k) < reach]
    weak, panels = _survey(jet, kinks, reach)
    known = _Known.of(panels)
    places = {*kinks, *_merged(weak)}
    _check_bounded(jet, sorted(places))
    for sign in (1.0, -1.0):
        start, width = 0.0, reach
        for stop in sorted({abs(k) for k in places if k * sign > 0} | {reach}):
            while start < stop:
                width = _longest(jet, known, sign, start, stop, width)
                start = start + width if start + width < stop else stop
                if start < stop:
                    places.add(sign * start)
                if len(places) > MAX_PIECES:
                    raise _too_many(reach)
    return tuple(sorted(places))


@dataclass(frozen=True, eq=False)
class _Known:
    """The survey's nodes in rising order, with φ, φ' and the sizes to which errors are compared there."""

    nodes: np.ndarray
    values: np.ndarray
    floor: np.ndarray

    @staticmethod
    def of(panels: Panels) -> _Known:
        nodes = panels.nodes.reshape(-1)
        order = np.argsort(nodes)
        values = panels.values.reshape(2, -1)[:, order]
        return _Known(nodes[order], values, np.repeat(panels.floor, _POINTS, 1)[:, order])


def _longest(
    jet: Jet, known: _Known, sign: float, start: float, stop: float, width: float
) -> float:
    """Return the width of the longest resolved panel from `start` towards `stop`; `width` is a guess."""
    width = min(stop - start, 4 * width)
    grows = True
    while width < stop - start and grows:
        grows = _resolved(jet, known, *sorted((sign * start, sign * (start + 2 * width))))
        width = min(stop - start, 2 * width) if grows else width
    least = 1e-9 * min(1.0, stop)
    while not _resolved(jet, known, *sorted((sign * start, sign * (start + width)))):
        width /= 2
        if width < least:
            break
    return width


def _resolved(jet: Jet, known: _Known, low: float, high: float) -> bool:
    """Whether polynomials through 20 nodes equal φ and φ' to rounding between low and high."""
    nodes = low + (high - low) * (_NODES + 1) / 2
    values = np.stack([v.double().numpy() for v in jet(torch.from_numpy(nodes))])
    first, last = np.searchsorted(known.nodes, [low, high])
    floor = known.floor[:, first:last].max(1) if last > first else known.floor[:, :1].max(1)
    coefficients = values @ _TO_COEFFICIENTS.T
    size = np.abs(coefficients)
    bound = np.maximum(size.max(1), floor)
    short = (high - low) / max(1.0, known.nodes[-1]) if high - low < 1e-5 else 1.0
    # on a very short panel an error counts only by the small probability mass there
    if (size[:, -3:].max(1) * min(1.0, short * 100) > _TOLERANCE * bound).any():
        return False
    x = (known.nodes[first:last] - low) * (2 / (high - low)) - 1
    fitted = np.polynomial.chebyshev.chebval(x, coefficients.T)
    error = np.abs(fitted - known.values[:, first:last]).max(1, initial=0.0)
    return bool((error <= 100 * _TOLERANCE * bound).all() or short < 1.0)
