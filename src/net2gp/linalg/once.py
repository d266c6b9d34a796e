"""Results that autograd can differentiate once, which say so when they are differentiated again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from net2gp.errors import NotAvailable


def once(
    values: Sequence[Tensor], inputs: Sequence[Tensor | None], what: str
) -> tuple[Tensor, ...]:
    """Let second derivatives of what a backward pass returns raise, where they would be left out.

    torch's `once_differentiable` raises only if the incoming gradients require a gradient themselves. In a
    sum they are constant, and the derivative in the saved inputs is then zero without a word.

    Args:
        values: What the backward pass returns, computed without a graph.
        inputs: The saved inputs and the incoming gradients, on which the values depend.
        what: Names the function in the error.

    Returns:
        The values, whose own backward pass raises NotAvailable.

    >>> x = torch.ones(1, requires_grad=True)
    >>> (value,) = once([2 * x.detach()], [x], "f")
    >>> value.backward()
    Traceback (most recent call last):
        ...
    net2gp.errors.NotAvailable: f has first derivatives only. Take differences of them for second ones.
    """
    traced = [x for x in inputs if x is not None and x.requires_grad]
    if not traced or not torch.is_grad_enabled():
        return tuple(values)
    return tuple(_Once.apply(what, value, *traced) for value in values)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, what: str, value: Tensor, *inputs: Tensor) -> Tensor:
        ctx.what = what
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotAvailable(
            f"{ctx.what} has first derivatives only. Take differences of them for second ones."
        )
