"""A tangent kernel with some points held: what they need is computed once, for many later points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from net2gp.inputs import follows, num_rows
from net2gp.linear.forward.factors import add_blocks
from net2gp.linear.jacobians.pieces import Pieces, add_tile, row_shapes
from net2gp.types import Inputs

if TYPE_CHECKING:
    from net2gp.linear.jacobians.tangent import TangentKernel


@dataclass(frozen=True, eq=False)
class Kept:
    """The kernel with the points `known`, whose factors serve every later call.

    Args:
        kernel: The kernel.
        known: The points.
        pieces: Their factors.
        traced: Whether the kernel is summed over outputs, as if there were one.
    """

    kernel: TangentKernel
    known: Inputs
    pieces: Pieces
    traced: bool = False

    def __call__(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Compute k(known, x), (N·C, M·C), and k(x_m, x_m), (M, C, C), both from one pass over `x`."""
        kernel, M = self.kernel, num_rows(x)
        layout = kernel._plan(x, training=False)
        alike = row_shapes(x) == row_shapes(self.known) and not layout.leftover
        if not alike or kernel._points(layout) < M:
            blocks = kernel.blocks(x)
            if self.traced:
                blocks = blocks.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
            return kernel._assemble(self.known, x, traced=self.traced), blocks
        C = 1 if self.traced else layout.num_outputs
        with torch.set_grad_enabled(follows(x)):
            own = kernel._pieces(x, layout, self.traced)
            K, blocks = kernel._zeros(num_rows(self.known) * C, M * C), kernel._zeros(M, C, C)
            add_tile(K, self.pieces, own, C)
            for factor in own.factors.values():
                add_blocks(blocks, factor)
        return K, blocks
