"""What a page shows of a network of yours: its posterior on a line or a plane through the data."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical as CategoricalLaw

from net2gp.data.scaling import Scaling
from net2gp.errors import InputError, NetworkError, NotAvailable
from net2gp.inputs import gather
from net2gp.likelihoods import Categorical, Gaussian
from net2gp.methods import laplace
from net2gp.posteriors import Posterior
from net2gp.progress import progress
from net2gp.structures import LastLayer, Structure
from net2gp.types import Data, Likelihood

LINE, SIDE = 161, 37
"""Places on a line, and on each side of a plane."""

MARGIN = 0.3
"""What a slice adds on each side to the range of the data, as a share of that range."""

SHOWN_POINTS, KERNEL_POINTS, SHOWN_OUTPUTS = 300, 40, 8

MOST_POINTS = 2000
"""Points through which the slice goes, of all that there are."""

LARGE = 100_000
"""Networks with more parameters keep their last layer alone, unless a structure is given."""

BATCH, FEWEST = 32, 9
"""Places that are predicted together, and the least side of a plane."""

SECONDS, PATIENCE = 60.0, 600.0
"""The time above which a plane has fewer places, and the one above which there is none."""


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
    names = ("first component", "second component")
    return Slice(center, directions, tuple(round(float(s), 4) for s in shares[:2]), names)


@dataclass(frozen=True)
class Shown:
    """How values are shown.

    Args:
        scaling: The means and deviations with which inputs and targets were standardized.
        columns: The names of the columns of inputs (N, D), or none.
    """

    scaling: Scaling = field(default_factory=Scaling)
    columns: Sequence[str] = ()


def own_network(
    network: nn.Module | Posterior,
    data: Data | None,
    likelihood: Likelihood | None,
    structure: Structure | None = None,
    shown: Shown | None = None,
) -> dict[str, Any]:
    """Compute what the page shows of a network and its data; see `write_explorer`.

    Cost: one call of `laplace`, unless a posterior is given, and the predictions at 161 or 37² places. A
    plane whose places would take more than a minute has fewer.
    """
    shown = shown or Shown()
    posterior, x, y = _posterior_of(network, data, likelihood, structure)
    some = _evenly(len(x), MOST_POINTS)
    x, y, count = x[some], y[some], len(x)
    through = slice_through(x)
    at = through.coordinates(x.detach().double().cpu())
    ranges = [_widened(column) for column in at.T]
    fields, side = _on_the_slice(posterior, through, ranges, x, shown.scaling)
    chosen = _evenly(len(x), SHOWN_POINTS)
    targets = shown.scaling.back(y.reshape(len(y), -1))[chosen, 0]
    kept = _evenly(len(x), KERNEL_POINTS)
    return {
        **_axes(through, ranges, at[chosen], shown),
        "side": side,
        "fields": fields,
        "targets": [round(float(v), 4) for v in targets],
        "kernel": _kernel(posterior, x[kept], at[kept, 0]),
        "about": _about(posterior, network, count)
        + (
            f" A place is slow to predict, so there are {side}² instead of {SIDE}²." * (side < SIDE)
        ),
    }


def _posterior_of(
    network: nn.Module | Posterior,
    data: Data | None,
    likelihood: Likelihood | None,
    structure: Structure | None,
) -> tuple[Posterior, Tensor, Tensor]:
    """The posterior, found by `laplace` if it is not there yet, and the data that are shown."""
    if isinstance(network, Posterior):
        given = network.data if data is None else data
        like = network.x if isinstance(network.x, Tensor) else None
    else:
        assert data is not None
        given, like = data, next(network.parameters(), None)
    x, y = gather(given, like=like)
    if not isinstance(x, Tensor) or not x.is_floating_point() or len(x) < 3:
        raise InputError(
            "a slice goes through inputs that are one tensor of numbers, with three points at least. "
            "Pass data=(x, y) with x as a float tensor (N, …)."
        )
    if isinstance(network, Posterior):
        return network, x, y
    chosen = likelihood or (Gaussian() if y.is_floating_point() else Categorical())
    if structure is None and sum(p.numel() for p in network.parameters()) > LARGE:
        try:
            return laplace(network, (x, y), chosen, structure=LastLayer()), x, y
        except NetworkError:  # which has no last layer
            pass
    return laplace(network, (x, y), chosen, structure=structure), x, y


def _on_the_slice(
    posterior: Posterior,
    through: Slice,
    ranges: list[tuple[float, float]],
    x: Tensor,
    scaling: Scaling,
) -> tuple[list[dict[str, Any]], int]:
    """Predict the places of the slice: the fields, and how many places each of its sides has."""
    side = LINE
    if len(ranges) == 2:
        few = through.places(_grid(ranges, FEWEST)[:8], x)
        _values(posterior, few, scaling)  # the first call also plans
        start = perf_counter()
        _values(posterior, few, scaling)
        side = _side((perf_counter() - start) / len(few))
    places = through.places(_grid(ranges, side), x)
    parts = []
    with progress("explore", len(places)) as advance:
        for some in places.split(BATCH):
            parts.append(_values(posterior, some, scaling))
            advance(len(some))
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return [{"name": name, "values": _packed(one)} for name, one in joined.items()], side


def _side(seconds: float) -> int:
    """How many places the side of a plane has if each takes so many seconds.

    >>> _side(0.001), _side(0.1), _side(2.0)
    (37, 24, 9)
    """
    if FEWEST**2 * seconds > PATIENCE:
        raise InputError(
            f"one place of the plane takes {seconds:.3g} s to predict, so that {FEWEST**2} would take "
            f"{FEWEST**2 * seconds / 60:.0f} minutes. Keep less of the covariance: structure=LastLayer(), or "
            "--structure last_layer."
        )
    return int(max(FEWEST, min(SIDE, (SECONDS / max(seconds, 1e-9)) ** 0.5)))


def _axes(
    through: Slice, ranges: list[tuple[float, float]], at: Tensor, shown: Shown
) -> dict[str, Any]:
    """Names and ranges of the axes with the coordinates of points, for inputs in their own units."""
    names, ends = list(through.names), torch.tensor(ranges, dtype=torch.float64).T
    if len(through.origin) <= 2:  # an axis is an input
        at, ends = shown.scaling.inputs_back(at), shown.scaling.inputs_back(ends)
        names = list(shown.columns) or names
    return {
        "axes": names,
        "shares": list(through.shares),
        "ranges": ends.T.tolist(),
        "points": [[round(float(v), 4) for v in one] for one in at],
    }


def _widened(values: Tensor) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    margin = MARGIN * (high - low) or 1.0
    return low - margin, high + margin


def _grid(ranges: list[tuple[float, float]], side: int) -> Tensor:
    """Coordinates of all places, those of the first axis varying fastest and the second one falling."""
    if len(ranges) == 1:
        return _between(ranges[0], side)[:, None]
    across, up = (_between(one, side) for one in ranges)
    return torch.stack([across.repeat(side), up.flip(0).repeat_interleave(side)], 1)


def _between(ends: tuple[float, float], count: int) -> Tensor:
    return torch.linspace(ends[0], ends[1], count, dtype=torch.float64)


def _evenly(count: int, most: int) -> list[int]:
    return sorted(set(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()))


@torch.no_grad()
def _values(posterior: Posterior, places: Tensor, scaling: Scaling) -> dict[str, Tensor]:
    """What a posterior says about places, by the name of the field."""
    law = posterior.predict(places)
    if isinstance(law, CategoricalLaw):
        columns, label, width = law.probs, "probability of class {}", torch.ones(())
    else:
        columns = scaling.back(law.mean.reshape(len(places), -1))
        width = scaling.width(columns)
        label = "mean" if columns.shape[1] == 1 else "mean of output {}"
    shown = columns[:, :SHOWN_OUTPUTS].unbind(1)
    fields = {label.format(c): one for c, one in enumerate(shown)}
    if isinstance(law, CategoricalLaw):
        fields["entropy of the classes"] = law.entropy()
    parts = _if_available(posterior.split, places)
    if parts is not None:
        for name, part in (
            ("standard deviation", parts.total),
            ("epistemic part", parts.epistemic),
            ("aleatoric part", parts.aleatoric),
        ):
            fields[name] = _root(part.reshape(len(places), -1) * width.to(part).square())
    else:
        fields["standard deviation"] = _root(law.variance.reshape(len(places), -1) * width**2)
    novelty = _if_available(posterior.novelty, places)
    return fields if novelty is None else {**fields, "novelty": novelty}


def _if_available(method: Callable[[Tensor], Any], places: Tensor) -> Any:
    try:
        return method(places)
    except NotAvailable:
        return None


def _root(variances: Tensor) -> Tensor:
    """The root of the sum over outputs: for classes, of the variance of all indicators."""
    return variances.reshape(len(variances), -1).sum(1).clamp_min(0).sqrt()


def _packed(values: Tensor) -> str:
    return base64.b64encode(values.detach().cpu().numpy().astype("<f4").tobytes()).decode()


def _kernel(posterior: Posterior, x: Tensor, first: Tensor) -> dict[str, Any] | None:
    """The mean over outputs of the prior covariance at some points, in the order of the first axis."""
    try:
        kernel = posterior.kernel
    except (NotAvailable, AttributeError):
        return None
    order = first.argsort(stable=True)
    x = x[order.to(x.device)]
    with torch.no_grad():
        K = kernel(x).double()
    C = K.shape[0] // len(x)
    K = K.reshape(len(x), C, len(x), C).diagonal(dim1=1, dim2=3).mean(-1)
    return {"size": len(x), "values": _packed(K)}


def _about(posterior: Posterior, network: nn.Module | Posterior, count: int) -> str:
    structure = getattr(posterior, "structure", None)
    kept = f", structure {type(structure).__name__}()" if structure is not None else ""
    if isinstance(network, Posterior):
        return f"your posterior at {count:,} points{kept}."
    parameters = sum(p.numel() for p in network.parameters())
    return f"laplace of a network with {parameters:,} parameters on {count:,} points{kept}."
