"""What a page shows of a network of yours: Laplace's posterior on a line or a plane through the data."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from net2gp.errors import InputError
from net2gp.inputs import gather
from net2gp.likelihoods import Categorical, Gaussian
from net2gp.methods import laplace
from net2gp.posteriors import Posterior
from net2gp.types import Data, Likelihood

LINE, SIDE = 161, 37
"""Places on a line, and on each side of a plane."""

MARGIN = 0.3
"""What a slice adds on each side to the range of the data, as a share of that range."""

SHOWN_POINTS, KERNEL_POINTS, SHOWN_OUTPUTS = 300, 40, 8


@dataclass(frozen=True)
class Slice:
    """A line or plane in the space of inputs: places origin + coordinates · directions.

    Args:
        origin: One input as a vector, (D,).
        directions: Orthonormal rows, (1, D) or (2, D).
        shares: The share of the variance of the inputs along each direction.
        names: What the axes are called.
    """

    origin: Tensor
    directions: Tensor
    shares: tuple[float, ...]
    names: tuple[str, ...]

    def coordinates(self, x: Tensor) -> Tensor:
        """Project inputs (N, …) on the slice: (N, 1) or (N, 2)."""
        return (x.flatten(1) - self.origin) @ self.directions.mT

    def places(self, coordinates: Tensor, like: Tensor) -> Tensor:
        """Return the inputs at coordinates, shaped as the rows of `like`."""
        flat = self.origin + coordinates @ self.directions
        return flat.reshape(-1, *like.shape[1:]).to(like)


def slice_through(x: Tensor) -> Slice:
    """Choose the slice: the axis of one input, the plane of two, else the first two principal components.

    Args:
        x: The inputs, (N, …).

    Returns:
        The slice, in float64.

    >>> plane = slice_through(torch.tensor([[0.0, 0, 5], [2, 0, 5], [0, 1, 5], [2, 1, 5]]))
    >>> plane.coordinates(torch.tensor([[1.0, 0.5, 7.0]])), sum(plane.shares)
    (tensor([[0., 0.]], dtype=torch.float64), 1.0)
    """
    flat = x.detach().flatten(1).double().cpu()
    D = flat.shape[1]
    if D <= 2:
        names = ("input",) if D == 1 else ("first input", "second input")
        return Slice(flat.new_zeros(D), torch.eye(D).double(), (1.0 / D,) * D, names)
    center = flat.mean(0)
    values, directions = torch.linalg.svd(flat - center, full_matrices=False)[1:]
    shares = values.square() / values.square().sum().clamp_min(1e-300)
    directions = directions[:2]
    names = ("first principal component", "second principal component")
    return Slice(center, directions, tuple(round(float(s), 4) for s in shares[:2]), names)


def own_network(network: nn.Module, data: Data, likelihood: Likelihood | None) -> dict[str, Any]:
    """Compute what the page shows of a network and its data; see `write_explorer`.

    Cost: one call of `laplace` and the predictions at 161 or 37² places.
    """
    x, y = gather(data, like=next(network.parameters(), None))
    if not isinstance(x, Tensor) or not x.is_floating_point() or len(x) < 3:
        raise InputError(
            "a slice goes through inputs that are one tensor of numbers, with three points at least. "
            "Pass data=(x, y) with x as a float tensor (N, …)."
        )
    chosen = likelihood or (Gaussian() if y.is_floating_point() else Categorical())
    posterior = laplace(network, (x, y), chosen)
    through = slice_through(x)
    at = through.coordinates(x.detach().double().cpu())
    ranges = [_widened(column) for column in at.T]
    grid = _grid(ranges)
    shown = _evenly(len(x), SHOWN_POINTS)
    return {
        "axes": list(through.names),
        "shares": list(through.shares),
        "ranges": ranges,
        "side": SIDE if len(ranges) == 2 else LINE,
        "fields": _fields(posterior, through.places(grid, x), classes=not y.is_floating_point()),
        "points": [[round(float(v), 4) for v in at[n]] for n in shown],
        "targets": [round(float(v), 4) for v in y.reshape(len(y), -1)[shown, 0]],
        "classes": not y.is_floating_point(),
        "kernel": _kernel(posterior, x[_evenly(len(x), KERNEL_POINTS)], at),
        "about": _about(posterior, network, len(x)),
    }


def _widened(values: Tensor) -> list[float]:
    low, high = float(values.min()), float(values.max())
    margin = MARGIN * (high - low) or 1.0
    return [low - margin, high + margin]


def _grid(ranges: list[list[float]]) -> Tensor:
    """Coordinates of all places, those of the first axis varying fastest and the second one falling."""
    if len(ranges) == 1:
        return torch.linspace(*ranges[0], LINE, dtype=torch.float64)[:, None]
    across, up = (torch.linspace(*one, SIDE, dtype=torch.float64) for one in ranges)
    return torch.stack([across.repeat(SIDE), up.flip(0).repeat_interleave(SIDE)], 1)


def _evenly(count: int, most: int) -> list[int]:
    return sorted(set(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()))


def _fields(posterior: Posterior, places: Tensor, classes: bool) -> list[dict[str, Any]]:
    with torch.no_grad():
        parts, novelty = posterior.split(places), posterior.novelty(places)
        law = posterior.predict(places)
        mean = law.probs if classes else law.mean
    mean = mean.reshape(len(places), -1)[:, :SHOWN_OUTPUTS]
    label = "probability of class {}" if classes else "mean of output {}"
    single = mean.shape[1] == 1
    names = ["mean"] if single and not classes else [label.format(c) for c in range(mean.shape[1])]
    fields = [{"name": name, "values": _packed(mean[:, c])} for c, name in enumerate(names)]
    if classes:
        entropy = -(law.probs.clamp_min(1e-12).log() * law.probs).sum(-1)
        fields.append({"name": "entropy of the classes", "values": _packed(entropy)})
    kinds = {
        "standard deviation": parts.total,
        "epistemic part": parts.epistemic,
        "aleatoric part": parts.aleatoric,
    }
    fields += [{"name": name, "values": _packed(_root(part))} for name, part in kinds.items()]
    return [*fields, {"name": "novelty", "values": _packed(novelty)}]


def _root(variances: Tensor) -> Tensor:
    """The root of the sum over outputs: for classes, of the variance of all indicators."""
    return variances.reshape(len(variances), -1).sum(1).clamp_min(0).sqrt()


def _packed(values: Tensor) -> str:
    return base64.b64encode(values.detach().cpu().numpy().astype("<f4").tobytes()).decode()


def _kernel(posterior: Posterior, x: Tensor, at: Tensor) -> dict[str, Any]:
    """The mean over outputs of the prior covariance at some points, in the order of the first axis."""
    order = at[_evenly(len(at), KERNEL_POINTS), 0].argsort(stable=True)
    x = x[order.to(x.device)]
    with torch.no_grad():
        K = posterior.kernel(x).double()
    C = K.shape[0] // len(x)
    K = K.reshape(len(x), C, len(x), C).diagonal(dim1=1, dim2=3).mean(-1)
    return {"size": len(x), "values": _packed(K)}


def _about(posterior: Posterior, network: nn.Module, count: int) -> str:
    parameters = sum(p.numel() for p in network.parameters())
    structure = getattr(posterior, "structure", None)
    kept = f", structure {type(structure).__name__}()" if structure is not None else ""
    return f"laplace of a network with {parameters:,} parameters on {count:,} points{kept}"
