"""Whether a kernel can tell points apart: on the data, and away from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import InputError, Net2GPWarning, warn
from net2gp.inputs import describe
from net2gp.types import Kernel

SAME, APART = 0.99, 0.01
"""Similarities from which on points count as the same, and below which they share nothing."""

DISTANCES = (3.0, 6.0)
"""How far probes are from the center of the data, in units of the farthest point's distance."""

MOST_POINTS = 500
"""The most points of the data that are compared with each other."""


class SaturatedKernel(Net2GPWarning):
    """A kernel cannot tell points apart, or takes every point for unrelated to every other."""


@dataclass(frozen=True)
class Saturation:
    """How similar points are under a kernel, s(x, x') = 2 k(x, x') / (k(x, x) + k(x', x')), which is 1 only
    if f(x) = f(x').

    Args:
        between: The median similarity of two points of the data.
        nearest: The median over points of the data of the similarity to the most similar other point.
        beyond: The median similarity of two probes in the same direction away from the data, at three and
            at six times the distance of the farthest point.
        mistaken: The median over the nearer probes of the similarity to the most similar point of the data.
    """

    between: float
    nearest: float
    beyond: float
    mistaken: float

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong, in sentences; empty if nothing is."""
        found = []
        if self.between > SAME:
            found.append(
                f"the kernel is constant on the data: the median similarity is {self.between:.4f}. Scale the "
                "inputs, shorten the length scale, or train with more weight_decay."
            )
        if self.nearest < APART:
            found.append(
                "every point is independent of every other: the median similarity to the most similar "
                f"one is {self.nearest:.4f}. Lengthen the length scale."
            )
        if self.mistaken > SAME:
            found.append(
                "points far away are taken for points of the data, so that predictions there are certain: "
                f"the median similarity is {self.mistaken:.4f}. Add a kernel of the inputs, as "
                "NetworkKernel(...) + RBF(), or use features that keep distances."
            )
        elif self.beyond > SAME:
            found.append(
                f"the kernel is constant off the data: the median similarity is {self.beyond:.4f}. Add a "
                "kernel of the inputs, as NetworkKernel(...) + RBF(), or use features that keep distances."
            )
        return tuple(found)

    def warn(self) -> None:
        """Warn with `SaturatedKernel` of everything that is wrong."""
        if self.faults:
            warn(" Also: ".join(self.faults), SaturatedKernel)


@torch.no_grad()
def saturation(kernel: Kernel, x: Tensor, *, seed: int = 0) -> Saturation:
    """Measure whether a kernel can tell points apart.

    Deep kernel learning fails silently: a network can map all data to one feature, a length scale of 1 can
    make all points independent if features are many, and bounded or collapsed features make the process
    certain far from the data. Predictions are then the mean of the targets, or as good as chance, and nothing
    else says so. Cost: kernel matrices of at most 500 × 500 points.

    Args:
        kernel: The kernel.
        x: The inputs of the data, (N, …), at least two different rows.
        seed: The seed of the choice of points, if there are more than 500.

    Returns:
        The similarities, whose `faults` say what is wrong.

    Raises:
        InputError: If `x` is not one floating tensor with two different rows.

    >>> from net2gp.kernels import RBF
    >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    >>> saturation(RBF(0.5), x).faults
    ()
    >>> saturation(RBF(100.0), x).faults[0][:34]
    'the kernel is constant on the data'

    Reference: Ober, Rasmussen & van der Wilk, "The promises and pitfalls of deep kernel learning", UAI 2021.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
        raise InputError(
            f"saturation needs x as one floating tensor of shape (N, D), but x is {describe(x)}."
        )
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(x), generator=generator)[:MOST_POINTS].sort().values
    points = x[chosen.to(x.device)]
    gaps = (points - points.mean(0)).flatten(1)
    length = gaps.norm(dim=1)
    keep = length > 1e-6 * length.max()
    if len(points) < 2 or not bool(keep.any()):
        raise InputError("saturation needs at least two different rows of x.")
    towards = gaps[keep] / length[keep, None] * length.max()
    near, far = (
        (points.mean(0).flatten() + r * towards).reshape(-1, *points.shape[1:]) for r in DISTANCES
    )
    precise = kernel.precise()
    own, away, farther = (precise.diag(part) for part in (points, near, far))
    among = _similarity(precise(points), own, own)
    others = among.masked_fill(torch.eye(len(points), dtype=torch.bool, device=x.device), -1.0)
    upper = torch.triu_indices(len(points), len(points), 1, device=x.device)
    return Saturation(
        between=float(among[upper[0], upper[1]].median()),
        nearest=float(others.max(1).values.median()),
        beyond=float(_similarity(precise(near, far), away, farther).diagonal().median()),
        mistaken=float(_similarity(precise(near, points), away, own).max(1).values.median()),
    )


def _similarity(K: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """2 k(x, x') / (k(x, x) + k(x', x')), and 1 where both variances are 0: (N, M)."""
    total = rows[:, None] + columns[None, :]
    return torch.where(total > 0, 2 * K / total.clamp(min=1e-300), torch.ones_like(K))
