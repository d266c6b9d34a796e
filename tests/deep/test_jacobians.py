"""Draws with their Jacobians, against difference quotients, closed forms and stored medians."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from scipy.stats import kstest
from torch import nn

import net2gp as n2g
from net2gp import RBF
from net2gp.deep import Layer, composed, draw_jacobians, log_slope
from net2gp.deep.jacobians import slope_covariance
from net2gp.errors import InputError, NotAvailable
from net2gp.kernels import BaseKernel, Linear, Periodic
from net2gp.limits import nngp, ntk


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def mlp(activation: nn.Module, inputs: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), activation, nn.Linear(8, 1))


KERNELS = {
    "RBF": RBF(torch.tensor([0.7, 1.3], dtype=torch.float64), 1.5),
    "Periodic": Periodic(4.0, 0.8, 1.2),
    "Linear": Linear(0.7, 0.3),
    "sum and product": 2.0 * RBF() * Linear() + Periodic(3.0),
    "composed": composed(RBF(0.7), RBF(0.8), width=2),
    "NNGP of ReLU": nngp(mlp(nn.ReLU()), weight_var=2.0, bias_var=0.1),
    "NNGP of GELU": nngp(mlp(nn.GELU()), weight_var=2.0, bias_var=0.1),
    "NTK of GELU": ntk(mlp(nn.GELU())),
}


def by_differences(kernel, h: torch.Tensor, step: float) -> torch.Tensor:
    """The covariance of values and central differences at N points (N, D)."""
    N, D = h.shape
    moves = [torch.zeros(D).to(h)]
    moves += [sign * step * torch.eye(D).to(h)[d] for d in range(D) for sign in (1, -1)]
    points = torch.cat([h + move for move in moves])
    weights = torch.zeros(1 + D, 1 + 2 * D).to(h)
    weights[0, 0] = 1.0
    for d in range(D):
        weights[1 + d, 1 + 2 * d], weights[1 + d, 2 + 2 * d] = 0.5 / step, -0.5 / step
    W = torch.kron(weights, torch.eye(N).to(h))
    return W @ kernel(points, points.clone()) @ W.T


@pytest.mark.parametrize("name", KERNELS)
def test_the_law_of_values_and_slopes_is_that_of_differences(name):
    kernel, h = KERNELS[name].precise(), normal(2, 3, 2, seed=1)
    found = slope_covariance(kernel, h)
    expected = torch.stack([by_differences(kernel, one, 1e-3) for one in h])
    # ReLU has a kink, so that differences converge only as the step
    atol = 2e-3 if name == "NNGP of ReLU" else 1e-4
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=atol)
    torch.testing.assert_close(found, found.mT, rtol=0, atol=0)
    assert torch.linalg.eigvalsh(found).min() > -1e-9


def test_slopes_of_a_squared_exponential_layer_have_their_closed_form():
    found = slope_covariance(RBF(0.7, 1.9), normal(1, 1, 3))[0]
    torch.testing.assert_close(found, torch.diag(torch.tensor([1.9, *[1.9 / 0.49] * 3]).to(found)))


def test_jacobians_are_derivatives_of_the_drawn_functions():
    """Values at two near points, drawn together with the Jacobian at both."""
    step = 1e-3
    x = torch.tensor([[0.3, -0.2], [0.3 + step, -0.2]], dtype=torch.float64)
    for connected in (False, True):
        draws = draw_jacobians(
            [Layer(RBF(), 3), Layer(RBF(), 2)],
            x,
            200,
            input_connected=connected,
            generator=generator(),
        )
        values, J = draws.values[-1], draws.jacobian
        assert J.shape == (200, 2, 2, 2)
        quotient = (values[:, 1] - values[:, 0]) / step
        middle = J[:, :, :, 0].mean(1)
        assert (quotient - middle).abs().quantile(0.95) < 1e-4


def test_medians_of_the_spectrum_over_depth():
    """log10 σ₁/σ₂ in five dimensions is .141 / .240 / .823 / 1.472 at 1 / 2 / 10 / 20 layers."""
    draws = draw_jacobians([Layer(RBF(), 5)] * 20, torch.zeros(1, 5), 4000, generator=generator())
    for depth, median in ((1, 0.141), (2, 0.240), (10, 0.823), (20, 1.472)):
        logs = draws.log_singular_values(depth)[:, 0]
        ratio = (logs[:, 0] - logs[:, 1]) / math.log(10)
        error = 1.2533 * ratio.std() / len(ratio) ** 0.5
        assert abs(ratio.median() - median) < 0.02 + 2 * error


@pytest.mark.parametrize(("variance", "low", "high"), [(1.0, 0.0, 0.3), (10.0, 1.0, 2.0)])
def test_inputs_keep_the_spectrum_together_where_layers_contract(variance, low, high):
    """The length scale is the root of the number of columns, so σ²/ℓ² is a tenth of the variance."""
    layers = [Layer(RBF(5**0.5), 5), *[Layer(RBF(10**0.5, variance), 5)] * 19]
    draws = draw_jacobians(
        layers, torch.zeros(1, 5), 800, input_connected=True, generator=generator()
    )
    logs = draws.log_singular_values()[:, 0] / math.log(10)
    assert low < (logs[:, 0] - logs[:, 1]).median() <= high


def test_slopes_of_many_layers_are_log_normal():
    """One output: the log slope is a sum of independent terms of known mean and variance."""
    layer, depth = RBF(0.7, 1.9), 40
    draws = draw_jacobians([layer] * depth, torch.zeros(1, 1), 4000, generator=generator())
    law = log_slope(layer)
    logs = draws.log_norms[-1][:, 0]
    scaled = (logs - depth * law.mean) / (depth * law.variance).sqrt()
    assert abs(scaled.mean()) < 4 / len(logs) ** 0.5
    assert abs(scaled.var() - 1) < 4 * (2 / len(logs)) ** 0.5 * 1.3
    one = draws.log_norms[0][:, 0].exp() * 0.7 / 1.9**0.5
    assert kstest(one.numpy(), "halfnorm").pvalue > 1e-3
    assert one.min() > 0


def test_the_spectrum_of_a_very_deep_process_does_not_underflow():
    draws = draw_jacobians([RBF(100.0)] * 200, torch.zeros(1, 1), 2, generator=generator())
    logs = draws.log_singular_values()
    assert torch.isfinite(logs).all()
    assert (logs < math.log(1e-300)).all()
    assert (draws.jacobian == 0).all()


@dataclass(frozen=True)
class Clamped(BaseKernel):
    """A squared exponential whose clamp hides its second derivatives from automatic differentiation."""

    def __call__(self, x, y=None):
        y = x if y is None else y
        return torch.exp(-0.5 * (x[:, None] - y).abs().clamp(min=1e-12).square().sum(-1))

    def diag(self, x):
        return torch.ones_like(x[:, 0])


@dataclass(frozen=True)
class Rough(BaseKernel):
    """Brownian paths on a line have no slope."""

    def __call__(self, x, y=None):
        return torch.exp(-(x[:, None] - (x if y is None else y)).abs().sum(-1))

    def diag(self, x):
        return torch.ones_like(x[:, 0])


@pytest.mark.parametrize("kernel", [Clamped(), Rough(), nngp(mlp(nn.Tanh())), ntk(mlp(nn.ReLU()))])
def test_kernels_without_second_derivatives_are_refused(kernel):
    with pytest.raises(NotAvailable, match=r"the kernel of layer 1 does not have here.*n2g\.RBF"):
        draw_jacobians([kernel], normal(1, 2))


def test_inputs_without_a_jacobian_are_refused():
    coupled = n2g.linearize(nn.Linear(2, 3).double().eval()).kernel()
    with pytest.raises(InputError, match=r"layer 1 couples them.*nngp\(network\)"):
        draw_jacobians([Layer(coupled, 3)], normal(1, 2))
    with pytest.raises(InputError, match=r"floating tensor of shape \(N, D\)"):
        draw_jacobians([RBF()], torch.zeros(3))
    with pytest.raises(InputError, match="only 1 layers were drawn"):
        draw_jacobians([RBF()], torch.zeros(1, 1)).log_singular_values(2)
