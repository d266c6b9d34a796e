"""Kernels of stretched inputs, with a length scale for each column."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from net2gp.errors import InputError, check_positive
from net2gp.inputs import check_inputs, describe
from net2gp.kernels.base import BaseKernel
from net2gp.tags import savable
from net2gp.types import Inputs, Kernel


@savable("interop.Stretched")
@dataclass(frozen=True, eq=False)
class Stretched(BaseKernel):
    """k((x − c) / ℓ, (x' − c) / ℓ): a kernel of inputs with one length scale per column, or one for all.

    For the limit of a network this is a first layer whose weights have variance weight_var / (d ℓ_j²) for
    input j, so that inputs with a long length scale hardly matter (automatic relevance determination). The
    cost is the kernel's own.

    Args:
        kernel: The kernel k of one tensor of points.
        lengthscale: Positive numbers, in a shape that broadcasts with a point; they may require a gradient.
        center: What is subtracted from the inputs, in such a shape; None is zero.

    Raises:
        InputError: A length scale is not positive, or points are not one tensor of as many columns.

    >>> import torch
    >>> from net2gp.kernels import RBF
    >>> x = torch.tensor([[0.0, 0.0], [2.0, 4.0]])
    >>> torch.equal(Stretched(RBF(), torch.tensor([2.0, 4.0]))(x), RBF()(x / torch.tensor([2.0, 4.0])))
    True

    Reference: Neal, Bayesian Learning for Neural Networks, 1996, section 1.2.2 (one variance per input).
    """

    kernel: Kernel
    lengthscale: Tensor
    center: Tensor | None = None

    def __post_init__(self) -> None:
        check_positive(self.lengthscale, "lengthscale")

    def check(self, x: Inputs) -> None:
        """Raise unless `x` is one tensor of points for the kernel."""
        self.kernel.check(self._stretched(x))

    def outputs(self, x: Inputs) -> int | None:
        """As the kernel itself."""
        return self.kernel.outputs(self._stretched(x))

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """k((x − c) / ℓ, (y − c) / ℓ)."""
        other = None if y is None or y is x else self._stretched(y)
        return self.kernel(self._stretched(x), other)

    def diag(self, x: Inputs) -> Tensor:
        """The diagonal of k((x − c) / ℓ, (x − c) / ℓ)."""
        return self.kernel.diag(self._stretched(x))

    def blocks(self, x: Inputs) -> Tensor:
        """k((x_n − c) / ℓ, (x_n − c) / ℓ) for each point."""
        return self.kernel.blocks(self._stretched(x))

    def matmul(self, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """k((x − c) / ℓ, (y − c) / ℓ) @ v, by the kernel's own product."""
        first = self._stretched(x)
        return self.kernel.matmul(first, first if y is x else self._stretched(y), v)

    def scaled(self, variance: float | Tensor) -> Stretched:
        """variance · k, by the kernel's own scale."""
        return replace(self, kernel=self.kernel.scaled(variance))

    def _stretched(self, x: Inputs) -> Tensor:
        check_inputs(x)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise InputError(
                f"Stretched divides one floating tensor of points, but x is {describe(x)}. Pass the kernel "
                "itself for other inputs."
            )
        columns = self.lengthscale.shape[-1:].numel()
        if columns > 1 and x.shape[-1] != columns:
            raise InputError(
                f"there are {columns} length scales, but x is {describe(x)}. Pass points of {columns} "
                "columns."
            )
        moved = x if self.center is None else x - self.center.to(x)
        return moved / self.lengthscale.to(x)
