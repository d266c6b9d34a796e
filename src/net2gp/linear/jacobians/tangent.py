"""The tangent kernel J diag(prior_var) Jᵀ of a linearized network, without its Jacobian."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from net2gp.errors import InputError, check_positive, one_number
from net2gp.inputs import check_inputs, chunks, follows, num_rows, ordinary_tensors, rows
from net2gp.kernels.features import BaseFeatureKernel
from net2gp.linear.forward.factors import Factor, add_blocks, in_dtype, mixed
from net2gp.linear.jacobians.capture import Plan, capture, plan
from net2gp.linear.jacobians.jacobian import jacobian
from net2gp.linear.jacobians.kept import Kept
from net2gp.linear.jacobians.passes import (
    capacity,
    check_device,
    check_height,
    column_products,
    column_pullbacks,
)
from net2gp.linear.jacobians.pieces import Pieces, add_tile, common_plans, row_shapes
from net2gp.linear.jacobians.products import (
    factors_times,
    jacobian_times,
    jacobian_transposed_times,
)
from net2gp.memory import available_memory, check_memory
from net2gp.progress import progress
from net2gp.show import as_html, as_text, number
from net2gp.types import Inputs, Params

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized

KEPT_BYTES = 2**26
"""The most bytes of factors of training points that are held from one prediction to the next."""


@dataclass(frozen=True, eq=False)
class TangentKernel(BaseFeatureKernel):
    """The tangent kernel k(x, x') = J(x) diag(prior_var) J(x')ᵀ of all outputs, with rows n·C + c.

    Parameters of layers with a rule (linear, convolution, attention, recurrent, embedding and norm layers)
    contribute by structure: a weight with inputs a and output gradients g adds Σ_ts (a_t·a'_s)(g_t·g'_s), or
    the product of layer gradients if that is cheaper. All other parameters contribute through their columns
    of the Jacobian, a few at a time. The cost is C backward passes over x and y, plus N²C² times the number
    of layer outputs (not parameters) for dense layers.

    A `precise` kernel runs the network in its own dtype but multiplies in float64: differences such as
    k(x, x) − k(x, X)K⁻¹k(X, x) keep their digits, and only the products cost more.

    Args:
        linearized: The linearized network, whose Jacobian is J.
        prior_var: The prior variance of every parameter, by name: one number, or one per entry.
        memory_budget: The bytes that may be held beside the result, or None for a quarter of the free memory.
        product_dtype: The dtype of products and results, or None for the dtype of the network.
        tolerance: The relative error that products of a float32 kernel may have on a GPU: see `within`.

    Reference: Novak et al., Fast finite width neural tangent kernel, ICML 2022.
    """

    linearized: Linearized
    prior_var: Params = field(repr=False)
    memory_budget: int | None = None
    product_dtype: torch.dtype | None = None
    tolerance: float = 0.0

    def _facts(self) -> dict[str, str]:
        return {"_network": repr(self.linearized), "prior_var": number(self.prior_var)}

    __repr__, _repr_html_ = as_text, as_html

    @property
    def num_features(self) -> int:
        """Return P, the number of chosen parameters."""
        return self.linearized.num_params

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the products."""
        return self.product_dtype or self.linearized.example.dtype

    def check(self, x: Inputs) -> None:
        """Raise if the network cannot take `x`, or cannot be linearized there."""
        self._plan(x, training=False)

    def outputs(self, x: Inputs) -> int:
        """Return C at points such as `x`, after the same checks; outputs share their parameters."""
        return self._plan(x, training=False).num_outputs

    def result_dtype(self, x: Inputs) -> torch.dtype:
        """Return the dtype of the products, which does not depend on `x`."""
        return self.dtype

    @ordinary_tensors()
    def keep(self, x: Inputs, *, traced: bool = False) -> Kept | None:
        """Hold the factors of the gradients at training points.

        Args:
            x: The points.
            traced: Whether the kernel is summed over outputs.

        Returns:
            A function from other points z to k(x, z) and k(z_n, z_n), or None if the factors are too large or
            are to be differentiated.
        """
        layout = self._plan(x, training=False)
        widened = self.dtype.itemsize / self.linearized.example.element_size()
        size = 2 * widened * num_rows(x) * layout.bytes_per_point
        tracked = follows(x) or any(v.requires_grad for v in self.prior_var.values())
        if layout.leftover or tracked or size > KEPT_BYTES or num_rows(x) > self._points(layout):
            return None
        with torch.no_grad():
            return Kept(self, x, self._pieces(x, layout, traced), traced)

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """Compute k(x, y), (N·C, M·C).

        >>> from net2gp.linear.linearized import linearize
        >>> kernel = linearize(torch.nn.Linear(2, 2).eval()).kernel()
        >>> kernel(torch.tensor([[1.0, 2.0]]))
        tensor([[6., 0.],
                [0., 6.]])
        """
        return self._assemble(x, y, traced=False)

    def blocks(self, x: Inputs) -> Tensor:
        """Compute k(x_n, x_n) per point, (N, C, C)."""
        layout = self._plan(x, training=False)
        C = layout.num_outputs
        parts = []
        for part in chunks(x, self._points(layout)):
            block = self._zeros(num_rows(part), C, C)
            for factor in self._factors(part, layout):
                add_blocks(block, factor)
            parts.append(block)
        return torch.cat(parts)

    def diag(self, x: Inputs) -> Tensor:
        """Compute the diagonal of k(x, x), (N·C,)."""
        return self.blocks(x).diagonal(dim1=1, dim2=2).reshape(-1)

    def blocks_and_products(self, x: Inputs, w: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the covariance of each point and the products of its features from one pass.

        Args:
            x: N points.
            w: A matrix of shape (P, k).

        Returns:
            k(x_n, x_n) for each point, (N, C, C), and Φ(x) w, (N, C, k).
        """
        check_height(w, self.num_features, "w", "parameters")
        layout = self._plan(x, training=False)
        if (
            layout.leftover
        ):  # their Jacobians are computed a few parameters at a time, not in one pass
            return self.blocks(x), self.apply(x, w).unflatten(0, (num_rows(x), -1))
        names, w = self.linearized.params, (w * self._roots[:, None]).to(self.dtype)
        blocks, products = [], []
        for part in chunks(x, self._points(layout)):
            pieces = self._pieces(part, layout, traced=False)
            blocks.append(self._zeros(num_rows(part), layout.num_outputs, layout.num_outputs))
            for factor in pieces.factors.values():
                add_blocks(blocks[-1], factor)
            ordered = [pieces.captured[name] for name in names]
            products.append(factors_times(self.linearized, ordered, w))
        return torch.cat(blocks), torch.cat(products)

    def matmul(self, x: Inputs, y: Inputs, v: Tensor) -> Tensor:
        """Compute k(x, y) @ v with a backward pass over y and a forward-mode pass over x per column of v."""
        return self.apply(x, self.adjoint(y, v))

    def features(self, x: Inputs) -> Tensor:
        """Compute Φ(x) = J(x) diag(√prior_var), (N, C, P)."""
        J = jacobian(self.linearized, x, training=False)
        return J.to(self.product_dtype or J.dtype) * self._roots

    def apply(self, x: Inputs, w: Tensor) -> Tensor:
        """Compute Φ(x) w, (N·C, k), for w (P, k)."""
        check_height(w, self.num_features, "w", "parameters")
        linearized, w = self.linearized, w * self._roots[:, None]
        if self.product_dtype is not None or follows(x):  # forward mode has wrong gradients in x
            layout = self._plan(x, training=False)
            w = w.to(self.product_dtype or linearized.example.dtype)
            return jacobian_times(linearized, x, layout, self._points(layout), w)
        w = w.to(linearized.example.dtype)
        return column_products(linearized, x, w, capacity(linearized, x, self._budget))

    def adjoint(self, x: Inputs, u: Tensor) -> Tensor:
        """Compute Φ(x)ᵀ u, (P, k), for u (N·C, k)."""
        linearized = self.linearized
        if self.product_dtype is not None or follows(x):
            layout = self._plan(x, training=False)
            u = u.to(self.product_dtype or linearized.example.dtype)
            pulled = jacobian_transposed_times(linearized, x, layout, self._points(layout), u)
        else:
            u = u.to(linearized.example.dtype)
            pulled = column_pullbacks(linearized, x, u, capacity(linearized, x, self._budget))
        return pulled * self._roots[:, None]

    def precise(self) -> TangentKernel:
        """Return the same kernel with products in float64; inputs stay in the network's dtype."""
        return replace(self, product_dtype=torch.float64)

    def within(self, tolerance: float) -> TangentKernel:
        """Return the same kernel, whose matrices may have a relative error of `tolerance`.

        From 5e-5 on, a float32 kernel on a GPU multiplies in bfloat16, which its matrix units are made for.
        Each number is the sum of two, so that errors are at most 5e-5 of the product of absolute values.
        Nothing changes elsewhere and in float64.

        Args:
            tolerance: The error; 0 is the default of all kernels.

        Returns:
            The kernel.

        Raises:
            InputError: If `tolerance` is negative or no number.

        >>> from net2gp.linear.linearized import linearize
        >>> kernel = linearize(torch.nn.Linear(2, 1).eval()).kernel().within(1e-4)
        >>> kernel(torch.tensor([[1.0, 2.0]]))
        tensor([[6.]])
        """
        check_positive(tolerance, "tolerance", zero=True, single=True)
        return replace(self, tolerance=float(tolerance))

    def scaled(self, variance: float | Tensor) -> TangentKernel:
        """Return variance · k, the same kernel with every prior variance multiplied."""
        like, hint = self.linearized.example, "Variances per parameter are given by prior_var."
        one = one_number(variance, "variance", hint)
        factor = torch.as_tensor(one, dtype=like.dtype, device=like.device).reshape(())
        products: dict[int, Tensor] = {id(v): v * factor for v in self.prior_var.values()}
        return replace(
            self, prior_var={name: products[id(v)] for name, v in self.prior_var.items()}
        )

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> TangentKernel:
        """Return the same kernel with its tensors on another device or in another dtype."""
        # a tensor that many parameters share stays shared, since gradients need one kernel per tensor
        moved = {id(v): v.to(device=device, dtype=dtype) for v in self.prior_var.values()}
        prior = {name: moved[id(value)] for name, value in self.prior_var.items()}
        return replace(self, linearized=self.linearized.to(device, dtype), prior_var=prior)

    @cached_property
    @ordinary_tensors()
    def _roots(self) -> Tensor:
        """Return √prior_var as a vector (P,)."""
        params = self.linearized.params
        dtype = self.product_dtype or self.linearized.example.dtype
        prior = {n: variance.to(dtype) for n, variance in self.prior_var.items()}
        return torch.cat([prior[n].sqrt().expand(p.shape).reshape(-1) for n, p in params.items()])

    @cached_property
    def _budget(self) -> int:
        if self.memory_budget is not None:
            return self.memory_budget
        return available_memory(self.linearized.example.device) // 4

    def _zeros(self, *shape: int) -> Tensor:
        like = self.linearized.example
        return torch.zeros(shape, dtype=self.product_dtype or like.dtype, device=like.device)

    def _plan(self, x: Inputs, *, training: bool) -> Plan:
        check_inputs(x)
        check_device(x, self.linearized)
        return plan(self.linearized, x, training=training)

    def _points(self, layout: Plan) -> int:
        """Return for how many points the factors fit into the memory budget."""
        leftover = max((self.linearized.params[n].numel() for n in layout.leftover), default=0)
        leftover *= layout.num_outputs * self.linearized.example.element_size()
        return max(1, self._budget // max(1, 2 * (layout.bytes_per_point + 2 * leftover)))

    def _assemble(self, x: Inputs, y: Inputs | None, *, traced: bool) -> Tensor:
        """Compute k(x, y), or its trace over outputs, as a sum over the prior variances that need gradients.

        The kernel is linear in the variances, so that autograd sees only their products with matrices.
        """
        groups = self._variance_groups()
        if groups is None:
            return self._dense(x, y, traced=traced)
        zero = self.linearized.example.new_zeros(())
        fixed = {n: zero if v.requires_grad else v for n, v in self.prior_var.items()}
        total = replace(self, prior_var=fixed)._dense(x, y, traced=traced)
        for variance, names in groups:
            only = {n: zero + 1 if n in names else zero for n in self.prior_var}
            total = total + variance * replace(self, prior_var=only)._dense(x, y, traced=traced)
        return total

    def _variance_groups(self) -> list[tuple[Tensor, set[str]]] | None:
        """Return the parameters by the variance tensor that they share, or None if none needs a gradient."""
        if not torch.is_grad_enabled() or not any(v.requires_grad for v in self.prior_var.values()):
            return None
        groups: dict[int, tuple[Tensor, set[str]]] = {}
        for name, variance in self.prior_var.items():
            if variance.dim() and variance.requires_grad:
                raise InputError(
                    f"prior_var for '{name}' has one value per entry and requires a gradient, which only "
                    "the weight space offers. Pass solver=WeightCholesky(), or one number per parameter."
                )
            if variance.requires_grad:
                groups.setdefault(id(variance), (variance, set()))[1].add(name)
        return list(groups.values())

    def _dense(self, x: Inputs, y: Inputs | None, *, traced: bool) -> Tensor:
        with torch.set_grad_enabled(follows(x) or follows(y)):
            return self._matrix(x, y, traced)

    def _matrix(self, x: Inputs, y: Inputs | None, traced: bool) -> Tensor:
        layout = right_layout = self._plan(x, training=y is None)
        if y is not None:
            self.linearized.check(y, "y")
            if row_shapes(x) != row_shapes(y):
                layout, right_layout = common_plans(layout, self._plan(y, training=False))
        C = 1 if traced else layout.num_outputs
        N, M = num_rows(x), num_rows(x if y is None else y)
        like = self.linearized.example
        check_memory(
            torch.finfo(self.product_dtype or like.dtype).bits // 8 * N * C * M * C,
            like.device,
            f"a {N * C} × {M * C} kernel matrix",
            "use kernel.matmul, condition(..., solver=CG()), or fewer points",
        )
        K = self._zeros(N * C, M * C)
        size = min(self._points(layout), self._points(right_layout))
        starts, others = range(0, N, size), range(0, M, size)
        with progress("tangent kernel", len(starts) * len(others)) as advance:
            for start in starts:
                join = layout is right_layout
                left = self._pieces(rows(x, slice(start, start + size)), layout, traced, join)
                for other in others:
                    advance()
                    if y is None and other < start:
                        continue
                    right = left
                    if y is not None or other != start:
                        points = rows(x if y is None else y, slice(other, other + size))
                        right = self._pieces(points, right_layout, traced, join)
                    n = slice(start * C, min(N, start + size) * C)
                    m = slice(other * C, min(M, other + size) * C)
                    add_tile(K[n, m], left, right, C)
                    if y is None and other != start:
                        K[m, n] = K[n, m].mT
        return K

    def _pieces(self, x: Inputs, layout: Plan, traced: bool, join: bool = True) -> Pieces:
        captured, prior = capture(self.linearized, x, layout), self.prior_var
        if self.product_dtype is not None:
            captured = {n: in_dtype(factor, self.product_dtype) for n, factor in captured.items()}
            prior = {n: variance.to(self.product_dtype) for n, variance in prior.items()}
        groups = self._leftover_groups(x, layout)
        tolerance = self.tolerance
        return Pieces(self.linearized, x, captured, prior, groups, traced, join, tolerance)

    def _leftover_groups(self, x: Inputs, layout: Plan) -> list[list[str]]:
        """Return the parameters without structure in groups whose Jacobian fits into the budget."""
        per_entry = 4 * num_rows(x) * layout.num_outputs * self.linearized.example.element_size()
        groups: list[list[str]] = []
        room = 0
        for name in layout.leftover:
            if bool((self.prior_var[name] == 0).all()):
                continue
            size = self.linearized.params[name].numel() * per_entry
            if not groups or size > room:
                groups.append([])
                room = self._budget
            groups[-1].append(name)
            room -= size
        return groups

    def points_at_once(self, x: Inputs) -> int:
        """Count the points whose factors fit into the memory budget together.

        Args:
            x: Points of the same shape.

        Returns:
            The number of points.
        """
        return self._points(self._plan(x, training=False))

    def factors(self, x: Inputs, mix: Tensor | None = None) -> list[Factor] | None:
        """Compute the factors of the gradients at points, scaled by the roots of the prior variances.

        Args:
            x: N points.
            mix: Combinations Σ_c mix_nck f_c(x_n) that take the place of the outputs, of shape (N, C, K), or
                None for the outputs themselves.

        Returns:
            The factors, or None where they do not fit into the memory budget.
        """
        if num_rows(x) > self.points_at_once(x):
            return None
        found = list(self._factors(x, self._plan(x, training=False)))
        return found if mix is None else [mixed(factor, mix) for factor in found]

    def _factors(self, x: Inputs, layout: Plan) -> Iterator[Factor]:
        """Yield all scaled factors at `x`, of leftover parameters too."""
        return self._pieces(x, layout, traced=False).all_factors()
