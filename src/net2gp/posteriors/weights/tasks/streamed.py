"""A task whose data are a stream: its points are together in pieces only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from net2gp.errors import InputError, NotAvailable
from net2gp.inputs import chunks, join, rows, same_inputs, tensors
from net2gp.likelihoods.traits import bound_to, of_points, tied_points
from net2gp.linear.curvatures.curvature import ExactFisher, Fisher, Source
from net2gp.linear.forward.factors import Factor
from net2gp.linear.jacobians.capture import Plan, Seeds
from net2gp.linear.linearized import Linearized
from net2gp.posteriors.weights.tasks.sums import Sums
from net2gp.posteriors.weights.tasks.task import Task
from net2gp.streams import Passes
from net2gp.types import Inputs, Likelihood

POINTS = 1500
"""Points that go through the network together."""


def outputs_at(linearized: Linearized, x: Inputs) -> Tensor:
    """The outputs of the network, (N, C), in float64."""
    return torch.cat([linearized(part) for part in chunks(x, POINTS)]).double()


def _checked(linearized: Linearized, likelihood: Likelihood, x: Inputs, y: Tensor) -> Tensor:
    """The outputs, with targets that suit them: a loader may give others than in the pass before."""
    f = outputs_at(linearized, x)
    likelihood.check(f.to(linearized.example.dtype), y)
    return f


@dataclass(frozen=True, eq=False)
class Piece(Task):
    """Some points of a stream that are together; their outputs are computed when they are asked for."""

    f: Tensor = field(init=False, repr=False)

    def __getattr__(self, name: str) -> Tensor:
        if name != "f":
            raise AttributeError(name)
        first, likelihood = cast(Any, self.among)
        part = slice(first, first + len(self.y))
        found = _checked(self.linearized, of_points(likelihood, part), self.x, self.y)
        object.__setattr__(self, "f", found)
        return found


@dataclass(frozen=True, eq=False)
class StreamedTask(Task):
    """A task whose data are read again in each pass.

    Args:
        passes: The passes over the data.
        known: The sums over all points.
        start: A few of the inputs, from which the network can be planned.
    """

    x: Inputs = field(init=False, repr=False)
    y: Tensor = field(init=False, repr=False)
    f: Tensor = field(init=False, repr=False)
    passes: Passes = field(kw_only=True, repr=False)
    known: Sums = field(kw_only=True, repr=False)
    start: Inputs = field(kw_only=True, repr=False)

    def __getattr__(self, name: str) -> Tensor:
        if name not in ("x", "y", "f"):
            raise AttributeError(name)
        raise NotAvailable(
            f"the data are read batch by batch, so task.{name} of all points is never in memory. Sum over "
            "task.pieces(), which are tasks with x, y and f, or over task.source().gradients(); or take some "
            "points with task.at(index)."
        )

    @property
    def sums(self) -> Sums:
        """The sums over all points, from the first pass."""
        return self.known

    @property
    def kept(self) -> None:
        """The posterior does not keep the data."""
        return None

    def pieces(self, what: str = "data") -> Iterator[Task]:
        """One pass over the data, some points at a time."""
        for first, x, y in self.passes.pieces(what):
            yield piece_of(self.linearized, self.likelihood, first, x, y)

    def few(self) -> Inputs:
        """The inputs that were kept."""
        return self.start

    def whole(self, what: str, instead: str) -> Task:
        """Raise `NotAvailable`, which names the alternatives."""
        raise NotAvailable(
            f"{what} needs all points together, but the data are read batch by batch. Pass {instead}; or the "
            "points as a pair (x, y), if they fit into memory."
        )

    def source(self, fisher: Fisher | None = None) -> Source:
        """The gradients of all points, chunk by chunk, in a pass for each time that they are asked for."""
        pieces = lambda: self.pieces("curvature")
        return StreamedSource(
            self.linearized, self.likelihood, fisher or ExactFisher(), pieces=pieces
        )

    def at(self, index: Tensor) -> Task:
        """The task at some of its points, which are together then; the pass ends behind the last."""
        wanted, place = torch.unique(index, return_inverse=True)
        parts: list[tuple[Inputs, Tensor]] = []
        for first, x, y in self.passes.pieces("some points"):
            own = wanted[(wanted >= first) & (wanted < first + len(y))] - first
            if len(own):
                parts.append((rows(x, own), y[own]))
            if int(wanted[-1]) < first + len(y):
                break
        x, y = join([x for x, _ in parts]), torch.cat([y for _, y in parts])
        x, y = rows(x, place), y[place]
        likelihood = of_points(self.likelihood, index)
        f = _checked(self.linearized, likelihood, x, y)
        options = self.open_noise, self.prior_var, self.temperature, self.free
        return Task(self.linearized, x, y, bound_to(likelihood, y), f, *options)

    def contents(self) -> Iterator[bytes]:
        """The sum of a hash of each point: the order in which they come does not matter."""
        total = 0
        for piece in self.pieces("fingerprint"):
            values = [*tensors(piece.x), piece.y, piece.f]
            arrays = [
                v.detach().cpu().reshape(len(piece.y), -1).contiguous().numpy() for v in values
            ]
            for point in zip(*arrays, strict=True):
                digest = hashlib.sha256(b"".join(part.tobytes() for part in point)).digest()
                total = (total + int.from_bytes(digest)) % 2**256
        yield total.to_bytes(32)


@dataclass(frozen=True, eq=False)
class StreamedSource(Source):
    """The gradients of a stream."""

    x: Inputs = field(init=False, repr=False)
    y: Tensor = field(init=False, repr=False)
    pieces: Callable[[], Iterator[Task]] = field(kw_only=True)

    def gradients(self, *, compress: bool = True) -> Iterator[dict[str, Factor]]:
        """Those of each piece."""
        for piece in self.pieces():
            yield from piece.source(self.fisher).gradients(compress=compress)

    def parts(self) -> Iterator[tuple[Inputs, Seeds, Plan]]:
        """Those of each piece."""
        for piece in self.pieces():
            yield from piece.source(self.fisher).parts()


def piece_of(
    linearized: Linearized, likelihood: Likelihood, first: int, x: Inputs, y: Tensor
) -> Piece:
    """The points from the number `first` on, of a stream whose likelihood of all points is given."""
    tied = tied_points(likelihood)
    if tied is not None and tied < first + len(y):
        raise InputError(
            f"the likelihood holds numbers for {tied} points, but the data have more. Pass one for each "
            "point, in the order of the data."
        )
    part = slice(first, first + len(y))
    own = bound_to(of_points(likelihood, part), y)
    return Piece(linearized, x, y, own, among=(first, likelihood))


def check_tied(likelihood: Likelihood, passes: Passes) -> None:
    """Raise unless numbers that a likelihood holds for each point suit the points of a stream.

    Args:
        likelihood: The likelihood of all points.
        passes: The stream, which was read once.

    Raises:
        InputError: If there are more or fewer numbers than points, or if the order of the points changes.
    """
    tied = tied_points(likelihood)
    if tied is None:
        return
    if tied != passes.num_rows:
        raise InputError(
            f"the likelihood holds numbers for {tied} points, but the data have {passes.num_rows}. Pass one "
            "for each point, in the order of the data."
        )
    (x, y), (again, same) = passes.first(), passes.first()
    if not (same_inputs(x, again) and torch.equal(y, same)):
        raise InputError(
            "the likelihood holds numbers for each point, in the order of the data, but the stream begins "
            "with other points in each pass. Pass a DataLoader with shuffle=False and without random "
            "transforms."
        )
