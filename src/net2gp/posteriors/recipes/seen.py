"""What a network has seen: how much of the prior variance at a point its training inputs leave open.

The Fisher information of a sure classifier is next to nothing, so that the variance of its logits says
little about where it was trained. Here each training input counts alike, like a target with Gaussian noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from net2gp.errors import NetworkError
from net2gp.inputs import chunks, rows
from net2gp.linalg import pivots
from net2gp.linear.curvatures.head import features, has_features, last_linearized
from net2gp.linear.forward.places import channels_of, num_places
from net2gp.linear.linearized import Linearized
from net2gp.linear.parameters import all_layers
from net2gp.linear.precision import rechosen
from net2gp.posteriors.weights import Task
from net2gp.tags import savable
from net2gp.types import Inputs

NOISE = 1e-3
"""The noise variance of a target, relative to the prior variance of f there."""

ORDINARY = 0.8
"""The quantile of the training inputs' own shares up to which an input counts as ordinary to a classifier."""

EDGE = 0.9
"""The same for a regression."""

ORDINARY_PLACES = 0.999
"""The same at places, whose shares differ by far more: an image has thousands, many of them at borders."""

NUM_POINTS = 400
"""Training inputs whose tangent kernel is kept."""

TOGETHER = 200
"""Candidates among them whose columns of the kernel are computed together."""

MOST_PARAMETERS = 100_000
"""Parameters up to which the tangent kernel of all of them is used, and not the last layer's."""

FEW_SHARES = 2000
"""Training inputs whose own shares are computed."""

QUANTILE_NUMBERS = 10**7

CHUNK = 500
"""Points that go through the network together."""


class Seen(Protocol):
    """The inputs that a network was trained on, as a Gaussian process with targets there."""

    @property
    def ordinary(self) -> float:
        """The share that all but a few training inputs stay below, each left out itself."""

    def shares(self, linearized: Linearized) -> Callable[[Inputs], Tensor]:
        """The function from x to the share of the prior variance that training inputs leave open: (N,)."""


@savable("seen.SeenPoints")
@dataclass(frozen=True, eq=False)
class SeenPoints:
    """Some training inputs under the tangent kernel of parameters, averaged over outputs.

    With k̃(x, x') = k(x, x') / √(k(x, x) k(x', x')) the share is 1 − k̃(x, X)(K̃ + νI)⁻¹k̃(X, x).

    Args:
        x: The training inputs X, M of them.
        whitening: L⁻¹ with LLᵀ = K̃ + νI: (M, M).
        scales: √k(x, x) at X: (M,).
        ordinary: The share up to which inputs are ordinary.
        names: The parameters that the kernel is of; empty for those that vary.
    """

    x: Inputs
    whitening: Tensor
    scales: Tensor
    ordinary: float
    names: tuple[str, ...] = ()

    def shares(self, linearized: Linearized) -> Callable[[Inputs], Tensor]:
        """Return the function of shares, which costs M entries of the kernel and M² operations per point.

        Gradients at X are held where they are small, so that a later call runs the network at its own points
        alone.
        """
        linearized = rechosen(linearized, self.names) if self.names else linearized
        kernel = linearized.trace_kernel()
        at = kernel.keep(self.x) or (lambda z: (kernel(self.x, z), kernel.blocks(z)))

        def share(part: Inputs) -> Tensor:
            cross, own = (value.double() for value in at(part))
            scale = own.reshape(-1).clamp(min=1e-300).sqrt()
            known = self.whitening @ (cross / self.scales[:, None] / scale)
            return (1 - known.square().sum(0)).clamp(0, 1)

        return lambda x: torch.cat([share(part) for part in chunks(x, CHUNK)])


@savable("seen.SeenFeatures")
@dataclass(frozen=True, eq=False)
class SeenFeatures:
    """All training inputs under the kernel of the last layer, φ(x)ᵀφ(x').

    The share is λ φᵀ(Σφφᵀ + λI)⁻¹φ / φᵀφ, where λ is the noise for features of the average length.

    Args:
        names: The parameters of the last layer.
        root: √λ L⁻¹ with LLᵀ = Σφφᵀ + λI: (D', D').
        ordinary: The share up to which inputs are ordinary.
    """

    names: tuple[str, ...]
    root: Tensor
    ordinary: float

    def shares(self, linearized: Linearized) -> Callable[[Inputs], Tensor]:
        """Return the function of shares, which costs a forward pass and D'² operations per point."""
        head = _head(linearized, self.names)

        def share(part: Inputs) -> Tensor:
            return _open(features(head, part).double(), self.root)

        return lambda x: torch.cat([share(part) for part in chunks(x, _together(head, x))])


