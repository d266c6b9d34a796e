"""A kernel that reads its matrix of some points from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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
    that a product takes the memory of a tile. Points are X if their numbers are equal. Where x requires a
    gradient the kernel itself is computed, since numbers in files have none. A file of a posterior holds the
    kernel itself.

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
        """k(x, y), read if both are X: (N, M), or (N·C, M·C)."""
        if not self._is_stored(x, y):
            return self.kernel(x, None if y is x else y)
        size, span = self.folder.num_rows, self.folder.span
        K = tensors(x)[0].new_empty(size, size, dtype=self.result_dtype(x))
        for (i, j), tile in self.folder.each():
            K[span(i), span(j)] = tile.to(K)
            K[span(j), span(i)] = tile.mT.to(K)
        return K

    def diag(self, x: Inputs) -> Tensor:
        """The diagonal of k(x, x), read if x is X: (N,), or (N·C,)."""
        if not self._is_stored(x):
            return self.kernel.diag(x)
        return torch.cat([tile.diagonal() for tile in self._on_diagonal(x)])

    def blocks(self, x: Inputs) -> Tensor:
        """k(x_n, x_n), read if x is X: (N, 1, 1), or (N, C, C)."""
        if not self._is_stored(x):
            return self.kernel.blocks(x)
        C = self.outputs(x) or 1
        tiles = [tile.reshape(-1, C, len(tile) // C, C) for tile in self._on_diagonal(x)]
        return torch.cat([tile.diagonal(dim1=0, dim2=2).permute(2, 0, 1) for tile in tiles])

    def matmul(self, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """k(x, y) @ v, of one tile at a time if both are X."""
        if not self._is_stored(x, y):
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

    def _is_stored(self, x: Inputs, y: Inputs | None = None) -> bool:
        return self._is_points(x) and (y is None or y is x or self._is_points(y))

    def _is_points(self, x: Inputs) -> bool:
        known = self.points
        if isinstance(known, Mapping) and isinstance(x, Mapping):
            if set(known) != set(x):
                return False
            x = {name: x[name] for name in known}
        if type(x) is not type(known) or num_rows(x) != num_rows(known) or follows(x):
            return False
        pairs = zip(tensors(x), tensors(known), strict=False)
        return all(one.device == other.device for one, other in pairs) and same_inputs(x, known)

    def _on_diagonal(self, x: Inputs) -> list[Tensor]:
        """The tiles on the diagonal."""
        self.folder.check_complete()
        like = tensors(x)[0].new_empty(0, dtype=self.result_dtype(x))
        return [self.folder.read((i, i)).to(like) for i in range(self.folder.grid)]
