"""The law of two points' distance over depth, without sampling, and the depth at which it stands still."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.deep.depth import checked, collapse_threshold, log_slope, ratio
from net2gp.errors import InputError, check_count, check_positive
from net2gp.kernels import RBF

STEP = 0.05
"""The smallest size of a cell of log distances."""

MOST_CELLS = 2000
"""The number of cells from which on they are made larger."""

MOST_LAYERS = 20_000
"""The depth at which the search for the effective depth ends."""

LONGEST_TAIL = 18.0
"""The longest tail of the law of log distances that a grid is made for."""


@dataclass(frozen=True, eq=False)
class _Chain:
    """The Markov chain of log distances on cells: p ← p T, where the lowest cell takes all that is below."""

    edges: Tensor
    step: float
    transition: Tensor

    @staticmethod
    def of(layer: RBF, width: int, lowest: float, distance: float) -> _Chain:
        """Integrate the law of the next log distance over cells, from the middle of each cell.

        Given u = log d the next one is m(u) + ½ log χ²_H, with m(u) = ½ log 2σ²(1 − exp(−d²/2ℓ²)).
        """
        output_var, scale = (
            torch.as_tensor(value, dtype=torch.float64).item()
            for value in (layer.output_var, layer.lengthscale)
        )
        # a χ² number exceeds its mean by more than 60 √(2H) + 60 with a probability below 1e-12
        top = 0.5 * math.log(2 * output_var * (width + 60 + 60 * (2 * width) ** 0.5))
        reach = max(top, math.log(distance)) - lowest
        step = max(STEP, reach / MOST_CELLS)
        count = int(reach / step) + 2
        edges = lowest + step * torch.arange(count + 1, dtype=torch.float64)
        log_z = 2 * (edges[:-1] + step / 2) - math.log(2 * scale**2)
        # log(1 − e^(−z)) is log z for small z, which may underflow
        apart = torch.where(log_z > -30, torch.log(-torch.expm1(-log_z.exp())), log_z)
        center = 0.5 * (math.log(2 * output_var) + apart)
        squares = (2 * (edges[None, 1:-1] - center[:, None])).clamp(max=700).exp()
        half = torch.tensor(width / 2, dtype=torch.float64)
        below = torch.special.gammainc(half, squares / 2)
        ones = torch.ones(count, 1, dtype=torch.float64)
        return _Chain(edges, step, torch.cat([0 * ones, below, ones], 1).diff(dim=1))

    def laws(self, distance: float) -> Iterator[Tensor]:
        """Yield the probabilities of the cells after 0, 1, 2, … layers, for two points at this distance."""
        place = (math.log(distance) - float(self.edges[0])) / self.step - 0.5
        p = torch.zeros(len(self.transition), dtype=torch.float64)
        # shared between two cells such that the mean is right
        left = min(max(int(place), 0), len(p) - 2)
        share = min(max(place - left, 0.0), 1.0)
        p[left], p[left + 1] = 1 - share, share
        while True:
            yield p
            p = p @ self.transition

    def stationary(self) -> Tensor:
        """Solve p T = p with Σ p = 1, the law that an ergodic chain comes to."""
        count = len(self.transition)
        system = self.transition.mT - torch.eye(count, dtype=torch.float64)
        # one of the equations follows from the others, and the sum takes its place
        system[-1] = 1.0
        right = torch.zeros(count, dtype=torch.float64)
        right[-1] = 1.0
        return torch.linalg.solve(system, right)


def distance_quantiles(
    layer: RBF,
    distance: float,
    num_layers: int,
    *,
    levels: Sequence[float] = (0.05, 0.5, 0.95),
    width: int = 1,
) -> Tensor:
    """Compute quantiles of log ‖f_l(x) − f_l(x')‖ for l = 1 … L, for two points at a given distance.

    The log distance is a Markov chain (see `log_distances`), whose law is carried from layer to layer on a
    grid of at most 2000 cells, which reaches as far down as distances fall. There is no sampling error. The
    cost is L products with the matrix of the chain.

    Args:
        layer: A kernel `RBF(lengthscale, output_var)` with a single length scale.
        distance: The distance of the two inputs.
        num_layers: The number L of layers.
        levels: The probabilities of the quantiles.
        width: The number of outputs of a layer.

    Returns:
        Quantiles of the log distance, (L, number of levels).

    Raises:
        InputError: If a level is not between 0 and 1, or another argument is out of range.

    >>> found = distance_quantiles(RBF(output_var=2.0), 0.5, 10, levels=[0.5])
    >>> round(found[-1].item(), 2)
    -3.65

    Reference: Dunlop, Girolami, Stuart & Teckentrup, "How deep are deep Gaussian processes?", 2018.
    """
    checked(layer, width)
    check_positive(distance, "distance")
    check_count(num_layers, "num_layers")
    if not levels or not all(0 < level < 1 for level in levels):
        raise InputError(
            f"levels must be probabilities between 0 and 1, such as (0.05, 0.5, 0.95), but are {levels}."
        )
    law = log_slope(layer, width=width)
    mean, spread = float(law.mean), float(law.variance)
    # eight standard deviations of a sum of log slopes, or what the limit's tail needs
    fall = 8 * (num_layers * spread) ** 0.5
    fall = min(fall, 30 + 4 * spread / mean) if mean > 0 else fall - num_layers * mean
    typical = float(torch.as_tensor(layer.output_var)) ** 0.5
    lowest = math.log(min(distance, typical)) - fall - 5
    chain = _Chain.of(layer, width, lowest, distance)
    wanted = torch.tensor(list(levels), dtype=torch.float64)
    laws = chain.laws(distance)
    next(laws)
    found = []
    for _, p in zip(range(num_layers), laws, strict=False):
        total = p.cumsum(0)
        cell = torch.searchsorted(total, wanted).clamp(max=len(p) - 1)
        into = 1 - (total[cell] - wanted) / p[cell].clamp(min=1e-300)
        found.append(chain.edges[cell] + chain.step * into)
    return torch.stack(found)


def effective_depth(
    layer: RBF,
    distance: float = 1.0,
    *,
    width: int = 1,
    resolution: float = 1e-3,
    tolerance: float = 0.05,
) -> int:
    """Count the layers after which one more layer changes the law of two points' distance no more.

    The distance of two points is a Markov chain over layers. Above `collapse_threshold()` it is ergodic: it
    forgets the inputs and comes to a law of its own. Below, it falls to zero. Both ways there is a depth from
    which on functions have the same law, and it is this depth that is returned: the first l at which the
    distribution function of max(d_l, `resolution`) is within `tolerance` of its limit everywhere. At the
    threshold itself convergence is slow. The law is carried on a grid, so the answer is not random.

    Args:
        layer: A kernel `RBF(lengthscale, output_var)` with a single length scale.
        distance: The distance of the two inputs.
        width: The number of outputs of a layer.
        resolution: The distance below which two points count as one.
        tolerance: The largest difference of the two distribution functions (Kolmogorov's distance).

    Returns:
        The depth.

    Raises:
        InputError: If an argument is out of range, or the layer is within a tenth of
            `collapse_threshold`, where the depth has no bound.

    >>> effective_depth(RBF(output_var=1.0)), effective_depth(RBF(output_var=8.0))
    (23, 8)

    Reference: Dunlop, Girolami, Stuart & Teckentrup, "How deep are deep Gaussian processes?", 2018.
    """
    checked(layer, width)
    for value, name in ((distance, "distance"), (resolution, "resolution")):
        check_positive(value, name)
    if not 1e-3 <= tolerance < 1:
        raise InputError(f"tolerance must be from 0.001 to 1, but is {tolerance}. Try 0.05.")
    # the law has a tail of about this length towards short distances, which the grid must hold
    law = log_slope(layer, width=width)
    tail = float(law.variance / (2 * law.mean.abs()))
    near = InputError(
        f"effective_depth needs output_var/lengthscale² away from collapse_threshold(width={width}) = "
        f"{collapse_threshold(width=width):.4g}, where convergence takes forever, but it is "
        f"{float(ratio(layer)):.4g}. Take a layer that differs from it by a tenth or more."
    )
    if tail > LONGEST_TAIL:
        raise near
    margin = max(30.0, 8 * tail)
    lowest = min(math.log(resolution), math.log(distance)) - margin
    chain = _Chain.of(layer, width, lowest, distance)
    seen = chain.edges[1:] >= math.log(resolution)
    limit = torch.ones(()) if law.mean < 0 else chain.stationary().cumsum(0)[seen]
    for depth, p in zip(range(MOST_LAYERS), chain.laws(distance), strict=False):
        if float((p.cumsum(0)[seen] - limit).abs().max()) <= tolerance:
            return depth
    raise near
