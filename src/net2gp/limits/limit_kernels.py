"""The two kernels of a network at infinite width, as values: NNGP and tangent kernel."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from net2gp.errors import InputError, check_dtype_and_device, one_number
from net2gp.inputs import (
    check_inputs,
    describe,
    follows,
    map_inputs,
    ordinary_tensors,
    tensors,
)
from net2gp.kernels.base import BaseKernel
from net2gp.kernels.values import rows_per_point
from net2gp.limits.plan import Plan, plan_of, remember
from net2gp.limits.prior import Prior
from net2gp.limits.tiles.batch import Tiles
from net2gp.limits.tiles.matrices import diagonal, matrix, own_blocks
from net2gp.limits.tiles.products import entries, product
from net2gp.show import as_html, as_text, number
from net2gp.types import Inputs

KEPT_BYTES = 2**26
"""The most bytes of moments of training points that are held from one prediction to the next."""


@dataclass(frozen=True, eq=False)
class InfiniteWidth:
    """A network in the limit of infinitely many channels, which computes both kernels in one pass.

    Call it for the pair (NNGP, tangent kernel); `nngp` and `ntk` are the two kernels by themselves. What is
    computed for inputs of one shape is a plan. The last 16 plans are held, and missing ones are found again.

    Args:
        graph: The traced network.
        prior: The variances of its weights and biases.
        product_dtype: The dtype of results, or None for the dtype of the inputs.
        plans: The plans that are known, by the shapes and dtypes of the inputs.
    """

    graph: fx.GraphModule
    prior: Prior
    product_dtype: torch.dtype | None = None
    plans: dict[tuple[tuple[int | torch.dtype, ...], ...], Plan] = field(
        default_factory=dict, repr=False
    )

    def __repr__(self) -> str:
        calls = [node for node in self.graph.graph.nodes if node.op.startswith("call_")]
        names = [
            type(self.graph.get_submodule(str(node.target))).__name__
            if node.op == "call_module"
            else getattr(node.target, "__name__", str(node.target))
            for node in calls
        ]
        more = [f"… ({len(names)} steps)"] if len(names) > 8 else []
        return f"InfiniteWidth({', '.join(names[:8] + more)})"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "plans": {}}  # made again from the graph when inputs come

    def __call__(self, x: Inputs, y: Inputs | None = None) -> tuple[Tensor, Tensor]:
        """Compute both kernel matrices.

        Args:
            x: N points.
            y: M points, or None for x itself.

        Returns:
            k(x, y) of the NNGP and of the tangent kernel, (N, M) each, or (N·C, M·C) if outputs are coupled.
        """
        first, second = self.values(x, y, tangent=True)
        assert second is not None
        return first, second

    def diag(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Compute both diagonals.

        Args:
            x: N points.

        Returns:
            The variances of the NNGP and of the tangent kernel, (N,) each, or (N·C,) if outputs are coupled.
        """
        first, second = self.diagonals(x, tangent=True)
        assert second is not None
        return first, second

    @property
    def nngp(self) -> LimitKernel:
        """Return the covariance of the network's outputs at initialization."""
        return LimitKernel(self, tangent=False)

    @property
    def ntk(self) -> LimitKernel:
        """Return the tangent kernel, which is constant during training in the limit."""
        return LimitKernel(self, tangent=True)

    def precise(self) -> InfiniteWidth:
        """Return the same limit of the same inputs, computed in float64."""
        return replace(self, product_dtype=torch.float64)

    @ordinary_tensors()
    def plan(self, x: Inputs) -> Plan:
        """Find what is computed for inputs of this shape.

        Args:
            x: Points of the shape.

        Returns:
            The plan, which is found once per shape.
        """
        inputs = self.inputs(x)
        key = tuple((*one.shape[1:], one.dtype) for one in inputs)
        found = self.plans.get(key)
        return remember(self.plans, key, plan_of(self.graph, inputs)) if found is None else found

    def inputs(self, x: Inputs, name: str = "x") -> tuple[Tensor, ...]:
        """Check inputs, and put them into the order of the network's arguments.

        Args:
            x: N points.
            name: What error messages call them.

        Returns:
            One tensor per argument.

        Raises:
            InputError: If numbers are complex, or a dict has other names than the arguments.
        """
        check_inputs(x, name)
        if not torch.is_inference_mode_enabled():  # a copy made in it has no derivatives outside
            x = map_inputs(x, lambda v: v.clone() if v.is_inference() else v)
        if any(one.is_complex() for one in tensors(x)):
            raise InputError(f"{name} must hold real numbers, but is {describe(x)}.")
        if isinstance(x, Tensor):
            return (x,)
        if isinstance(x, tuple):
            return x
        names = [node.target for node in self.graph.graph.nodes if node.op == "placeholder"]
        if set(names) != set(x):
            raise InputError(
                f"x has the names {sorted(x)}, but the network takes {names}. Pass a dict with those names."
            )
        return tuple(x[name] for name in names)

    @ordinary_tensors()
    def values(
        self, x: Inputs, y: Inputs | None, tangent: bool, scale: float | Tensor = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the NNGP matrix, and the tangent kernel if it is wanted.

        Args:
            x: N points.
            y: M points, or None for x itself.
            tangent: Whether the tangent kernel is computed.
            scale: A factor of both.

        Returns:
            Both matrices; the second is None unless `tangent`.
        """
        left = self.tiles(x, tangent)
        if y is None or y is x:
            return matrix(left, None, scale)
        self.check_alike(x, y)
        return matrix(left, self.tiles(y, tangent), scale)

    def check_alike(self, x: Inputs, y: Inputs) -> None:
        """Check that two sets of points can be compared.

        Args:
            x: Some points.
            y: The others.

        Raises:
            InputError: If shapes, dtypes or devices differ.
        """
        for one, other in zip(self.inputs(x), self.inputs(y, "y"), strict=True):
            check_dtype_and_device(other, "y", one, "x")
            if one.shape[1:] != other.shape[1:]:
                raise InputError(
                    f"both sets of points need inputs of one shape, but got {tuple(one.shape)} and "
                    f"{tuple(other.shape)}."
                )

    @ordinary_tensors()
    def diagonals(self, x: Inputs, tangent: bool) -> tuple[Tensor, Tensor | None]:
        """Compute the diagonals of the kernel matrices.

        Args:
            x: N points.
            tangent: Whether the diagonal of the tangent kernel is computed.

        Returns:
            The diagonals of both kernels; the second is None unless `tangent`.
        """
        return diagonal(self.tiles(x, tangent))

    def tiles(self, x: Inputs, tangent: bool) -> Tiles:
        """Compute what a pair of points needs of each point by itself.

        Args:
            x: N points.
            tangent: Whether the tangent kernel is wanted.

        Returns:
            The data and the moments of each point.

        Raises:
            InputError: If the variance of a point is not a finite number.
        """
        inputs = self.inputs(x)
        plan = self.plan(x)
        dtype = self.result_dtype(x)
        prior = self.prior.to(inputs[0].device, dtype)
        tiles = Tiles.of(plan, prior, plan.data(inputs, dtype), tangent)
        if not bool(torch.isfinite(tiles.own[0]).all()):
            raise InputError(
                f"the kernel of a point of x with itself is not a finite number in {str(dtype)[6:]}: x, or "
                "weight_var, is too large. Divide x by its standard deviation, or pass x.double()."
            )
        return tiles

    def outputs(self, x: Inputs) -> int | None:
        """Count the outputs that are coupled: networks that keep positions to the end couple them.

        Args:
            x: Points, whose shape decides.

        Returns:
            C, or None if outputs are independent copies of each other.
        """
        plan = self.plan(x)
        return prod(plan.layout.shape) if plan.program.output.positions else None

    def result_dtype(self, x: Inputs) -> torch.dtype:
        """Find the dtype of the kernels.

        Args:
            x: Points.

        Returns:
            float64 if the limit is precise, else the dtype of the points.
        """
        floating = (one.dtype for one in tensors(x) if one.is_floating_point())
        return self.product_dtype or next(floating, None) or torch.get_default_dtype()


@dataclass(frozen=True, eq=False)
class LimitKernel(BaseKernel):
    """One of the two kernels of an infinitely wide network.

    Args:
        limit: The network at infinite width.
        tangent: Whether it is the tangent kernel; otherwise it is the covariance of the outputs (NNGP).
        variance: A factor of the kernel.
    """

    limit: InfiniteWidth
    tangent: bool
    variance: float | Tensor = 1.0

    def _facts(self) -> dict[str, str]:
        return {
            "_limit": repr(self.limit),
            "kernel": "NTK" if self.tangent else "NNGP",
            "variance": number(self.variance),
        }

    __repr__, _repr_html_ = as_text, as_html

    def check(self, x: Inputs) -> None:
        """Raise an error that says what to change, if the network cannot take `x`."""
        self.limit.plan(x)

    def outputs(self, x: Inputs) -> int | None:
        """Return C if the network keeps positions to the end, which couples its outputs, or else None."""
        return self.limit.outputs(x)

    def result_dtype(self, x: Inputs) -> torch.dtype:
        """Return the dtype of the inputs, or float64 if precise."""
        return self.limit.result_dtype(x)

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """Compute k(x, y), (N, M), or (N·C, M·C) if outputs are coupled."""
        found = None if self._differentiable(x, y) else self._fused(x, None if y is x else y)
        if found is not None:
            return found
        first, second = self.limit.values(x, y, self.tangent, self.variance)
        return self._chosen(first, second)

    @ordinary_tensors()
    def _fused(self, x: Inputs, y: Inputs | None) -> Tensor | None:
        """The matrix in one pass over the memory of a GPU, or None where that is impossible."""
        on_gpu = isinstance(x, Tensor) and x.is_cuda
        if not on_gpu or self.limit.result_dtype(x) != torch.float32:
            return None
        with torch.no_grad():
            left = self.limit.tiles(x, self.tangent)
            if y is not None:
                self.limit.check_alike(x, y)
            found = entries(left, None if y is None else self.limit.tiles(y, self.tangent))
            return None if found is None else found.mul_(self.variance)

    def _chosen(self, first: Tensor, second: Tensor | None) -> Tensor:
        if not self.tangent:
            return first
        assert second is not None
        return second

    @ordinary_tensors()
    def blocks(self, x: Inputs) -> Tensor:
        """Compute k(x_n, x_n), (N, 1, 1), or (N, C, C) if outputs are coupled."""
        return self._chosen(*own_blocks(self.limit.tiles(x, self.tangent))) * self.variance

    def diag(self, x: Inputs) -> Tensor:
        """Compute the diagonal of k(x, x), (N,), or (N·C,) if outputs are coupled."""
        return self._chosen(*self.limit.diagonals(x, self.tangent)) * self.variance

    @ordinary_tensors()
    def matmul(self, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """Compute k(x, y) @ v; no part of k(x, y) that is larger than a tile is ever in memory."""
        if self._differentiable(x, y, v):
            return super().matmul(x, y, v)
        rows_per_point(y, v)
        with torch.no_grad():
            left = self.limit.tiles(x, self.tangent)
            right = None if y is x else self.limit.tiles(y, self.tangent)
            if right is not None:
                self.limit.check_alike(x, y)
            return product(left, right, v.to(left.prior.dtype)) * self.variance

    def _differentiable(self, *values: Inputs | None) -> bool:
        """Whether autograd follows the kernel or some of the values."""
        own = isinstance(self.variance, Tensor) and self.variance.requires_grad
        varied = torch.is_grad_enabled() and (own or self.limit.prior.requires_grad)
        return varied or any(follows(value) for value in values)

    @ordinary_tensors()
    def keep(self, x: Inputs) -> KeptLimit | None:
        """Return k(x, ·) with the moments of `x` held, or None if they are too large or differentiated."""
        if follows(x) or self.limit.prior.requires_grad:
            return None
        with torch.no_grad():
            tiles = self.limit.tiles(x, self.tangent)
        numbers = sum(t.numel() for t in (*tiles.data.values(), *tiles.profile.values()))
        return KeptLimit(self, x, tiles) if 8 * numbers <= KEPT_BYTES else None

    def precise(self) -> LimitKernel:
        """Return the same kernel of the same inputs, computed in float64."""
        return replace(self, limit=self.limit.precise())

    def scaled(self, variance: float | Tensor) -> LimitKernel:
        """Return variance · k."""
        return replace(self, variance=self.variance * one_number(variance, "variance"))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> LimitKernel:
        """Return the same kernel with its tensors on another device or in another dtype."""
        return replace(self, limit=replace(self.limit, prior=self.limit.prior.to(device, dtype)))


@dataclass(frozen=True, eq=False)
class KeptLimit:
    """The kernel with the points `known`, whose moments `tiles` serve every later call.

    Args:
        kernel: The kernel.
        known: The points.
        tiles: Their data and moments.
    """

    kernel: LimitKernel
    known: Inputs
    tiles: Tiles

    def __reduce__(self) -> Any:
        # the moments are computed again, since a plan holds functions, which cannot be pickled
        return LimitKernel.keep, (self.kernel, self.known)

    @ordinary_tensors()
    def __call__(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Compute k(known, x), (N·C, M·C), and k(x_m, x_m), (M, C, C), both from the moments of `x`."""
        kernel, limit = self.kernel, self.kernel.limit
        limit.check_alike(self.known, x)
        own = limit.tiles(x, kernel.tangent)
        matrices, blocks = matrix(self.tiles, own, kernel.variance), own_blocks(own)
        return kernel._chosen(*matrices), kernel._chosen(*blocks) * kernel.variance
