"""Activations without a closed form: expectations by quadrature, right to about 1e-11.

`Quadrature` takes any function of one number that is smooth apart from kinks and jumps; its derivatives
come from autograd. A jump is a delta in E[φ'] and in derivatives of expectations, where it must be, but it
contributes nothing to E[φ'φ''], just as it contributes nothing to the gradients of a network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from net2gp.errors import NetworkError
from net2gp.limits.duals.interpolation import kept_table_for, table_for
from net2gp.limits.integrals.expectations import (
    COARSE,
    ORDER,
    Expectation,
    PointFunction,
    Term,
    has_jumps,
    line_moments,
    moments,
)
from net2gp.limits.integrals.plane_quadrature import REACH

_FLOOR = 1e-10  # derivatives in a variance divide by it, so smaller variances are raised to this


@dataclass(frozen=True)
class Quadrature:
    """An activation given as a function on tensors, of at most polynomial growth.

    The plane integral costs about 2e4 evaluations of φ per pair, so `dual` of many pairs goes through a
    table (see `interpolation`).

    Args:
        function: φ, applied entry by entry.
        kinks: The places where φ or φ' jumps; None searches for them.
        name: What messages call the function.

    >>> Quadrature(torch.tanh, ()).variance(torch.ones(1, dtype=torch.float64), True)
    (tensor([0.3943], dtype=torch.float64), tensor([0.4644], dtype=torch.float64))

    Reference: Lee et al. (2018), Deep neural networks as Gaussian processes, section 2.5; the derivatives
    follow from Price's theorem (1958).
    """

    function: Callable[[Tensor], Tensor]
    kinks: tuple[float, ...] | None = None
    name: str = field(default="φ", compare=False)
    formula: ClassVar[str] = "E[φ(u)φ(v)] by quadrature"

    def __call__(self, u: Tensor) -> Tensor:
        """Apply φ to every entry of u."""
        return self.function(u)

    def mean(self, var: Tensor) -> Tensor:
        """Compute E[φ]; its derivative is E[u φ']/(2var)."""
        return _line(self, var, [((0, 0),)], lambda q: [_over(self, q, (1, 1)) / (2 * q)])[0]

    def mean_slope(self, var: Tensor) -> Tensor:
        """Compute E[φ'] = E[u φ]/var; its derivative is (E[u²φ'] − E[u φ])/(2var²)."""

        def derive(q: Tensor) -> list[Tensor]:
            return [(_over(self, q, (1, 2)) - _over(self, q, (0, 1))) / (2 * q * q)]

        return _line(self, var, [((1, 0),)], derive)[0]

    def mean_gradient(self, var: Tensor) -> Tensor:
        """Compute E[φ'] without the jumps of φ, which gradients of a network do not see either."""
        return _line(self, var, [((1, 0),)], lambda q: [torch.zeros_like(q)], deltas=False)[0]

    def variance(self, var: Tensor, slope: bool) -> tuple[Tensor, Tensor | None]:
        """Compute E[φ²] and, if `slope`, E[φ'²]."""
        squares: list[tuple[Term, ...]] = [((0, 0), (0, 0)), ((1, 0), (1, 0))]
        rates: list[tuple[Term, ...]] = [((0, 0), (1, 1)), ((1, 0), (2, 1))]
        count = 2 if slope else 1

        def derive(q: Tensor) -> list[Tensor]:
            return [value / q for value in line_moments(self, q, rates[:count])]

        result = _line(self, var, squares[:count], derive, deltas=False)
        return result[0], result[1] if slope else None

    def dual(
        self, cov: Tensor, var1: Tensor, var2: Tensor, slope: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute E[φ(u)φ(v)] and, if `slope`, E[φ'(u)φ'(v)]."""
        table = table_for(self, cov, var1, var2)
        if table is not None:
            return table.dual(cov, var1, var2, slope)
        table = kept_table_for(self, cov, var1, var2)
        if table is not None:
            values = table.dual(cov.double(), var1.double(), var2.double(), slope)
            return values[0].to(cov), None if values[1] is None else values[1].to(cov)
        return mixed_dual(self, self, cov, var1, var2, slope)


def mixed_dual(
    act1: PointFunction, act2: PointFunction, cov: Tensor, var1: Tensor, var2: Tensor, slope: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute E[φ1(u)φ2(v)] and E[φ1'(u)φ2'(v)] of two activations by quadrature.

    The result keeps dtype and device, is computed in float64, and has first derivatives. A pair takes
    about 0.3 ms.

    Args:
        act1: φ1, the function of u.
        act2: φ2, the function of v.
        cov: Covariances of u and v; the three tensors broadcast.
        var1: Variances of u.
        var2: Variances of v.
        slope: Whether to compute the second expectation too.

    Returns:
        Both expectations, of the broadcast shape; None for the second one without `slope`.

    >>> from net2gp.limits.duals.power_forms import ABReLU
    >>> one = torch.ones(1, dtype=torch.float64)
    >>> mixed_dual(ABReLU(), ABReLU(-1.0, 1.0), one, one, one, False)[0]
    tensor([0.5000], dtype=torch.float64)
    """
    inputs = torch.broadcast_tensors(cov, var1, var2)
    diagonal: list[tuple[Term, Term]] = [((0, 0), (0, 0)), ((1, 0), (1, 0))]
    count = 2 if slope else 1

    def evaluate(c: Tensor, q1: Tensor, q2: Tensor) -> list[Tensor]:
        order = ORDER if cov.dtype == torch.float64 else COARSE
        return moments(act1, act2, (c, q1, q2), diagonal[:count], order, deltas=False)

    def derive(needed: Sequence[int], c: Tensor, q1: Tensor, q2: Tensor) -> list[list[Tensor]]:
        q1, q2 = q1.clamp_min(_FLOOR), q2.clamp_min(_FLOOR)
        if 1 in needed:
            _check_continuous(act1, act2, q1, q2)
        return [_derivatives(act1, act2, c, q1, q2, m) for m in needed]

    result = Expectation.apply(evaluate, derive, *inputs)
    return result[0], result[1] if slope else None


def _derivatives(
    act1: PointFunction, act2: PointFunction, cov: Tensor, var1: Tensor, var2: Tensor, m: int
) -> list[Tensor]:
    """Compute ∂E[f g]/∂(cov, var1, var2) for f = φ1^{(m)}, g = φ2^{(m)}.

    By Price's theorem ∂/∂cov = E[f'g'] and ∂/∂var1 = E[f''g]/2. Stein's lemma turns the latter into
    (E[u f'g] − cov E[f'g'])/(2var1), which needs no second derivative at a kink.
    """
    rise: Term = (m + 1, 0)
    both, first, second = moments(
        act1,
        act2,
        (cov, var1, var2),
        [(rise, rise), ((m + 1, 1), (m, 0)), ((m, 0), (m + 1, 1))],
    )
    return [both, (first - cov * both) / (2 * var1), (second - cov * both) / (2 * var2)]


def _check_continuous(act1: PointFunction, act2: PointFunction, var1: Tensor, var2: Tensor) -> None:
    for act, var in ((act1, var1), (act2, var2)):
        if has_jumps(act, REACH * math.sqrt(float(var.max()))):
            raise NetworkError(
                f"E[φ'φ''] of an activation with jumps ({getattr(act, 'name', act)}) cannot be "
                "differentiated. Differentiate the NNGP kernel instead of the NTK, or use a continuous "
                "activation."
            )


def _over(act: Quadrature, var: Tensor, term: Term) -> Tensor:
    return line_moments(act, var, [(term,)])[0]


def _line(
    act: Quadrature,
    var: Tensor,
    products: Sequence[tuple[Term, ...]],
    derive: Callable[[Tensor], list[Tensor]],
    deltas: bool = True,
) -> tuple[Tensor, ...]:
    """Compute the expectation of each product of terms for u ~ N(0, var).

    `derive` returns the derivatives of these expectations in var.
    """

    def rows(needed: Sequence[int], q: Tensor) -> list[list[Tensor]]:
        values = derive(q.clamp_min(_FLOOR))
        return [[values[i]] for i in needed]

    return Expectation.apply(lambda q: line_moments(act, q, products, deltas), rows, var)
