"""Which points a network finds similar: its tangent kernel between points, and the nearest neighbors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from net2gp.calling import picked
from net2gp.errors import InputError, check_count
from net2gp.inputs import check_inputs, describe, num_rows, rows
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.linear.jacobians.trace import TraceKernel
from net2gp.types import Inputs, Kernel


@dataclass(frozen=True)
class Traced:
    """Aggregate a kernel over outputs by its trace, Σ_c k_cc(x, x'): each output is compared with itself."""


@dataclass(frozen=True)
class Summed:
    """Aggregate a kernel over outputs by its sum, Σ_cd k_cd(x, x'): the kernel of the sum of all outputs."""


Aggregation = Traced | Summed


def output_blocks(kernel: Kernel, x: Inputs, y: Inputs | None = None) -> Tensor:
    """Return k(x_n, y_m) for all pairs of outputs.

    Args:
        kernel: The kernel.
        x: N points.
        y: M points. None takes x again.

    Returns:
        One (C, C) block per pair of points: (N, M, C, C).

    >>> from net2gp.linear.linearized import linearize
    >>> kernel = linearize(torch.nn.Linear(2, 3).eval()).kernel()
    >>> output_blocks(kernel, torch.zeros(4, 2), torch.zeros(5, 2)).shape
    torch.Size([4, 5, 3, 3])
    """
    _check_kernel(kernel)
    K = kernel(x, y)
    N, M = num_rows(x), num_rows(x if y is None else y)
    C = K.shape[0] // N
    return K.reshape(N, C, M, C).transpose(1, 2)


def aggregate(
    kernel: Kernel, x: Inputs, y: Inputs | None = None, *, aggregation: Aggregation | None = None
) -> Tensor:
    """Return one number for each pair of points, by summing the kernel over outputs.

    A tangent kernel never forms the (N·C, M·C) matrix for this. The trace multiplies the layers' gradients of
    all outputs at once, and the sum is the tangent kernel of one output, Σ_c f_c, with one backward pass in
    place of C. A kernel of independent outputs is returned as it is.

    Args:
        kernel: The kernel.
        x: N points.
        y: M points. None takes x again.
        aggregation: `Traced()`, which is also the meaning of None, or `Summed()`.

    Returns:
        The aggregated kernel: (N, M).

    Raises:
        InputError: If `kernel` is not a kernel, or `aggregation` is something else.

    >>> from net2gp.linear.linearized import linearize
    >>> kernel = linearize(torch.nn.Linear(2, 3).eval()).kernel()
    >>> aggregate(kernel, torch.ones(1, 2))
    tensor([[9.]])

    Reference: Khan et al., Approximate inference turns deep networks into Gaussian processes, NeurIPS 2019.
    """
    aggregation = _checked(aggregation)
    _check_kernel(kernel)
    if isinstance(kernel, TangentKernel):
        if isinstance(aggregation, Summed):
            return _of_the_sum(kernel)(x, y)
        return TraceKernel(kernel)(x, y) * kernel.blocks(rows(x, slice(0, 1))).shape[-1]
    if kernel.outputs(x) is None:
        return kernel(x, y)
    blocks = output_blocks(kernel, x, y)
    if isinstance(aggregation, Summed):
        return blocks.sum((2, 3))
    return blocks.diagonal(dim1=2, dim2=3).sum(-1)


def similarity(
    kernel: Kernel, x: Inputs, y: Inputs | None = None, *, aggregation: Aggregation | None = None
) -> Tensor:
    """Return k(x, y)/√(k(x, x) k(y, y)) of the aggregated kernel.

    Args:
        kernel: The kernel, such as `posterior.kernel` or `linearize(network).kernel()`.
        x: N points.
        y: M points. None takes x again.
        aggregation: `Traced()`, which is also the meaning of None, or `Summed()` over outputs.

    Returns:
        The similarities, between −1 and 1, and zero for points without any gradient: (N, M).

    Raises:
        InputError: If `kernel` is not a kernel, or `aggregation` is something else.

    >>> from net2gp.kernels import RBF
    >>> similarity(RBF(output_var=4.0), torch.zeros(1, 1))
    tensor([[1.]])
    """
    aggregation = _checked(aggregation)
    _check_kernel(kernel)
    left = _norms(kernel, x, aggregation)
    right = left if y is None else _norms(kernel, y, aggregation)
    scale = left[:, None] * right
    return torch.where(
        scale > 0, aggregate(kernel, x, y, aggregation=aggregation) / scale, 0.0
    ).clamp(-1.0, 1.0)


@dataclass(frozen=True, eq=False)
class Neighbors:
    """The nearest candidates of each of M points, nearest first.

    Args:
        index: Their indices among the candidates: (M, k).
        similarity: Their similarities: (M, k).
    """

    index: Tensor
    similarity: Tensor


def nearest(
    kernel: Kernel,
    x: Inputs,
    candidates: Inputs,
    num_neighbors: int = 5,
    *,
    aggregation: Aggregation | None = None,
) -> Neighbors:
    """Return the candidates, such as training points, that the network finds most similar to each point of x.

    Cost: `similarity(kernel, x, candidates)`.

    Args:
        kernel: The kernel, such as `posterior.kernel` or `linearize(network).kernel()`.
        x: M points.
        candidates: The points to search.
        num_neighbors: How many neighbors k to return per point.
        aggregation: `Traced()`, which is also the meaning of None, or `Summed()` over outputs.

    Returns:
        The indices and similarities of the nearest candidates.

    Raises:
        InputError: If there are fewer candidates than neighbors, or `kernel` is not a kernel.

    >>> from net2gp.kernels import RBF
    >>> nearest(RBF(), torch.tensor([[0.9]]), torch.tensor([[0.0], [1.0], [2.0]]), 2).index
    tensor([[1, 0]])
    """
    _check_kernel(kernel)
    check_inputs(candidates, "candidates")
    check_count(num_neighbors, "num_neighbors", example=5)
    if num_neighbors > num_rows(candidates):
        raise InputError(
            f"num_neighbors must be between 1 and the {num_rows(candidates)} candidates, but is "
            f"{num_neighbors}."
        )
    found = similarity(kernel, x, candidates, aggregation=aggregation).topk(num_neighbors, dim=1)
    return Neighbors(found.indices, found.values)


@dataclass(frozen=True)
class _SumOutputs:
    """The sum Σ_c f_c of the outputs that `output` picks."""

    output: Callable[[Any], Tensor] | None

    def __call__(self, out: Any) -> Tensor:
        found = picked(out, self.output)
        return found.reshape(found.shape[0], -1).sum(1, keepdim=True)


def _of_the_sum(kernel: TangentKernel) -> TangentKernel:
    linearized = kernel.linearized
    summed = replace(linearized, output=_SumOutputs(linearized.output))
    return replace(kernel, linearized=summed)


def _norms(kernel: Kernel, x: Inputs, aggregation: Aggregation) -> Tensor:
    """√k(x_n, x_n) of the aggregated kernel."""
    blocks = kernel.blocks(x)
    if isinstance(aggregation, Summed):
        values = blocks.sum((1, 2))
    else:
        values = blocks.diagonal(dim1=1, dim2=2).sum(1)
    return values.clamp(min=0.0).sqrt()


def _check_kernel(kernel: Kernel) -> None:
    if isinstance(kernel, Kernel) and not isinstance(kernel, type):
        return
    own = "posterior.kernel" if hasattr(kernel, "kernel") else "linearize(network).kernel()"
    raise InputError(f"kernel must be a Kernel, but is {describe(kernel)}. Pass {own}.")


def _checked(aggregation: Aggregation | None) -> Aggregation:
    if aggregation is None:
        return Traced()
    if not isinstance(aggregation, Traced | Summed):
        raise InputError(
            f"aggregation must be Traced(), Summed() or None, but is {describe(aggregation)}."
        )
    return aggregation
