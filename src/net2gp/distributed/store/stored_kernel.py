"""A kernel that reads its matrix of some points from a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b

import torch
from torch import Tensor

from net2gp.distributed.store.tile_folder import TileFolder
from net2gp.inputs import follows, map_inputs, num_rows, same_inputs, tensors
from net2gp.kernels import BaseKernel
from net2gp.kernels.base import Kept, dtype_of
from net2gp.kernels.values import rows_per_point, wrong_height
from net2gp.types import Inputs, Kernel


@dataclass(frozen=True, eq=False)
class StoredKernel(BaseKernel):
    """A kernel whose matrix k(X, X) of the points X is in a folder; other pairs are computed.

    `KernelStore.kernel()` makes it. The diagonal, blocks and products with k(X, X) are read tile by tile, so
    that a product takes the memory of a tile. Columns and rows of k(X, X), for some of the points X in any
    order, are read if all tiles are there. Points are those of the store if their numbers are equal. Where x
    requires a gradient the kernel itself is computed, since numbers in files have none. A file of a posterior
    holds the kernel itself.

    Args:
        kernel: The kernel itself.
        points: The points X.
        folder: Where their matrix is.
    """

    kernel: Kernel
    points: Inputs
    folder: TileFolder

    def __repr__(self) -> str:
        return f"StoredKernel({str(self.folder.path)!r}, {self.kernel!r})"

    def outputs(self, x: Inputs) -> int | None:
        """As the kernel itself."""
        return self.kernel.outputs(x)

    def check(self, x: Inputs) -> None:
        """As the kernel itself."""
        self.kernel.check(x)

    def result_dtype(self, x: Inputs) -> torch.dtype:
        """As the kernel itself."""
        return dtype_of(self.kernel, x)

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """k(x, y), read if one is X and the other is X or a part of it: (N, M), or (N·C, M·C)."""
        y = x if y is None else y
        first, second = self._is_points(x), self._is_points(y)
        if first and second:
            return self._matrix(x)
        if first or second:
            some = self._places_of(y if first else x)
            if some is not None and not self.folder.missing():
                return self._columns(some, x) if first else self._columns(some, x).mT
        return self.kernel(x, None if y is x else y)

    def _matrix(self, x: Inputs) -> Tensor:
        size, span = self.folder.num_rows, self.folder.span
        K = tensors(x)[0].new_empty(size, size, dtype=self.result_dtype(x))
        for (i, j), tile in self.folder.each():
            K[span(i), span(j)] = tile.to(K)
            if i != j:
                K[span(j), span(i)] = tile.mT.to(K)
        return K

    def _columns(self, some: list[int], x: Inputs) -> Tensor:
        """The columns of k(X, X) that belong to some of the points."""
        folder, C = self.folder, self.folder.num_rows // num_rows(self.points)
        taken = (torch.tensor(some)[:, None] * C + torch.arange(C)).reshape(-1)
        K = tensors(x)[0].new_empty(folder.num_rows, len(taken), dtype=self.result_dtype(x))
        for j in (taken // folder.width).unique().tolist():
            here = (taken // folder.width == j).nonzero().flatten()
            inside = taken[here] - j * folder.width
            for i in range(folder.grid):
                tile = folder.read((i, j)) if i <= j else folder.read((j, i)).mT
                K[folder.span(i), here.to(K.device)] = tile[:, inside].to(K)
        return K

    def diag(self, x: Inputs) -> Tensor:
        """The diagonal of k(x, x), read if x is X: (N,), or (N·C,)."""
        if not self._is_points(x):
            return self.kernel.diag(x)
        return torch.cat([tile.diagonal() for tile in self._on_diagonal(x)])

    def blocks(self, x: Inputs) -> Tensor:
        """k(x_n, x_n), read if x is X: (N, 1, 1), or (N, C, C)."""
        if not self._is_points(x):
            return self.kernel.blocks(x)
        C = self.outputs(x) or 1
        tiles = [tile.reshape(-1, C, len(tile) // C, C) for tile in self._on_diagonal(x)]
        return torch.cat([tile.diagonal(dim1=0, dim2=2).permute(2, 0, 1) for tile in tiles])

    def matmul(self, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """k(x, y) @ v, of one tile at a time if both are X."""
        if not (self._is_points(x) and (y is x or self._is_points(y))):
            return self.kernel.matmul(x, y, v)
        rows_per_point(y, v)
        if len(v) != self.folder.num_rows:
            raise wrong_height(self.folder.num_rows, v)
        span, v = self.folder.span, v.to(self.result_dtype(x))
        product = torch.zeros_like(v)
        for (i, j), tile in self.folder.each():
            tile = tile.to(v)
            product[span(i)] += tile @ v[span(j)]
            if i != j:
                product[span(j)] += tile.mT @ v[span(i)]
        return product

    def keep(self, x: Inputs) -> Kept | None:
        """As the kernel itself."""
        return self.kernel.keep(x) if isinstance(self.kernel, BaseKernel) else None

    def precise(self) -> StoredKernel:
        """The same kernel of the same inputs, its results in float64; a store in float32 keeps its digits."""
        return replace(self, kernel=self.kernel.precise())

    def portable(self) -> Kernel:
        """The kernel itself, since a posterior outlives the folder."""
        return self.kernel

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> StoredKernel:
        """The same kernel for points on another device or in another dtype; X moves along."""
        move = lambda v: v.to(device=device, dtype=dtype if v.is_floating_point() else None)
        return replace(
            self, kernel=self.kernel.to(device, dtype), points=map_inputs(self.points, move)
        )

    def _is_points(self, x: Inputs) -> bool:
        """Whether these are the points X, all of them and in their order."""
        parts, known = self._aligned(x), tensors(self.points)
        return (
            parts is not None
            and all(one.device == other.device for one, other in zip(parts, known, strict=True))
            and same_inputs(tuple(parts), tuple(known))
        )

    def _aligned(self, x: Inputs) -> list[Tensor] | None:
        """The tensors of x in the order of those of X, or None if x can be no part of X."""
        known = self.points
        kinds = (Tensor, tuple, Mapping)
        if follows(x) or any(isinstance(x, kind) != isinstance(known, kind) for kind in kinds):
            return None
        if isinstance(known, Mapping) and isinstance(x, Mapping):
            if set(known) != set(x):
                return None
            x = {name: x[name] for name in known}
        parts = tensors(x)
        alike = len(parts) == len(tensors(known)) and all(
            isinstance(one, Tensor)
            and one.shape[1:] == other.shape[1:]
            and one.dtype == other.dtype
            for one, other in zip(parts, tensors(known), strict=True)
        )
        return parts if alike else None

    def _places_of(self, x: Inputs) -> list[int] | None:
        """Which of the points X these are, or None if one of them is none."""
        parts, found = self._aligned(x), []
        if parts is None or not len(parts[0]):
            return None
        for name in _names(parts):
            if name not in self._numbers:
                return None
            found.append(self._numbers[name])
        return found

    @cached_property
    def _numbers(self) -> dict[bytes, int]:
        """The numbers of the points X."""
        return {name: n for n, name in enumerate(_names(tensors(self.points)))}

    def _on_diagonal(self, x: Inputs) -> list[Tensor]:
        """The tiles on the diagonal."""
        self.folder.check_complete()
        like = tensors(x)[0].new_empty(0, dtype=self.result_dtype(x))
        return [self.folder.read((i, i)).to(like) for i in range(self.folder.grid)]


def _names(parts: list[Tensor]) -> Iterator[bytes]:
    """A digest of the bytes of each point."""
    arrays = [part.detach().cpu().contiguous().reshape(len(part), -1) for part in parts]
    for row in zip(*arrays, strict=True):
        digest = blake2b(digest_size=16)
        for values in row:
            digest.update(values.view(torch.uint8).numpy().data)
        yield digest.digest()
