"""Plain covariance functions beside those that networks give, and adapters between kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from net2gp.errors import InputError, check_positive
from net2gp.inputs import check_inputs, chunks, describe, num_rows
from net2gp.linalg import kron_identity
from net2gp.types import Inputs, Kernel

TILE_BYTES = 2**27


@dataclass(frozen=True, eq=False)
class RBF:
    """k(x, x') = output_var · exp(−‖x − x'‖² / (2 lengthscale²)), for x of shape (N, D).

    `lengthscale` is a number or a tensor (D,), one per input; both may require gradients.
    Cost: N·M·D. Squared distances are taken from differences to the mean of x, so that an offset of
    the data costs no digits.

    >>> RBF()(torch.tensor([[0.0], [1.0]]))
    tensor([[1.0000, 0.6065],
            [0.6065, 1.0000]])

    Reference: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, ch. 4.
    """

    lengthscale: float | Tensor = 1.0
    output_var: float | Tensor = 1.0

    def __post_init__(self) -> None:
        check_positive(self.lengthscale, "lengthscale")
        check_positive(self.output_var, "output_var")

    @property
    def joint(self) -> bool:
        """False: outputs are independent copies."""
        return False

    def check(self, x: Inputs) -> None:
        """Raise unless `x` is one floating tensor of shape (N, D)."""
        check_inputs(x)
        if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
            raise InputError(
                f"RBF needs x as a floating tensor of shape (N, D), but x is {describe(x)}."
            )

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """k(x, y): (N, M)."""
        self.check(x)
        assert isinstance(x, Tensor)
        y = x if y is None else y
        assert isinstance(y, Tensor)
        center = x.mean(0).detach()
        a, b = (x - center) / self.lengthscale, (y - center) / self.lengthscale
        squared = (a * a).sum(1)[:, None] + (b * b).sum(1)[None, :] - 2 * a @ b.T
        if y is x:
            squared = squared - torch.diag(squared.diagonal())
        return self.output_var * torch.exp(-0.5 * squared.clamp(min=0))

    def blocks(self, x: Inputs) -> Tensor:
        """k(x_n, x_n): (N, 1, 1)."""
        return self.diag(x)[:, None, None]

    def diag(self, x: Inputs) -> Tensor:
        """k(x_n, x_n): (N,)."""
        self.check(x)
        assert isinstance(x, Tensor)
        return x.new_ones(x.shape[0]) * self.output_var

    def matmul(self, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """k(x, y) @ v, a tile of rows of k(x, y) at a time."""
        size = max(1, TILE_BYTES // (v.element_size() * num_rows(y)))
        return torch.cat(
            [tile @ v.to(tile.dtype) for tile in (self(part, y) for part in chunks(x, size))]
        )

    def scaled(self, variance: float | Tensor) -> RBF:
        """variance · k."""
        return replace(self, output_var=self.output_var * variance)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> RBF:
        """The same kernel with its tensors on another device or in another dtype."""
        moved = {
            name: value.to(device=device, dtype=dtype)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True, eq=False)
class IndependentOutputs:
    """k ⊗ I_C: a kernel of one output as the joint kernel of C independent ones, rows n·C + c."""

    kernel: Kernel
    num_outputs: int

    @property
    def joint(self) -> bool:
        """True: rows run over points and outputs."""
        return True

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
        columns = v.reshape(num_rows(y), self.num_outputs * v.shape[1])
        return self.kernel.matmul(x, y, columns).reshape(-1, v.shape[1])

    def scaled(self, variance: float | Tensor) -> IndependentOutputs:
        """variance · k."""
        return replace(self, kernel=self.kernel.scaled(variance))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> IndependentOutputs:
        """The same kernel with its tensors on another device or in another dtype."""
        return replace(self, kernel=self.kernel.to(device, dtype))
