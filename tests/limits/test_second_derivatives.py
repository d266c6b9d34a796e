"""Second derivatives of limits in both inputs by every mode of torch, or an error where there are none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp

import net2gp as n2g
from net2gp.errors import NotAvailable
from net2gp.limits.modules import Erf
from net2gp.linalg import symmetric_root

ZERO, STEP = torch.zeros((), dtype=torch.float64), 1e-3
ONE = torch.ones_like(ZERO)
Surface = Callable[[Tensor, Tensor], Tensor]


def surface(activation: nn.Module, kind: str, *, equal: bool) -> Surface:
    """k(x + s·u, y + t·v) as a function of s and t."""
    network = nn.Sequential(
        nn.Linear(2, 8), activation, nn.Linear(8, 8), activation, nn.Linear(8, 1)
    )
    kernel = getattr(n2g, kind)(network.double())
    x = torch.tensor([[0.7, -0.2]], dtype=torch.float64)
    y = x if equal else torch.tensor([[0.1, 0.9]], dtype=torch.float64)
    u, v = (torch.tensor([w], dtype=torch.float64) for w in ([0.3, 1.0], [1.0, -0.4]))
    return lambda s, t: kernel(x + s * u, y + t * v)[0, 0]


def reverse(f: Surface) -> Tensor:
    s, t = ZERO.clone().requires_grad_(), ZERO.clone().requires_grad_()
    (slope,) = torch.autograd.grad(f(s, t), s, create_graph=True)
    return torch.autograd.grad(slope, t)[0]


def forward(f: Surface) -> Tensor:
    inner = lambda t: jvp(lambda s: f(s, t), (ZERO,), (ONE,))[1]
    return jvp(inner, (ZERO,), (ONE,))[1]


def mixed(f: Surface) -> Tensor:
    return jvp(lambda t: grad(lambda s: f(s, t))(ZERO), (ZERO,), (ONE,))[1]


@pytest.mark.parametrize("mode", [reverse, forward, mixed])
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(
    ("activation", "kind"),
    [(Erf(), "nngp"), (Erf(), "ntk"), (nn.GELU(), "ntk"), (nn.ReLU(), "nngp")],
)
def test_second_derivatives_are_differences_of_values(activation, kind, equal, mode) -> None:
    f = surface(activation, kind, equal=equal)
    plus, minus = ZERO + STEP, ZERO - STEP
    corners = f(plus, plus) - f(plus, minus) - f(minus, plus) + f(minus, minus)
    torch.testing.assert_close(mode(f), corners / (4 * STEP**2), rtol=1e-3, atol=1e-5)


def test_an_integrated_limit_says_that_it_has_first_derivatives_only() -> None:
    f = surface(nn.Tanh(), "nngp", equal=False)
    with pytest.raises(NotAvailable, match=r"integrated numerically has first derivatives only"):
        reverse(f)


def test_a_symmetric_root_says_that_it_has_first_derivatives_only() -> None:
    A = torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64)).requires_grad_()
    (slope,) = torch.autograd.grad(symmetric_root(A).sum(), A, create_graph=True)
    torch.testing.assert_close(slope.diagonal(), torch.tensor([0.5, 0.25], dtype=torch.float64))
    with pytest.raises(NotAvailable, match=r"a symmetric root has first derivatives only"):
        slope.sum().backward()
