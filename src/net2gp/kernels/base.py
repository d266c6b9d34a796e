"""What every kernel is given by default, and the kernels that are made of others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from numbers import Number
from operator import add, mul
from typing import Any, Self, cast

import torch
from torch import Tensor

from net2gp.errors import InputError, one_number
from net2gp.inputs import check_inputs, chunks, map_inputs, num_rows, rows
from net2gp.kernels.values import changed, is_kernel, moved, rows_per_point, times, wrong_height
from net2gp.linalg import kron_identity
from net2gp.tags import savable
from net2gp.types import Inputs, Kernel

TILE_BYTES = 2**27
"""The size of the part of a kernel matrix that a product with it holds at a time."""

Kept = Callable[[Inputs], tuple[Tensor, Tensor]]
"""From x to k(X, x) and k(x_n, x_n), with what belongs to the points X held."""


class BaseKernel(ABC):
    """A covariance function of your own: write `__call__` and `diag`, and get the rest.

    A frozen dataclass that derives from it is a kernel wherever one is taken: `condition`, `tune`, draws,
    files. `k + l`, `k * l` and `2.0 * k` are kernels again: the covariances of a sum and of a product of
    independent processes, and of one that is multiplied by √2. Outputs are independent copies, with
    covariance K ⊗ I, unless `outputs` says how many are coupled. Override what you can make faster.

    A kernel is a value: what it says of points depends on them and on its fields alone.

    >>> @dataclass(frozen=True)
    ... class Linear(BaseKernel):
    ...     offset: float = 0.0
    ...
    ...     def __call__(self, x, y=None):
    ...         return x @ (x if y is None else y).mT + self.offset
    ...
    ...     def diag(self, x):
    ...         return (x * x).sum(1) + self.offset
    >>> x = torch.tensor([[1.0], [2.0]])
    >>> (Linear() + 3.0 * Linear(1.0))(x)
    tensor([[ 7., 11.],
            [11., 19.]])

    Reference: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, section 4.2.4.
    """

    # numpy would multiply by an object array instead of asking the kernel
    __array_ufunc__ = None

    @abstractmethod
    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """k(x, y): (N, M), or (N·C, M·C) with rows n·C + c; y = x if left out."""

    @abstractmethod
    def diag(self, x: Inputs) -> Tensor:
        """The diagonal of k(x, x): (N,), or (N·C,)."""

    def outputs(self, x: Inputs) -> int | None:
        """None: outputs are independent copies, as many as the data have."""
        return None

    def check(self, x: Inputs) -> None:
        """Raise unless `x` holds finite numbers and the kernel has the outputs that it says it has.

        Args:
            x: N points.

        Raises:
            InputError: `x` is no tensor, tuple or dict of finite numbers, or `diag` has another number of
                rows per point than `outputs` says.
        """
        check_inputs(x)
        first = rows(x, slice(0, 1))
        with torch.no_grad():
            found, count = tuple(self.diag(first).shape), self.outputs(first)
        if found != (count or 1,):
            raise InputError(
                f"diag of {type(self).__name__} has shape {found} for one point, but ({count or 1},) is "
                f"needed, since outputs(x) is {count}. Return C from outputs(x) if it couples C outputs."
            )

    def result_dtype(self, x: Inputs) -> torch.dtype:
        """Find the dtype of k(x, x), by default from its value at the first point.

        Args:
            x: Points, of which the first is enough.

        Returns:
            The dtype.
        """
        with torch.no_grad():
            return self.diag(rows(x, slice(0, 1))).dtype

    def blocks(self, x: Inputs) -> Tensor:
        """k(x_n, x_n) for each point: (N, 1, 1), or (N, C, C)."""
        if self.outputs(x) is None:
            return self.diag(x)[:, None, None]
        return torch.stack([self(part) for part in chunks(x, 1)])

    def matmul(self, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """k(x, y) @ v, a tile of rows of k(x, y) at a time."""
        check_inputs(x)
        check_inputs(y)
        size = max(1, self._tile_bytes() // (8 * rows_per_point(y, v) * len(v)))
        return torch.cat([times(self(part, y), v) for part in chunks(x, size)])

    def keep(self, x: Inputs) -> Kept | None:
        """Hold what belongs to training points from one prediction to the next.

        Args:
            x: The points.

        Returns:
            A function from other points z to k(x, z) and k(z_n, z_n), or None if there is nothing to hold.
        """
        return None

    def precise(self) -> Kernel:
        """The same kernel of the same inputs, its results in float64.

        A field `product_dtype` is set to float64 where there is one; else fields and inputs are converted.
        """
        if hasattr(self, "product_dtype"):
            return changed(self, {"product_dtype": torch.float64})
        return Precise(self)

    def scaled(self, variance: float | Tensor) -> Kernel:
        """variance · k."""
        return Scaled(self, variance)

    def portable(self) -> Kernel:
        """What a file holds in place of this kernel: itself, unless it depends on more than its fields."""
        return self

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """The same kernel with its tensors, kernels and modules on another device or in another dtype."""
        values = {name: moved(value, device, dtype) for name, value in vars(self).items()}
        return changed(self, values)

    def __add__(self, other: Kernel) -> Kernel:
        return (
            Sum(terms_of(self, Sum) + terms_of(other, Sum)) if is_kernel(other) else NotImplemented
        )

    def __radd__(self, other: float) -> Self:
        # the built-in sum starts from 0
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __mul__(self, other: Kernel | float | Tensor) -> Kernel:
        if isinstance(other, Number) or hasattr(other, "__array__"):
            return self.scaled(cast(Any, other))
        if not is_kernel(other):
            return NotImplemented
        return Product(terms_of(self, Product) + terms_of(other, Product))

    __rmul__ = __mul__

    def _tile_bytes(self) -> int:
        return TILE_BYTES


def terms_of(kernel: Any, kind: type[Any]) -> tuple[Any, ...]:
    """The terms of a sum, or factors of a product: (k + l) + m is one sum of three."""
    return kernel.kernels if isinstance(kernel, kind) else (kernel,)


def dtype_of(kernel: Kernel, x: Inputs) -> torch.dtype:
    """The dtype of k(x, x)."""
    if isinstance(kernel, BaseKernel):
        return kernel.result_dtype(x)
    return kernel.diag(rows(x, slice(0, 1))).dtype


def independent_product(kernel: Kernel, x: Inputs, y: Inputs, v: Tensor, count: int) -> Tensor:
    """(k(x, y) ⊗ I) @ v of a kernel of independent outputs, with the outputs as further columns."""
    if rows_per_point(y, v) != count:
        raise wrong_height(count * num_rows(y), v)
    columns = v.reshape(num_rows(y), count * v.shape[1])
    return kernel.matmul(x, y, columns).reshape(-1, v.shape[1])


@savable("kernels.Precise")
@dataclass(frozen=True, eq=False)
class Precise(BaseKernel):
    """The kernel in float64, of inputs in any precision: what `precise()` returns by default.

    Args:
        kernel: The kernel, whose tensors are converted to float64.
    """

    kernel: Kernel

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernel", self.kernel.to(None, torch.float64))

    def outputs(self, x: Inputs) -> int | None:
        """As the kernel itself."""
        return self.kernel.outputs(widened(x))

    def check(self, x: Inputs) -> None:
        """As the kernel itself."""
        check_inputs(x)
        self.kernel.check(widened(x))

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """k(x, y) in float64."""
        return self.kernel(widened(x), None if y is None or y is x else widened(y)).double()

    def diag(self, x: Inputs) -> Tensor:
        """The diagonal of k(x, x) in float64."""
        return self.kernel.diag(widened(x)).double()

    def blocks(self, x: Inputs) -> Tensor:
        """k(x_n, x_n) in float64."""
        return self.kernel.blocks(widened(x)).double()

    def matmul(self, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """k(x, y) @ v in float64."""
        return self.kernel.matmul(widened(x), widened(y), v.double())


def widened(x: Inputs) -> Inputs:
    """The inputs in float64, but for integers such as tokens."""
    return map_inputs(x, lambda v: v.double() if v.is_floating_point() else v)


@savable("kernels.Scaled")
@dataclass(frozen=True, eq=False)
class Scaled(BaseKernel):
    """variance · k: what `variance * k` and `k.scaled(variance)` are unless a kernel has a scale of its own.

    Args:
        kernel: The kernel k.
        variance: A positive number, or a tensor of one element, which may require a gradient.

    Raises:
        InputError: The variance is not positive, or has several elements.
    """

    kernel: Kernel
    variance: float | Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "variance", one_number(self.variance, "variance"))

    def outputs(self, x: Inputs) -> int | None:
        """As the kernel itself."""
        return self.kernel.outputs(x)

    def check(self, x: Inputs) -> None:
        """As the kernel itself."""
        self.kernel.check(x)

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """variance · k(x, y)."""
        return self._times(self.kernel(x, y))

    def diag(self, x: Inputs) -> Tensor:
        """variance · k(x_n, x_n)."""
        return self._times(self.kernel.diag(x))

    def blocks(self, x: Inputs) -> Tensor:
        """variance · k(x_n, x_n) as blocks."""
        return self._times(self.kernel.blocks(x))

    def matmul(self, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """variance · k(x, y) @ v."""
        return self._times(self.kernel.matmul(x, y, v))

    def precise(self) -> Kernel:
        """The same kernel of the same inputs, its results in float64."""
        return replace(self, kernel=self.kernel.precise())

    def scaled(self, variance: float | Tensor) -> Scaled:
        """One scale in place of two."""
        return replace(self, variance=self.variance * one_number(variance, "variance"))

    def _times(self, value: Tensor) -> Tensor:
        return value * torch.as_tensor(self.variance, dtype=value.dtype, device=value.device)


@dataclass(frozen=True, eq=False)
class Combined(BaseKernel):
    """Several kernels at the same points, each made as wide as the widest."""

    kernels: tuple[Kernel, ...]

    def outputs(self, x: Inputs) -> int | None:
        """Count the outputs that some of the kernels couple.

        Args:
            x: Points, of which the first are enough.

        Returns:
            C, or None where no kernel couples them.

        Raises:
            InputError: Two kernels couple different numbers of outputs.
        """
        counts = {kernel.outputs(x) for kernel in self.kernels} - {None}
        if len(counts) > 1:
            numbers = " and ".join(str(count) for count in sorted(c for c in counts if c))
            raise InputError(
                f"kernels of {numbers} coupled outputs have no sum and no product. Combine kernels of one "
                "network, or of networks with the same number of outputs."
            )
        return counts.pop() if counts else None

    def check(self, x: Inputs) -> None:
        """As each of the kernels, which must have the same number of outputs."""
        for kernel in self.kernels:
            kernel.check(x)
        self.outputs(x)

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """The matrices combined, entry by entry: (N, M), or (N·C, M·C)."""
        return self._combined(x, [kernel(x, y) for kernel in self.kernels], kron_identity)

    def diag(self, x: Inputs) -> Tensor:
        """The diagonals combined, entry by entry: (N,), or (N·C,)."""
        found = [kernel.diag(x) for kernel in self.kernels]
        return self._combined(x, found, lambda d, count: d.repeat_interleave(count))

    def blocks(self, x: Inputs) -> Tensor:
        """The blocks combined, entry by entry: (N, 1, 1), or (N, C, C)."""
        found = [kernel.blocks(x) for kernel in self.kernels]
        return self._combined(x, found, lambda b, count: b * torch.eye(count).to(b))

    def precise(self) -> Kernel:
        """The same kernel of the same inputs, its results in float64."""
        return replace(self, kernels=tuple(kernel.precise() for kernel in self.kernels))

    def _combined(
        self, x: Inputs, parts: Sequence[Tensor], widen: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        """All parts combined, those of independent outputs as K ⊗ I where others couple C of them."""
        if len({part.shape for part in parts}) == 1:
            return reduce(self._operation(), parts)
        count = self.outputs(x)
        assert count is not None
        alone = [kernel.outputs(x) is None for kernel in self.kernels]
        wide = [widen(p, count) if one else p for p, one in zip(parts, alone, strict=True)]
        return reduce(self._operation(), wide)

    @staticmethod
    @abstractmethod
    def _operation() -> Callable[[Tensor, Tensor], Tensor]: ...


@savable("kernels.Sum")
@dataclass(frozen=True, eq=False)
class Sum(Combined):
    """k + l: the covariance of a sum of independent processes.

    Where one kernel couples C outputs and another has independent ones, the other is K ⊗ I_C. The cost is the
    cost of all kernels together.

    Args:
        kernels: The terms.
    """

    def matmul(self, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """Σ k(x, y) @ v, by the products of the kernels."""
        count = rows_per_point(y, v)
        alone = [count > 1 and kernel.outputs(x) is None for kernel in self.kernels]
        products = [
            independent_product(kernel, x, y, v, count) if one else kernel.matmul(x, y, v)
            for kernel, one in zip(self.kernels, alone, strict=True)
        ]
        return reduce(add, products)

    def scaled(self, variance: float | Tensor) -> Kernel:
        """variance · k: every term multiplied."""
        return replace(self, kernels=tuple(kernel.scaled(variance) for kernel in self.kernels))

    @staticmethod
    def _operation() -> Callable[[Tensor, Tensor], Tensor]:
        return add


@savable("kernels.Product")
@dataclass(frozen=True, eq=False)
class Product(Combined):
    """k · l, entry by entry: the covariance of a product of independent processes.

    Where one kernel couples C outputs and another has independent ones, the other is K ⊗ I_C, so that the
    outputs of the product are uncorrelated. The cost is the cost of all kernels together.

    Args:
        kernels: The factors.
    """

    @staticmethod
    def _operation() -> Callable[[Tensor, Tensor], Tensor]:
        return mul
