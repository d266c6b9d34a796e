"""Find out on a few points how a network treats its parameters and its points."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from net2gp.errors import NetworkError
from net2gp.inputs import num_rows, rows, tensors
from net2gp.linear.calls import Call, forward, fresh_leaves
from net2gp.linear.evaluation import accepts
from net2gp.linear.linearized import Linearized
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


def plan(linearized: Linearized, x: Inputs) -> Plan:
    """Run the network on the first, the middle and the last point of `x`, in batches of two and three.

    A parameter is structured if every path from it to the output leads through a layer with a rule:
    the edges that enter it in the autograd graph are as many as the calls of its layers. Raises
    `NetworkError` if the network acts at random, couples the points of a batch, is not finite, or has
    chosen parameters that do not reach the output. Asked for the same inputs again, it answers from memory.
    """
    values = [*tensors(x), *linearized.params.values()]
    if any(value.is_inference() for value in values):  # it does not tell whether it was changed
        return _probed(linearized, x)
    known = _KNOWN.setdefault(linearized, OrderedDict())
    key = (*((id(value), value._version) for value in values), *_signature(linearized.network))
    kept, found = known.get(key, ([], None))
    if found is None or any(one() is not value for one, value in zip(kept, values, strict=True)):
        found = _probed(linearized, x)
        known[key] = [weakref.ref(value) for value in values], found
        if len(known) > NUM_KNOWN:
            known.popitem(last=False)
    return found


NUM_KNOWN = 4
"""Inputs of a network whose plans are remembered: training and test points, in a posterior's two dtypes."""

_Known = OrderedDict[tuple[Any, ...], tuple[list[weakref.ref[Tensor]], Plan | None]]
_KNOWN: weakref.WeakKeyDictionary[Linearized, _Known] = weakref.WeakKeyDictionary()


def _signature(network: nn.Module) -> list[tuple[Any, ...]]:
    """What the plan depends on beside tensors: which modules there are, their hooks, flags and numbers."""
    plain = (bool, int, float, str, type(None))
    return [
        (
            id(module),
            *module._forward_hooks,
            *module._forward_pre_hooks,
            *((k, v if isinstance(v, plain) else id(v)) for k, v in vars(module).items()),
        )
        for module in network.modules()
    ]


def _probed(linearized: Linearized, x: Inputs) -> Plan:
    first, middle, last = 0, (num_rows(x) - 1) // 2, num_rows(x) - 1
    leaves = fresh_leaves(linearized, tuple(linearized.params))
    noise = _random_state(linearized.example.device)
    with accepts(x):
        calls, out = forward(linearized, leaves, _pick(x, first, middle, last))
    short, turned = forward(linearized, leaves, _pick(x, last, first))
    with torch.no_grad():
        doubled = linearized.evaluate(linearized.params, _pick(x, middle, middle))
    _check_finite(out)
    _check_alike(out[[2, 0, 1, 1]], torch.cat([turned, doubled]))
    if not torch.equal(noise, _random_state(linearized.example.device)):
        _check_repeats(linearized, x)
    edges, reached = _walk(out, leaves)
    _check_used(edges)
    used = [call if call.edge is not None and call.edge.node in reached else None for call in calls]
    layouts = _layouts(used, out, short, turned)
    structured = tuple(n for n in leaves if _is_structured(n, used, layouts, edges[n]))
    leftover = tuple(name for name in leaves if name not in structured)
    return Plan(out.shape[1], layouts, structured, leftover, _bytes_per_point(calls, layouts, out))


def _pick(x: Inputs, *index: int) -> Inputs:
    return rows(x, torch.tensor(index, device=tensors(x)[0].device))


def _walk(out: Tensor, leaves: Params) -> tuple[Counter[str], set[Any]]:
    """How many operations in the graph of `out` read each leaf directly, and all operations."""
    names = {id(value): name for name, value in leaves.items()}
    count: Counter[str] = Counter(dict.fromkeys(leaves, 0))
    stack: list[Any] = [out.grad_fn] if out.grad_fn is not None else []
    seen: set[Any] = set(stack)
    while stack:
        for follower, _ in stack.pop().next_functions:
            variable = getattr(follower, "variable", None)
            if variable is not None:
                count[names.get(id(variable), "")] += 1
            elif follower is not None and follower not in seen:
                seen.add(follower)
                stack.append(follower)
    return count, seen


def _is_structured(
    name: str, calls: Sequence[Call | None], layouts: Sequence[Layout | None], edges: int
) -> bool:
    own = [
        (call, layout)
        for call, layout in zip(calls, layouts, strict=True)
        if call is not None and name in call.names.values()
    ]
    uses = sum(list(call.names.values()).count(name) for call, _ in own)
    kinds = {
        (
            call.rule,
            getattr(call.module, "groups", 1),
            tuple(suffix for suffix, n in call.names.items() if n == name),
        )
        for call, _ in own
    }
    return uses == edges and len(kinds) == 1 and all(layout is not None for _, layout in own)


