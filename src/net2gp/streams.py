"""Data that are read batch by batch, in as many passes as are needed, and what is gathered instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import (
    DATASET_BATCH,
    batches_of,
    check_same_shapes,
    gather,
    join,
    map_inputs,
    pair,
    rows,
    tensors,
    with_batches,
)
from net2gp.progress import progress
from net2gp.types import Data, Inputs, Stream

GATHERED_BYTES = 2**30
"""Bytes of inputs and targets up to which a loader is joined in memory; a larger one is streamed."""

PIECE_ROWS, PIECE_BYTES = 6000, 2**26
"""The most points of one piece of a stream, and the most bytes, whatever the batches of the loader are."""

EXHAUSTED = (
    "it is exhausted after one pass. Pass a DataLoader, or an object whose __iter__ starts again."
)


def held_or_streamed(data: Data, like: Tensor | None) -> tuple[Inputs, Tensor] | Stream:
    """The data as one checked pair, or as a stream if they are one, or a loader of more than 1 GiB.

    Args:
        data: A pair (x, y), a loader of pairs, a `Dataset` or a `Stream`.
        like: A parameter of the network; None means torch's default dtype.

    Returns:
        All inputs and all targets, or a stream.
    """
    if isinstance(data, Stream):
        return data
    single = isinstance(data, tuple | list | Mapping)
    return Stream(data) if not single and _too_large(data, like) else gather(data, like)


def _too_large(data: Any, like: Tensor | None) -> bool:
    """Whether batches take more than `GATHERED_BYTES`: by the first one, where their number is known."""
    loader, total = with_batches(data), 0
    try:
        count = len(loader)
    except TypeError:
        count = None
    for batch in batches_of(loader):
        x, y = pair(batch, like, empty=True)
        size = sum(value.numel() * value.element_size() for value in (*tensors(x), y))
        if count is not None:
            return count * size > GATHERED_BYTES
        total += size
        if total > GATHERED_BYTES:
            return True
    return False


class Passes:
    """The passes over a stream: each gives the same number of points, in pieces of even size.

    Args:
        stream: The data.
        like: A parameter of the network, on whose device the pieces are; None leaves them where they are.
        most: How many passes there will be at most, which the bars show.
    """

    def __init__(self, stream: Stream, like: Tensor | None, most: int | None = None) -> None:
        self.loader = _loader(stream.data)
        self.like = like
        self.most = most
        self.begun = 0
        self.started = False
        self.num_rows: int | None = None

    def pieces(self, what: str) -> Iterator[tuple[int, Inputs, Tensor]]:
        """Read all points once.

        Args:
            what: What is done with them, for the bar.

        Yields:
            The number of the first point, the inputs and the targets of each piece.

        Raises:
            InputError: The data have another form, or another number of rows than in the first pass.
        """
        self.begun += 1
        most = "" if self.most is None else f" of at most {max(self.most, self.begun)}"
        first = 0
        with progress(f"pass {self.begun}{most}: {what}", self.num_rows) as advance:
            for x, y in _even(self._batches()):
                first += len(y)
                self._check_rows(first, ended=False)
                yield first - len(y), x, y
                advance(len(y))
            self._check_rows(first, ended=True)
        self.num_rows = first

    def first(self) -> tuple[Inputs, Tensor]:
        """The first piece."""
        found = next(_even(self._batches()), None) or self._empty()
        self.started = True
        return found

    def _batches(self) -> Iterator[tuple[Inputs, Tensor]]:
        """The batches that have rows, checked, on the device of the network."""
        shape = None
        for batch in batches_of(self.loader):
            x, y = pair(batch, self.like, empty=True)
            if len(y) == 0:
                continue
            one = rows(x, slice(0, 1)), y[:1]
            shape = one if shape is None else shape
            _check_alike(shape, one)
            yield map_inputs(x, self._own), self._own(y)

    def _own(self, value: Tensor) -> Tensor:
        """On the network's device, as a tensor that autograd can save."""
        value = value.detach()
        value = value if self.like is None else value.to(self.like.device)
        return value.clone() if value.is_inference() else value

    def _check_rows(self, count: int, *, ended: bool) -> None:
        known = self.num_rows
        if known is None:
            if ended and count == 0:
                self._empty()
            return
        if count == known if ended else count <= known:
            return
        if count == 0:
            raise InputError(
                f"the loader gave {known} rows in its first pass and none in pass {self.begun}: {EXHAUSTED}"
            )
        raise InputError(
            f"the loader gave {known} rows in its first pass and {'' if ended else 'at least '}{count} in "
            f"pass {self.begun}, but sums over the data need the same number of points in each pass. Pass a "
            "loader whose length does not change: without random filters, and with a fixed number of draws."
        )

    def _empty(self) -> Any:
        if self.started:
            raise InputError(
                f"the loader gave no batch with rows when it was read again: {EXHAUSTED}"
            )
        raise InputError("data is empty: the loader gave no batch with rows.")


