"""Features and outputs of a last layer that are kept for the duration of a block.

A posterior of classes needs the features of the same points for its covariance, its novelty and its mean, and
`laplace` needs those of the training points several times. Each would be a pass through the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from net2gp.inputs import num_rows, tensors
from net2gp.types import Inputs

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized

MOST_BYTES = 2**28
"""The size up to which features are kept."""


@dataclass(eq=False)
class _Rows:
    """Features (N, D') and outputs (N, C) at N points, and at which of these they are known, (N,).

    Outputs are direct, (N,), where they are those of the layer itself.
    """

    linearized: Linearized
    phi: Tensor
    f: Tensor
    known: Tensor
    direct: Tensor


@dataclass(eq=False)
class _Kept:
    """The points of a block, and the rows that are known of them, by layer."""

    x: Inputs
    versions: list[int]
    found: dict[tuple[object, ...], _Rows] = field(default_factory=dict)


_BLOCK: ContextVar[_Kept | None] = ContextVar("kept_features", default=None)


@contextmanager
def keeping_features(x: Inputs | None) -> Iterator[None]:
    """Within the block, features of points of `x`, or of slices of it, are computed once.

    The points and the network must not change within the block. A block within another one adds nothing if
    both are about the same points, and replaces it otherwise. It costs D' + C numbers for each point, and
    nothing where these would be more than 256 MiB.

    Args:
        x: N points; None keeps nothing.
    """
    outer, values = _BLOCK.get(), [] if x is None else tensors(x)
    if x is None or any(value.is_inference() or value.requires_grad for value in values):
        yield  # changes of such tensors are not counted, or results are differentiated in them
        return
    if outer is not None and _slice_of(outer, x) is not None:
        yield
        return
    token = _BLOCK.set(_Kept(x, [value._version for value in values]))
    try:
        yield
    finally:
        _BLOCK.reset(token)


def kept(linearized: Linearized, x: Inputs) -> tuple[Tensor, Tensor] | None:
    """What is known of the features (N, D') and outputs (N, C) at `x`.

    Args:
        linearized: The network with the parameters of its last layer as the chosen ones.
        x: N points.

    Returns:
        Both, if they are known at all of these points, else None.
    """
    place = _place(linearized, x)
    if place is None:
        return None
    rows, part = place
    return (rows.phi[part], rows.f[part]) if bool(rows.known[part].all()) else None


def kept_outputs(linearized: Linearized, x: Inputs) -> Tensor | None:
    """What is known of the outputs of a network, whichever of its parameters are chosen: (N, C), or None."""
    block = _BLOCK.get()
    part = None if block is None else _slice_of(block, x)
    if block is None or part is None:
        return None
    for rows in block.found.values():
        same = _values(rows.linearized) == _values(linearized)
        if same and rows.linearized.output is linearized.output and bool(rows.known[part].all()):
            return rows.f[part]
    return None


def keeps(x: Inputs) -> bool:
    """Whether a block asks for features at `x`."""
    block = _BLOCK.get()
    return block is not None and _slice_of(block, x) is not None


def direct_rows(linearized: Linearized, x: Inputs) -> Tensor:
    """At which of the points `x` the outputs are known to be the layer's own: (N,)."""
    place = _place(linearized, x)
    if place is None:
        return torch.zeros(num_rows(x), dtype=torch.bool)
    rows, part = place
    return rows.direct[part] & rows.known[part]


def keep(linearized: Linearized, x: Inputs, phi: Tensor, f: Tensor, *, direct: bool) -> None:
    """Keep features (N, D') and outputs (N, C) at `x`, if a block asks for it.

    Args:
        linearized: The network with the parameters of its last layer as the chosen ones.
        x: N points.
        phi: Features.
        f: Outputs.
        direct: Whether the outputs are the layer's own at all of these points.
    """
    block = _BLOCK.get()
    part = None if block is None else _slice_of(block, x)
    if block is None or part is None or len(phi) != num_rows(x):
        return
    count = num_rows(block.x)
    if count * (phi.shape[1] + f.shape[1]) * phi.element_size() > MOST_BYTES:
        return
    rows = block.found.get(_key(linearized))
    if rows is None:
        flags = (torch.zeros(count, dtype=torch.bool) for _ in range(2))
        made = (value.new_zeros(count, value.shape[1]) for value in (phi, f))
        rows = block.found[_key(linearized)] = _Rows(linearized, *made, *flags)
    rows.phi[part], rows.f[part], rows.known[part], rows.direct[part] = phi, f, True, direct


def _place(linearized: Linearized, x: Inputs) -> tuple[_Rows, slice] | None:
    """The rows of the layer and which of them `x` is, or None."""
    block = _BLOCK.get()
    part = None if block is None else _slice_of(block, x)
    if block is None or part is None:
        return None
    rows = block.found.get(_key(linearized))
    return None if rows is None else (rows, part)


def _key(linearized: Linearized) -> tuple[object, ...]:
    """Of the layer; the rows that it leads to hold the network, so that no other one takes its place."""
    return (tuple(linearized.params), id(linearized.output), *_values(linearized))


def _values(linearized: Linearized) -> tuple[object, ...]:
    """Of the network at its values."""
    values = {**linearized.params, **linearized.frozen}
    return (id(linearized.network), *(_address(values[name]) for name in sorted(values)))


def _address(value: Tensor) -> int:
    """Where the numbers of a tensor are; of a sparse one, which has no storage, which object it is."""
    return value.data_ptr() if value.layout == torch.strided else id(value)


def _slice_of(block: _Kept, x: Inputs) -> slice | None:
    """Which rows of the block's points `x` is, if it is a slice of them and nothing has changed."""
    given, whole = tensors(x), tensors(block.x)
    if len(given) != len(whole) or (
        torch.is_grad_enabled() and any(v.requires_grad for v in given)
    ):
        return None
    starts = {
        _start(part, value, version)
        for part, value, version in zip(given, whole, block.versions, strict=True)
    }
    start = starts.pop()
    if starts or start is None:
        return None
    return slice(start, start + num_rows(x))


def _start(part: Tensor, whole: Tensor, version: int) -> int | None:
    """The number of the first row of `whole` that `part` is a slice of, or None if it is none."""
    if part.is_inference() or whole._version != version or not part.numel():
        return None
    if part.layout != torch.strided or whole.layout != torch.strided:
        return None
    alike = part.dtype == whole.dtype and part.shape[1:] == whole.shape[1:]
    if not alike or part.device != whole.device or part.stride() != whole.stride():
        return None
    if part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return None
    step, gap = whole.stride(0), int(part.storage_offset()) - int(whole.storage_offset())
    start, rest = divmod(gap, step) if step else (0, 1)
    return start if not rest and 0 <= start <= len(whole) - len(part) else None
