"""Plain covariance functions beside those that networks give, and adapters between kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from net2gp.errors import InputError, check_dtype_and_device, check_positive
from net2gp.inputs import check_inputs, chunks, describe, num_rows
from net2gp.linalg import kron_identity
from net2gp.types import Inputs, Kernel

TILE_BYTES = 2**27


@dataclass(frozen=True, eq=False)
class RBF:
    """k(x, x') = output_var · exp(−‖x − x'‖² / (2 lengthscale²)), for x of shape (N, D).

    `lengthscale` is a number or a tensor (D,), one per input; both may require gradients.
    Cost: N·M·D. Squared distances are taken in float64 and from differences to the mean of x, so that
    neither a short length scale nor an offset of the data costs digits; the result has x's dtype.

    >>> RBF()(torch.tensor([[0.0], [1.0]]))
    tensor([[1.0000, 0.6065],
            [0.6065, 1.0000]])

    Reference: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, ch. 4.
    """

    lengthscale: float | Tensor = 1.0
    output_var: float | Tensor = 1.0
    product_dtype: torch.dtype | None = None

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
        if isinstance(self.lengthscale, Tensor) and self.lengthscale.shape not in (
            torch.Size([]),
            torch.Size([1]),
            x.shape[1:],
        ):
            raise InputError(
                f"RBF needs one lengthscale, or one for each of the {x.shape[1]} columns of x, but "
                f"lengthscale is {describe(self.lengthscale)}."
            )

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """k(x, y): (N, M)."""
        self.check(x)
        y = x if y is None else y
        self.check(y)
        assert isinstance(x, Tensor)
        assert isinstance(y, Tensor)
        check_dtype_and_device(x, "x", y, "the other points")
        if x.shape[1] != y.shape[1]:
            raise InputError(
                f"RBF compares points of equally many columns, but got {describe(x)} and {describe(y)}."
            )
        center = x.detach().double().mean(0)
        lengthscale = torch.as_tensor(self.lengthscale, dtype=torch.float64, device=x.device)
        a, b = (x - center) / lengthscale, (y - center) / lengthscale
        squared = (a * a).sum(1)[:, None] + (b * b).sum(1)[None, :] - 2 * a @ b.T
        if y is x:
            squared = squared - torch.diag(squared.diagonal())
        # rounding below zero is lifted as a constant: a clamp would cut the second derivatives at y = x
        squared = squared + (squared.clamp(min=0) - squared).detach()
        return (self.output_var * torch.exp(-0.5 * squared)).to(self.product_dtype or x.dtype)

    def blocks(self, x: Inputs) -> Tensor:
        """k(x_n, x_n): (N, 1, 1)."""
        return self.diag(x)[:, None, None]

    def diag(self, x: Inputs) -> Tensor:
        """k(x_n, x_n): (N,)."""
        self.check(x)
        assert isinstance(x, Tensor)
        dtype = self.product_dtype or x.dtype
        return (x.new_ones(x.shape[0], dtype=dtype) * self.output_var).to(dtype)

    def matmul(self, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """k(x, y) @ v, a tile of rows of k(x, y) at a time."""
        size = max(1, TILE_BYTES // (v.element_size() * num_rows(y)))
        return torch.cat(
            [tile @ v.to(tile.dtype) for tile in (self(part, y) for part in chunks(x, size))]
        )

    def precise(self) -> RBF:
        """The same kernel of the same inputs, its results in float64."""
        return replace(self, product_dtype=torch.float64)

    def scaled(self, variance: float | Tensor) -> RBF:
        """variance · k."""
        return replace(self, output_var=self.output_var * variance)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> RBF:
        """The same kernel with its tensors on another device or in another dtype."""
        moved: dict[str, Any] = {
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

    def precise(self) -> IndependentOutputs:
        """The same kernel of the same inputs, its results in float64."""
        return replace(self, kernel=self.kernel.precise())

    def scaled(self, variance: float | Tensor) -> IndependentOutputs:
        """variance · k."""
        return replace(self, kernel=self.kernel.scaled(variance))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> IndependentOutputs:
        """The same kernel with its tensors on another device or in another dtype."""
        return replace(self, kernel=self.kernel.to(device, dtype))


@runtime_checkable
class _Settling(Protocol):
    """A kernel for which the shape of the inputs decides whether its outputs are coupled."""

    def at(self, x: Inputs) -> Kernel:
        """The same kernel for inputs of this shape."""


def settled(kernel: Kernel, x: Inputs) -> Kernel:
    """The kernel for inputs of the shape of `x`: whether its outputs are coupled, no earlier inputs say.

    >>> settled(RBF(), torch.zeros(1, 2)).joint
    False
    """
    return kernel.at(x) if isinstance(kernel, _Settling) else kernel
