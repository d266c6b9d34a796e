"""The share of the prior variance that training inputs leave open, written so that it can be traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import NotAvailable
from net2gp.inputs import chunks, num_rows
from net2gp.linear.forward.factors import Factor, Outer
from net2gp.linear.linearized import Linearized
from net2gp.linear.precision import rechosen
from net2gp.posteriors.recipes.seen import Seen, SeenFeatures, SeenPoints
from net2gp.serving.programs.gradients import direct, outputs_and_gradients

MOST_NUMBERS = 2**27
"""Numbers that the gradients of the training points may have: half a gigabyte in a file."""

Shares = Callable[[dict[str, Factor], Tensor | None], Tensor]
"""From the gradients of all parameters and the last layer's features to shares (B,)."""


@dataclass(frozen=True, eq=False)
class Compared:
    """What comparing points with training inputs takes.

    Args:
        shares: The function.
        names: The parameters whose gradients it reads.
        head: The parameters of the last layer, if it reads its features.
        carries: What it holds of the training data.
    """

    shares: Shares
    names: tuple[str, ...]
    head: tuple[str, ...]
    carries: str


def compared(seen: Seen, linearized: Linearized, num_outputs: int) -> Compared:
    """Return the function of shares of a kind of `Seen`.

    Raises:
        NotAvailable: If the kind is not known, or the gradients at its points are too many numbers.
    """
    if isinstance(seen, SeenFeatures):
        return Compared(_by_features(seen), (), seen.names, "")
    if isinstance(seen, SeenPoints):
        names = seen.names or tuple(linearized.params)
        shares = _by_points(seen, rechosen(linearized, names), num_outputs)
        count = num_rows(seen.x)
        carries = f"layer inputs and gradients at {count} training points, for novelty"
        return Compared(shares, names, (), carries)
    raise NotAvailable(
        f"novelty by {type(seen).__name__} cannot be exported. Pass novelty=False, which leaves out what "
        "predictions gain at novel points."
    )


def _by_features(seen: SeenFeatures) -> Shares:
    """|root φ|²/|φ|², one where φ is zero."""

    def shares(found: dict[str, Factor], phi: Tensor | None) -> Tensor:
        assert phi is not None
        phi = phi.double()
        length = phi.square().sum(1)
        left = (phi @ seen.root.mT).square().sum(1)
        return torch.where(length > 0, left / torch.where(length > 0, length, 1.0), 1.0)

    return shares


def _by_points(seen: SeenPoints, linearized: Linearized, num_outputs: int) -> Shares:
    """1 − k̃(x, X)(K̃ + νI)⁻¹k̃(X, x), k being the trace of the tangent kernel."""
    known = _known(seen, linearized, num_outputs)
    rooted = seen.whitening / seen.scales  # whitening · diag(1/scales)

    def shares(found: dict[str, Factor], phi: Tensor | None) -> Tensor:
        cross, own = _traces(known, {name: found[name] for name in known})
        cross, own = cross.double() / num_outputs, own.double() / num_outputs
        scale = own.clamp(min=1e-300).sqrt()
        return (1 - (rooted @ (cross / scale)).square().sum(0)).clamp(0, 1)

    return shares


Sides = tuple[Tensor, Tensor | None]
"""Inputs (B, I) and output gradients (B, C·O) of a weight used at one place; or gradients, and None."""


def _known(seen: SeenPoints, linearized: Linearized, num_outputs: int) -> dict[str, Sides]:
    parts: list[dict[str, Sides]] = []
    for some in chunks(seen.x, 50):
        with torch.no_grad():
            _, found = outputs_and_gradients(linearized, some, num_outputs)
            parts.append({name: _sides(factor) for name, factor in found.items()})
        numbers = sum(
            value.numel() for sides in parts[0].values() for value in sides if value is not None
        )
        if numbers * num_rows(seen.x) / num_rows(some) > MOST_NUMBERS:
            raise NotAvailable(
                "novelty of this network needs its gradients at the training points, which are more than "
                f"{MOST_NUMBERS:,} numbers. Pass novelty=False, which leaves out what predictions gain at "
                "novel points."
            )
    return {name: _joined([part[name] for part in parts]) for name in parts[0]}


def _joined(parts: list[Sides]) -> Sides:
    first = torch.cat([one for one, _ in parts])
    return first, None if parts[0][1] is None else torch.cat(
        [two for _, two in parts if two is not None]
    )


def _sides(factor: Factor) -> Sides:
    if isinstance(factor, Outer) and factor.g.shape[2] == 1 and factor.g.shape[4] == 1:
        return factor.a[:, 0, 0], factor.g[:, :, 0, :, 0].flatten(1)
    return direct(factor).flatten(1), None


def _traces(known: dict[str, Sides], found: dict[str, Factor]) -> tuple[Tensor, Tensor]:
    """Σ_c k_cc(X, x), (M, B), and Σ_c k_cc(x, x), (B,), summed over parameters."""
    cross: Tensor | float = 0.0
    own: Tensor | float = 0.0
    for name, factor in found.items():
        (a, g), (b, h) = known[name], _sides(factor)
        if g is None or h is None:
            cross, own = cross + a @ b.mT, own + b.square().sum(1)
        else:
            cross = cross + (a @ b.mT) * (g @ h.mT)
            own = own + b.square().sum(1) * h.square().sum(1)
    assert isinstance(cross, Tensor)
    assert isinstance(own, Tensor)
    return cross, own
