"""One forward pass, one backward pass per output, and the parts of the gradients that layers leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from net2gp.inputs import follows, num_rows
from net2gp.linear.forward.calls import forward, fresh_leaves, run
from net2gp.linear.forward.factors import Direct, Factor, Outer, jacobian, pulled
from net2gp.linear.planning.loops import leftover_jacobian
from net2gp.linear.planning.plans import Plan
from net2gp.linear.planning.probe import demote, plan
from net2gp.linear.planning.proof import differing, random_like
from net2gp.linear.planning.proof import gradients as plain_gradients
from net2gp.linear.planning.uses import Uses, find_uses
from net2gp.linear.precision import check_gradients
from net2gp.types import Inputs, Params

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized

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
"""From a network's outputs (B, C) to K combinations of them (B, C, K), which are then differentiated."""


def capture(
    linearized: Linearized,
    x: Inputs,
    plan: Plan,
    seeds: Seeds | None = None,
    *,
    compress: bool = True,
    check: bool = True,
) -> dict[str, Factor]:
    """Return the gradients of all outputs at `x` for each structured parameter, as unscaled factors.

    The cost is one forward pass, and C (or K) backward passes that skip the weights. If `follows(x)`, factors
    are differentiable in `x`, at the cost of one more forward pass.

    Args:
        linearized: The linearized network.
        x: The inputs.
        plan: The plan for them.
        seeds: The combinations of outputs that are differentiated; None differentiates each output.
        compress: Whether a weight that is used at many places comes as its gradient where that is smaller
            than the factor.
        check: Whether the gradients are compared with plain reverse mode at these points, in one more pass.

    Returns:
        The factors by parameter.
    """
    if not plan.structured:
        return {}
    taken, follow = _take(linearized, x, plan, seeds), follows(x)
    if follow:  # compared first, since the pass that follows x does not reach the parameters
        taken = taken.without(taken.alone() if check else ())
        taken, check = taken.following(plan), False
    gradients = _Gradients(taken.count, compress, follow)
    for c in range(taken.count):
        for name, factor in taken.gradients(c, keep=check or c < taken.count - 1).items():
            gradients.add(name, c, factor)
    if check and taken.uses.names:
        taken = taken.without(taken.differing(gradients.factors))
    found = gradients.factors | {name: Direct(J) for name, J in taken.apart().items()}
    check_gradients(linearized, {name: [_outputs(factor)] for name, factor in found.items()})
    return {name: found[name] for name in plan.structured}


def each_output(
    linearized: Linearized, x: Inputs, plan: Plan, seeds: Seeds | None = None
) -> Iterator[dict[str, Factor]]:
    """Yield the gradients of one output after the other, without keeping earlier ones.

    Parameters that these points use differently than planned come as their gradients, computed in the way
    that is right for any network; two more backward passes find them.
    """
    if not plan.structured:
        return
    taken = _take(linearized, x, plan, seeds)
    taken = taken.without(taken.alone())
    apart = taken.apart()
    for c in range(taken.count):
        found = taken.gradients(c, keep=c < taken.count - 1)
        check_gradients(linearized, {name: [_outputs(factor)] for name, factor in found.items()})
        yield found | {name: Direct(J[:, c : c + 1]) for name, J in apart.items()}