def _loader(data: Any) -> Any:
    """What gives batches: a pair of tensors or arrays, which may be on disk, is cut."""
    return (
        _Cut(data)
        if isinstance(data, tuple | list | Mapping) and _is_pair(data)
        else with_batches(data)
    )


def _is_pair(data: Any) -> bool:
    """Whether these are all inputs and all targets, and not a list of batches."""
    if isinstance(data, Mapping):
        return bool(data)
    return len(data) == 2 and hasattr(data[1], "shape")


class _Cut:
    """The rows of a pair or dict, some at a time."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        targets = self.data.values() if isinstance(self.data, Mapping) else (self.data[1],)
        count = len(next(iter(targets)))
        for start in range(0, count, DATASET_BATCH):
            yield _sliced(self.data, slice(start, start + DATASET_BATCH))


def _sliced(value: Any, part: slice) -> Any:
    if isinstance(value, Mapping):
        return {name: _sliced(one, part) for name, one in value.items()}
    return (
        tuple(_sliced(one, part) for one in value)
        if isinstance(value, tuple | list)
        else value[part]
    )


def _check_alike(first: tuple[Inputs, Tensor], other: tuple[Inputs, Tensor]) -> None:
    """Raise unless two batches have the same entries, with rows of the same shapes."""
    names = [_names(x) for x, _ in (first, other)]
    if names[0] != names[1]:
        raise InputError(
            f"the inputs of all batches must have the same entries, but one batch has {names[0]} and another "
            f"{names[1]}. Give each batch the same ones."
        )
    check_same_shapes([first, other])


def _names(x: Inputs) -> object:
    if isinstance(x, Mapping):
        return sorted(map(str, x))
    return len(x) if isinstance(x, tuple) else "a tensor"


def _even(batches: Iterator[tuple[Inputs, Tensor]]) -> Iterator[tuple[Inputs, Tensor]]:
    """The same rows in pieces of even size: small batches cost little more than large ones then."""
    held: list[tuple[Inputs, Tensor]] = []
    count, size = 0, 0
    for x, y in batches:
        size = size or _piece_size(x, y)
        start = 0
        while count + len(y) - start >= size:
            stop = start + size - count
            yield _joined([*held, (rows(x, slice(start, stop)), y[start:stop])])
            held, count, start = [], 0, stop
        if start < len(y):
            held.append((rows(x, slice(start, None)), y[start:]))
            count += len(y) - start
    if held:
        yield _joined(held)


def _piece_size(x: Inputs, y: Tensor) -> int:
    each = sum(v[:1].numel() * v.element_size() for v in (*tensors(x), y))
    return max(1, min(PIECE_ROWS, PIECE_BYTES // max(1, each)))


def _joined(parts: list[tuple[Inputs, Tensor]]) -> tuple[Inputs, Tensor]:
    return join([x for x, _ in parts]), torch.cat([y for _, y in parts])
