"""Run a network once, backward once per output, and keep what its layers' gradients are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from net2gp.errors import NetworkError
from net2gp.inputs import map_inputs, num_rows, rows
from net2gp.linear.calls import Call, forward, fresh_leaves, recordable, recording
from net2gp.linear.evaluation import without_vmap_warnings
from net2gp.linear.factors import Direct, Factor, Lookup, Outer, jacobian
from net2gp.linear.linearized import Linearized
from net2gp.linear.probe import Layout, Plan, plan
from net2gp.progress import progress
from net2gp.types import Inputs, Params

__all__ = ["Plan", "Seeds", "capture", "each_output", "leftover_jacobian", "plan"]

Seeds = Callable[[Tensor], Tensor]
"""From a network's outputs (B, C) to the K combinations of them (B, C, K) that are differentiated."""


def capture(
    linearized: Linearized,
    x: Inputs,
    plan: Plan,
    seeds: Seeds | None = None,
    *,
    compress: bool = True,
) -> dict[str, Factor]:
    """The gradients of all outputs at `x` for each structured parameter, as unscaled factors.

    `seeds` asks for the gradients of combinations of the outputs instead. With `compress` a weight that
    is used at many places comes as its gradient, where that is smaller than what it is made of.

    Cost: one forward pass, and C (or K) backward passes that skip the weights.
    """
    gradients: _Gradients | None = None
    for c, count, found in each_output(linearized, x, plan, seeds):
        gradients = gradients or _Gradients(count, compress)
        for name, factor in found.items():
            gradients.add(name, c, factor)
    return {} if gradients is None else gradients.factors


def each_output(
    linearized: Linearized, x: Inputs, plan: Plan, seeds: Seeds | None = None
) -> Iterator[tuple[int, int, dict[str, Factor]]]:
    """c, C and the gradients of output c alone, output by output: nothing is kept of those before."""
    if not plan.structured:
        return
    calls, out = forward(linearized, fresh_leaves(linearized, plan.structured), x)
    if len(calls) != len(plan.layouts):
        raise NetworkError(
            "the network calls other layers for some inputs than for others: its control flow depends "
            "on the data. Use a network that calls the same layers for every input."
        )
    kept = [
        (call, layout)
        for call, layout in zip(calls, plan.layouts, strict=True)
        if layout is not None and set(call.names.values()) & set(plan.structured)
    ]
    repeats = [_rows_per_point(call, layout, num_rows(x)) for call, layout in kept]
    edges = [call.edge for call, _ in kept]
    chosen = None if seeds is None else seeds(out.detach()).to(out)
    count = out.shape[1] if chosen is None else chosen.shape[2]
    for c in range(count):
        seed = torch.zeros_like(out) if chosen is None else chosen[:, :, c]
        if chosen is None:
            seed[:, c] = 1.0
        keep = c < count - 1
        grads = torch.autograd.grad(out, edges, seed, retain_graph=keep, allow_unused=True)  # type: ignore[arg-type]
        uses: dict[str, list[Factor]] = {name: [] for name in plan.structured}
        for (call, layout), g, repeat in zip(kept, grads, repeats, strict=True):
            g = linearized.example.new_zeros(call.shape) if g is None else g
            a, g = _points_first(call.a, layout), _points_first(g, layout)[:, None]
            for suffix, factor in call.rule.factors(call.module, a, g).items():
                if call.names.get(suffix) in uses:
                    uses[call.names[suffix]].append(_regroup(factor, repeat))
        yield c, count, {name: _merge(factors) for name, factors in uses.items()}


class _Gradients:
    """Factors of all outputs, collected one output at a time into buffers of their final size."""

    def __init__(self, num_outputs: int, compress: bool) -> None:
        self.num_outputs = num_outputs
        self.compress = compress
        self.factors: dict[str, Factor] = {}

    def add(self, name: str, c: int, factor: Factor) -> None:
        """Put the gradients of output `c`, a factor with one output, in their place."""
        wide = isinstance(factor, Outer) and factor.a.shape[-1] <= 2 * factor.a.shape[-2]
        if wide and self.compress:
            # many places, few inputs: the weight's gradient is no larger than what it is made of
            factor = Direct(jacobian(factor))
        part = factor.J if isinstance(factor, Direct) else factor.g
        if name not in self.factors:
            B, _, *rest = part.shape
            room = part.new_empty(B, self.num_outputs, *rest)
            self.factors[name] = (
                Direct(room) if isinstance(factor, Direct) else replace(factor, g=room)
            )
        whole = self.factors[name]
        (whole.J if isinstance(whole, Direct) else whole.g)[:, c] = part[:, 0]


