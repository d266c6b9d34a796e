"""Moments of the activation of one hidden unit, up to the fourth order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.inputs import ordinary_tensors
from net2gp.limits.duals.activations import Activation
from net2gp.limits.duals.quadrature import Quadrature, mixed_dual


def moments(phi: Activation, q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return E[φ²], E[φ⁴], and the first two derivatives of E[φ²] in q, at u ~ N(0, q)."""
    g = phi.variance(q, False)[0]
    fourth = _monomial(phi, 0, 2).variance(q, False)[0]
    once = _monomial(phi, 1, 1).variance(q, False)[0] / q
    twice = _monomial(phi, 2, 1).variance(q, False)[0] / q.square()
    return g, fourth, (once - g) / (2 * q), (twice - 6 * once + 3 * g) / (4 * q.square())


def products_of(phi: Activation, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Return E[φ(u)²], E[φ(u) φ(v)], E[φ(v)²] (…, 3) at entries (…, 3) of K, and the Jacobian (…, 3, 3)."""
    with ordinary_tensors(), torch.enable_grad():
        entries = entries.detach().clone().requires_grad_()
        var1, cov, var2 = entries.unbind(-1)
        values = (
            phi.variance(var1, False)[0],
            phi.dual(cov, var1, var2, False)[0],
            phi.variance(var2, False)[0],
        )
        rows = [torch.autograd.grad(value.sum(), entries)[0] for value in values]
    return torch.stack(values, -1).detach(), torch.stack(rows, -2)


def product_covariance(phi: Activation, entries: Tensor, products: Tensor) -> Tensor:
    """Return the covariance (…, 3, 3) of φ(u)², φ(u) φ(v), φ(v)²."""
    var1, cov, var2 = entries.unbind(-1)
    square, cube = _monomial(phi, 0, 2), _monomial(phi, 0, 3)
    mixed = square.dual(cov, var1, var2, False)[0]
    left = mixed_dual(cube, phi, cov, var1, var2, False)[0]
    right = mixed_dual(phi, cube, cov, var1, var2, False)[0]
    fourth1, fourth2 = square.variance(var1, False)[0], square.variance(var2, False)[0]
    rows = ((fourth1, left, mixed), (left, mixed, right), (mixed, right, fourth2))
    second = torch.stack([torch.stack(row, -1) for row in rows], -2)
    return second - products[..., :, None] * products[..., None, :]


@dataclass(frozen=True)
class _Monomial:
    """The function u^p φ(u)^k, as a value: quadrature keeps what it finds out about equal functions."""

    phi: Activation
    p: int
    k: int

    def __call__(self, u: Tensor) -> Tensor:
        return u**self.p * self.phi(u) ** self.k


def _monomial(phi: Activation, p: int, k: int) -> Activation:
    # a monomial is smooth wherever φ is, but a search for kinks could miss those that powers smooth out
    return Quadrature(_Monomial(phi, p, k), getattr(phi, "kinks", None))
