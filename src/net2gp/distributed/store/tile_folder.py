"""A symmetric matrix as a folder that zarr can read: the tiles of its upper triangle, a file each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from net2gp.errors import FileFormatError, InputError

Tile = tuple[int, int]
"""Row and column of a tile in the grid of tiles; the row is not below the column."""

METADATA = "zarr.json"
WORK = ".work"
"""Claims and tiles that are being written. It is gone when all tiles are there."""

CHECKSUM_BYTES = 4

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class TileFolder:
    """Where the tiles of a symmetric matrix lie, and how they are written and read.

    It is one array of zarr's format 3. A tile is one chunk, whose last four bytes are the CRC32C of the
    others; tiles at the lower and right edge are filled up with NaN. Tiles below the diagonal do not exist.

    Args:
        path: The folder.
        num_rows: The number of rows of the matrix.
        width: The number of rows of a tile.
        dtype: float32 or float64.

    >>> folder = TileFolder(Path("kernel.zarr"), num_rows=5, width=2, dtype=torch.float64)
    >>> folder.tiles()
    [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]
    >>> folder.span(2)
    slice(4, 5, None)
    """

    path: Path
    num_rows: int
    width: int
    dtype: torch.dtype

    @property
    def grid(self) -> int:
        """The number of tiles in a row."""
        return -(-self.num_rows // self.width)

    @property
    def tile_bytes(self) -> int:
        """The size of the file of a tile."""
        return self.width**2 * self.dtype.itemsize + CHECKSUM_BYTES

    @property
    def work(self) -> Path:
        """The folder of claims and unfinished files."""
        return self.path / WORK

    def tiles(self) -> list[Tile]:
        """All tiles on and above the diagonal, row by row."""
        return [(i, j) for i in range(self.grid) for j in range(i, self.grid)]

    def span(self, index: int) -> slice:
        """The rows of the matrix that belong to a row of tiles."""
        return slice(index * self.width, min((index + 1) * self.width, self.num_rows))

    def file(self, tile: Tile) -> Path:
        """The file of a tile."""
        return self.path / _key(tile)

    def holds(self, tile: Tile) -> bool:
        """Whether the tile is there in its full size."""
        try:
            return self.file(tile).stat().st_size == self.tile_bytes
        except (FileNotFoundError, NotADirectoryError):
            return False

    def missing(self) -> list[Tile]:
        """The tiles that are not there."""
        return [tile for tile in self.tiles() if not self.holds(tile)]

    def read(self, tile: Tile) -> Tensor:
        """Read a tile.

        Args:
            tile: Row and column of the tile.

        Returns:
            Its values, without what fills up a tile at the edge.

        Raises:
            FileFormatError: The bytes do not have their checksum.
            InputError: The tile is not there.
        """
        rows, columns = (self.span(index) for index in tile)
        try:
            found = self._array()[rows, columns]
        except ValueError as error:
            raise FileFormatError(
                f"tile {tile} of {self.path} is corrupted ({error}). Type store.repair(), which computes "
                "corrupted tiles again."
            ) from None
        if np.isnan(found[0, 0]):  # zarr fills up what is not there, and no tile is written with it
            self.check_complete()
        return torch.from_numpy(found)

    def readable(self, tile: Tile) -> bool:
        """Whether a tile that is there has its checksum."""
        try:
            self.read(tile)
        except FileFormatError:
            return False
        return True

    def each(self) -> Iterator[tuple[Tile, Tensor]]:
        """Read all tiles on and above the diagonal, one after the other."""
        self.check_complete()
        for tile in self.tiles():
            yield tile, self.read(tile)

    def check_complete(self) -> None:
        """Raise unless all tiles are there.

        Raises:
            InputError: Some are missing.
        """
        missing = len(self.missing())
        if missing:
            raise InputError(
                f"{missing} of {len(self.tiles())} tiles of the store {self.path} are missing. Compute them "
                "first: store.fill()."
            )

    def write(self, tile: Tile, values: Tensor, part: Path) -> None:
        """Write a tile beside its place first, so that whoever finds it there finds all of it.

        Args:
            tile: Row and column of the tile.
            values: Its values.
            part: The file that is written and then moved, on the same disk.

        Raises:
            OSError: The disk is full, or broken. No part of the tile is left.
        """
        place = self.file(tile)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(part, self._encoded(tile, values))
        os.replace(part, place)
        _settle(place.parent)

    def _array(self) -> Any:
        return zarr_module().open_array(str(self.path), mode="r")

    def _encoded(self, tile: Tile, values: Tensor) -> bytes:
        """The bytes of a tile, as zarr writes them."""
        chunks: dict[str, Any] = {}
        array = new_array(chunks, self, {})
        rows, columns = (self.span(index) for index in tile)
        array[rows, columns] = values.numpy()
        return chunks[_key(tile)].to_bytes()


def _key(tile: Tile) -> str:
    return f"c/{tile[0]}/{tile[1]}"


def zarr_module() -> Any:
    """The library zarr.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import zarr
    except ImportError as error:
        raise ImportError("a kernel store needs zarr: pip install 'net2gp[store]'.") from error
    return zarr