@savable("seen.Widening")
@dataclass(frozen=True, eq=False)
class Widening:
    """The variance that the outputs of a regression gain where inputs are novel: min(v (u/u₀)², w).

    The variance of the linear model is about proportional to the share u of the prior variance that training
    inputs leave open. What the network has beyond the linear model is of second order in its parameters, so
    that its variance is about proportional to u². It has the size v of the linear model's own variance where
    u is at the end u₀ of what is ordinary, and is never larger than the prior variance w. With `edge` as u₀
    its average over training inputs that are left out is at most v.

    Args:
        seen: The training inputs, with the share u₀ up to which inputs are ordinary.
        variance: The variance v of each output, the average at training inputs: (C,).
        prior_scale: By how much w is larger than the prior variance of the posterior.
    """

    seen: Seen
    variance: Tensor
    prior_scale: float = 1.0

    def gained(self, shares: Tensor, prior_variances: Tensor) -> Tensor:
        """Return the variances (N, C) for shares (N,) and prior variances (N, C)."""
        squares = (shares.double() / self.seen.ordinary).square()
        return torch.minimum(
            squares[:, None] * self.variance, self.prior_scale * prior_variances.double()
        )

    def scaled(self, factor: float) -> Widening:
        """Return what belongs to `factor` times the covariance and the prior variance."""
        return replace(self, variance=factor * self.variance)


def seen_by(
    task: Task,
    some: Task,
    *,
    ordinary: Callable[[Tensor], float] | None = None,
    at_random: bool = False,
) -> SeenPoints | SeenFeatures | None:
    """What the training inputs tell a network.

    Small networks keep the tangent kernel at some of the inputs: of the parameters that vary, or if these are
    the last layer alone, of all that are not frozen, since a last layer sees little of where the layers
    before it were trained. A large network that has a last layer keeps a matrix of all inputs' features;
    another one keeps nothing.

    Args:
        task: The network with the parameters that vary, and its training inputs.
        some: The task at `FEW_SHARES` of the inputs, a random choice.
        ordinary: What the training inputs' own shares say is ordinary; None takes what four in five inputs
            (or all but one in a thousand places) stay below.
        at_random: Keep a random choice of points, which are dense where the data are, and not those that the
            others say least about, which leave the same everywhere.

    Returns:
        What was seen, or None.
    """
    linearized, few = task.linearized, task.few()
    at_points = channels_of(linearized) is None
    ordinary = ordinary or (most if at_points else partial(most, quantile=ORDINARY_PLACES))
    whole = all_layers(linearized) if _is_last(linearized, few) else linearized
    if at_points and whole.num_params <= MOST_PARAMETERS:
        names = () if whole is linearized else tuple(whole.params)
        with suppress(NetworkError):  # layers before the last one may have no kernel
            points = some.some(NUM_POINTS).x if at_random else some.x
            return replace(_points(whole, points, ordinary), names=names)
    try:
        head = last_linearized(linearized, few)
    except NetworkError:
        return None
    return _features(head, task, some, ordinary) if has_features(head, few) else None


def _is_last(linearized: Linearized, x: Inputs) -> bool:
    """Whether the last layer alone varies, as a matrix that multiplies features."""
    names = [name.rpartition(".") for name in linearized.params]
    if len({place for place, _, _ in names}) > 1 or {own for _, _, own in names} - {
        "weight",
        "bias",
    }:
        return False
    try:
        return set(last_linearized(linearized, x).params) == set(linearized.params)
    except NetworkError:
        return False


