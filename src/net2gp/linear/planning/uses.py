"""The uses of structured parameters in one forward pass, and their gradients from one backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from net2gp.linear.forward.calls import Call, Key
from net2gp.linear.forward.evaluation import differentiates
from net2gp.linear.forward.factors import (
    Direct,
    Factor,
    Lookup,
    Outer,
    jacobian,
    pulled,
)
from net2gp.linear.planning.layouts import Layout, matched
from net2gp.linear.planning.proof import differing, gradients, random_like
from net2gp.types import Params


@dataclass(frozen=True, eq=False)
class Uses:
    """Parameters and the calls that use them.

    Args:
        names: The parameters.
        kept: The calls, each with where it keeps its points, and how many of its rows belong to one point.
    """

    names: tuple[str, ...]
    kept: tuple[tuple[Call, Layout, int], ...]

    def factors(
        self, out: Tensor, seed: Tensor, keep: bool, follow: bool = False
    ) -> dict[str, Factor]:
        """Return the gradients of the combination `seed` (B, C) of each point's outputs, factors with C = 1.

        With `follow` they have a graph, which reaches back as far as the graph of `out`.
        """
        edges = [call.edge for call, _, _ in self.kept]
        with differentiates():
            grads = torch.autograd.grad(
                out,
                edges,  # type: ignore[arg-type]
                seed,
                retain_graph=keep or follow,
                create_graph=follow,
                allow_unused=True,
            )
        uses: dict[str, list[Factor]] = {name: [] for name in self.names}
        for (call, layout, repeat), g in zip(self.kept, grads, strict=True):
            g = out.new_zeros(call.shape) if g is None else g
            layout = replace(layout, repeat=repeat)
            # a pass of half precision ends here, and sums over places have more digits
            a = call.a.to(out.dtype) if call.a.is_floating_point() else call.a
            a, g = layout.points_first(a), layout.points_first(g.to(out.dtype))[:, None]
            for suffix, factor in call.rule.factors(call.module, a, g).items():
                if call.names.get(suffix) in uses:
                    uses[call.names[suffix]].append(_regroup(factor, repeat))
        return {name: _merge(factors) for name, factors in uses.items()}

    @property
    def stepwise(self) -> bool:
        """Whether some calls are steps of what torch computes in one operation otherwise."""
        return any(call.part for call, _, _ in self.kept)

    def differing(
        self, out: Tensor, leaves: Params, plain: Tensor, rounding: torch.dtype
    ) -> tuple[str, ...]:
        """Return the parameters whose factors differ from plain reverse mode, with random weights per point.

        Without the weights, gradients that are assigned to the wrong points would have the right sum. `plain`
        is the output of a pass without steps, or `out` itself.
        """
        if not self.names:
            return ()
        seed, weights = random_like(out), random_like(out[:, :1], seed=1)
        found = self.factors(out, seed, keep=True)
        own = {name: leaves[name] for name in self.names}
        wanted = gradients(plain, own, seed * weights, keep=plain is out)
        ours = {n: pulled(factor, weights) for n, factor in found.items()}
        return differing(ours, wanted, rounding=rounding)

    def without(self, names: Sequence[str]) -> Uses:
        """Return the uses of all other parameters."""
        left = tuple(name for name in self.names if name not in names)
        return Uses(left, tuple(k for k in self.kept if set(k[0].names.values()) & set(left)))


def find_uses(
    calls: Sequence[Call],
    layers: Sequence[Key],
    layouts: Sequence[Layout | None],
    names: Sequence[str],
    num_points: int,
) -> Uses:
    """Return the uses of the parameters `names`, without those that the calls do not treat as planned."""
    kept: list[tuple[Call, Layout, int]] = []
    lost: set[str] = set()
    partners = matched(layers, calls)
    for key, layout, call in zip(layers, layouts, partners, strict=True):
        if layout is None or not set(key[1:]) & set(names):
            continue
        repeat = 0 if call is None else _rows_per_point(call, layout, num_points)
        if call is None or not repeat:
            lost.update(key[1:])
        else:
            kept.append((call, layout, repeat))
    known = set(layers)
    for call in calls:
        if call.key not in known:
            lost.update(call.names.values())
    return Uses(tuple(names), tuple(kept)).without(tuple(lost))


def _rows_per_point(call: Call, layout: Layout, num_points: int) -> int:
    """Return how many rows of a layer's input belong to one point, or 0 if that is not known."""
    if call.edge is None or call.a._version != call.version:
        return 0  # the call has no gradient, or its input was changed in place after its use
    repeat, rest = divmod(call.a.shape[layout.axis], num_points)
    return 0 if rest or (repeat == 1) != (layout.repeat == 1) else repeat


def _regroup(factor: Factor, repeat: int) -> Factor:
    """Turn factors of B·repeat rows into factors of B points with `repeat` times as many places."""
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
    """Merge a parameter's several uses into one factor: its gradient is the sum over all places of use."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Lookup) and all(isinstance(part, Lookup) for part in parts):
        uses = [part for part in parts if isinstance(part, Lookup)]
        ids, g = torch.cat([u.ids for u in uses], 1), torch.cat([u.g for u in uses], 2)
        return replace(first, ids=ids, g=g)
    outers = [part for part in parts if isinstance(part, Outer)]
    if len(outers) == len(parts) and len({_form(outer) for outer in outers}) == 1:
        a, g = torch.cat([o.a for o in outers], 2), torch.cat([o.g for o in outers], 4)
        return replace(outers[0], a=a, g=g)
    # such as an embedding that is the output layer too
    return Direct(torch.stack([jacobian(part) for part in parts]).sum(0))


def _form(outer: Outer) -> tuple[int | bool, ...]:
    """Return what outer products must have in common to be places of one."""
    return *outer.g.shape[2:4], outer.a.shape[3], outer.turned