@dataclass(frozen=True, eq=False)
class _Taken:
    """A forward pass over the points `x`, and where it uses the structured parameters."""

    linearized: Linearized
    x: Inputs
    names: tuple[str, ...]
    leaves: Params
    uses: Uses
    out: Tensor
    mix: Tensor | None
    follow: bool = False

    @property
    def count(self) -> int:
        """Return how many combinations of outputs are differentiated."""
        return self.out.shape[1] if self.mix is None else self.mix.shape[2]

    def gradients(self, c: int, keep: bool) -> dict[str, Factor]:
        """Return the gradients of one of the combinations, from one backward pass."""
        unit = self.out.new_zeros(len(self.out), self.count)
        unit[:, c] = 1.0
        if not self.uses.names:
            return {}
        return self.uses.factors(self.out, self.seed(unit), keep, self.follow)

    def seed(self, v: Tensor) -> Tensor:
        """Return the combination v (B, K) of the combinations as a combination of outputs (B, C)."""
        return v if self.mix is None else (self.mix @ v[..., None])[..., 0]

    def differing(self, factors: dict[str, Factor]) -> tuple[str, ...]:
        """Return the parameters whose factors differ from plain reverse mode, with random weights."""
        v = random_like(self.out.new_empty(len(self.out), self.count))
        own = {name: self.leaves[name] for name in self.uses.names}
        wanted = plain_gradients(self.plain(), own, self.seed(v))
        ours = {name: pulled(factors[name], v) for name in own}
        return differing(ours, wanted, rounding=self.linearized.rounding)

    def alone(self) -> tuple[str, ...]:
        """Return the parameters whose factors of one combination differ from plain reverse mode."""
        rounding = self.linearized.rounding
        return self.uses.differing(self.out, self.leaves, self.plain(), rounding)

    def plain(self) -> Tensor:
        """Return the outputs with a graph in which nothing is computed step by step."""
        return run(self.linearized, self.leaves, self.x) if self.uses.stepwise else self.out

    def without(self, names: Sequence[str]) -> _Taken:
        """Return the same pass without these parameters, whose gradients `apart` then computes."""
        return replace(self, uses=self.uses.without(names))

    def following(self, plan: Plan) -> _Taken:
        """Return a pass whose graph goes back to the points instead of the parameters."""
        calls, out = forward(self.linearized, self.linearized.params, self.x, follow=True)
        names = self.uses.names
        uses = find_uses(calls, plan.layers, plan.layouts, names, num_rows(self.x))
        return replace(self, uses=uses, out=out, follow=True)

    def apart(self) -> Params:
        """Return the gradients (B, C, p) of the parameters that these points do not use as planned."""
        other = tuple(name for name in self.names if name not in self.uses.names)
        demote(self.linearized, other)
        return gradients_apart(self.linearized, self.x, other, self.mix)


def _take(linearized: Linearized, x: Inputs, plan: Plan, seeds: Seeds | None) -> _Taken:
    leaves = fresh_leaves(linearized, plan.structured)
    calls, out = forward(linearized, leaves, x)
    uses = find_uses(calls, plan.layers, plan.layouts, plan.structured, num_rows(x))
    mix = None if seeds is None else seeds(out.detach()).to(out)
    return _Taken(linearized, x, plan.structured, leaves, uses, out, mix)


def gradients_apart(
    linearized: Linearized, x: Inputs, names: Sequence[str], mix: Tensor | None = None
) -> Params:
    """Return the gradients (B, C, p) of each parameter, of all outputs or of the combinations `mix`."""
    if not names:
        return {}
    J = leftover_jacobian(linearized, x, names, mix)
    sizes = [linearized.params[name].numel() for name in names]
    return dict(zip(names, J.split(sizes, -1), strict=True))


class _Gradients:
    """Factors of all outputs, collected output by output into buffers of their final size.

    If they are to be differentiated they are joined at the end: autograd would copy a buffer at each write.
    """

    def __init__(self, num_outputs: int, compress: bool, follow: bool) -> None:
        self.num_outputs = num_outputs
        self.compress = compress
        self.follow = follow
        self.buffers: dict[str, Factor] = {}
        self.parts: dict[str, list[Factor]] = {}

    def add(self, name: str, c: int, factor: Factor) -> None:
        """Store the gradients of output `c`, a factor with one output."""
        wide = isinstance(factor, Outer) and factor.a.shape[-1] <= 2 * factor.a.shape[-2]
        if wide and self.compress:
            # with many places and few inputs the weight's gradient is no larger than the factor
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
        """Return the collected factors by parameter."""
        joined = {
            name: _with_outputs(parts[0], torch.cat([_outputs(part) for part in parts], 1))
            for name, parts in self.parts.items()
        }
        return self.buffers | joined


def _outputs(factor: Factor) -> Tensor:
    """Return the tensor of a factor that has the axis of outputs: (B, C, …)."""
    return factor.J if isinstance(factor, Direct) else factor.g


def _with_outputs(factor: Factor, value: Tensor) -> Factor:
    return Direct(value) if isinstance(factor, Direct) else replace(factor, g=value)
