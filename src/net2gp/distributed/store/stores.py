"""The kernel matrix of some points as a folder, which is filled by any number of processes."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from net2gp.distributed.store.filling import fill
from net2gp.distributed.store.identity import KIND, check_no_gradient, differences, identity_of
from net2gp.distributed.store.stored_kernel import StoredKernel
from net2gp.distributed.store.tile_folder import (
    DTYPES,
    Tile,
    TileFolder,
    read_metadata,
    write_metadata,
    zarr_module,
)
from net2gp.errors import FileFormatError, InputError, check_count, check_positive
from net2gp.inputs import check_inputs, copied, describe, map_inputs, num_rows
from net2gp.kernels.values import is_kernel
from net2gp.show import as_html, as_text
from net2gp.types import Inputs, Kernel

ROWS = 512
"""The rows of a tile unless the caller says otherwise."""

LEASE = 60.0
"""Seconds after which the claim of a process that shows no life is taken over."""


@dataclass(frozen=True, eq=False)
class KernelStore:
    """The matrix k(X, X) of the points X in a folder, tile by tile. `kernel_store` makes it.

    Args:
        source: The kernel that computes.
        points: The points X.
        folder: Where the tiles are.
        identity: What the folder says about kernel and points.
    """

    source: Kernel = field(repr=False)
    points: Inputs = field(repr=False)
    folder: TileFolder
    identity: dict[str, Any] = field(repr=False)

    def _facts(self) -> dict[str, str]:
        folder = self.folder
        return {
            "_path": repr(str(folder.path)),
            "rows": f"{folder.num_rows}",
            "tiles": f"{len(folder.tiles())}",
            "dtype": str(folder.dtype).removeprefix("torch."),
            "progress": f"{self.progress:.0%}",
            "gigabytes": f"{len(folder.tiles()) * folder.tile_bytes / 1e9:.3g}",
        }

    __repr__, _repr_html_ = as_text, as_html

    @property
    def progress(self) -> float:
        """The share of tiles that are there."""
        tiles = len(self.folder.tiles())
        return (tiles - len(self.folder.missing())) / tiles

    def fill(self, *, limit: float | None = None, lease: float = LEASE) -> float:
        """Compute the tiles that are missing; any number of processes may do so at once.

        A process claims a tile, computes it, writes it beside its place and moves it there. It may be
        interrupted or killed at any point, and costs at most the tile that it was at. Where another
        process computes the last tiles, this one waits for them, and takes over what a killed one has left.

        Args:
            limit: Seconds after which no further tile is begun, or None.
            lease: Seconds after which the claim of a process is taken over that has not shown life, which
                it does four times as often. A process of the same machine that has ended is known at once.

        Returns:
            The share of tiles that are there.

        Raises:
            InputError: Entries of the matrix are not finite, or the folder has become another store.
            OSError: The disk is full, or broken.
        """
        if limit is not None:
            check_positive(limit, "limit")
        check_positive(lease, "lease")
        _check_same(self.folder, self.identity, self.source, self.points)
        kernel = self.source.precise() if self.folder.dtype == torch.float64 else self.source
        fill(self.folder, kernel, self.points, limit, lease)
        return self.progress

    def repair(self) -> list[Tile]:
        """Compute tiles again whose bytes do not have their checksum, and those that are missing.

        Cost: all tiles are read once.

        Returns:
            Row and column of each tile that was corrupted.

        Raises:
            InputError: As `fill`.
            OSError: As `fill`.
        """
        there = [tile for tile in self.folder.tiles() if self.folder.holds(tile)]
        bad = [tile for tile in there if not self.folder.readable(tile)]
        for tile in bad:
            self.folder.file(tile).unlink(missing_ok=True)
        self.fill()
        return bad

    def kernel(self) -> StoredKernel:
        """The kernel, which reads k(X, X) from the folder and computes all other pairs."""
        return StoredKernel(self.source, self.points, self.folder)


def kernel_store(
    path: str | os.PathLike,
    kernel: Kernel,
    x: Inputs,
    *,
    tile: int | None = None,
    dtype: torch.dtype | None = None,
) -> KernelStore:
    """Open the folder that holds k(x, x), or make it, without computing the matrix.

    It is for kernels whose entries are costly, such as limits of convolutional networks with pooling. The
    folder is an array of zarr's format 3 with the upper triangle of the matrix: N²C²/2 numbers. Each tile has
    a checksum, and the metadata are JSON. In float64 the numbers are those of `kernel.precise()`, which
    `condition` uses; in float32, half as large, those of the kernel, whose rounding acts as noise.

    Args:
        path: The folder. One that exists must belong to this kernel and these points.
        kernel: The kernel, without anything that requires a gradient.
        x: N points.
        tile: The number of points of a tile. None takes what the folder has, or 512 rows of the matrix.
        dtype: float32 or float64. None takes what the folder has, or float64.

    Returns:
        The store, of whose tiles none, some or all may be there.

    Raises:
        InputError: The store is of another kernel, other points, or another tile or dtype, the path is
            something else, or the kernel cannot take `x`.
        FileFormatError: The metadata cannot be read.
        ImportError: zarr is not installed.

    >>> import tempfile
    >>> import net2gp as n2g
    >>> x = torch.linspace(0, 1, 5, dtype=torch.float64)[:, None]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = n2g.distributed.kernel_store(f"{folder}/kernel.zarr", n2g.RBF(), x, tile=2)
    ...     before, after = store.progress, store.fill()
    ...     posterior = n2g.condition(store.kernel(), (x, x.sin()), n2g.Gaussian(0.01))
    ...     same = torch.equal(store.kernel()(x), n2g.RBF()(x))
    >>> before, after, same
    (0.0, 1.0, True)

    Reference: the Zarr core specification, version 3, 2023, https://zarr-specs.readthedocs.io.
    """
    zarr_module()
    place = _checked(path, kernel, x, tile, dtype)
    x = map_inputs(x, copied)  # data that are changed in place later would be another matrix
    found = read_metadata(place)
    mine = _attributes(found)
    count = kernel.outputs(x) or 1
    size = min(tile or mine.get("tile") or max(1, ROWS // count), num_rows(x))
    dtype = dtype or DTYPES.get(str((found or {}).get("data_type")), torch.float64)
    folder = TileFolder(place, num_rows(x) * count, size * count, dtype)
    identity = identity_of(kernel.precise() if dtype == torch.float64 else kernel, x, size)
    if found is None:
        write_metadata(folder, {"net2gp": identity}, f"{uuid.uuid4().hex}.part")
    _check_same(folder, identity, kernel, x)
    return KernelStore(kernel, x, folder, identity)


def _checked(
    path: str | os.PathLike,
    kernel: Kernel,
    x: Inputs,
    tile: int | None,
    dtype: torch.dtype | None,
) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise InputError(
            f'path must be a text or a path, but is {describe(path)}. Pass for example "kernel.zarr".'
        )
    if not is_kernel(kernel):
        raise InputError(
            f"kernel must be a Kernel, but is {describe(kernel)}. Pass for example nngp(network)."
        )
    if dtype is not None and dtype not in DTYPES.values():
        raise InputError(
            f"dtype must be torch.float32 or torch.float64, but is {dtype!r}. Leave it out for float64."
        )
    if tile is not None:
        check_count(tile, "tile", example=ROWS)
    check_inputs(x)
    kernel.check(x)
    check_no_gradient(kernel, x)
    return Path(path).expanduser().absolute()


def _attributes(metadata: dict[str, Any] | None) -> dict[str, Any]:
    found = (metadata or {}).get("attributes", {}).get("net2gp", {})
    return found if isinstance(found, dict) else {}


def _check_same(folder: TileFolder, identity: dict[str, Any], kernel: Kernel, x: Inputs) -> None:
    """Raise unless the folder holds the matrix of this kernel and these points."""
    metadata = read_metadata(folder.path)
    if metadata is None:
        raise InputError(
            f"there is no store in {folder.path} any more. Call kernel_store again, which makes it."
        )
    found = _attributes(metadata)
    if found.get("kind") != KIND:
        raise InputError(
            f"{folder.path} is an array of zarr, but not a store of net2gp. Pass another path."
        )
    if found.get("format") != identity["format"] or set(found) != set(identity):
        raise FileFormatError(
            f"the store {folder.path} has format {found.get('format')}, but this net2gp reads format "
            f"{identity['format']}. Pass another path, or use the net2gp that wrote it."
        )
    said = differences(found, identity, kernel, x)
    dtype = str(folder.dtype).removeprefix("torch.")
    if metadata.get("data_type") != dtype:
        said.append(f"its numbers are {metadata.get('data_type')} and not {dtype}")
    if said:
        raise InputError(
            f"the store {folder.path} is another one: {'; '.join(said)}. Pass what it was made with, or "
            "another path."
        )