def _rows_per_point(call: Call, layout: Layout, num_points: int) -> int:
    """How many rows of a layer's input belong to one point, checked against the plan."""
    if call.a._version != call.version:
        raise NetworkError(
            f"the input of {call.module} was changed in place after its use. "
            "Replace the in-place operation (inplace=True or +=) behind it."
        )
    repeat, rest = divmod(call.a.shape[layout.axis], num_points)
    if rest or (repeat == 1) != (layout.repeat == 1):
        raise NetworkError(
            f"{call.module} gets {call.a.shape[layout.axis]} rows for {num_points} points: the network "
            "sends only some of its points through it. Use a network that treats all points alike."
        )
    return repeat


def leftover_jacobian(linearized: Linearized, x: Inputs, names: Sequence[str]) -> Tensor:
    """The gradients (B, C, p) of the parameters `names`, one example at a time: right for any network.

    Vectorized over examples where the network's operations allow it, else in a loop.
    """
    others = {name: value for name, value in linearized.params.items() if name not in names}
    chosen = {name: linearized.params[name] for name in names}
    x = map_inputs(x, lambda value: value.detach())

    def single(params: Params, point: Inputs) -> Tensor:
        return linearized.evaluate({**others, **params}, map_inputs(point, lambda v: v[None]))[0]

    try:
        with without_vmap_warnings():
            parts = vmap(jacrev(single), in_dims=(None, 0))(chosen, x)
    except (RuntimeError, NotImplementedError, ValueError):
        # data-dependent Python, in-place updates and unbatched operators cannot be vectorized
        points = [rows(x, slice(n, n + 1)) for n in range(num_rows(x))]
        with progress("per-example gradients", len(points)) as advance:
            singles = []
            for point in points:
                singles.append(_looped_jacobian(linearized, chosen, others, point))
                advance()
        return torch.stack(singles)
    return torch.cat([parts[name].reshape(*parts[name].shape[:2], -1) for name in names], -1)


def _looped_jacobian(
    linearized: Linearized, chosen: Params, others: Params, point: Inputs
) -> Tensor:
    with recording():
        leaves = {name: value.detach().requires_grad_() for name, value in chosen.items()}
        out = linearized.evaluate({**others, **leaves}, recordable(point))[0]
        values = list(leaves.values())
        gradients = [
            torch.autograd.grad(value, values, retain_graph=True, materialize_grads=True)
            for value in out
        ]
    return torch.stack([torch.cat([g.reshape(-1) for g in grads]) for grads in gradients])


def _points_first(value: Tensor, layout: Layout) -> Tensor:
    return value.movedim(layout.axis, 0) if layout.axis else value


def _regroup(factor: Factor, repeat: int) -> Factor:
    """Factors of B·repeat rows as factors of B points with `repeat` times as many places."""
    if repeat == 1:
        return factor
    if isinstance(factor, Direct):
        return Direct(factor.J.unflatten(0, (-1, repeat)).sum(1))
    g = factor.g.unflatten(0, (-1, repeat))
    if isinstance(factor, Lookup):
        ids = factor.ids.reshape(-1, repeat * factor.ids.shape[1])
        return replace(factor, ids=ids, g=g.transpose(1, 2).flatten(2, 3))
    a = factor.a.unflatten(0, (-1, repeat)).transpose(1, 2).flatten(2, 3)
    return replace(factor, a=a, g=g.movedim(1, 4).flatten(4, 5))


def _merge(parts: list[Factor]) -> Factor:
    """One factor from a parameter's several uses: its gradient is the sum over all places of use."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Direct):
        return Direct(torch.stack([part.J for part in parts if isinstance(part, Direct)]).sum(0))
    if isinstance(first, Lookup):
        uses = [part for part in parts if isinstance(part, Lookup)]
        ids, g = torch.cat([u.ids for u in uses], 1), torch.cat([u.g for u in uses], 2)
        return replace(first, ids=ids, g=g)
    outers = [part for part in parts if isinstance(part, Outer)]
    a, g = torch.cat([o.a for o in outers], 2), torch.cat([o.g for o in outers], 4)
    return replace(first, a=a, g=g)
