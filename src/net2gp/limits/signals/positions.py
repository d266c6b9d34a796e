"""What networks do to positions: fixed linear maps, and the windows of convolutions.

Moments are tensors (*positions of x, *positions of x', *pairs) or, where only equal positions matter,
(*positions, *pairs). The pairs come last, so that a shift of positions moves contiguous blocks of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from net2gp.limits import gpu_kernels

_functional: ContextVar[bool] = ContextVar("functional", default=False)


@contextmanager
def functional_windows() -> Iterator[None]:
    """Within this context, sums over windows do not write in place, so that compilers can fuse them."""
    token = _functional.set(True)
    try:
        yield
    finally:
        _functional.reset(token)


@dataclass(frozen=True, eq=False)
class PositionMap:
    """A linear map of positions, which is the same for every input and channel.

    It has one of five forms, here from the cheapest on: a change of shape alone, an `order` of axes, an
    `index`, `blocks`, or `matrices`.

    Args:
        before: The shape of the positions before the map.
        after: The shape after it.
        order: The old axis of each new axis.
        index: The old position of each new one, or −1 where the new one is zero.
        matrices: One matrix per axis, or a single one for all positions.
        together: Whether there is a single matrix for all positions.
        blocks: How many neighbors along each axis are added up (pooling).
        factor: What the sums of neighbors are multiplied by.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    order: tuple[int, ...] | None = None
    index: Tensor | None = None
    matrices: tuple[Tensor, ...] = ()
    together: bool = False
    blocks: tuple[int, ...] = ()
    factor: float = 1.0

    @property
    def selects(self) -> bool:
        """Whether every new position is an old one or zero, so that moments at equal positions suffice."""
        return not self.matrices and not self.blocks

    @property
    def keeps(self) -> bool:
        """Whether every position stays where it is in row-major order."""
        return self.order is None and self.index is None and self.selects

    def __call__(self, t: Tensor, axis: int = 0) -> Tensor:
        """Apply the map to the positions that begin at `axis` of t."""
        rank = len(self.before)
        head, tail = t.shape[:axis], t.shape[axis + rank :]
        if self.order is not None:
            axes = [*range(axis), *(axis + number for number in self.order)]
            return t.permute(*axes, *range(axis + rank, t.dim()))
        if self.index is not None:
            return self._selected(t.reshape(*head, prod(self.before), *tail), axis).reshape(
                *head, *self.after, *tail
            )
        if self.together:
            matrix = self.matrices[0].to(t)
            flat = t.reshape(prod(head), prod(self.before), prod(tail))
            return (matrix @ flat).reshape(*head, *self.after, *tail)
        for number, block in enumerate(self.blocks):
            t = _block_sums(t, axis + number, block)
        if self.factor != 1:
            t = t * self.factor
        for number, matrix in enumerate(self.matrices):
            place = axis + number
            flat = t.reshape(prod(t.shape[:place]), t.shape[place], prod(t.shape[place + 1 :]))
            moved = matrix.to(t) @ flat
            t = moved.reshape(*t.shape[:place], matrix.shape[0], *t.shape[place + 1 :])
        return t.reshape(*head, *self.after, *tail)

    def on_both(self, t: Tensor) -> Tensor:
        """Apply the map to the positions of both sides of (*before, *before, *pairs)."""
        rank = len(self.before)
        # a global pool is a single sum over all pairs of positions, without an intermediate tensor
        if self.blocks and self.blocks == self.before:
            total = t.sum(tuple(range(2 * rank))) * self.factor**2
            return total.reshape(*self.after, *self.after, *total.shape)
        if rank == 2 and self.blocks and prod(self.blocks) <= 16 and gpu_kernels.available(t):
            return gpu_kernels.block_sums(t, self.blocks, self.factor**2)
        return self(self(t, rank), 0)

    def _selected(self, flat: Tensor, axis: int) -> Tensor:
        assert self.index is not None
        index = self.index.to(flat.device)
        chosen = flat.index_select(axis, index.clamp(min=0))
        empty = index < 0
        if bool(empty.any()):
            shape = [1] * chosen.dim()
            shape[axis] = -1
            chosen = chosen.masked_fill(empty.reshape(shape), 0.0)
        return chosen


def reshaping(before: Sequence[int], after: Sequence[int]) -> PositionMap:
    """Return the map that keeps positions and changes the sizes of axes."""
    return PositionMap(tuple(before), tuple(after))


def reordering(before: Sequence[int], order: Sequence[int]) -> PositionMap:
    """Return the map that puts the axes of positions in another order."""
    return PositionMap(tuple(before), tuple(before[number] for number in order), tuple(order))


