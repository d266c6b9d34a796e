"""Independent outputs as a kernel that couples them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from net2gp.kernels.base import BaseKernel, independent_product
from net2gp.linalg import kron_identity
from net2gp.types import Inputs, Kernel


@dataclass(frozen=True, eq=False)
class IndependentOutputs(BaseKernel):
    """k ⊗ I_C: a kernel of one output as the joint kernel of C independent ones, rows n·C + c.

    Args:
        kernel: A kernel of independent outputs.
        num_outputs: The number of outputs C.
    """

    kernel: Kernel
    num_outputs: int

    def outputs(self, x: Inputs) -> int:
        """C."""
        return self.num_outputs

    def check(self, x: Inputs) -> None:
        """As the kernel of one output."""
        self.kernel.check(x)

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """k(x, y) ⊗ I: (N·C, M·C)."""
        return kron_identity(self.kernel(x, y), self.num_outputs)

    def blocks(self, x: Inputs) -> Tensor:
        """k(x_n, x_n) I: (N, C, C)."""
        diagonal = self.kernel.diag(x)
        return diagonal[:, None, None] * torch.eye(self.num_outputs).to(diagonal)

    def diag(self, x: Inputs) -> Tensor:
        """k(x_n, x_n), C times each: (N·C,)."""
        return self.kernel.diag(x).repeat_interleave(self.num_outputs)

    def matmul(self, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """(k(x, y) ⊗ I) @ v, with the outputs as further columns."""
        return independent_product(self.kernel, x, y, v, self.num_outputs)

    def precise(self) -> IndependentOutputs:
        """The same kernel of the same inputs, its results in float64."""
        return replace(self, kernel=self.kernel.precise())

    def scaled(self, variance: float | Tensor) -> IndependentOutputs:
        """variance · k."""
        return replace(self, kernel=self.kernel.scaled(variance))
