"""Run a network once, backward once per output, and keep what its layers' gradients are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import jacrev, vmap

from net2gp.errors import NetworkError
from net2gp.inputs import map_inputs, num_rows, rows, tensors
from net2gp.linear.factors import Direct, Factor, Lookup, Outer
from net2gp.linear.layers import Rule, find_rule
from net2gp.linear.linearized import Linearized
from net2gp.progress import progress
from net2gp.types import Inputs, Params


@dataclass(frozen=True)
class Layout:
    """Where the points are in a layer's input: along `axis`, each taking `repeat` rows in a run."""

    axis: int
    repeat: int


@dataclass(frozen=True)
class Plan:
    """Which parameters have structured gradients, and how their layers lay out the points."""

    num_outputs: int
    layouts: tuple[Layout | None, ...]
    structured: tuple[str, ...]
    leftover: tuple[str, ...]
    bytes_per_point: int


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of one layer during the forward pass."""

    module: nn.Module
    rule: Rule
    names: dict[str, str]
    a: Tensor
    version: int
    shape: torch.Size
    edge: GradientEdge | None = field(repr=False)


def plan(linearized: Linearized, x: Inputs) -> Plan:
    """Find out on two and three points of `x` how the network treats its parameters and its points.

    A parameter is structured if every path from it to the output leads through a layer with a rule:
    the edges that enter it in the autograd graph are as many as the calls of its layers. Raises
    `NetworkError` if the network acts at random, couples the points of a batch, is not finite, or has
    chosen parameters that do not reach the output.
    """
    device = tensors(x)[0].device
    last = num_rows(x) - 1
    three = rows(x, torch.tensor([0, last // 2, last], device=device))
    two = rows(three, slice(0, 2))
    leaves = _leaves(linearized, tuple(linearized.params))
    short, out_short = _forward(linearized, leaves, two)
    calls, out = _forward(linearized, leaves, three)
    _check_outputs(out.detach(), out_short.detach())
    edges = _edges_per_leaf(out, leaves)
    _check_used(edges)
    layouts = _layouts(short, calls, out)
    structured = tuple(name for name in leaves if _is_structured(name, calls, layouts, edges[name]))
    leftover = tuple(name for name in leaves if name not in structured)
    size = _bytes_per_point(calls, layouts, out.shape[1])
    return Plan(out.shape[1], layouts, structured, leftover, size)


def capture(linearized: Linearized, x: Inputs, plan: Plan) -> dict[str, Factor]:
    """The gradients of all outputs at `x` for each structured parameter, as unscaled factors.

    Cost: one forward pass, and C backward passes that skip the weights.
    """
    if not plan.structured:
        return {}
    calls, out = _forward(linearized, _leaves(linearized, plan.structured), x)
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
    parts: dict[str, list[Factor]] = {name: [] for name in plan.structured}
    for (call, layout), g in zip(
        kept, _output_gradients(out, [call for call, _ in kept]), strict=True
    ):
        if call.a._version != call.version:
            raise NetworkError(
                f"the input of {call.module} was changed in place after its use. "
                "Replace the in-place operation (inplace=True or +=) behind it."
            )
        factors = call.rule(
            call.module,
            _points_first(call.a, layout, 0),
            _points_first(g, layout, 1).transpose(0, 1),
        )
        for suffix, name in call.names.items():
            if name in parts:
                parts[name].append(_regroup(factors[suffix], layout.repeat))
    return {name: _merge(factors) for name, factors in parts.items()}


def leftover_jacobian(linearized: Linearized, x: Inputs, names: Sequence[str]) -> Tensor:
    """The gradients (B, C, p) of the parameters `names`, one example at a time: right for any network.

    Vectorized over examples where the network's operations allow it, else in a loop.
    """
    others = {name: value for name, value in linearized.params.items() if name not in names}
    chosen = {name: linearized.params[name] for name in names}

    def single(params: Params, point: Inputs) -> Tensor:
        return linearized.evaluate({**others, **params}, map_inputs(point, lambda v: v[None]))[0]

    try:
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
    return torch.cat([parts[name].flatten(2) for name in names], -1)


def _looped_jacobian(
    linearized: Linearized, chosen: Params, others: Params, point: Inputs
) -> Tensor:
    leaves = {name: value.detach().requires_grad_() for name, value in chosen.items()}
    with torch.enable_grad():
        out = linearized.evaluate({**others, **leaves}, point)[0]
    return torch.stack(
        [
            torch.cat(
                [
                    g.reshape(-1)
                    for g in torch.autograd.grad(
                        value, list(leaves.values()), retain_graph=True, materialize_grads=True
                    )
                ]
            )
            for value in out
        ]
    )


def _leaves(linearized: Linearized, names: Sequence[str]) -> Params:
    """The parameters, with those named `names` as fresh leaves of the autograd graph."""
    return {
        name: value.detach().requires_grad_() if name in names else value
        for name, value in linearized.params.items()
    }


def _forward(linearized: Linearized, leaves: Params, x: Inputs) -> tuple[list[_Call], Tensor]:
    """The outputs, with a graph, and the calls of all layers that have a rule and chosen parameters."""
    calls: list[_Call] = []
    canonical = {id(value): name for name, value in linearized.network.named_parameters()}
    handles = []
    for module in linearized.network.modules():
        rule = find_rule(module)
        names = {
            suffix: canonical[id(value)]
            for suffix, value in module.named_parameters(recurse=False)
            if suffix in ("weight", "bias") and canonical[id(value)] in leaves
        }
        if rule is not None and names:
            handles.append(
                module.register_forward_hook(_recorder(calls, rule, names), with_kwargs=True)
            )
    try:
        with torch.enable_grad():
            out = linearized.evaluate(leaves, x)
    finally:
        for handle in handles:
            handle.remove()
    return calls, out


def _recorder(calls: list[_Call], rule: Rule, names: dict[str, str]) -> Any:
    def hook(module: nn.Module, arguments: tuple, keywords: dict, out: Tensor) -> None:
        a = arguments[0] if arguments else keywords["input"]
        # the edge names this output even if an in-place operation overwrites the tensor later
        edge = get_gradient_edge(out) if out.requires_grad else None
        calls.append(_Call(module, rule, names, a.detach(), a._version, out.shape, edge))

    return hook


def _output_gradients(out: Tensor, calls: Sequence[_Call]) -> list[Tensor]:
    """∂ Σ_n f_nc / ∂(layer output) for all c, which is each point's own gradient: (C, *shape) per call."""
    edges = [call.edge for call in calls]
    columns: list[list[Tensor | None]] = []
    for c in range(out.shape[1]):
        seed = torch.zeros_like(out)
        seed[:, c] = 1.0
        keep = c < out.shape[1] - 1
        columns.append(
            list(torch.autograd.grad(out, edges, seed, retain_graph=keep, allow_unused=True))  # type: ignore[arg-type]
        )
    return [
        torch.stack([out.new_zeros(call.shape) if g is None else g for g in grads])
        for call, grads in zip(calls, zip(*columns, strict=True), strict=True)
    ]


