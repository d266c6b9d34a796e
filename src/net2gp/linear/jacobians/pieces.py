"""Scaled factors of a batch of points, and the kernel between two batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from net2gp.inputs import ordinary_tensors, tensors
from net2gp.linear.forward.factors import (
    Direct,
    Factor,
    Outer,
    accumulate,
    mirror,
    scaled,
    with_bias,
)
from net2gp.linear.jacobians.capture import Plan, leftover_jacobian
from net2gp.types import Inputs, Params

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized


@dataclass(frozen=True, eq=False)
class Pieces:
    """The scaled factors of a batch of points, and the parameters whose Jacobian is computed when needed.

    Args:
        linearized: The linearized network.
        x: The points.
        captured: The unscaled factors of structured parameters.
        prior: The prior variances, by parameter.
        leftover: Groups of the other parameters whose Jacobians fit into memory together.
        traced: Whether products sum over outputs.
        join: Whether the bias of a dense layer is joined to its weight.
        tolerance: The relative error that products in float32 may have on a GPU.
    """

    linearized: Linearized
    x: Inputs
    captured: dict[str, Factor]
    prior: Params
    leftover: list[list[str]]
    traced: bool = False
    join: bool = True
    tolerance: float = 0.0

    @cached_property
    @ordinary_tensors()
    def factors(self) -> dict[tuple[str, ...], Factor]:
        """Return the scaled factors by the parameters that each belongs to."""
        return self._scaled(self.join)

    @cached_property
    @ordinary_tensors()
    def apart(self) -> dict[tuple[str, ...], Factor]:
        """Return the scaled factors without joining biases to weights."""
        return self._scaled(join=False)

    def _scaled(self, join: bool) -> dict[tuple[str, ...], Factor]:
        found = scaled_factors(self.captured, self.prior, join)
        return {n: factor.traced() for n, factor in found.items()} if self.traced else found

    def all_factors(self) -> Iterator[Factor]:
        """Yield all factors; leftover parameters come at the end, a few at a time."""
        yield from self.factors.values()
        for names in self.leftover:
            yield self.jacobian(names)

    def jacobian(self, names: list[str]) -> Direct:
        """Return the scaled gradients of some of the leftover parameters."""
        params, prior = self.linearized.params, self.prior
        J = leftover_jacobian(self.linearized, self.x, names)
        roots = torch.cat([prior[n].sqrt().expand(params[n].shape).reshape(-1) for n in names])
        factor = Direct(J.to(roots.dtype) * roots)
        return factor.traced() if self.traced else factor


def add_tile(K: Tensor, left: Pieces, right: Pieces, C: int) -> None:
    """Add the kernel between two batches of points, which may be the same, to K in place."""
    # a batch that uses parameters differently may have biases that cannot be joined to weights
    alike = left.factors.keys() == right.factors.keys()
    ours, theirs = (left.factors, right.factors) if alike else (left.apart, right.apart)
    for key, factor in ours.items():
        accumulate(K, factor, theirs[key], C, tolerance=left.tolerance)
    for names in left.leftover:
        J = left.jacobian(names)
        other = J if left is right else right.jacobian(names)
        accumulate(K, J, other, C, tolerance=left.tolerance)
    if left is right:
        mirror(K, C)


def row_shapes(x: Inputs) -> list[torch.Size]:
    """Return the shapes of one point."""
    return [value.shape[1:] for value in tensors(x)]


def common_plans(one: Plan, other: Plan) -> tuple[Plan, Plan]:
    """Return both plans, restricted to the parameters that are structured in both.

    Which parameters are structured may depend on the length of a point.
    """
    structured = tuple(name for name in one.structured if name in other.structured)
    leftover = tuple(sorted({*one.structured, *one.leftover} - set(structured)))
    return (
        replace(one, structured=structured, leftover=leftover),
        replace(other, structured=structured, leftover=leftover),
    )


def scaled_factors(
    factors: dict[str, Factor], prior_var: Params, join: bool = True
) -> dict[tuple[str, ...], Factor]:
    """Return factors times √prior_var, without parameters of zero variance.

    With `join`, the bias of a dense layer that is used at one place is joined to its weight: it is the weight
    of a constant input, and so needs no product of its own.
    """
    done: dict[tuple[str, ...], Factor] = {}
    joined: set[str] = set()
    for name, factor in factors.items():
        if name in joined or bool((prior_var[name] == 0).all()):
            continue
        bias = name.removesuffix("weight") + "bias"
        result = scaled(factor, prior_var[name])
        if (
            join
            and isinstance(result, Outer)
            and result.by_gram
            and name.endswith("weight")
            and bias in factors
            and not prior_var[bias].dim()
            and result.g.shape[2] * result.g.shape[4] == 1
            and _belongs(factors[bias], result)
        ):
            joined.add(bias)
            done[name, bias] = with_bias(result, prior_var[bias])
        else:
            done[(name,)] = result
    return done


def _belongs(bias: Factor, weight: Outer) -> bool:
    """Whether a bias has no gradient except through the layer of this weight."""
    return isinstance(bias, Direct) and torch.equal(bias.J, weight.g[:, :, 0, :, 0])
