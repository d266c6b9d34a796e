"""The tangent kernel averaged over outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.inputs import chunks, num_rows, rows
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.types import Inputs


@dataclass(frozen=True, eq=False)
class TraceKernel:
    """(1/C) Σ_c k_cc(x, x'): the tangent kernel averaged over outputs, for any number of independent ones."""

    tangent: TangentKernel

    @property
    def joint(self) -> bool:
        """False: outputs are independent copies."""
        return False

    def check(self, x: Inputs) -> None:
        """Raise if the network cannot take `x`, or cannot be linearized there."""
        self.tangent.check(x)

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """k(x, y): (N, M)."""
        return self.tangent._assemble(x, y, traced=True) / self._num_outputs(x)

    def blocks(self, x: Inputs) -> Tensor:
        """k(x_n, x_n): (N, 1, 1)."""
        return self.diag(x)[:, None, None]

    def diag(self, x: Inputs) -> Tensor:
        """k(x_n, x_n): (N,)."""
        return self.tangent.blocks(x).diagonal(dim1=1, dim2=2).mean(1)

    def matmul(self, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """k(x, y) @ v, a tile of rows of k(x, y) at a time."""
        self.tangent.linearized.check(x)
        self.tangent.linearized.check(y, "y")
        element = self.tangent.linearized.example.element_size()
        size = max(1, self.tangent._budget // (element * num_rows(y)))
        return torch.cat(
            [tile @ v.to(tile.dtype) for tile in (self(part, y) for part in chunks(x, size))]
        )

    def precise(self) -> TraceKernel:
        """The same kernel with products in float64; inputs stay in the network's dtype."""
        return TraceKernel(self.tangent.precise())

    def scaled(self, variance: float | Tensor) -> TraceKernel:
        """variance · k."""
        return TraceKernel(self.tangent.scaled(variance))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> TraceKernel:
        """The same kernel with its tensors on another device or in another dtype."""
        return TraceKernel(self.tangent.to(device, dtype))

    def _num_outputs(self, x: Inputs) -> int:
        return self.tangent.linearized(rows(x, slice(0, 1))).shape[1]
