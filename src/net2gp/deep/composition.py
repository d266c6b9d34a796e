"""A Gaussian process of a Gaussian process, by its moments.

With g = (g_1 … g_H), independent Gaussian processes of kernel k₁, and f one of the squared-exponential
kernel k₂, the composition f(g(x)) is not Gaussian, but its moments are known in closed form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from net2gp.errors import InputError, check_count
from net2gp.kernels import RBF, BaseKernel
from net2gp.kernels.base import dtype_of
from net2gp.types import Inputs, Kernel


@dataclass(frozen=True, eq=False)
class Composed(BaseKernel):
    """E k₂(g(x), g(x')): the covariance of f ∘ g, itself a kernel. Made by `composed`.

    Args:
        outer: The kernel k₂ of f.
        inner: The kernel of each inner process.
        width: The number H of inner processes.
        product_dtype: The dtype of results, or None for the dtype of the inner kernel.
    """

    outer: RBF
    inner: Kernel
    width: int
    product_dtype: torch.dtype | None = None

    def check(self, x: Inputs) -> None:
        """As the inner kernel, whose outputs must be independent."""
        self.inner.check(x)
        _check_independent(self.inner, x)

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """E k₂(g(x), g(y)): (N, M)."""
        similarity = torch.exp(-0.5 * ratios(self, x, y).log1p().sum(0))
        return (self.outer.output_var * similarity).to(self.result_dtype(x))

    def result_dtype(self, x: Inputs) -> torch.dtype:
        """The dtype of the inner kernel, or float64 if precise."""
        return self.product_dtype or dtype_of(self.inner, x)

    def diag(self, x: Inputs) -> Tensor:
        """σ₂² for each point: (N,)."""
        inner = self.inner.diag(x)
        dtype = self.product_dtype or inner.dtype
        return (torch.ones_like(inner, dtype=dtype) * self.outer.output_var).to(dtype)

    def scaled(self, variance: float | Tensor) -> Composed:
        """variance · k."""
        return replace(self, outer=self.outer.scaled(variance))


def composed(outer: RBF, inner: Kernel, *, width: int | None = None) -> Composed:
    """Compute the covariance of f(g(x)), where f has the kernel `outer` and g are independent processes.

    Each of the H inner processes g_h has the kernel k₁ = `inner`. A difference g_h(x) − g_h(x') is N(0, v)
    with v = k₁(x, x) + k₁(x', x') − 2 k₁(x, x'), hence

        E k₂(g(x), g(x')) = σ₂² ∏_h (1 + v / ℓ_h²)^(−1/2).

    The kernel can be conditioned like any other. This is regression with the Gaussian process that has the
    covariance of the deep process. Used as an inner kernel again, it stands for that Gaussian process and
    not for three exact layers. The cost is that of `inner` plus N·M·H. Differences are computed in float64.

    Args:
        outer: The squared-exponential kernel k₂ of f, with variance σ₂² and length scales ℓ_h.
        inner: The kernel of each inner process, with independent outputs.
        width: The number H of inner processes. None means the number of length scales of `outer`.

    Returns:
        The covariance of the composition, as a kernel.

    Raises:
        InputError: If a kernel is of the wrong kind, or `width` does not fit the length scales.

    >>> kernel = composed(RBF(lengthscale=0.7), RBF(lengthscale=0.8, output_var=1.3**2))
    >>> kernel(torch.tensor([[0.0], [0.5]], dtype=torch.float64))
    tensor([[1.0000, 0.6706],
            [0.6706, 1.0000]], dtype=torch.float64)

    Reference: Lu, Yang, Hao & Shafto, "Interpretable deep Gaussian processes with moments", 2020.
    """
    if not isinstance(outer, RBF):
        raise InputError(
            f"composed needs a squared-exponential outer kernel, n2g.RBF(...), but outer is a "
            f"{type(outer).__name__}."
        )
    if not isinstance(inner, Kernel):
        raise InputError(
            f"composed needs a kernel as inner, such as n2g.RBF(...) or n2g.nngp(network), but inner "
            f"is a {type(inner).__name__}."
        )
    scales = torch.as_tensor(outer.lengthscale).numel()
    width = scales if width is None else width
    check_count(width, "width")
    if scales not in (1, width):
        raise InputError(
            f"composed needs one length scale of outer, or one for each of the width = {width} inner "
            f"processes, but got {scales}."
        )
    return Composed(outer, inner, width)


def _check_independent(inner: Kernel, x: Inputs) -> None:
    if inner.outputs(x) is not None:
        raise InputError(
            "composed needs an inner kernel of independent outputs, but its outputs are correlated. For a "
            "network, use linearize(network).trace_kernel() or nngp(network)."
        )


def increment_kurtosis(kernel: Composed, x: Inputs, y: Inputs | None = None) -> Tensor:
    """Compute the kurtosis of f(g(x)) − f(g(y)) for each pair. For a Gaussian process it would be 3.

    Given d = g(x) − g(y), the increment is N(0, 2σ₂²(1 − e(d))) with e(d) = exp(−½ Σ d_h² / ℓ_h²), so

        E[Δ⁴] / E[Δ²]² = 3 E[(1 − e)²] / E[1 − e]² = 3 (1 − 2A + B) / (1 − A)²,

    A = ∏ (1 + v/ℓ_h²)^(−1/2), B = ∏ (1 + 2v/ℓ_h²)^(−1/2). It is evaluated as 3 + 3A² (B/A² − 1) / (1 − A)²,
    which keeps its digits at small v. At v = 0 it is the limit, which is 9 for one inner process.

    Args:
        kernel: A kernel that `composed` returned.
        x: N points.
        y: M points. None means `x`.

    Returns:
        The kurtosis of each pair, (N, M), in float64.

    Raises:
        InputError: If `kernel` is not a composed kernel.

    >>> kernel = composed(RBF(lengthscale=0.7), RBF(lengthscale=0.8, output_var=1.3**2))
    >>> points = torch.tensor([[0.0], [0.5]], dtype=torch.float64)
    >>> increment_kurtosis(kernel, points)
    tensor([[9.0000, 5.4573],
            [5.4573, 9.0000]], dtype=torch.float64)

    Reference: Lu, Yang, Hao & Shafto, "Interpretable deep Gaussian processes with moments", 2020.
    """
    if not isinstance(kernel, Composed):
        raise InputError(
            f"increment_kurtosis needs a composed kernel, composed(outer, inner), but got a "
            f"{type(kernel).__name__}. Increments of a single process are Gaussian: their kurtosis is 3."
        )
    u = ratios(kernel, x, y)
    twice = u.square()
    log_similarity = -0.5 * u.log1p().sum(0)
    excess = torch.exp(2 * log_similarity) * torch.expm1(0.5 * (twice / (1 + 2 * u)).log1p().sum(0))
    apart = torch.expm1(log_similarity).square()
    scales = squared_scales(kernel, u)
    limit = 2 * scales.pow(-2).sum() / scales.reciprocal().sum().square()
    # Below this v / ℓ² the limit is exact up to rounding, and `apart` may underflow.
    near = u.amax(0) < 1e-16
    return 3 + 3 * torch.where(near, limit, excess / torch.where(near, 1.0, apart))


def ratios(kernel: Composed, x: Inputs, y: Inputs | None) -> Tensor:
    """Compute v(x, y) / ℓ_h² of each inner process: (H, N, M), in float64."""
    _check_independent(kernel.inner, x)
    inner = kernel.inner.precise()
    own, other = inner.diag(x), inner.diag(x if y is None else y)
    v = (own[:, None] + other[None, :] - 2 * inner(x, y)).double().clamp(min=0)
    if y is None:
        # A point has distance 0 from itself; rounding would show in the kurtosis, which divides by v.
        v = v - torch.diag(v.diagonal())
    return v / squared_scales(kernel, v)[:, None, None]


def squared_scales(kernel: Composed, like: Tensor) -> Tensor:
    """Return ℓ_h² of each inner process: (H,)."""
    scale = torch.as_tensor(kernel.outer.lengthscale, dtype=torch.float64, device=like.device)
    return scale.reshape(-1).expand(kernel.width).square()
