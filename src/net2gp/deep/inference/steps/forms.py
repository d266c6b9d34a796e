"""Quadratic forms of many vectors with many matrices: the variances of a layer, and their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

NUMBERS = 2**17
"""About how many numbers a block of rows may hold on a CPU, so that it stays in the cache."""


def quadratic_forms(A: Tensor, W: Tensor) -> Tensor:
    """Compute a_rᵀ W_c a_r for all columns a_r and symmetric matrices W_c.

    The gradients of a symmetric form need no third product: that in A is 2 Σ_c g_rc W_c a_r, whose products
    are known from the forms, so both together cost 2·C·M²·R. A has the dtype of the result, and the products
    have the dtype of W. Second derivatives are not available.

    Args:
        A: The vectors, (M, R).
        W: The matrices, (C, M, M).

    Returns:
        The forms, (R, C).

    >>> quadratic_forms(torch.tensor([[1.0], [2.0]]), torch.eye(2)[None])
    tensor([[5.]])
    """
    return _Forms.apply(A, W)


class _Forms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, A: Tensor, W: Tensor) -> Tensor:
        rows = A.mT.to(W.dtype).contiguous()
        count, size = W.shape[:2]
        matrix = W.reshape(count * size, size).mT
        products = rows.new_empty(len(rows), count * size)
        forms = rows.new_empty(len(rows), count)
        for some in _blocks(products):
            part = torch.mm(rows[some], matrix, out=products[some]).unflatten(1, (count, size))
            torch.sum(part * rows[some, None], 2, out=forms[some])
        ctx.save_for_backward(rows, products)
        ctx.dtype, ctx.shape = A.dtype, W.shape
        return forms.to(A.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, products = ctx.saved_tensors
        count, size, _ = ctx.shape
        g = gradient.to(rows.dtype).contiguous()
        in_A = rows.new_empty(rows.shape) if ctx.needs_input_grad[0] else None
        in_W = rows.new_zeros(count * size, size) if ctx.needs_input_grad[1] else None
        for some in _blocks(products):
            if in_A is not None:
                part = products[some].unflatten(1, (count, size))
                torch.sum(part * g[some, :, None], 1, out=in_A[some])
            if in_W is not None:
                scaled = (rows[some, None] * g[some, :, None]).flatten(1)
                in_W.addmm_(scaled.mT, rows[some])
        if in_A is not None:
            in_A = (2 * in_A).to(ctx.dtype).mT
        return in_A, None if in_W is None else in_W.reshape(ctx.shape)


def _blocks(products: Tensor) -> Iterator[slice]:
    """Blocks of rows: all at once on a GPU, and as many as the cache holds on a CPU."""
    count = len(products)
    size = count if products.is_cuda else max(64, NUMBERS // max(1, products.shape[1]))
    for start in range(0, count, max(1, size)):
        yield slice(start, start + size)
