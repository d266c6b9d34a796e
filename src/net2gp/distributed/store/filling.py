"""Tiles, computed by as many processes as there are."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.distributed.store.claims import Claims
from net2gp.distributed.store.tile_folder import Tile, TileFolder
from net2gp.errors import InputError
from net2gp.inputs import num_rows, ordinary_tensors, rows
from net2gp.progress import Advance, progress
from net2gp.types import Inputs, Kernel

PAUSE = 0.1
"""Seconds between two looks at tiles that other processes compute."""


def fill(folder: TileFolder, kernel: Kernel, x: Inputs, limit: float | None, lease: float) -> None:
    """Compute tiles until all are there, or the time is over.

    Args:
        folder: Where tiles go.
        kernel: The kernel, of the dtype of the folder.
        x: The points.
        limit: Seconds after which no tile is begun, or None.
        lease: Seconds after which the claim of a process that shows no life is taken over.
    """
    missing, total = folder.missing(), len(folder.tiles())
    _check_space(folder, len(missing))
    end = float("inf") if limit is None else time.monotonic() + limit
    with (
        progress(f"tiles of {folder.path.name}", total) as advance,
        Claims(folder.work, lease) as claims,
    ):
        advance(total - len(missing))
        work = _Work(folder, kernel, x, claims, end)
        while missing and not work.over:
            left = work.passed(missing, advance)
            if len(left) == len(missing):
                time.sleep(max(0.0, min(PAUSE, end - time.monotonic())))
            missing = left
    if not missing:
        shutil.rmtree(folder.work, ignore_errors=True)


@dataclass(frozen=True, eq=False)
class _Work:
    """What one process does until `end`, a time of its own clock."""

    folder: TileFolder
    kernel: Kernel
    x: Inputs
    claims: Claims
    end: float

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.end

    def passed(self, missing: list[Tile], advance: Advance) -> list[Tile]:
        """Compute each tile that nobody else computes, and return those that are missing after that."""
        left = []
        for tile in missing:
            if not self.folder.holds(tile) and not self.over:
                self.compute(tile)
            if self.folder.holds(tile):
                advance()
            else:
                left.append(tile)
        return left

    def compute(self, tile: Tile) -> None:
        """Compute a tile unless another process does."""
        taken = False
        with _said(self.folder, tile):
            taken = self.claims.take(tile)
        if not taken:
            return
        try:
            if not self.folder.holds(tile):  # its owner may have finished between the two looks
                found = values(self.folder, tile, self.kernel, self.x)
                with _said(self.folder, tile):
                    self.folder.write(tile, found, self.claims.part(tile))
        finally:
            self.claims.release(tile)


@ordinary_tensors()
def values(folder: TileFolder, tile: Tile, kernel: Kernel, x: Inputs) -> Tensor:
    """Compute a tile, always by the same call.

    Args:
        folder: The shapes.
        tile: Row and column of the tile.
        kernel: The kernel.
        x: The points.

    Returns:
        Its values on the CPU.

    Raises:
        InputError: Some are not finite.
    """
    size = folder.width * num_rows(x) // folder.num_rows
    left, right = (rows(x, slice(index * size, (index + 1) * size)) for index in tile)
    with torch.no_grad():
        K = _mirrored(kernel(left)) if tile[0] == tile[1] else kernel(left, right)
    K = K.to("cpu", folder.dtype).contiguous()  # in which numbers may be too large
    bad = ~torch.isfinite(K)
    if bool(bad.any()):
        named = _points_of(bad, tile, size, folder.width // size)
        raise InputError(
            f"k(x, x) is not finite in tile {tile}, at the points {named[:5]} of x"
            f"{' and others' if len(named) > 5 else ''}. Leave these points out, or divide x by its standard "
            "deviation. Tiles that are there stay."
        )
    return K


def _points_of(bad: Tensor, tile: Tile, size: int, outputs: int) -> list[int]:
    """Points with whole rows or columns of bad entries, or if there are none, with any."""
    sides = ((bad, tile[0]), (bad.mT, tile[1]))
    named = torch.cat([_rows_of(side.all(1), index * size, outputs) for side, index in sides])
    if not len(named):
        named = torch.cat([_rows_of(side.any(1), index * size, outputs) for side, index in sides])
    return named.unique().tolist()


def _rows_of(bad: Tensor, start: int, outputs: int) -> Tensor:
    return start + bad.reshape(-1, outputs).any(1).nonzero().flatten()


def _mirrored(K: Tensor) -> Tensor:
    """Symmetric to the last digit, which rounding may have left out."""
    return K.triu() + K.triu(1).mT


@contextmanager
def _said(folder: TileFolder, tile: Tile) -> Iterator[None]:
    """Say which tile could not be written, and that nothing is lost."""
    try:
        yield
    except FileNotFoundError:
        if not folder.path.is_dir():
            raise
        # another process saw all tiles and took the folder of unfinished ones away; this one is tried again
    except OSError as error:
        raise OSError(
            error.errno,
            f"tile {tile} of the store {folder.path} could not be written ({error.strerror}). Nothing half "
            "written is left, and the tiles that are there stay. Make room, then go on with store.fill()",
        ) from error


def _check_space(folder: TileFolder, missing: int) -> None:
    """Refuse before hours of work what the disk cannot hold."""
    free, needed = shutil.disk_usage(folder.path).free, missing * folder.tile_bytes
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"the {missing} missing tiles of the store {folder.path} take {needed / 2**30:.3g} GiB, but "
            f"{free / 2**30:.3g} GiB are free on its disk. Make room, or take another disk or dtype="
            "torch.float32",
        )
