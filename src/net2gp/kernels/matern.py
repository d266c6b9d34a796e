"""Kernels of rougher functions than the squared exponential's."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from net2gp.errors import InputError, check_positive, one_number
from net2gp.kernels.base import BaseKernel
from net2gp.kernels.distances import check_pair, check_points, product, squared_distances
from net2gp.tags import savable
from net2gp.types import Inputs

SMALLEST = 1e-30
"""Added to squared distances, so that the root has a derivative between equal points."""


@savable("kernels.Matern")
@dataclass(frozen=True, eq=False)
class Matern(BaseKernel):
    """k(x, x') = output_var · p(s) e^{−s} with s = √(2·smoothness) ‖x − x'‖ / lengthscale, for x (N, D).

    p is 1, 1 + s or 1 + s + s²/3 for a smoothness of 1/2, 3/2 or 5/2, where functions have no derivative, one
    or two. Cost: N·M·D. Products with vectors on a GPU in single precision write no entry of k to memory.

    Args:
        smoothness: 0.5, 1.5 or 2.5.
        lengthscale: The length scale, a number, or a tensor (D,) with one length scale per column of x. It
            may require a gradient.
        output_var: The variance of every output, a number or a tensor of one element, which may require a
            gradient.
        product_dtype: The dtype of results, or None for the dtype of x.

    Raises:
        InputError: The smoothness is another one, or a length scale or the variance is not positive.

    >>> Matern(0.5)(torch.tensor([[0.0], [1.0]]))
    tensor([[1.0000, 0.3679],
            [0.3679, 1.0000]])

    Reference: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, section 4.2.1.
    """

    smoothness: float = 2.5
    lengthscale: float | Tensor = 1.0
    output_var: float | Tensor = 1.0
    product_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.smoothness not in PROFILES:
            raise InputError(
                f"smoothness must be 0.5, 1.5 or 2.5, but is {self.smoothness}. For smoother functions "
                "pass RBF()."
            )
        check_positive(self.lengthscale, "lengthscale")
        object.__setattr__(self, "output_var", one_number(self.output_var, "output_var"))

    def check(self, x: Inputs) -> None:
        """Raise unless `x` is a floating tensor (N, D) that suits the length scales."""
        check_points("Matern", x, self.lengthscale)

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """Compute k(x, y), (N, M)."""
        self.check(x)
        y = x if y is None else y
        self.check(y)
        assert isinstance(x, Tensor)
        assert isinstance(y, Tensor)
        check_pair("Matern", x, y)
        values = PROFILES[self.smoothness](squared_distances(x, y, self.lengthscale))
        return (self.output_var * values).to(self.product_dtype or x.dtype)

    def matmul(self, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """Compute k(x, y) @ v without the matrix."""
        self.check(x)
        self.check(y)
        scales = (self.lengthscale, self.output_var, self.product_dtype)
        found = product("Matern", PROFILES[self.smoothness], scales, (x, y), v)
        return super().matmul(x, y, v) if found is None else found

    def diag(self, x: Inputs) -> Tensor:
        """k(x_n, x_n): (N,)."""
        self.check(x)
        assert isinstance(x, Tensor)
        dtype = self.product_dtype or x.dtype
        return (x.new_ones(x.shape[0], dtype=dtype) * self.output_var).to(dtype)

    def scaled(self, variance: float | Tensor) -> Matern:
        """variance · k."""
        return replace(self, output_var=self.output_var * one_number(variance, "variance"))


def _half(squared: Tensor) -> Tensor:
    return torch.exp(-torch.sqrt(squared + SMALLEST))


def _three_halves(squared: Tensor) -> Tensor:
    s = math.sqrt(3) * torch.sqrt(squared + SMALLEST)
    return (1 + s) * torch.exp(-s)


def _five_halves(squared: Tensor) -> Tensor:
    s = math.sqrt(5) * torch.sqrt(squared + SMALLEST)
    return (1 + s + s * s / 3) * torch.exp(-s)


PROFILES = {0.5: _half, 1.5: _three_halves, 2.5: _five_halves}
"""The kernel of variance one, by smoothness, as a function of squared distances."""
