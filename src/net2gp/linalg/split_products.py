"""Products of float32 matrices on the matrix units of a GPU, which multiply numbers of eight bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

SPLIT_ERROR = 5e-5
"""The largest error of a split product beside the product of absolute values, 3·2⁻¹⁶ and some roundings.

A number in bfloat16 is wrong by 2⁻⁸ of itself at most, so that the sum of two is by 2⁻¹⁶, on both sides. The
product of the two small parts, which is left out, is as large.
"""

ALIGNED = 8
"""Inner lengths are multiples of this, which fast programs for matrix units need: rows begin at 16 bytes."""

WIDE_SUMS = "dtype" in torch.ops.aten.mm.overloads()
"""Whether torch returns float32 sums of products in bfloat16, as it does from version 2.8 on."""


def split(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Write a float32 matrix as the sum of two in bfloat16, up to 2⁻¹⁶ of each entry.

    >>> large, small = split(torch.tensor([[1.2345678]]))
    >>> bool((large.double() + small.double() - 1.2345678).abs() < 1.3 * 2**-16)
    True
    """
    large = matrix.bfloat16()
    return large, (matrix - large).bfloat16()


def joined(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Return matrices in bfloat16 whose product is A B up to `SPLIT_ERROR`.

    With A = A₁ + A₂ and B = B₁ + B₂ it is A₁B₁ + A₁B₂ + A₂B₁, as one product of three times the inner length,
    so that all three are summed in float32 where the product is computed.

    Args:
        A: A float32 matrix, (n, k).
        B: A float32 matrix, (k, m).

    Returns:
        Matrices (n, 3k) and (3k, m).

    Reference: Henry, Tang and Heinecke, Leveraging the bfloat16 artificial intelligence datatype for
    higher-precision computations, ARITH 2019.
    """
    missing = -A.shape[1] % ALIGNED
    (large, small), (first, second) = (split(pad(M, (0, missing))) for M in (A, B.mT))
    return torch.cat([large, large, small], 1), torch.cat([first, second, first], 1).mT


def applies(matrix: Tensor, tolerance: float) -> bool:
    """Whether products of a matrix are split: it is a float32 one on a GPU, and the error is allowed."""
    return (
        tolerance >= SPLIT_ERROR
        and matrix.dtype == torch.float32
        and matrix.device.type == "cuda"
        and not torch.is_grad_enabled()
        and WIDE_SUMS
    )


def add_product(K: Tensor, A: Tensor, B: Tensor, tolerance: float = 0.0) -> None:
    """Add A B to K in place.

    Args:
        K: A matrix, (n, m).
        A: A matrix, (n, k).
        B: A matrix, (k, m).
        tolerance: The relative error that products of float32 matrices may have on a GPU.

    >>> K = torch.ones(1, 1)
    >>> add_product(K, torch.tensor([[2.0]]), torch.tensor([[3.0]]))
    >>> K
    tensor([[7.]])
    """
    if applies(K, tolerance):
        K.copy_(torch.addmm(K, *joined(A, B), out_dtype=torch.float32))
    else:
        K.addmm_(A, B)


def product(A: Tensor, B: Tensor, tolerance: float = 0.0) -> Tensor:
    """Compute A B, as `add_product` does.

    >>> product(torch.tensor([[2.0]]), torch.tensor([[3.0]]))
    tensor([[6.]])
    """
    if applies(A, tolerance):
        return torch.mm(*joined(A, B), out_dtype=torch.float32)
    return A @ B
