"""Features and outputs of a last layer, row by row: a row is a point, or a place of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.inputs import num_rows, rows
from net2gp.likelihoods.places import EachPlace
from net2gp.likelihoods.traits import of_points, summed_curvature
from net2gp.linear.curvatures.curvature import ExactFisher, Fisher
from net2gp.linear.curvatures.head import features_and_outputs
from net2gp.posteriors.weights.tasks.task import Task
from net2gp.types import Likelihood

CURVATURE_NUMBERS = 2**24
"""Numbers of the curvatures of one chunk of rows."""


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Some rows of a task whose parameters are those of the last layer.

    Args:
        phi: Features with a one behind them for a bias, (B, D').
        f: Outputs, (B, C).
        y: Targets of the rows.
        likelihood: The likelihood of all rows of the task.
        first: The number of the first of these rows.
        kept: Which of the rows count, (B,), where labels of places are ignored; else None.
    """

    phi: Tensor
    f: Tensor
    y: Tensor
    likelihood: Likelihood
    first: int
    kept: Tensor | None = None

    def curvatures(self, fisher: Fisher) -> Tensor:
        """Λ of each row, zero for rows that do not count: (B, C, C)."""
        if isinstance(fisher, ExactFisher):
            part = of_points(self.likelihood, slice(self.first, self.first + len(self.f)))
            # diag(p) − ppᵀ in float32 is indefinite by its rounding, which a wide prior brings out
            found = part.curvature(self.f.double())
        else:
            R = fisher.root(self.likelihood, self.f, self.y, self.first)
            found = R @ R.mT
        return found if self.kept is None else found * self.kept[:, None, None]

    def summed(self, fisher: Fisher) -> Tensor:
        """Σ Λ over the rows that count, (C, C)."""
        if not isinstance(fisher, ExactFisher):
            parts = [part.curvatures(fisher).sum(0) for part in self.parts(CURVATURE_NUMBERS)]
            return torch.stack(parts).sum(0)
        part = of_points(self.likelihood, slice(self.first, self.first + len(self.f)))
        f = self.f if self.kept is None else self.f[self.kept]
        return summed_curvature(part, f.double())

    def counted(self) -> Tensor:
        """Features of the rows that count."""
        return self.phi if self.kept is None else self.phi[self.kept]

    def parts(self, numbers: int) -> Iterator[HeadRows]:
        """The same rows, so many at a time that their curvatures have at most `numbers` numbers."""
        size = max(1, min(numbers, CURVATURE_NUMBERS) // self.f.shape[1] ** 2)
        yield from self.pieces(size)

    def pieces(self, size: int) -> Iterator[HeadRows]:
        """The same rows, `size` at a time."""
        for start in range(0, len(self.f), size):
            part = slice(start, start + size)
            kept = None if self.kept is None else self.kept[part]
            values = self.phi[part], self.f[part], self.y[part]
            yield HeadRows(*values, self.likelihood, self.first + start, kept)


def head_rows(task: Task, size: int) -> Iterator[HeadRows]:
    """The rows of a task, from one pass over its points.

    Args:
        task: The network with the parameters of its last layer as the chosen ones.
        size: How many rows are together.

    Yields:
        Rows in the order of the points.
    """
    for piece in task.pieces("curvature of the last layer"):
        before, likelihood = piece.among or (0, piece.likelihood)
        places = 1
        if isinstance(piece.likelihood, EachPlace):
            places = len(piece.likelihood.rows(piece.f[:1]))
        step = max(1, size // places)
        for start in range(0, num_rows(piece.x), step):
            part = slice(start, start + step)
            phi, f = features_and_outputs(task.linearized, rows(piece.x, part))
            y, first = piece.y[part], before + start
            if isinstance(piece.likelihood, EachPlace):
                _, y, kept = piece.likelihood.flat(f, y)
                found = HeadRows(phi, f, y, piece.likelihood.likelihood, first * places, kept)
            else:
                found = HeadRows(phi, f, y, likelihood, first)
            yield from found.pieces(size)