def probed(
    before: tuple[int, ...], after: tuple[int, ...], apply: Callable[[Tensor], Tensor]
) -> PositionMap:
    """Return the matrix of `apply`, which takes (K, *before) to (K, *after), found with unit vectors.

    The matrix contains whatever torch does at borders, with padding, strides or interpolation. A matrix
    that selects positions becomes an index, and a Kronecker product is split into one matrix per axis,
    since both are much cheaper to apply.
    """
    size = prod(before)
    matrix = apply(torch.eye(size, dtype=torch.float64).reshape(size, *before))
    matrix = matrix.reshape(size, prod(after)).T
    chosen = matrix != 0
    if bool((chosen.sum(1) <= 1).all()) and bool((matrix[chosen] == 1).all()):
        index = torch.where(chosen.any(1), chosen.to(torch.int8).argmax(1), -1)
        return PositionMap(before, after, index=index)
    separate = _separated(matrix, before, after)
    if separate is None:
        return PositionMap(before, after, matrices=(matrix,), together=True)
    return _pooling(before, after, separate) or PositionMap(before, after, matrices=separate)


def _pooling(
    before: tuple[int, ...], after: tuple[int, ...], matrices: tuple[Tensor, ...]
) -> PositionMap | None:
    """Return the map as sums over blocks of neighbors, or None if its matrices are something else."""
    blocks, factor = [], 1.0
    for matrix in matrices:
        size = matrix.shape[1] // matrix.shape[0]
        value = float(matrix[0, 0])
        ones = torch.ones(1, size, dtype=matrix.dtype)
        whole = torch.kron(torch.eye(matrix.shape[0], dtype=matrix.dtype), ones)
        if value == 0 or whole.shape != matrix.shape:
            return None
        if not torch.allclose(matrix / value, whole, rtol=1e-13, atol=1e-13):
            return None
        blocks.append(size)
        factor *= value
    return PositionMap(before, after, blocks=tuple(blocks), factor=factor)


