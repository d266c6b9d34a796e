"""The squared-exponential kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from net2gp.errors import check_positive, one_number
from net2gp.kernels.base import BaseKernel
from net2gp.kernels.distances import check_pair, check_points, product, squared_distances
from net2gp.types import Inputs


@dataclass(frozen=True, eq=False)
class RBF(BaseKernel):
    """k(x, x') = output_var · exp(−‖x − x'‖² / (2 lengthscale²)), for x of shape (N, D).

    Cost: N·M·D. Squared distances are taken in float64 and from differences to the mean of x, so that
    neither a short length scale nor an offset of the data costs digits; the result has x's dtype. Products
    with vectors on a GPU in single precision write no entry of k to memory.

    Args:
        lengthscale: The length scale, a number, or a tensor (D,) with one length scale per column of x. It
            may require a gradient.
        output_var: The variance of every output, a number or a tensor of one element, which may require a
            gradient.
        product_dtype: The dtype of results, or None for the dtype of x.

    Raises:
        InputError: A length scale or the variance is not positive, or the variance has several elements.

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
        object.__setattr__(self, "output_var", one_number(self.output_var, "output_var"))

    def check(self, x: Inputs) -> None:
        """Raise unless `x` can be an input of this kernel.

        Args:
            x: N points.

        Raises:
            InputError: `x` is not one floating tensor (N, D), or the length scales are not one or D.
        """
        check_points("RBF", x, self.lengthscale)

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """Compute the kernel matrix.

        Args:
            x: N points, of shape (N, D).
            y: M points, of shape (M, D), or None for x itself.

        Returns:
            k(x, y), of shape (N, M).

        Raises:
            InputError: The numbers of columns differ.
        """
        self.check(x)
        y = x if y is None else y
        self.check(y)
        assert isinstance(x, Tensor)
        assert isinstance(y, Tensor)
        check_pair("RBF", x, y)
        values = _gaussian(squared_distances(x, y, self.lengthscale))
        return (self.output_var * values).to(self.product_dtype or x.dtype)

    def matmul(self, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """Compute k(x, y) @ v without the matrix."""
        self.check(x)
        self.check(y)
        scales = (self.lengthscale, self.output_var, self.product_dtype)
        found = product("RBF", _gaussian, scales, (x, y), v)
        return super().matmul(x, y, v) if found is None else found

    def diag(self, x: Inputs) -> Tensor:
        """k(x_n, x_n): (N,)."""
        self.check(x)
        assert isinstance(x, Tensor)
        dtype = self.product_dtype or x.dtype
        return (x.new_ones(x.shape[0], dtype=dtype) * self.output_var).to(dtype)

    def scaled(self, variance: float | Tensor) -> RBF:
        """variance · k."""
        return replace(self, output_var=self.output_var * one_number(variance, "variance"))


def _gaussian(squared: Tensor) -> Tensor:
    return torch.exp(-0.5 * squared)
