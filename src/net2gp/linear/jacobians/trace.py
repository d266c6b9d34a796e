"""The tangent kernel averaged over outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from net2gp.inputs import rows
from net2gp.kernels.base import BaseKernel
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.types import Inputs


@dataclass(frozen=True, eq=False)
class TraceKernel(BaseKernel):
    """The tangent kernel averaged over outputs, (1/C) Σ_c k_cc(x, x').

    It serves tasks with any number of independent outputs.

    Args:
        tangent: The tangent kernel k.
    """

    tangent: TangentKernel

    def check(self, x: Inputs) -> None:
        """Raise if the network cannot take `x`, or cannot be linearized there."""
        self.tangent.check(x)

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """Compute k(x, y), (N, M)."""
        return self.tangent._assemble(x, y, traced=True) / self._num_outputs(x)

    def diag(self, x: Inputs) -> Tensor:
        """Compute the diagonal of k(x, x), (N,)."""
        return self.tangent.blocks(x).diagonal(dim1=1, dim2=2).mean(1)

    def keep(self, x: Inputs) -> Callable[[Inputs], tuple[Tensor, Tensor]] | None:
        """Hold the factors of the gradients at points, or return None if they are too large.

        Args:
            x: N points.

        Returns:
            A function from M other points z to k(x, z), (N, M), and k(z_m, z_m), (M, 1, 1).
        """
        kept = self.tangent.keep(x, traced=True)
        if kept is None:
            return None
        num_outputs = self._num_outputs(x)

        def at(points: Inputs) -> tuple[Tensor, Tensor]:
            cross, own = kept(points)
            return cross / num_outputs, own / num_outputs

        return at

    def precise(self) -> TraceKernel:
        """Return the same kernel with products in float64; inputs stay in the network's dtype."""
        return TraceKernel(self.tangent.precise())

    def within(self, tolerance: float) -> TraceKernel:
        """Return the same kernel, whose matrices may be less exact on a GPU: see `TangentKernel.within`.

        Args:
            tolerance: The error.

        Returns:
            The kernel.

        Raises:
            InputError: If `tolerance` is negative or no number.
        """
        return TraceKernel(self.tangent.within(tolerance))

    def scaled(self, variance: float | Tensor) -> TraceKernel:
        """Return variance · k."""
        return TraceKernel(self.tangent.scaled(variance))

    def _tile_bytes(self) -> int:
        return self.tangent._budget

    def _num_outputs(self, x: Inputs) -> int:
        return self.tangent.linearized(rows(x, slice(0, 1))).shape[1]