def _block_sums(t: Tensor, axis: int, block: int) -> Tensor:
    """Sum every `block` neighbors along an axis."""
    if block == 1:
        return t
    if block > 4:
        shape = (*t.shape[:axis], t.shape[axis] // block, block, *t.shape[axis + 1 :])
        return t.reshape(shape).sum(axis + 1)
    wide = [slice(None)] * t.dim()
    total: Tensor | None = None
    for start in range(block):
        wide[axis] = slice(start, None, block)
        part = t[tuple(wide)]
        total = part if total is None else total + part
    assert total is not None
    return total


def _separated(
    matrix: Tensor, before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[Tensor, ...] | None:
    """Return the factors of a Kronecker product, one per axis, or None if the matrix is not one.

    The factors are the rows and columns through the largest entry, where rounding counts least.
    """
    if len(before) != len(after) or len(before) < 2:
        return (matrix,) if len(before) == len(after) == 1 else None
    factors = []
    rest = matrix.reshape(*after, *before)
    peak = int(rest.abs().argmax())
    place = torch.unravel_index(torch.tensor(peak), rest.shape)
    largest = rest[place]
    rank = len(before)
    for axis in range(rank):
        keep = tuple(
            slice(None) if number % rank == axis else int(place[number])
            for number in range(2 * rank)
        )
        factors.append(rest[keep] / (1.0 if axis == 0 else largest))
    product = factors[0]
    for factor in factors[1:]:
        product = torch.kron(product, factor)
    close = torch.allclose(product, matrix, rtol=1e-12, atol=1e-14 * float(largest.abs()))
    return tuple(factors) if close else None


@dataclass(frozen=True)
class Window:
    """The window of a convolution.

    Args:
        kernel: The size of the kernel, per axis.
        stride: The stride, per axis.
        dilation: The dilation, per axis.
        padding: How many positions are added before and after, per axis.
        fill: What lies outside: "zeros", or "circular", "reflect" and "replicate" as in torch.
        insert: How many zeros are inserted between neighbors first, per axis; this makes a transposed
            convolution out of an ordinary one.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    fill: str = "zeros"
    insert: tuple[int, ...] = ()

    def size(self, before: Sequence[int]) -> tuple[int, ...]:
        """Return the number of windows along each axis."""
        return tuple(
            (self._stretched(number, length) + sum(self.padding[number]) - self._reach(number))
            // self.stride[number]
            + 1
            for number, length in enumerate(before)
        )

    @property
    def total(self) -> int:
        """Return the number of positions in the window."""
        return prod(self.kernel)

    def sum(self, t: Tensor, full: bool) -> Tensor:
        """Sum t over the window, where both positions of a pair move together.

        (A t)(p, p') = Σ_{w ∈ W} t(p + w, p' + w), with values outside as `fill` says. A sum over a box is
        done axis by axis, so that it costs the sum of the kernel's sizes and not their product.
        """
        rank = len(self.kernel)
        for number in range(rank):
            axes = (number, rank + number) if full else (number,)
            t = self._summed(t, number, axes)
        return t

    def _summed(self, t: Tensor, number: int, axes: tuple[int, ...]) -> Tensor:
        recorded = _functional.get() or (torch.is_grad_enabled() and t.requires_grad)
        equal = len({t.shape[axis] for axis in axes}) == 1
        if self._keeps_size(number) and equal and not recorded:
            return self._summed_in_place(t, number, axes)
        for axis in axes:
            t = self.padded(t, number, axis)
        kernel, stride = self.kernel[number], self.stride[number]
        if kernel == 1 and stride == 1:
            return t
        counts = [(t.shape[axis] - self._reach(number)) // stride + 1 for axis in axes]
        result = None
        for step in range(kernel):
            start = step * self.dilation[number]
            piece = t
            for axis, count in zip(axes, counts, strict=True):
                where = [slice(None)] * t.dim()
                where[axis] = slice(start, start + (count - 1) * stride + 1, stride)
                piece = piece[tuple(where)]
            if result is None:
                result = piece
            elif step == 1 or recorded:
                result = (
                    result + piece
                )  # the first result is a view of t, which must not be changed
            else:
                result += piece
        assert result is not None
        return result

    @property
    def keeps_size(self) -> bool:
        """Whether there are as many windows as positions, with stride one and zeros around the input."""
        return all(self._keeps_size(number) for number in range(len(self.kernel)))

    def _keeps_size(self, number: int) -> bool:
        """Whether one axis keeps its size, with stride one and zeros around the input."""
        return (
            self.fill == "zeros"
            and self.stride[number] == 1
            and not (self.insert and self.insert[number])
            and sum(self.padding[number]) == self._reach(number) - 1
            and min(self.padding[number]) >= 0
        )

    def _summed_in_place(self, t: Tensor, number: int, axes: tuple[int, ...]) -> Tensor:
        """Add up shifted copies where they overlap, so that no padding is stored."""
        length, low = t.shape[axes[0]], self.padding[number][0]
        shifts = [step * self.dilation[number] - low for step in range(self.kernel[number])]
        if shifts == [0]:
            return t
        result = t.clone() if 0 in shifts else torch.zeros_like(t)
        for shift in shifts:
            if shift == 0 or abs(shift) >= length:
                continue
            into, out_of = [slice(None)] * t.dim(), [slice(None)] * t.dim()
            for axis in axes:
                into[axis] = slice(max(0, -shift), length - max(0, shift))
                out_of[axis] = slice(max(0, shift), length - max(0, -shift))
            result[tuple(into)] += t[tuple(out_of)]
        return result

    def padded(self, t: Tensor, number: int, axis: int) -> Tensor:
        """Pad t along one of the window's axes, which is `axis` of t."""
        if self.insert and self.insert[number]:
            t = _with_zeros_between(t, axis, self.insert[number])
        low, high = self.padding[number]
        if low < 0 or high < 0:
            t = t.narrow(axis, max(0, -low), t.shape[axis] + min(0, low) + min(0, high))
            low, high = max(0, low), max(0, high)
        if low == 0 and high == 0:
            return t
        if self.fill == "zeros":
            pads = [0] * (2 * (t.dim() - axis))
            pads[-2:] = [low, high]
            return torch.nn.functional.pad(t, pads)
        places = _outside(t.shape[axis], low, high, self.fill)
        return t.index_select(axis, places.to(t.device))

    def _stretched(self, number: int, length: int) -> int:
        return length + (length - 1) * self.insert[number] if self.insert else length

    def _reach(self, number: int) -> int:
        return self.dilation[number] * (self.kernel[number] - 1) + 1


def _with_zeros_between(t: Tensor, axis: int, count: int) -> Tensor:
    length = t.shape[axis]
    shape = (*t.shape[: axis + 1], count + 1, *t.shape[axis + 1 :])
    wide = t.new_zeros(shape)
    wide = wide.select_scatter(t, axis + 1, 0)
    flat = wide.reshape(*t.shape[:axis], length * (count + 1), *t.shape[axis + 1 :])
    return flat.narrow(axis, 0, length + (length - 1) * count)


def _outside(length: int, low: int, high: int, fill: str) -> Tensor:
    """Return the position inside that each padded position copies."""
    places = torch.arange(-low, length + high)
    if fill == "circular":
        return places % length
    if fill == "replicate":
        return places.clamp(0, length - 1)
    period = 2 * (length - 1)
    places = places % period
    return torch.where(places < length, places, period - places)
