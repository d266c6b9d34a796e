"""Double descent: the test error of least squares on random features, over their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor

from net2gp.errors import InputError, check_count, check_positive, check_seed
from net2gp.inputs import describe, gather
from net2gp.progress import progress
from net2gp.types import Data


@dataclass(frozen=True, eq=False)
class Descent:
    """Mean squared errors of least squares on P random features.

    Args:
        widths: The numbers of features P: (W,).
        train: Errors at the training points: (S, W) for S draws of the features.
        test: Errors at the test points: (S, W).
        norms: The lengths of the fitted weights: (S, W).
    """

    widths: Tensor
    train: Tensor
    test: Tensor
    norms: Tensor


def double_descent(
    data: Data,
    test: Data,
    widths: Sequence[int],
    *,
    ridge: float = 0.0,
    num_draws: int = 1,
    seed: int = 0,
) -> Descent:
    """Fit y by least squares on random ReLU features φ(x) = max(0, [x, 1] V)/√P of growing number P.

    The last layer w of a network with P hidden units is fitted exactly, while its first layer V ~ N(0, 1)
    stays as it was drawn. Up to P = N the least-squares solution is unique. Beyond it, infinitely many w fit
    the data, and the one of least norm, w = Φᵀ(ΦΦᵀ)⁺ y, is taken: where gradient descent from 0 arrives. Near
    P = N the matrix ΦᵀΦ is almost singular, so that noise in y is multiplied and the test error has a peak;
    beyond, it falls a second time. A ridge removes the peak. Features of a larger P contain those of a
    smaller one. Cost: O(N P min(N, P)) for each P and draw, in float64.

    Args:
        data: Training inputs (N, d) and real targets (N,) or (N, C).
        test: Test inputs and targets.
        widths: The numbers of features.
        ridge: Minimizes ‖y − Φw‖² + ridge·‖w‖²; 0 is the solution of least norm.
        num_draws: How many times the features are drawn.
        seed: Makes the draws repeatable.

    Returns:
        The errors for each draw and number of features.

    Raises:
        InputError: If inputs are not (N, d) tensors, targets are not real, or a number is not positive.

    >>> x = torch.linspace(-1, 1, 8)[:, None]
    >>> found = double_descent((x, x.sin()), (x + 0.1, (x + 0.1).sin()), [2, 8, 64])
    >>> bool(found.train[0, -1] < 1e-10)  # more features than points: the fit is exact
    True

    References: Belkin et al., Reconciling modern machine-learning practice and the bias–variance trade-off,
    PNAS 2019; Hastie et al., Surprises in high-dimensional ridgeless least squares interpolation, Annals of
    Statistics 2022.
    """
    check_positive(ridge, "ridge", zero=True, single=True)
    check_count(num_draws, "num_draws")
    check_seed(seed)
    sizes = _sizes(widths)
    x, y = _table(data, "data")
    x_test, y_test = _table(test, "test")
    if x_test.shape[1] != x.shape[1] or y_test.shape[1] != y.shape[1]:
        raise InputError(
            f"data has {x.shape[1]} inputs and {y.shape[1]} targets per point, and test has "
            f"{x_test.shape[1]} and {y_test.shape[1]}. Pass the same columns."
        )
    found = torch.zeros(3, num_draws, len(sizes), dtype=torch.float64)
    with progress("double descent", num_draws * len(sizes)) as advance:
        for draw in range(num_draws):
            generator = torch.Generator().manual_seed(seed + draw)
            shape = (max(sizes), x.shape[1] + 1)  # a row per feature, so that they are nested
            layer = torch.randn(shape, generator=generator, dtype=torch.float64).to(x.device)
            for place, width in enumerate(sizes):
                inner, outer = (_features(v, layer[:width]) for v in (x, x_test))
                w = _least_squares(inner, y, float(ridge))
                errors = (inner @ w - y).square().mean(), (outer @ w - y_test).square().mean()
                found[:, draw, place] = torch.stack([*errors, w.norm()]).cpu()
                advance()
    return Descent(torch.tensor(sizes), *found)


def _sizes(widths: Sequence[int]) -> list[int]:
    try:
        sizes = [index(width) for width in widths]
    except TypeError:
        sizes = []
    if not sizes:
        raise InputError(
            f"widths must be one or more whole numbers of features, but is {describe(widths)}. Pass for "
            "example widths=[10, 100, 1000]."
        )
    for width in sizes:
        check_count(width, "widths")
    return sizes


def _table(data: Data, name: str) -> tuple[Tensor, Tensor]:
    x, y = gather(data)
    if not isinstance(x, Tensor) or x.dim() != 2 or not y.is_floating_point():
        raise InputError(
            f"{name} must be inputs of shape (N, d) and real targets, but has {describe(x)} and "
            f"{describe(y)}. Flatten the inputs, and pass classes as real numbers."
        )
    return x.double(), y.double().reshape(len(y), -1)


def _features(x: Tensor, layer: Tensor) -> Tensor:
    return (x @ layer[:, :-1].mT + layer[:, -1]).relu() / len(layer) ** 0.5


def _least_squares(features: Tensor, y: Tensor, ridge: float) -> Tensor:
    """The minimizer of ‖y − Φw‖² + ridge·‖w‖², of least norm where there are several."""
    u, s, vh = torch.linalg.svd(features, full_matrices=False)
    cutoff = max(features.shape) * torch.finfo(s.dtype).eps * s[0]
    inverse = torch.where(s > cutoff, s / (s.square() + ridge), torch.zeros_like(s))
    return vh.mT @ (inverse[:, None] * (u.mT @ y))
