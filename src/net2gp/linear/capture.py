"""Run a network once, backward once per output, and keep what its layers' gradients are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from net2gp.inputs import follows, num_rows
from net2gp.linear.calls import forward, fresh_leaves
from net2gp.linear.factors import Direct, Factor, Outer, jacobian
from net2gp.linear.linearized import Linearized
from net2gp.linear.loops import leftover_jacobian
from net2gp.linear.probe import Plan, demote, plan
from net2gp.linear.uses import find_uses
from net2gp.types import Inputs, Params

__all__ = [
    "Plan",
    "Seeds",
    "capture",
    "each_output",
    "gradients_apart",
    "leftover_jacobian",
    "plan",
]

Seeds = Callable[[Tensor], Tensor]
"""From a network's outputs (B, C) to the K combinations of them (B, C, K) that are differentiated."""


def capture(
    linearized: Linearized,
    x: Inputs,
    plan: Plan,
    seeds: Seeds | None = None,
    *,
    compress: bool = True,
    check: bool = True,
) -> dict[str, Factor]:
    """The gradients of all outputs at `x` for each structured parameter, as unscaled factors.

    `seeds` asks for the gradients of combinations of the outputs instead. With `compress` a weight that
    is used at many places comes as its gradient, where that is smaller than what it is made of. With
    `check` the gradients are compared with plain reverse mode at these points, at two more passes. Factors
    are differentiable in `x` where it `follows`.

    Cost: one forward pass, and C (or K) backward passes that skip the weights.
    """
    gradients: _Gradients | None = None
    for c, count, found in each_output(linearized, x, plan, seeds, check=check):
        gradients = gradients or _Gradients(count, compress, follows(x))
        for name, factor in found.items():
            gradients.add(name, c, factor)
    return {} if gradients is None else gradients.factors


def each_output(
    linearized: Linearized,
    x: Inputs,
    plan: Plan,
    seeds: Seeds | None = None,
    *,
    check: bool = True,
) -> Iterator[tuple[int, int, dict[str, Factor]]]:
    """c, C and the gradients of output c alone, output by output: nothing is kept of those before.

    Parameters that these points use in another way than the plan says come as their gradients, made in
    the way that is right for any network. With `check`, two backward passes find them.
    """
    if not plan.structured:
        return
    leaves = fresh_leaves(linearized, plan.structured)
    calls, out = forward(linearized, leaves, x)
    uses = find_uses(calls, plan.layers, plan.layouts, plan.structured, num_rows(x))
    if check:
        uses = uses.without(uses.differing(out, leaves))
    follow = follows(x)
    if follow:  # a graph back to the points, without the parameters
        calls, out = forward(linearized, linearized.params, x, follow=True)
        uses = find_uses(calls, plan.layers, plan.layouts, uses.names, num_rows(x))
    chosen = None if seeds is None else seeds(out.detach()).to(out)
    count = out.shape[1] if chosen is None else chosen.shape[2]
    other = tuple(name for name in plan.structured if name not in uses.names)
    demote(linearized, other)
    apart = gradients_apart(linearized, x, other, chosen)
    for c in range(count):
        seed = torch.zeros_like(out) if chosen is None else chosen[:, :, c]
        if chosen is None:
            seed[:, c] = 1.0
        keep = c < count - 1
        found = uses.factors(out, seed, keep=keep, follow=follow) if uses.names else {}
        found |= {name: Direct(J[:, c : c + 1]) for name, J in apart.items()}
        yield c, count, {name: found[name] for name in plan.structured}


def gradients_apart(
    linearized: Linearized, x: Inputs, names: Sequence[str], mix: Tensor | None = None
) -> Params:
    """The gradients (B, C, p) of each of the parameters `names`, or of the combinations `mix` (B, C, K)."""
    if not names:
        return {}
    J = leftover_jacobian(linearized, x, names, mix)
    sizes = [linearized.params[name].numel() for name in names]
    return dict(zip(names, J.split(sizes, -1), strict=True))


class _Gradients:
    """Factors of all outputs, collected one output at a time into buffers of their final size.

    Where they are to be differentiated they are joined at the end: autograd would copy a buffer each time.
    """

    def __init__(self, num_outputs: int, compress: bool, follow: bool) -> None:
        self.num_outputs = num_outputs
        self.compress = compress
        self.follow = follow
        self.buffers: dict[str, Factor] = {}
        self.parts: dict[str, list[Factor]] = {}

    def add(self, name: str, c: int, factor: Factor) -> None:
        """Put the gradients of output `c`, a factor with one output, in their place."""
        wide = isinstance(factor, Outer) and factor.a.shape[-1] <= 2 * factor.a.shape[-2]
        if wide and self.compress:
            # many places, few inputs: the weight's gradient is no larger than what it is made of
            factor = Direct(jacobian(factor))
        if self.follow:
            self.parts.setdefault(name, []).append(factor)
            return
        part = _outputs(factor)
        if name not in self.buffers:
            B, _, *rest = part.shape
            self.buffers[name] = _with_outputs(factor, part.new_empty(B, self.num_outputs, *rest))
        _outputs(self.buffers[name])[:, c] = part[:, 0]

    @property
    def factors(self) -> dict[str, Factor]:
        """What was collected, by parameter."""
        joined = {
            name: _with_outputs(parts[0], torch.cat([_outputs(part) for part in parts], 1))
            for name, parts in self.parts.items()
        }
        return self.buffers | joined


def _outputs(factor: Factor) -> Tensor:
    """The tensor of a factor that has the axis of outputs: (B, C, …)."""
    return factor.J if isinstance(factor, Direct) else factor.g


def _with_outputs(factor: Factor, value: Tensor) -> Factor:
    return Direct(value) if isinstance(factor, Direct) else replace(factor, g=value)
