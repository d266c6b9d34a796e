"""Laws of functions written out in forward: what is a function of one signal is one activation."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import net2gp as n2g
from net2gp.limits import UnsupportedLayer
from net2gp.limits.modules.pointwise import Pointwise

WRITTEN = {
    "quick gelu": lambda u: u * torch.sigmoid(1.702 * u),
    "exp(-u u)": lambda u: torch.exp(-u * u),
    "relu of a sum": lambda u: F.relu(torch.tanh(u) + 0.5 * u - 0.1),
    "where": lambda u: torch.where(u > 0, u, 0.1 * torch.expm1(u)),
    "where with a number": lambda u: torch.where(u > 0.5, u, 0.0),
    "u (u > 0)": lambda u: u * (u > 0),
    "u (u > 0).float()": lambda u: u * (u > 0).float(),
    "a band": lambda u: u * ((u > -1) & (u < 1)),
    "maximum": lambda u: torch.maximum(u, torch.tensor(0.0)),
    "maximum of two": lambda u: torch.maximum(u, 0.3 * torch.tanh(u)),
    "rational": lambda u: u**2 / (1 + u**2),
    "one over": lambda u: 1 / (1 + u * u),
    "softsign": lambda u: u / (1 + u.abs()),
    "tanh gelu": lambda u: (
        0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
    ),
    "mish": lambda u: u * torch.tanh(F.softplus(u)),
    "masked": lambda u: u.masked_fill(u < 0, 0.0),
}


class Own(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, u):
        return self.function(u)


def kernels(activation, x):
    layers = nn.Linear(5, 8), activation, nn.Linear(8, 8), activation, nn.Linear(8, 1)
    return n2g.infinite_width(nn.Sequential(*layers), weight_var=1.5, bias_var=0.1)(x)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_function_written_out_is_the_pointwise_function(name):
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, wanted = kernels(Own(WRITTEN[name]), x), kernels(Pointwise(WRITTEN[name]), x)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


def test_functions_of_two_signals_are_refused_and_told_of_pointwise():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.o = nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(8, 1)

        def forward(self, x):
            return self.o(torch.where(self.a(x) > 0, self.a(x), self.b(x)))

    with pytest.raises(UnsupportedLayer, match=r"where.*Pointwise\(function\)"):
        n2g.nngp(Two())(torch.randn(3, 5))


def test_coupled_outputs_do_not_depend_on_earlier_inputs():
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randn(5, 6, 4, generator=generator, dtype=torch.float64)
    x, y = sequences[:, 0], sequences[:, 1, :3]
    kernel = n2g.nngp(network)
    kernel(sequences)
    assert kernel.outputs(x) is None
    assert kernel.outputs(sequences) == 18
    assert kernel.outputs(x) is None
    assert kernel.blocks(x).shape == (5, 1, 1)
    seen = n2g.condition(kernel, (x, y), n2g.Gaussian(0.1)).predict(x)
    fresh = n2g.condition(n2g.nngp(network), (x, y), n2g.Gaussian(0.1)).predict(x)
    torch.testing.assert_close(seen.mean, fresh.mean, rtol=0, atol=0)
    targets = sequences[:, :, :1].expand(-1, -1, 3).flatten(1)
    flat = n2g.condition(kernel, (sequences, targets), n2g.Gaussian(0.1)).predict(sequences)
    assert flat.mean.shape == (5, 18)


def test_a_flow_and_an_aggregate_do_not_depend_on_earlier_inputs():
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randn(5, 6, 4, generator=generator, dtype=torch.float64)
    x, y = sequences[:, 0], sequences[:, 1, :2]

    def flow(limit):
        return n2g.gradient_flow(limit, (x, y), learning_rate=1.0).at(2.0, x).mean

    def aggregate(limit):
        return n2g.explain.aggregate(limit.ntk, sequences)

    seen = n2g.infinite_width(network)
    aggregate(seen), flow(seen)
    for ask in (flow, aggregate):
        fresh = n2g.infinite_width(network)
        torch.testing.assert_close(ask(seen), ask(fresh), rtol=1e-12, atol=0)
