"""Find out on a few points how a network treats its parameters and its points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from net2gp.errors import InputError, NetworkError
from net2gp.inputs import chunks, num_rows, rows, tensors
from net2gp.linear.forward.calls import Call, forward, fresh_leaves, run
from net2gp.linear.forward.evaluation import accepts
from net2gp.linear.planning.layouts import Layout, find_layouts, is_structured, matched
from net2gp.linear.planning.loops import leave_out
from net2gp.linear.planning.plans import Known, Plan
from net2gp.linear.planning.proof import gradients
from net2gp.linear.planning.uses import find_uses
from net2gp.linear.precision import HALF
from net2gp.types import Inputs, Params

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized

Found = TypeVar("Found")

ALIKE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""By how much of the largest output the outputs of a point may differ between batches."""


def plan(linearized: Linearized, x: Inputs, *, training: bool = True) -> Plan:
    """Return the plan for inputs such as `x`, found by running the network on three of the points.

    The first, the middle and the last point run in batches of two and three. A parameter is structured if
    every path from it to the output leads through a layer with a rule (as many edges enter it in the autograd
    graph as its layers have calls), and if the rules agree with plain reverse mode. `linearized.plans` holds
    the plan for inputs of the same shapes until the network or its parameters change. Points that were not
    seen before are still checked, in two passes over at most three of them.

    Args:
        linearized: The linearized network.
        x: The inputs.
        training: Whether these points are trained on, so that they must use all chosen parameters.

    Returns:
        The plan.

    Raises:
        NetworkError: If the network acts at random, couples the points of a batch, has outputs that are not
            finite, or if training points leave chosen parameters unused.
        InputError: If autocast is on.
    """
    if torch.is_autocast_enabled(linearized.example.device.type):
        raise InputError(
            "autocast is on, where derivatives and kernels would have 8 bits. Call this outside of "
            "torch.autocast(...), or within torch.autocast(..., enabled=False)."
        )
    plans, values = linearized.plans, _values_of(linearized)
    key = _key(linearized, x, values)
    known = None if key is None else plans.get(key, values)
    if known is None:
        known = Known.of(_probed(linearized, x), linearized.output, () if key is None else values)
        known.see(x)
        if key is not None:
            plans.remember(key, known)
    elif not known.has_seen(x):
        _check_points(linearized, x)
        known.see(x)
    if training:
        _check_reached(linearized, x, known.plan.unreached)
    return known.plan.without(plans.demoted)


def once(linearized: Linearized, x: Inputs, find: Callable[[Linearized, Inputs], Found]) -> Found:
    """Return what `find` finds at the first, the middle and the last point, and keep it with the plan."""
    values = _values_of(linearized)
    key = _key(linearized, x, values)
    known = None if key is None else linearized.plans.get(key, values)
    if known is None:
        return find(linearized, _pick(x, *_looked_at(x)))
    if find.__name__ not in known.found:
        known.found[find.__name__] = find(linearized, _pick(x, *_looked_at(x)))
    return known.found[find.__name__]


def demote(linearized: Linearized, names: Sequence[str]) -> None:
    """Let later plans treat `names` as leftover, since some points use them differently than planned."""
    linearized.plans.demoted.update(names)


