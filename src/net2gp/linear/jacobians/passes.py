"""Passes through a network for products with its Jacobian, under a memory budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from net2gp.errors import InputError, NetworkError
from net2gp.inputs import (
    chunks,
    describe,
    follows,
    map_inputs,
    num_rows,
    ordinary_tensors,
    rows,
    tensors,
)
from net2gp.linear.forward.calls import fresh_leaves, run
from net2gp.linear.forward.evaluation import (
    is_wrapped,
    pullback,
    pushforward,
    without_vmap_warnings,
)
from net2gp.linear.jacobians.products import jacobian_times
from net2gp.linear.planning.probe import once, plan
from net2gp.linear.planning.proof import differing, plain_pullback, random_like
from net2gp.linear.precision import check_kinds
from net2gp.memory import available_memory
from net2gp.types import Inputs, Params

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized

FEWEST_POINTS = 16
"""The number of points that a pass takes, if memory allows, before it takes more than one column."""


def points_at_once(num_points: int, num_columns: int, capacity: int) -> int:
    """Return how many points a pass takes; all columns share the network's activations at these."""
    return max(1, min(num_points, capacity, max(FEWEST_POINTS, capacity // max(1, num_columns))))


@dataclass(frozen=True)
class Ways:
    """How J v and Jᵀu are computed: ways that agree with plain reverse mode for a random vector.

    Args:
        push: "forward" mode, "reverse" mode over reverse mode, or "rows" of J if an operation has neither.
        functional: Whether torch.func computes Jᵀu; otherwise plain autograd does.
    """

    push: str
    functional: bool


def ways(linearized: Linearized, x: Inputs) -> Ways:
    """Return the fastest ways that are right at inputs such as `x`, which are also checked as in `plan`."""
    if any(
        is_wrapped(value) for value in tensors(x)
    ):  # under a transform tensors have no values to check
        return Ways("forward", functional=True)
    plan(linearized, x, training=False)
    return once(linearized, x, _find_ways)


def _find_ways(linearized: Linearized, x: Inputs) -> Ways:
    names = list(linearized.params)
    u, wanted = plain_pullback(linearized, x, names)
    v = {n: random_like(value, seed=i) for i, (n, value) in enumerate(linearized.params.items())}
    terms = torch.stack([(wanted[name] * v[name]).sum() for name in names])
    function = partial(_evaluate, linearized, x)

    def pushes(forward: bool) -> bool:
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
            out = pushforward(function, linearized.params, v, forward=forward)
            # u · J v is a sum of these terms, so its error is compared with their sizes
            found, expected = terms.clone(), terms.clone()
            found[0] += (u * out).sum() - terms.sum()
            sums = {"": found}, {"": expected}
            return not differing(*sums, slack=10.0, rounding=linearized.rounding)
        return False

    functional = False
    with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
        pulled = pullback(function, linearized.params)[1](u)
        functional = not differing(pulled, wanted, rounding=linearized.rounding)
    push = "forward" if pushes(True) else "reverse" if pushes(False) else "rows"
    return Ways(push, functional)


def pushed(linearized: Linearized, x: Inputs, v: Params) -> Tensor:
    """Compute J(x) v: (N, C).

    Forward mode is 0 · ∞ at points where a function has no slope but backward passes take it as 0, such as
    a root of a window of zeros. Products that are not finite are therefore computed from the rows of J.
    """
    way = ways(linearized, x)
    if way.push == "rows" or follows(x):  # the rows of J are differentiable in x
        product = _rows_times(linearized, x, linearized.flatten(v)[:, None])
        return product.reshape(num_rows(x), -1)
    function = partial(_evaluate, linearized, x)
    out = pushforward(function, linearized.params, v, forward=way.push == "forward")
    if is_wrapped(out) or bool(out.isfinite().all()):
        return out
    return _rows_times(linearized, x, linearized.flatten(v)[:, None]).reshape(out.shape)


def pulling(linearized: Linearized, x: Inputs) -> tuple[Tensor, Callable[[Tensor], Params]]:
    """Return f(x), and the function u ↦ J(x)ᵀu for u (N, C)."""
    function = partial(_evaluate, linearized, x)
    twice = not ways(linearized, x).functional
    return pullback(function, linearized.params, twice=twice, follow=follows(x))


def _rows_times(linearized: Linearized, x: Inputs, v: Tensor) -> Tensor:
    layout = plan(linearized, x, training=False)
    size = linearized.num_params * layout.num_outputs * v.element_size() + layout.bytes_per_point
    points = max(1, memory_budget(v.device) // (2 * size))
    return jacobian_times(linearized, x, layout, points, v)


def column_products(linearized: Linearized, x: Inputs, v: Tensor, capacity: int) -> Tensor:
    """Compute J(x) v (N·C, k) for v (P, k), with at most `capacity` points times columns at a time."""
    check_height(v, linearized.num_params, "v", "parameters")
    if torch.is_inference_mode_enabled():
        return _ordinarily(column_products, linearized, x, v, capacity)
    way = ways(linearized, x)
    if way.push == "rows" or follows(x):
        return _rows_times(linearized, x, v)
    size = points_at_once(num_rows(x), v.shape[1], capacity)
    parts = []
    for part in chunks(x, size):
        push = partial(_push_flat, linearized, part, way.push == "forward")
        columns = _each(push, v.mT.contiguous(), max(1, capacity // size), linearized.rounding)
        product = columns.permute(1, 2, 0).flatten(0, 1)
        if not is_wrapped(product) and not bool(product.isfinite().all()):
            product = _rows_times(linearized, part, v)
        parts.append(product)
    return torch.cat(parts)


def column_pullbacks(linearized: Linearized, x: Inputs, u: Tensor, capacity: int) -> Tensor:
    """Compute J(x)ᵀ u (P, k) for u (N·C, k), with at most `capacity` points times columns at a time."""
    if torch.is_inference_mode_enabled():
        return _ordinarily(column_pullbacks, linearized, x, u, capacity)
    size = points_at_once(num_rows(x), u.shape[-1], capacity)
    width = u.shape[0] // num_rows(x)
    total = u.new_zeros(u.shape[-1], linearized.num_params)
    start = 0
    for part in chunks(x, size):
        stop = start + num_rows(part) * width
        out, pull = pulling(linearized, part)
        check_height(u, num_rows(x) * out.shape[1], "u", "outputs of the given points")
        pull_flat = partial(_pull_flat, linearized, pull, out)
        mine, at_once = u[start:stop].mT.contiguous(), max(1, capacity // size)
        total = total + _each(pull_flat, mine, at_once, linearized.rounding)
        start = stop
    return total.mT


def _ordinarily(
    products: Callable[[Linearized, Inputs, Tensor, int], Tensor],
    linearized: Linearized,
    x: Inputs,
    columns: Tensor,
    capacity: int,
) -> Tensor:
    """Return the products with copies that autograd can record, which torch.func before 2.12 needs."""
    with ordinary_tensors():
        return products(linearized, map_inputs(x, torch.clone), columns.clone(), capacity)


def _evaluate(linearized: Linearized, x: Inputs, params: Params) -> Tensor:
    return linearized.evaluate(params, x)


def _push_flat(linearized: Linearized, x: Inputs, forward: bool, column: Tensor) -> Tensor:
    function, tangent = partial(_evaluate, linearized, x), linearized.unflatten(column)
    return pushforward(function, linearized.params, tangent, forward=forward)


def _pull_flat(
    linearized: Linearized, pull: Callable[[Tensor], Params], out: Tensor, column: Tensor
) -> Tensor:
    return linearized.flatten(pull(column.reshape(out.shape).to(out.dtype)))


def check_height(value: Tensor, height: int, name: str, meaning: str) -> None:
    """Raise unless `value` is a matrix with `height` rows."""
    if value.dim() != 2 or value.shape[0] != height:
        raise InputError(
            f"{name} must have shape ({height}, k), a row for each of the {meaning}, but is "
            f"{describe(value)}."
        )


def _each(
    function: Callable[[Tensor], Tensor], columns: Tensor, at_once: int, rounding: torch.dtype
) -> Tensor:
    """Apply a linear function to each row of `columns`, vectorized if the network's operations allow it.

    torch vectorizes some operations wrongly, and only for some sizes, so a random combination of the results
    is compared with the function of that combination.
    """
    if len(columns) > 1 and at_once > 1:
        with (
            contextlib.suppress(RuntimeError, NotImplementedError, ValueError),
            without_vmap_warnings(),
        ):
            found = vmap(function, chunk_size=at_once)(columns)
            weights = random_like(columns[:, 0])
            once = function(weights @ columns)
            mixed = (weights @ found.flatten(1)).reshape(once.shape)
            if not differing({"": mixed}, {"": once}, rounding=rounding):
                return found
    return torch.stack([function(column) for column in columns])


def memory_budget(device: torch.device) -> int:
    """Return the bytes for one pass: 1 GiB, or a quarter of the free memory on a GPU."""
    return 2**30 if device.type == "cpu" else available_memory(device) // 4


def capacity(linearized: Linearized, x: Inputs, memory_budget: int) -> int:
    """Return how many points times columns one forward-mode or backward pass can take within the budget."""
    linearized.check(x)
    wrapped = any(is_wrapped(value) for value in tensors(x))
    kept = _kept_bytes(linearized, x) if wrapped else once(linearized, x, _kept_bytes)
    return max(1, memory_budget // (4 * max(kept, 1)))


def _kept_bytes(linearized: Linearized, x: Inputs) -> int:
    """Return the bytes that autograd keeps for one point, measured on the first point of `x`."""
    total = 0

    def count(saved: Tensor) -> Tensor:
        nonlocal total
        total += saved.numel() * saved.element_size()
        return saved

    leaves = fresh_leaves(linearized, tuple(linearized.params))
    own = sum(value.numel() * value.element_size() for value in leaves.values())
    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved)
    point = rows(x, slice(0, 1))
    try:
        with hooks:
            run(linearized, leaves, point, x)
    except NetworkError as error:
        if "saved tensor hooks" not in str(error):
            raise
        # torch.func inside a network forbids these hooks, so all computed tensors are counted instead
        with _Computed() as computed:
            run(linearized, leaves, point, x)
        total = own + computed.total
    return total - own


class _Computed(TorchFunctionMode):
    """A context that counts the bytes of all tensors that torch functions return."""

    total = 0

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        out = function(*arguments, **(keywords or {}))
        if isinstance(out, Tensor):
            self.total += out.numel() * out.element_size()
        return out


def check_device(x: Inputs, linearized: Linearized) -> None:
    """Raise unless `x` has the device and a floating dtype of the network."""
    check_kinds(linearized, x, "x")
