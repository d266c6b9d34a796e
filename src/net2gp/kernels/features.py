"""Kernels with an explicit finite feature map, k(x, y) = Φ(x) Φ(y)ᵀ, and what is made of them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from net2gp.errors import InputError, one_number
from net2gp.inputs import chunks, rows
from net2gp.kernels.base import BaseKernel, Sum, terms_of, widened
from net2gp.kernels.values import rows_per_point
from net2gp.tags import savable
from net2gp.types import FeatureKernel, Inputs, Kernel


def _plus(first: Any, second: Kernel) -> Kernel:
    """A sum that has features if both kernels do."""
    if isinstance(second, FeatureKernel):
        return FeatureSum(terms_of(first, FeatureSum) + terms_of(second, FeatureSum))
    return BaseKernel.__add__(first, second)


class BaseFeatureKernel(BaseKernel):
    """A kernel of your own that is an inner product of features: write `features` and `num_features`.

    With features come solvers in weight space, whose cost is linear in the number of points, and draws that
    are functions. Sums, multiples and `precise()` keep them, but for sums of a kernel that couples several
    outputs and one that does not. For C coupled outputs override `outputs`.

    >>> @dataclass(frozen=True)
    ... class Quadratic(BaseFeatureKernel):
    ...     num_features = 3
    ...
    ...     def features(self, x):
    ...         return torch.stack([x**0, x, x**2], -1)
    >>> Quadratic()(torch.tensor([[1.0], [2.0]]))
    tensor([[ 3.,  7.],
            [ 7., 21.]])
    """

    @property
    @abstractmethod
    def num_features(self) -> int:
        """P, the width of Φ."""

    @abstractmethod
    def features(self, x: Inputs) -> Tensor:
        """Φ(x): (N, 1, P), or (N, C, P)."""

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """Φ(x) Φ(y)ᵀ: (N, M), or (N·C, M·C)."""
        left = self.features(x).flatten(0, 1)
        right = left if y is None or y is x else self.features(y).flatten(0, 1)
        return left @ right.mT

    def diag(self, x: Inputs) -> Tensor:
        """|Φ_r(x)|² of each row r: (N,), or (N·C,)."""
        return self.features(x).square().sum(-1).reshape(-1)

    def blocks(self, x: Inputs) -> Tensor:
        """Φ(x_n) Φ(x_n)ᵀ for each point: (N, 1, 1), or (N, C, C)."""
        Phi = self.features(x)
        return Phi @ Phi.mT

    def matmul(self, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """Φ(x) (Φ(y)ᵀ v)."""
        return self.apply(x, self.adjoint(y, v))

    def apply(self, x: Inputs, w: Tensor) -> Tensor:
        """Φ(x) w: (N·C, k) for w of shape (P, k), some points at a time."""
        parts = (self.features(part).flatten(0, 1) for part in chunks(x, self._points_at_once()))
        return torch.cat([Phi @ w.to(Phi.dtype) for Phi in parts])

    def adjoint(self, x: Inputs, u: Tensor) -> Tensor:
        """Φ(x)ᵀ u: (P, k) for u of shape (N·C, k), some points at a time."""
        parts = (self.features(part).flatten(0, 1) for part in chunks(x, self._points_at_once()))
        pieces = u.split(self._points_at_once() * rows_per_point(x, u))
        return sum_of([Phi.mT @ v.to(Phi.dtype) for Phi, v in zip(parts, pieces, strict=True)])

    def precise(self) -> FeatureKernel:
        """The same kernel of the same inputs, its features in float64."""
        return PreciseFeatures(self)

    def scaled(self, variance: float | Tensor) -> FeatureKernel:
        """variance · k: the features multiplied by √variance."""
        return ScaledFeatures(self, variance)

    __add__ = _plus

    def _points_at_once(self) -> int:
        return max(1, self._tile_bytes() // (8 * self.num_features))


def sum_of(parts: list[Tensor]) -> Tensor:
    """The sum of tensors of one shape."""
    return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


@savable("kernels.PreciseFeatures")
@dataclass(frozen=True, eq=False)
class PreciseFeatures(BaseFeatureKernel):
    """The features in float64, of inputs in any precision: what `precise()` returns by default.

    Args:
        kernel: The kernel, whose tensors are converted to float64.
    """

    kernel: FeatureKernel

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernel", self.kernel.to(None, torch.float64))

    @property
    def num_features(self) -> int:
        """P, the width of Φ."""
        return self.kernel.num_features

    def outputs(self, x: Inputs) -> int | None:
        """As the kernel itself."""
        return self.kernel.outputs(widened(x))

    def check(self, x: Inputs) -> None:
        """As the kernel itself."""
        self.kernel.check(x)

    def features(self, x: Inputs) -> Tensor:
        """Φ(x) in float64."""
        return self.kernel.features(widened(x)).double()


@savable("kernels.ScaledFeatures")
@dataclass(frozen=True, eq=False)
class ScaledFeatures(BaseFeatureKernel):
    """variance · k of a kernel with features: √variance · Φ.

    Args:
        kernel: The kernel k.
        variance: A positive number, or a tensor of one element, which may require a gradient.

    Raises:
        InputError: The variance is not positive, or has several elements.
    """

    kernel: FeatureKernel
    variance: float | Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "variance", one_number(self.variance, "variance"))

    @property
    def num_features(self) -> int:
        """P, the width of Φ."""
        return self.kernel.num_features

    def outputs(self, x: Inputs) -> int | None:
        """As the kernel itself."""
        return self.kernel.outputs(x)

    def check(self, x: Inputs) -> None:
        """As the kernel itself."""
        self.kernel.check(x)

    def features(self, x: Inputs) -> Tensor:
        """√variance · Φ(x)."""
        Phi = self.kernel.features(x)
        return Phi * torch.as_tensor(self.variance, dtype=Phi.dtype, device=Phi.device).sqrt()


@savable("kernels.FeatureSum")
@dataclass(frozen=True, eq=False)
class FeatureSum(Sum):
    """k + l of kernels that all have features: [Φ, Ψ] side by side.

    Where some terms couple C > 1 outputs and others have independent ones, it is the kernel of `Sum`, and its
    features are refused, since their number would depend on the points.

    Args:
        kernels: The terms.
    """

    kernels: tuple[FeatureKernel, ...]

    @property
    def num_features(self) -> int:
        """P, the features of all terms."""
        return sum(kernel.num_features for kernel in self.kernels)

    def features(self, x: Inputs) -> Tensor:
        """[Φ(x), Ψ(x), …]: (N, C, P)."""
        self._check_widths(x)
        return torch.cat([kernel.features(x) for kernel in self.kernels], -1)

    def apply(self, x: Inputs, w: Tensor) -> Tensor:
        """Φ(x) w: (N·C, k) for w of shape (P, k)."""
        self._check_widths(x)
        parts = w.split([kernel.num_features for kernel in self.kernels])
        pairs = zip(self.kernels, parts, strict=True)
        return sum_of([kernel.apply(x, part) for kernel, part in pairs])

    def adjoint(self, x: Inputs, u: Tensor) -> Tensor:
        """Φ(x)ᵀ u: (P, k) for u of shape (N·C, k)."""
        self._check_widths(x)
        return torch.cat([kernel.adjoint(x, u) for kernel in self.kernels])

    def at(self, x: Inputs) -> Sum:
        """The same kernel, without a claim to features if it has none at points such as `x`."""
        return self if len(self._widths(x)) == 1 else Sum(self.kernels)

    __add__ = _plus

    def _widths(self, x: Inputs) -> list[int]:
        first = rows(x, slice(0, 1))
        return sorted({kernel.outputs(first) or 1 for kernel in self.kernels})

    def _check_widths(self, x: Inputs) -> None:
        counts = self._widths(x)
        if len(counts) > 1:
            raise InputError(
                f"the kernels of a sum have features of {' and '.join(map(str, counts))} outputs. Wrap those "
                f"of one output, IndependentOutputs(kernel, {counts[-1]}), which has no features."
            )