def _layouts(
    calls: Sequence[Call | None], out: Tensor, short: Sequence[Call], turned: Tensor
) -> tuple[Layout | None, ...]:
    """Where each call keeps its points: the axis that grows from two points to three.

    The gradients of a point's outputs must then live on the point's own rows; a layer whose rows do
    not grow with the batch, or that keeps its points in another order, has no layout.
    """
    if len(short) != len(calls):
        return tuple(None for _ in calls)
    layouts = [
        None if b is None or a.edge is None else _layout(a, b)
        for a, b in zip(short, calls, strict=True)
    ]
    for source, values, points in ((calls, out, (0, 2)), (short, turned, (0,))):
        for n in points:
            kept = [i for i, layout in enumerate(layouts) if layout is not None]
            grads = _gradients_of(values, n, [source[i] for i in kept])
            for i, g in zip(kept, grads, strict=True):
                layouts[i] = _confirmed(layouts[i], g, n)
    return tuple(layouts)


def _layout(short: Call, call: Call) -> Layout | None:
    two, three = (short.a.shape, short.shape), (call.a.shape, call.shape)
    for axis in (0, 1):
        if min(map(len, two)) <= axis or min(map(len, three)) <= axis:
            continue
        grows = all(3 * a[axis] == 2 * b[axis] for a, b in zip(two, three, strict=True))
        others = all(
            a[:axis] + a[axis + 1 :] == b[:axis] + b[axis + 1 :]
            for a, b in zip(two, three, strict=True)
        )
        repeat = call.shape[axis] // 3
        if not (grows and others and call.a.shape[axis] == call.shape[axis]) or repeat == 0:
            continue
        if axis == 1 and (repeat > 1 or not isinstance(call.module, _ELEMENTWISE_IN_FRONT)):
            return None
        return Layout(axis, repeat)
    return None


_ELEMENTWISE_IN_FRONT = (nn.Linear, nn.LayerNorm, nn.Embedding)
"""Layers that treat all axes but the last alike, so that the points may stand on the second."""


def _gradients_of(out: Tensor, n: int, calls: Sequence[Call | None]) -> list[Tensor | None]:
    """The gradient of a mixture of the outputs of point n at each call's output."""
    edges = [call.edge for call in calls if call is not None and call.edge is not None]
    if not edges:
        return []
    seed = torch.zeros_like(out)
    seed[n] = 1.5 + torch.arange(out.shape[1], device=out.device, dtype=out.dtype).cos()
    return list(torch.autograd.grad(out, edges, seed, retain_graph=True, allow_unused=True))


def _confirmed(layout: Layout | None, g: Tensor | None, n: int) -> Layout | None:
    """`layout` if the gradient of point n lives on the rows where it puts point n."""
    if layout is None or g is None or not bool(g.any()):
        # nothing to see: rows that are as many as points are taken to be in order
        return layout if layout is not None and layout.repeat == 1 else None
    start, stop = n * layout.repeat, (n + 1) * layout.repeat
    before = g.narrow(layout.axis, 0, start)
    after = g.narrow(layout.axis, stop, g.shape[layout.axis] - stop)
    return None if bool(before.any()) or bool(after.any()) else layout


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def _check_repeats(linearized: Linearized, x: Inputs) -> None:
    """Raise if copies of one point get different outputs: many copies, to see a rare dropout too."""
    with torch.no_grad():
        out = linearized.evaluate(linearized.params, _pick(x, *[0] * 256))
    _check_alike(out, out[:1].expand_as(out))


def _check_finite(out: Tensor) -> None:
    if not bool(torch.isfinite(out.detach()).all()):
        raise NetworkError("the network's output has NaN or infinite values on the given inputs.")


def _check_alike(out: Tensor, again: Tensor) -> None:
    scale = float(out.detach().abs().max()) + 1e-30
    tolerance = 1e-6 if out.dtype == torch.float64 else 1e-3
    if not float((out - again).detach().abs().max()) <= tolerance * scale:
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


def _bytes_per_point(calls: Sequence[Call], layouts: Sequence[Layout | None], out: Tensor) -> int:
    """What `capture` keeps for one point: prepared inputs, outputs, and C gradients in their final form."""
    total, C = 0, out.shape[1]
    for call, layout in zip(calls, layouts, strict=True):
        if layout is None:
            continue
        inputs, outputs = call.a.numel() // 3, call.shape.numel() // 3
        own = sum(value.numel() for value in call.module.parameters(recurse=False))
        # an output, its saved copy and one pass's gradient live beside the gradients that are kept
        total += inputs + 3 * outputs + C * min(own, outputs)
    return total * out.element_size()
