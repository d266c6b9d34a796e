"""A printed table of all known activations and their duals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from net2gp.limits.duals.activations import activation_of
from net2gp.limits.duals.quadrature import Quadrature
from net2gp.limits.modules import pointwise as points


@dataclass(frozen=True)
class Row:
    """One line of `activation_table`.

    Args:
        layer: An example of the layer.
        formula: The formula of its dual E[φ(u) φ(v)].
        closed: Whether the dual is computed by a closed form.
    """

    layer: nn.Module
    formula: str
    closed: bool

    def __str__(self) -> str:
        return f"{self.layer!s:<44} {'closed' if self.closed else 'quadrature':<11} {self.formula}"


@dataclass(frozen=True)
class ActivationTable:
    """The rows of `activation_table`, which print as a table.

    Args:
        rows: One row per kind of layer.
    """

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        head = (
            "E[φ(u)φ(v)] for variances q, q', covariance k, correlation ρ = cos θ = k/√(qq'); the parameters "
            "of a layer in order are a, b, c.\n"
        )
        return head + "\n".join(str(row) for row in self.rows)


_EXAMPLES: dict[type, Callable[[], nn.Module]] = {
    nn.RReLU: lambda: nn.RReLU().eval(),
    nn.Threshold: lambda: nn.Threshold(0.5, 0.1),
    points.ABReLU: lambda: points.ABReLU(0.5, 2.0),
    points.Monomial: lambda: points.Monomial(3),
    points.RectifiedMonomial: lambda: points.RectifiedMonomial(2),
    points.Polynomial: lambda: points.Polynomial([0.0, 1.0, 0.5]),
    points.Hermite: lambda: points.Hermite(3),
    points.Pointwise: lambda: points.Pointwise(torch.atan, ()),
}


def activation_table() -> ActivationTable:
    """Return the table from activation to kernel, made from the registry, with your own entries.

    >>> "RectifiedMonomial(2)" in str(activation_table())
    True
    """
    rows = []
    for kind in activation_of.registry:
        if kind is object:
            continue
        try:
            layer = _EXAMPLES.get(kind, kind)()
        except TypeError:  # registered by a user, with arguments that only the user knows
            continue
        activation = activation_of(layer)
        formula = getattr(activation, "formula", "E[φ(u)φ(v)]")
        rows.append(Row(layer, formula, not isinstance(activation, Quadrature)))
    return ActivationTable(tuple(sorted(rows, key=lambda row: (not row.closed, str(row.layer)))))
