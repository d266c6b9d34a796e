"""The Fisher information of a network's parameters, as an operator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.inputs import check_inputs, num_rows, rows
from net2gp.likelihoods.responses import divergence
from net2gp.likelihoods.traits import curvature_times, of_points
from net2gp.linear.jacobians.passes import (
    capacity,
    column_products,
    column_pullbacks,
    memory_budget,
    points_at_once,
)
from net2gp.types import Inputs, Likelihood

if TYPE_CHECKING:
    from net2gp.linear.linearized import Linearized


@dataclass(frozen=True, eq=False)
class GaussNewton:
    """The generalized Gauss–Newton matrix F = Σ_n J_nᵀ Λ_n J_n (P, P), as an operator that never stores it.

    Λ_n is the likelihood's curvature at the network's output: 1/noise_var for Gaussian noise,
    diag(p) − ppᵀ for softmax. For these likelihoods F is the Fisher information of the parameters,
    summed (not averaged) over the points.

    Args:
        linearized: The network.
        x: The points.
        likelihood: The likelihood, which provides Λ_n.

    Raises:
        InputError: If `x` cannot be the input of a network.

    Reference: Martens, New insights and perspectives on the natural gradient method, JMLR 2020.
    """

    linearized: Linearized
    x: Inputs = field(repr=False)
    likelihood: Likelihood

    def __post_init__(self) -> None:
        check_inputs(self.x)

    def matmul(self, v: Tensor) -> Tensor:
        """Compute F v with a forward-mode and a backward pass per column, chunk by chunk of points.

        Sums over chunks have the dtype of `v`, and passes the dtype of the network.

        Args:
            v: Vectors over all parameters as columns, (P, k), in the order of `Linearized.flatten`.

        Returns:
            F v, (P, k), in the dtype of `v`.

        Raises:
            InputError: If `v` does not have P rows.

        >>> from net2gp.likelihoods import Gaussian
        >>> from net2gp.linear.linearized import linearize
        >>> fisher = GaussNewton(linearize(torch.nn.Linear(1, 1).eval()), torch.ones(3, 1), Gaussian(0.5))
        >>> fisher.matmul(torch.eye(2))
        tensor([[6., 6.],
                [6., 6.]])
        """
        self._check(v)
        size = capacity(self.linearized, self.x, memory_budget(v.device))
        at_once = points_at_once(num_rows(self.x), v.shape[1], size)
        columns, total = v.to(self.linearized.example), torch.zeros_like(v)
        for start in range(0, num_rows(self.x), at_once):
            points = slice(start, start + at_once)
            part = rows(self.x, points)
            likelihood, f = of_points(self.likelihood, points), self.linearized(part)
            pushed = column_products(self.linearized, part, columns, size)
            weighted = curvature_times(likelihood, f, pushed).to(pushed.dtype)
            total += column_pullbacks(self.linearized, part, weighted, size)
        return total

    def finite_difference(self, v: Tensor, step: float = 1e-3) -> Tensor:
        """Approximate F v by one backward pass at parameters that are moved along v.

        F v ≈ ‖v‖/step · ∇_θ' Σ_n KL(p(y | x_n, θ) ‖ p(y | x_n, θ')) at θ' = θ + step·v/‖v‖. This works for
        networks without forward mode. The error is O(step) plus rounding/step, about 1e-3 in float32.

        Args:
            v: A vector over all parameters, (P,).
            step: How far the parameters are moved.

        Returns:
            F v, (P,).

        Raises:
            InputError: If `v` does not have P entries.
        """
        self._check(v[:, None])
        norm = v.norm()
        if norm == 0:
            return torch.zeros_like(v)
        moved = self.linearized.flatten(self.linearized.params) + v * (step / norm)
        params = {
            n: p.requires_grad_() for n, p in self.linearized.unflatten(moved.detach()).items()
        }
        here = self.linearized(self.x)
        with torch.enable_grad():
            there = self.linearized.evaluate(params, self.x)
            total = divergence(self.likelihood, here.double(), there.double()).sum()
            grads = torch.autograd.grad(total, list(params.values()), materialize_grads=True)
        return self.linearized.flatten(dict(zip(params, grads, strict=True))) * (norm / step)

    def _check(self, v: Tensor) -> None:
        if v.dim() != 2 or v.shape[0] != self.linearized.num_params:
            raise InputError(
                f"v must have {self.linearized.num_params} rows, one per parameter, but has shape "
                f"{tuple(v.shape)}. Flatten parameters with linearized.flatten(params)."
            )