def _edges_per_leaf(out: Tensor, leaves: Params) -> Counter[str]:
    """How many operations in the graph of `out` read each leaf directly."""
    names = {id(value): name for name, value in leaves.items()}
    count: Counter[str] = Counter(dict.fromkeys(leaves, 0))
    seen: set[Any] = set()
    stack = [out.grad_fn] if out.grad_fn is not None else []
    while stack:
        node = stack.pop()
        for follower, _ in node.next_functions:
            if follower is None:
                continue
            variable = getattr(follower, "variable", None)
            if variable is not None:
                count[names.get(id(variable), "")] += 1
            elif follower not in seen:
                seen.add(follower)
                stack.append(follower)
    return count


def _is_structured(
    name: str, calls: Sequence[_Call], layouts: Sequence[Layout | None], edges: int
) -> bool:
    own = [
        (c, layout) for c, layout in zip(calls, layouts, strict=True) if name in c.names.values()
    ]
    uses = sum(list(call.names.values()).count(name) for call, _ in own)
    alike = (
        len({(call.rule, tuple(s for s, n in call.names.items() if n == name)) for call, _ in own})
        == 1
    )
    return uses == edges and alike and all(layout is not None for _, layout in own)


def _layouts(short: list[_Call], calls: list[_Call], out: Tensor) -> tuple[Layout | None, ...]:
    """Where each call keeps its points: the axis that grows from two points to three.

    The gradient of the first point's output must then live on the first point's rows alone; a layer
    whose rows do not grow with the batch, or mix its points, has no layout and is not structured.
    """
    edges = [call.edge for call in calls]
    if not edges or len(short) != len(calls):
        return tuple(None for _ in calls)
    seed = torch.zeros_like(out)
    seed[0] = 1.5 + torch.arange(out.shape[1], device=out.device, dtype=out.dtype).cos()
    grads = torch.autograd.grad(out, edges, seed, allow_unused=True)  # type: ignore[arg-type]
    return tuple(_layout(a, b, g) for a, b, g in zip(short, calls, grads, strict=True))