def _key(linearized: Linearized, x: Inputs, values: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """Return what a plan depends on besides the values of tensors, or None if changes cannot be noticed."""
    if any(value.is_inference() for value in values):  # such a tensor has no version
        return None
    return (
        *_shapes(x),
        *linearized.params,
        *map(id, values),
        id(linearized.output),
        *_signature(linearized.network),
    )


def _values_of(linearized: Linearized) -> list[Tensor]:
    return [*linearized.params.values(), *linearized.frozen.values()]


def _shapes(x: Inputs) -> tuple[Any, ...]:
    keys = tuple(x) if isinstance(x, dict) else ()
    return (*keys, *((value.shape[1:], value.dtype, value.device) for value in tensors(x)))


def _signature(network: nn.Module) -> list[tuple[Any, ...]]:
    """Return the modules with their hooks, flags and numbers, on which a plan depends besides tensors."""
    plain = (bool, int, float, str, type(None))
    return [
        (
            id(module),
            type(module),
            *module._forward_hooks,
            *module._forward_pre_hooks,
            *((k, v if isinstance(v, plain) else id(v)) for k, v in vars(module).items()),
        )
        for module in network.modules()
    ]


def _probed(linearized: Linearized, x: Inputs) -> Plan:
    first, middle, last = _looked_at(x)
    leaves = fresh_leaves(linearized, tuple(linearized.params))
    noise = _random_state(linearized.example.device)
    # a second batch of another size and order shows where layers keep the points and whether points are
    # coupled; a third one of two copies shows a network that treats equal points unequally
    calls, out = forward(linearized, leaves, _pick(x, first, middle, last), x)
    short, turned = forward(linearized, leaves, _pick(x, last, first), x)
    doubled = _values(linearized, _pick(x, middle, middle))
    _check_finite(out)
    _check_alike(linearized, x, out[[2, 0, 1, 1]], torch.cat([turned, doubled]))
    # a network that drew random numbers may drop out so rarely that three batches do not show it
    if not torch.equal(noise, _random_state(linearized.example.device)):
        _check_repeats(linearized, x)
    # calls whose output does not reach the network's output have no gradient and count for nothing
    edges, reached = _walk(out, leaves)
    used = [call if call.edge is not None and call.edge.node in reached else None for call in calls]
    layers = tuple(call.key for call in calls)
    layouts = find_layouts(used, matched(layers, short), turned)
    structured = tuple(n for n in leaves if is_structured(n, used, layouts, edges[n]))
    uses = find_uses(calls, layers, layouts, structured, 3)
    three = _pick(x, first, middle, last)
    plain = run(linearized, leaves, three) if uses.stepwise else out
    structured = uses.without(uses.differing(out, leaves, plain, linearized.rounding)).names
    return Plan(
        out.shape[1],
        layouts,
        structured,
        tuple(name for name in leaves if name not in structured),
        _bytes_per_point(calls, layouts, out, leaves),
        layers,
        tuple(name for name in leaves if not edges[name]),
    )


def _looked_at(x: Inputs) -> tuple[int, int, int]:
    return 0, (num_rows(x) - 1) // 2, num_rows(x) - 1


def _values(linearized: Linearized, x: Inputs) -> Tensor:
    with torch.no_grad(), accepts(x):
        return linearized.evaluate(linearized.params, x)


def _check_points(linearized: Linearized, x: Inputs) -> None:
    """Raise if points of a known shape have outputs that are not finite, or that differ between batches."""
    first, middle, last = _looked_at(x)
    out = _values(linearized, _pick(x, first, middle, last))
    _check_finite(out)
    _check_alike(linearized, x, out[[2, 0]], _values(linearized, _pick(x, last, first)))


def _pick(x: Inputs, *index: int) -> Inputs:
    return rows(x, torch.tensor(index, device=tensors(x)[0].device))


def _walk(out: Tensor, leaves: Params) -> tuple[Counter[str], set[Any]]:
    """Return how many operations in the graph of `out` read each leaf, and all operations.

    An operation that reads some rows of a leaf, or its transpose, counts as often as its result is read,
    since layers may use that.
    """
    names = {id(value): name for name, value in leaves.items()}
    count: Counter[str] = Counter(dict.fromkeys(leaves, 0))
    stack: list[Any] = [out.grad_fn] if out.grad_fn is not None else []
    seen: set[Any] = set(stack)
    read, views = Counter(stack), []
    while stack:
        node = stack.pop()
        for follower, _ in node.next_functions:
            variable = getattr(follower, "variable", None)
            if variable is not None and node.name() in _VIEWS:
                views.append((node, names.get(id(variable), "")))
            elif variable is not None:
                count[names.get(id(variable), "")] += 1
            elif follower is not None:
                read[follower] += 1
                if follower not in seen:
                    seen.add(follower)
                    stack.append(follower)
    for node, name in views:
        count[name] += read[node]
    return count, seen


_VIEWS = ("SplitBackward0", "SliceBackward0", "SplitWithSizesBackward0", "TBackward0")
"""What torch calls the operations that give some rows of a tensor, or its transpose."""


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def _check_repeats(linearized: Linearized, x: Inputs) -> None:
    """Raise if copies of one point get different outputs; many copies show a rare dropout too."""
    out = _values(linearized, _pick(x, *[0] * 256))
    _check_alike(linearized, x, out, out[:1].expand_as(out))


def _check_finite(out: Tensor) -> None:
    if not bool(torch.isfinite(out.detach()).all()):
        raise NetworkError("the network's output has NaN or infinite values on the given inputs.")


def _check_alike(linearized: Linearized, x: Inputs, out: Tensor, again: Tensor) -> None:
    scale = float(out.detach().abs().max()) + 1e-30
    # torch's kernels sum in another order for another batch size, which changes the last digits; noise and
    # coupling change far more. Outputs near zero can be all rounding, which only `_rounding` can judge
    tolerance = ALIKE[linearized.rounding]
    error = float((out - again).detach().abs().max())
    if not error <= tolerance * scale and not error <= _rounding(linearized, x):
        raise NetworkError(
            "the network gives other outputs for the same points in another batch: it acts at random "
            "(dropout or noise that stays on in eval mode), or couples the points of a batch (batch "
            "statistics). Switch that off, e.g. F.dropout(x, training=self.training)."
        )


def _rounding(linearized: Linearized, x: Inputs) -> float:
    """Return an estimate of rounding errors from the sizes of the summed terms, 30 ε Σ |θ ∂f/∂θ|.

    In half precision this bound is larger than the outputs, and the size of a sum of random errors takes its
    place, 4 ε (Σ |θ ∂f/∂θ|²)^½.
    """
    leaves = fresh_leaves(linearized, tuple(linearized.params))
    out = run(linearized, leaves, _pick(x, *_looked_at(x)))
    found = gradients(out, leaves, torch.ones_like(out))
    terms = [(g.double() * leaves[name].detach().double()).flatten() for name, g in found.items()]
    if linearized.rounding in HALF:
        size = sum(float(term.square().sum()) for term in terms) ** 0.5
        return 4 * torch.finfo(linearized.rounding).eps * size
    return 30 * torch.finfo(out.dtype).eps * sum(float(term.abs().sum()) for term in terms)


def _check_reached(linearized: Linearized, x: Inputs, unreached: Sequence[str]) -> None:
    """Raise if no point of `x`, and none before, uses some of the parameters `unreached`."""
    reached = linearized.plans.reached
    reached.update(name for name in linearized.params if name not in unreached)
    if not set(unreached) <= reached:
        _look(linearized, x, unreached, reached)


def check_used(linearized: Linearized, x: Inputs) -> None:
    """Raise if no point of `x` uses some of the chosen parameters, even if earlier points do."""
    reached: set[str] = set()
    find_used(linearized, x, reached)
    check_all_used(linearized, reached)


def find_used(linearized: Linearized, x: Inputs, reached: set[str]) -> None:
    """Add the parameters that points of `x` use to `reached`, unless all are there."""
    _find(linearized, x, list(linearized.params), reached)


def check_all_used(linearized: Linearized, reached: set[str]) -> None:
    """Raise if some of the chosen parameters were not reached by any training point."""
    _raise_unused([name for name in linearized.params if name not in reached])
    linearized.plans.reached.update(reached)


def _look(linearized: Linearized, x: Inputs, names: Sequence[str], reached: set[str]) -> None:
    """Add the parameters that points of `x` use to `reached`, and raise if some of `names` are not used."""
    _find(linearized, x, names, reached)
    _raise_unused([name for name in names if name not in reached])


def _find(linearized: Linearized, x: Inputs, names: Sequence[str], reached: set[str]) -> None:
    if set(names) <= reached:
        return
    leaves = fresh_leaves(linearized, tuple(linearized.params))
    for part in chunks(x, POINTS_PER_LOOK):
        edges, _ = _walk(run(linearized, leaves, part), leaves)
        reached.update(name for name in leaves if edges[name])
        if set(names) <= reached:
            return


def _raise_unused(unused: Sequence[str]) -> None:
    if not unused:
        return
    more = f", … ({len(unused)} in all)" if len(unused) > 5 else ""
    raise NetworkError(
        f"{len(unused)} of the chosen parameters do not reach the output: {', '.join(unused[:5])}{more}. "
        f"Leave them out: {leave_out(unused)}."
    )


POINTS_PER_LOOK = 32
"""The number of points per pass when looking for the parameters that points use."""


def _bytes_per_point(
    calls: Sequence[Call], layouts: Sequence[Layout | None], out: Tensor, leaves: Params
) -> int:
    """Return the bytes that `capture` keeps per point: inputs, outputs, and C gradients in final form."""
    total, C = 0, out.shape[1]
    for call, layout in zip(calls, layouts, strict=True):
        if layout is None:
            continue
        inputs, outputs = call.a.numel() // 3, call.shape.numel() // 3
        own = sum(leaves[name].numel() for name in call.names.values())
        # an output, its saved copy and the gradient of one pass exist besides the gradients that are kept
        total += inputs + 3 * outputs + C * min(own, outputs)
    return total * out.element_size()
