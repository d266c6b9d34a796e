"""The periodic kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import one_number
from net2gp.kernels.base import BaseKernel
from net2gp.kernels.rbf import RBF
from net2gp.tags import savable
from net2gp.types import Inputs


def circle(x: Tensor, period: float | Tensor) -> Tensor:
    """Wrap every column of `x` around a circle of radius 1.

    Args:
        x: N points, (N, D).
        period: The length that goes once around.

    Returns:
        cos(2πx/period) and sin(2πx/period), (N, 2D).

    >>> circle(torch.tensor([[0.0]]), 1.0)
    tensor([[1., 0.]])
    """
    angle = 2 * torch.pi / period * x
    return torch.cat([angle.cos(), angle.sin()], -1)


@savable("kernels.Periodic")
@dataclass(frozen=True, eq=False)
class Periodic(BaseKernel):
    """k(x, x') = output_var · exp(−2 Σ_d sin²(π (x_d − x'_d) / period) / lengthscale²), for x (N, D).

    It is the squared exponential of points on circles: chords have the length 2 |sin(π Δ / period)|. Cost:
    N·M·D.

    Args:
        period: The distance after which functions repeat, a number or a tensor of one element, which may
            require a gradient.
        lengthscale: The length scale on the circle of radius 1, likewise.
        output_var: The variance of every output, likewise.
        product_dtype: The dtype of results, or None for the dtype of x.

    Raises:
        InputError: A number is not positive, or has several elements.

    >>> Periodic(period=2.0)(torch.tensor([[0.0], [0.5], [2.0]]))[0]
    tensor([1.0000, 0.3679, 1.0000])

    Reference: MacKay, Introduction to Gaussian processes, 1998, section 5.
    """

    period: float | Tensor = 1.0
    lengthscale: float | Tensor = 1.0
    output_var: float | Tensor = 1.0
    product_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("period", "lengthscale", "output_var"):
            object.__setattr__(self, name, one_number(getattr(self, name), name))

    @property
    def _on_the_circle(self) -> RBF:
        return RBF(self.lengthscale, self.output_var, self.product_dtype)

    def check(self, x: Inputs) -> None:
        """Raise unless `x` is a floating tensor (N, D)."""
        self._on_the_circle.check(x)

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """Compute k(x, y), (N, M)."""
        self.check(x)
        assert isinstance(x, Tensor)
        first = circle(x, self.period)
        if y is None or y is x:
            return self._on_the_circle(first)
        self.check(y)
        assert isinstance(y, Tensor)
        return self._on_the_circle(first, circle(y, self.period))

    def diag(self, x: Inputs) -> Tensor:
        """k(x_n, x_n): (N,)."""
        return self._on_the_circle.diag(x)
