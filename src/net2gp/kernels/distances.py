"""What kernels of the distance between two points share: checks, distances, and products on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from net2gp.errors import InputError, check_dtype_and_device
from net2gp.inputs import check_inputs, describe, follows
from net2gp.linalg.fused import ScalarGraph, available, multiply, recorded
from net2gp.types import Inputs

Profile = Callable[[Tensor], Tensor]
"""From squared distances to values of a kernel of variance one."""

LARGEST_ROUNDING = 1e-4
"""The error of a squared distance in single precision up to which it serves."""


def check_points(name: str, x: Inputs, lengthscale: float | Tensor) -> None:
    """Raise unless `x` can be an input of a kernel of distances.

    Args:
        name: What error messages call the kernel.
        x: N points.
        lengthscale: One length scale, or one per column of x.

    Raises:
        InputError: `x` is not one floating tensor (N, D), or the length scales are not one or D.
    """
    check_inputs(x)
    if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
        raise InputError(
            f"{name} needs x as a floating tensor of shape (N, D), but x is {describe(x)}."
        )
    if isinstance(lengthscale, Tensor) and lengthscale.shape not in (
        torch.Size([]),
        torch.Size([1]),
        x.shape[1:],
    ):
        raise InputError(
            f"{name} needs one lengthscale, or one for each of the {x.shape[1]} columns of x, but "
            f"lengthscale is {describe(lengthscale)}."
        )


def check_pair(name: str, x: Tensor, y: Tensor) -> None:
    """Raise unless two sets of points can be compared.

    Args:
        name: What error messages call the kernel.
        x: N points.
        y: M points.

    Raises:
        InputError: Dtypes, devices or numbers of columns differ.
    """
    check_dtype_and_device(x, "x", y, "the other tensor of points")
    if x.shape[1] != y.shape[1]:
        raise InputError(
            f"{name} compares points of equally many columns, but got {describe(x)} and {describe(y)}."
        )


def scaled_points(x: Tensor, y: Tensor, lengthscale: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return x and y less the mean of x, in units of the length scale, in float64."""
    center = x.detach().double().mean(0)
    scale = torch.as_tensor(lengthscale, dtype=torch.float64, device=x.device)
    return (x - center) / scale, (y - center) / scale


def squared_distances(x: Tensor, y: Tensor, lengthscale: float | Tensor) -> Tensor:
    """Compute ‖x − y‖² in units of the length scale, (N, M), in float64; its diagonal is zero if y is x."""
    a, b = scaled_points(x, y, lengthscale)
    squared = (a * a).sum(1)[:, None] + (b * b).sum(1)[None, :] - 2 * a @ b.T
    if y is x:
        squared = squared - torch.diag(squared.diagonal())
    # rounding below zero is lifted as a constant: a clamp would cut the second derivatives at y = x
    return squared + (squared.clamp(min=0) - squared).detach()


def fused_product(
    profile: Profile, lengthscale: float | Tensor, x: Inputs, y: Inputs, v: Tensor
) -> Tensor | None:
    """Compute k(x, y) v for a kernel of variance one with entries that are never written to memory.

    Args:
        profile: The kernel as a function of squared distances; the same object for the same function.
        lengthscale: One length scale, or one per column of x.
        x: N points that were checked.
        y: M points that were checked.
        v: Vectors, (M, k).

    Returns:
        The product, (N, k), in float64; None off a GPU, in double precision, under autograd, or where
        distances in single precision would lose digits.
    """
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    if not available(x) or any(follows(one) for one in (x, y, v, (torch.as_tensor(lengthscale),))):
        return None
    a, b = scaled_points(x, y, lengthscale)
    squares = [(t * t).sum(1) for t in (a, b)]
    largest = max(float(one.max()) for one in squares)
    graph = _graph_of(profile, x.shape[1])
    if graph is None or largest * torch.finfo(torch.float32).eps > LARGEST_ROUNDING:
        return None
    numbers = graph.numbers([squares[0].float()], [squares[1].float()], [])
    own = torch.ones(len(x), dtype=torch.float32, device=x.device) if y is x else None
    return multiply(graph, (a.float(), b.float()), numbers, own, v)


def product(
    name: str,
    profile: Profile,
    scales: tuple[float | Tensor, float | Tensor, torch.dtype | None],
    points: tuple[Inputs, Inputs],
    v: Tensor,
) -> Tensor | None:
    """Compute k(x, y) v of a kernel of distances in the dtype of x, where `fused_product` serves.

    Args:
        name: What error messages call the kernel.
        profile: The kernel of variance one as a function of squared distances.
        scales: The length scale, the variance, and the dtype of results or None.
        points: N points x and M points y that were checked one by one.
        v: Vectors, (M, k).

    Returns:
        The product, (N, k), or None where it has to be computed by tiles.
    """
    (lengthscale, output_var, dtype), (x, y) = scales, points
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    check_pair(name, x, y)
    variance = torch.as_tensor(output_var)
    if dtype not in (None, torch.float32) or len(v) != len(y) or variance.requires_grad:
        return None
    found = fused_product(profile, lengthscale, x, y, v)
    return None if found is None else (found * variance.to(found)).to(x.dtype)


@lru_cache(maxsize=32)
def _graph_of(profile: Profile, width: int) -> ScalarGraph | None:
    def function(
        x: Tensor, y: Tensor, left: list[Tensor], right: list[Tensor], shared: list[Tensor]
    ) -> Tensor:
        return profile((left[0] + right[0] - 2 * (x @ y.T)).clamp_min(0.0))

    return recorded(function, width, (1, 1, 0), torch.float32)
