"""The two kernels of a network in training: the covariance at the start and the tangent kernel."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from net2gp.errors import InputError, check_dtype_and_device, check_finite
from net2gp.inputs import check_inputs, describe, map_inputs, num_rows, rows, tensors
from net2gp.limits import InfiniteWidth, infinite_width
from net2gp.limits.limit_kernels import LimitKernel
from net2gp.linear import Linearized, TangentKernel
from net2gp.linear.precision import HALF
from net2gp.types import Inputs, Kernel


class KernelPair(Protocol):
    """The two kernels of an infinitely wide network, as `infinite_width(network)` gives them.

    An object with `joint = True` gives both with rows n·C + c; otherwise outputs are independent. If it has
    the kernels as attributes `nngp` and `ntk`, these are used where only one kernel is needed.
    """

    def __call__(self, x: Inputs, y: Inputs | None = None) -> tuple[Tensor, Tensor]:
        """The covariance K(x, y) of the outputs at the start (NNGP) and the tangent kernel Θ(x, y) (NTK)."""


class Part(enum.Enum):
    """One of the two kernels of a pair."""

    NNGP = 0
    NTK = 1


@dataclass(frozen=True, eq=False)
class Limit:
    """Infinitely wide networks: outputs start as GP(0, K) and move along Θ.

    `joint` says whether the kernels couple the outputs, as `at` finds out from the training points.
    """

    pair: KernelPair
    joint: bool = False

    def check(self, x: Inputs) -> None:
        """Raise unless `x` can be an input of both kernels."""
        check_inputs(x)
        kernel = self._alone(Part.NTK)
        if kernel is not None:
            kernel.check(x)

    def at(self, x: Inputs) -> Limit:
        """The same kernels for inputs of this shape, which determines whether outputs are coupled."""
        kernel = self._alone(Part.NTK)
        given = bool(getattr(self.pair, "joint", False))
        return replace(self, joint=given if kernel is None else kernel.outputs(x) is not None)

    def start(self, x: Inputs) -> Tensor | None:
        """The mean at the start: None, which means zero."""
        return None

    @property
    def mean(self) -> None:
        """The mean at the start as a function: None, which means zero."""

    def both(self, x: Inputs, y: Inputs | None = None) -> tuple[Tensor, Tensor]:
        """K(x, y) and Θ(x, y), from inputs in float64."""
        other = None if y is None else _precise(y)
        result = self.pair(_precise(x), other)
        if not isinstance(result, tuple) or len(result) != 2:
            raise InputError(
                "the kernels must give a pair (K, Θ) of matrices, as infinite_width(network) does, but "
                f"gave {describe(result)}."
            )
        return result

    def one(self, part: Part, x: Inputs, y: Inputs | None = None) -> Tensor:
        """One of the two kernels in float64."""
        kernel = self._alone(part)
        if kernel is not None:
            return kernel.precise()(x, y).double()
        return self.both(x, y)[part.value].double()

    def blocks(self, part: Part, x: Inputs) -> Tensor:
        """One of the kernels between each point and itself: (N, 1, 1), or (N, C, C) if joint."""
        kernel = self._alone(part)
        if kernel is not None:
            return kernel.precise().blocks(x).double()
        K = self.both(x)[part.value].double()
        C = len(K) // num_rows(x)
        return K.unflatten(1, (-1, C)).unflatten(0, (-1, C)).diagonal(dim1=0, dim2=2).movedim(-1, 0)

    def matmul(self, part: Part, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """k(x, y) @ v, without storing k(x, y) if the kernel can do that."""
        kernel = self._alone(part)
        return self.one(part, x, y) @ v if kernel is None else kernel.precise().matmul(x, y, v)

    def alone(self, part: Part | None) -> Kernel | None:
        """One of the kernels, with results in the dtype of its inputs, if the pair has it."""
        kernel = None if part is None else self._alone(part)
        if isinstance(kernel, LimitKernel):
            return replace(kernel, limit=replace(kernel.limit, product_dtype=None))
        return kernel

    def _alone(self, part: Part) -> Kernel | None:
        kernel = getattr(self.pair, part.name.lower(), None)
        return kernel if isinstance(kernel, Kernel) else None


@dataclass(frozen=True, eq=False)
class Single:
    """One finite network, linearized: it starts at f(x; θ*), without variance, and moves along J Jᵀ."""

    kernel: TangentKernel

    @property
    def joint(self) -> bool:
        """True, since rows run over points and outputs."""
        return True

    def check(self, x: Inputs) -> None:
        """Raise unless `x` can be an input of the network."""
        self.kernel.check(x)

    def at(self, x: Inputs) -> Single:
        """The same value, since the outputs of a finite network are always coupled."""
        return self

    def start(self, x: Inputs) -> Tensor:
        """f(x; θ*): (N, C)."""
        return self.kernel.linearized(x)

    @property
    def mean(self) -> Linearized:
        """The mean at the start as a function: the network itself."""
        return self.kernel.linearized

    def alone(self, part: Part | None) -> TangentKernel | None:
        """The tangent kernel; there is no covariance at the start."""
        return self.kernel if part is Part.NTK else None

    def both(self, x: Inputs, y: Inputs | None = None) -> tuple[None, Tensor]:
        """No covariance, and Θ(x, y)."""
        return None, self.kernel.precise()(x, y)

    def one(self, part: Part, x: Inputs, y: Inputs | None = None) -> Tensor:
        """Θ(x, y) in float64."""
        return self._only(part).precise()(x, y)

    def blocks(self, part: Part, x: Inputs) -> Tensor:
        """Θ(x_n, x_n): (N, C, C)."""
        return self._only(part).precise().blocks(x)

    def matmul(self, part: Part, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """Θ(x, y) @ v by products with J, without storing Θ(x, y)."""
        return self._only(part).precise().matmul(x, y, v)

    def _only(self, part: Part) -> TangentKernel:
        assert part is Part.NTK
        return self.kernel


Source = Limit | Single


def source_of(network: Any, prior: dict[str, Any]) -> Source:
    """The kernels of a module at infinite width, of a linearized network, or of a given pair."""
    given = {name: value for name, value in prior.items() if value is not None}
    if isinstance(network, nn.Module):
        return _limit(infinite_width(network, **given))
    if given:
        raise InputError(
            f"{', '.join(given)} set the prior of a torch.nn.Module at infinite width, but network is "
            f"{describe(network)}, which has its kernels already. Leave them out."
        )
    if isinstance(network, Linearized):
        return Single(network.kernel())
    if isinstance(network, Kernel | type) or not callable(network):
        raise InputError(
            "network must be a torch.nn.Module, a linearized network or a pair of kernels, but is "
            f"{describe(network)}. Pass the module itself, linearize(network), or "
            "infinite_width(network)."
        )
    return _limit(network)


def _limit(pair: Any) -> Limit:
    if isinstance(pair, InfiniteWidth):
        # Inputs such as tokens are integers and cannot ask for float64 by their dtype.
        pair = replace(pair, product_dtype=torch.float64)
    return Limit(pair)


def check_matrix(matrix: Tensor, name: str, size: int) -> Tensor:
    """`matrix` in float64, if it is finite and (size, size)."""
    if matrix.shape != (size, size):
        raise InputError(
            f"{name} must have shape ({size}, {size}) for the training points, but has shape "
            f"{tuple(matrix.shape)}. A kernel of coupled outputs needs joint = True."
        )
    check_finite(matrix, name)
    return matrix.detach().double()


def count_outputs(source: Source, x: Inputs) -> int | None:
    """The number of outputs C of a joint kernel; None for other kernels, where the data determine it."""
    if not source.joint:
        return None
    return source.blocks(Part.NTK, rows(x, slice(0, 1))).shape[-1]


def own(x: Inputs, y: Tensor) -> tuple[Inputs, Tensor]:
    """Copies, so that editing the data in place later does not change a value made from them."""
    copy: Callable[[Tensor], Tensor] = lambda value: value.detach().clone()
    return map_inputs(x, copy), copy(y)


def check_like(x: Inputs, train: Inputs) -> None:
    """Raise unless `x` has the dtypes and devices of the training inputs."""
    for value, like in zip(tensors(x), tensors(train), strict=False):
        check_dtype_and_device(value, "x", like, "the training inputs")


def begin_at(start: Any, x: Inputs, num_outputs: int) -> Tensor:
    """start(x) in float64: (N, C); zero if `start` returns None."""
    given, shape = start(x), (num_rows(x), num_outputs)
    if given is None:
        return tensors(x)[0].new_zeros(shape, dtype=torch.float64)
    if not isinstance(given, Tensor) or tuple(given.shape) != shape:
        raise InputError(
            f"start must map {shape[0]} points to shape {shape}, but gives {describe(given)}."
        )
    check_finite(given, "start(x)")
    return given.detach().double()


def result_dtype(x: Inputs, y: Tensor) -> torch.dtype:
    """The dtype of the inputs, or the dtype of y if the inputs are integers; float32 for half precision."""
    found = next((v.dtype for v in (*tensors(x), y) if v.is_floating_point()), torch.float32)
    return torch.float32 if found in HALF else found


def _precise(x: Inputs) -> Inputs:
    return map_inputs(x, lambda value: value.double() if value.is_floating_point() else value)
