"""The kernel of linear functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import InputError, check_dtype_and_device, check_positive
from net2gp.inputs import check_inputs, describe
from net2gp.kernels.base import BaseKernel
from net2gp.tags import savable
from net2gp.types import Inputs


@savable("kernels.Linear")
@dataclass(frozen=True, eq=False)
class Linear(BaseKernel):
    """k(x, x') = weight_var · x·x' + bias_var, the covariance of f(x) = w·x + b, for x (N, D).

    Cost: N·M·D.

    Args:
        weight_var: The variance of each weight, a number or a tensor of one element, which may require a
            gradient.
        bias_var: The variance of the offset, likewise; it may be zero.
        product_dtype: The dtype of results, or None for the dtype of x.

    Raises:
        InputError: A variance is negative, or has several elements.

    >>> Linear(bias_var=0.5)(torch.tensor([[1.0], [2.0]]))
    tensor([[1.5000, 2.5000],
            [2.5000, 4.5000]])

    Reference: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, section 4.2.2.
    """

    weight_var: float | Tensor = 1.0
    bias_var: float | Tensor = 0.0
    product_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_positive(self.weight_var, "weight_var", zero=True, single=True)
        check_positive(self.bias_var, "bias_var", zero=True, single=True)

    def check(self, x: Inputs) -> None:
        """Raise unless `x` can be an input of this kernel.

        Args:
            x: N points.

        Raises:
            InputError: `x` is not one floating tensor (N, D).
        """
        check_inputs(x)
        if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
            raise InputError(
                f"Linear needs x as a floating tensor of shape (N, D), but x is {describe(x)}."
            )

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
        y = x if y is None else y
        self.check(x)
        self.check(y)
        assert isinstance(x, Tensor)
        assert isinstance(y, Tensor)
        check_dtype_and_device(x, "x", y, "the other tensor of points")
        if x.shape[1] != y.shape[1]:
            raise InputError(
                f"Linear compares points of equally many columns, but got {describe(x)} and {describe(y)}."
            )
        dtype = self.product_dtype or x.dtype
        return (self.weight_var * (x.to(dtype) @ y.to(dtype).mT) + self.bias_var).to(dtype)

    def diag(self, x: Inputs) -> Tensor:
        """k(x_n, x_n): (N,)."""
        self.check(x)
        assert isinstance(x, Tensor)
        squares = x.to(self.product_dtype or x.dtype).square().sum(1)
        return (self.weight_var * squares + self.bias_var).to(squares.dtype)