def _points(
    linearized: Linearized, points: Inputs, ordinary: Callable[[Tensor], float]
) -> SeenPoints:
    """Keep the points that the others say least about, and note what they leave open of each.

    Each pivot of the normalized kernel is the point of the largest share that the pivots before it leave
    open, so that 400 of them know nearly what all points know. If fewer leave nothing open, some of the
    others are kept as well: each one makes its surroundings surer. Cost: twice as many columns.
    """
    kernel = linearized.trace_kernel()
    scales = kernel.diag(points).double().clamp(min=1e-300).sqrt()
    at = kernel.keep(points)

    def columns(index: Tensor) -> Tensor:
        some = rows(points, index)
        found = kernel(points, some) if at is None else at(some)[0]
        return found.double() / scales[:, None] / scales[index]

    chosen, cross = _knowing(columns, torch.arange(len(scales), device=scales.device))
    noisy = cross[chosen]
    noisy.diagonal().add_(NOISE)
    L = torch.linalg.cholesky(noisy)
    whitening = torch.linalg.solve_triangular(L, torch.eye(len(L)).to(L), upper=False)
    shares = 1 - (whitening @ cross.mT).square().sum(0)
    shares[chosen] = 1 / whitening.square().sum(0) - NOISE
    kept = points if len(chosen) == len(scales) else rows(points, chosen)
    return SeenPoints(kept, whitening, scales[chosen], ordinary(shares.clamp(0, 1)))


def _knowing(columns: Callable[[Tensor], Tensor], every: Tensor) -> tuple[Tensor, Tensor]:
    """The indices (M,) of points that know most of what all know, and their columns of the kernel (N, M)."""
    count = len(every)
    if count <= NUM_POINTS:
        return every, columns(every)
    # a thousandth of the noise is more than float32 rounds, and nothing is open below it
    ones = every.new_ones(count, dtype=torch.float64)
    found = pivots(ones, columns, NUM_POINTS, block=TOGETHER, largest=1e-3 * NOISE)
    chosen, cross = found.index, found.L @ found.L[found.index].mT
    if len(chosen) < NUM_POINTS:
        rest = ones.index_fill(0, chosen, 0.0).nonzero()[: NUM_POINTS - len(chosen), 0]
        chosen, cross = torch.cat([chosen, rest]), torch.cat([cross, columns(rest)], 1)
    return chosen, cross


def _features(
    head: Linearized, task: Task, some: Task, ordinary: Callable[[Tensor], float]
) -> SeenFeatures:
    width = sum(value[0].numel() for value in head.params.values())
    H, count = head.example.new_zeros(width, width, dtype=torch.float64), 0
    for piece in task.pieces("features"):
        for phi in _counted(head, piece):
            H += phi.T @ phi
            count += len(phi)
    noise = NOISE * float(H.trace()) / count
    if not noise > 0:  # the features are zero, so that nothing was seen
        noise = NOISE
    H.diagonal().add_(noise)
    L = torch.linalg.cholesky(H)
    root = noise**0.5 * torch.linalg.solve_triangular(L, torch.eye(width).to(L), upper=False)
    phi = torch.cat(list(_counted(head, some)))
    left = (phi @ root.T).square().sum(1) / noise
    without = _open(phi, root) / (1 - left).clamp(min=1e-3)
    return SeenFeatures(tuple(head.params), root, ordinary(without.clamp(max=1)))


def _counted(head: Linearized, task: Task) -> Iterator[Tensor]:
    """Features of the points of a task, or of those of their places that count."""
    size = _together(head, task.x)
    used = getattr(task.likelihood, "used", None)
    for number, part in enumerate(chunks(task.x, size)):
        phi = features(head, part).double()
        if used is not None:
            phi = phi[used[number * size : (number + 1) * size].reshape(-1)]
        yield phi


def _together(head: Linearized, x: Inputs) -> int:
    """How many points go through the network together: fewer, the more places they have."""
    return max(1, CHUNK // num_places(head, x))


def _open(phi: Tensor, root: Tensor) -> Tensor:
    """|root φ|²/|φ|², one where φ is zero: (N,)."""
    length = phi.square().sum(1)
    left = (phi @ root.T).square().sum(1)
    return torch.where(length > 0, left / torch.where(length > 0, length, 1.0), 1.0)


def most(shares: Tensor, quantile: float = ORDINARY) -> float:
    """The share that most points stay below; at least some roundings above zero."""
    few = shares[:: -(-len(shares) // QUANTILE_NUMBERS)]  # torch takes no more
    return max(float(torch.quantile(few, quantile)), 1e-12)


def edge(shares: Tensor) -> float:
    """The share that nine in ten stay below, or the root mean square if a few shares are much larger."""
    return max(most(shares, EDGE), float(shares.square().mean().sqrt()))


def _head(linearized: Linearized, names: tuple[str, ...]) -> Linearized:
    values = {**linearized.frozen, **linearized.params}
    frozen = {name: value for name, value in values.items() if name not in names}
    return replace(linearized, params={name: values[name] for name in names}, frozen=frozen)