def _layout(short: _Call, call: _Call, g: Tensor | None) -> Layout | None:
    for axis in (0, 1):
        two, three = [short.a.shape, short.shape], [call.a.shape, call.shape]
        if any(len(shape) <= axis for shape in two):
            continue
        grows = all(3 * a[axis] == 2 * b[axis] for a, b in zip(two, three, strict=True))
        others = all(
            a[:axis] + a[axis + 1 :] == b[:axis] + b[axis + 1 :]
            for a, b in zip(two, three, strict=True)
        )
        repeat = call.shape[axis] // 3
        if not (grows and others and call.a.shape[axis] == call.shape[axis]):
            continue
        if axis == 1 and (repeat > 1 or not isinstance(call.module, _ELEMENTWISE_IN_FRONT)):
            return None
        if g is None or not bool(g.any()):
            return Layout(axis, repeat) if repeat == 1 else None
        return None if bool(g.narrow(axis, repeat, 2 * repeat).any()) else Layout(axis, repeat)
    return None


_ELEMENTWISE_IN_FRONT = (nn.Linear, nn.LayerNorm, nn.Embedding)
"""Layers that treat all axes but the last alike, so that the points may stand on the second."""


def _points_first(value: Tensor, layout: Layout, offset: int) -> Tensor:
    return value.movedim(layout.axis + offset, offset) if layout.axis else value


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


def _check_outputs(out: Tensor, again: Tensor) -> None:
    if not bool(torch.isfinite(out).all()):
        raise NetworkError("the network's output has NaN or infinite values on the given inputs.")
    scale = float(out.abs().max()) + 1e-30
    if float((out[: len(again)] - again).abs().max()) > 1e-3 * scale:
        raise NetworkError(
            "the network gives other outputs for the same points in another batch: it acts at random "
            "(dropout or noise that stays on in eval mode), or couples the points of a batch (batch "
            "statistics). Switch that off, e.g. F.dropout(x, training=self.training)."
        )


def _check_used(edges: Counter[str]) -> None:
    unused = [name for name in edges if name and edges[name] == 0]
    if unused:
        patterns = ", ".join(f'"!{name}"' for name in unused[:3])
        raise NetworkError(
            f"{len(unused)} of the chosen parameters do not reach the output: {', '.join(unused[:5])}. "
            f'Leave them out: linearize(network, only=["*", {patterns}]).'
        )


def _bytes_per_point(calls: Sequence[_Call], layouts: Sequence[Layout | None], C: int) -> int:
    """What `capture` keeps for one point: layer inputs (as patches), outputs, and C output gradients."""
    total = 0
    for call, layout in zip(calls, layouts, strict=True):
        if layout is None:
            continue
        inputs, outputs = call.a.numel() // 3, call.shape.numel() // 3
        if isinstance(call.module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            places = outputs // call.module.out_channels
            inputs += places * call.module.in_channels * torch.Size(call.module.kernel_size).numel()
        # a stack of C gradients exists twice for a moment: as single passes and stacked
        total += inputs + 2 * (C + 1) * outputs
    return (
        total * (calls[0].a.element_size() if calls[0].a.is_floating_point() else 8) if calls else 0
    )