def new_array(chunks: dict[str, Any], folder: TileFolder, attributes: dict[str, Any]) -> Any:
    """Make an empty array in memory, which zarr writes into a dict as it would into a folder.

    Args:
        chunks: Where the files go, by name.
        folder: The shapes.
        attributes: What the metadata say beside shapes.

    Returns:
        The array.
    """
    zarr = zarr_module()
    return zarr.create_array(
        zarr.storage.MemoryStore(chunks),
        shape=(folder.num_rows, folder.num_rows),
        chunks=(folder.width, folder.width),
        dtype=str(folder.dtype).removeprefix("torch."),
        filters=None,
        compressors=[zarr.codecs.Crc32cCodec()],
        fill_value=float("nan"),
        attributes=attributes,
    )


def write_metadata(folder: TileFolder, attributes: dict[str, Any], part: str) -> None:
    """Write the description of the array, unless another process has been faster.

    Args:
        folder: The folder, which is made if it is missing.
        attributes: What the metadata say beside shapes.
        part: The name of an unfinished file that no other process uses.

    Raises:
        InputError: The path holds something else, or has no folder to be in.
    """
    _check_place(folder.path)
    files: dict[str, Any] = {}
    new_array(files, folder, attributes)
    folder.work.mkdir(parents=True, exist_ok=True)
    beside, place = folder.work / part, folder.path / METADATA
    write_whole(beside, files[METADATA].to_bytes())
    try:
        os.link(beside, place)  # unlike a move it fails if another process was faster
    except FileExistsError:
        pass
    except OSError:  # a disk without links
        os.replace(beside, place)
    beside.unlink(missing_ok=True)
    _settle(folder.path)


def _check_place(path: Path) -> None:
    if (path / METADATA).exists():  # another process made the store in this moment
        return
    if not path.parent.is_dir():
        raise InputError(
            f"there is no folder {path.parent} for the store. Make it first: "
            f"Path({str(path.parent)!r}).mkdir(parents=True)."
        )
    if path.exists() and (not path.is_dir() or {one.name for one in path.iterdir()} - {WORK}):
        kind = "a folder of something else" if path.is_dir() else "a file"
        raise InputError(
            f"{path} is {kind}. Pass the path of a store, or one where nothing is yet, for example "
            f"{str(path.with_suffix('.zarr'))!r}."
        )


def read_metadata(path: Path) -> dict[str, Any] | None:
    """Read the description of the array.

    Args:
        path: The folder.

    Returns:
        What zarr wrote, or None if there is nothing.

    Raises:
        FileFormatError: It is no JSON, or not of an array.
    """
    try:
        text = (path / METADATA).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("node_type") != "array":
        raise FileFormatError(
            f"{path / METADATA} does not describe an array of zarr. Delete the folder {path} to start again, "
            "or pass another path."
        )
    return found


def write_whole(part: Path, content: bytes) -> None:
    """Write a file up to the disk itself, or leave none.

    Args:
        part: The file.
        content: What it holds.

    Raises:
        OSError: The disk is full, or broken.
    """
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def _settle(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the system has a way to ask for it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
