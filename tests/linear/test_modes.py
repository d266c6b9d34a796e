"""A network in training mode is taken if that mode changes nothing, and refused if it does."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import net2gp as n2g
from architectures import Apply
from methods.laplace_cases import quietly
from net2gp.errors import NetworkError
from net2gp.linear import linearize
from net2gp.methods.training.train_many import AdamSettings, train_many

REFUSED = (
    r"training mode \(it does not do what it does in eval mode\): the network, .*"
    r"Call network\.eval\(\) first"
)


def x(num_points: int = 5) -> Tensor:
    return torch.randn(num_points, 3, 4, generator=torch.Generator().manual_seed(0)).double()


def between(function, **parts: nn.Module) -> nn.Module:
    """A network that applies `function(network, h)` between two layers."""
    return Apply(
        lambda self, x: self.head(function(self, self.inner(x))).flatten(1),
        inner=nn.Linear(4, 6), head=nn.Linear(6, 1), **parts,
    )  # fmt: skip


def layered(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 1), nn.Flatten())


def rare(self: nn.Module, h: Tensor) -> Tensor:
    return -h if self.training and float(torch.rand(())) < 1e-9 else h


def counting(self: nn.Module, h: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return h


def averaging(self: nn.Module, h: Tensor) -> Tensor:
    if self.training:
        self.average.lerp_(h.detach().mean(), 0.1)
    return h


def with_buffer() -> nn.Module:
    network = between(averaging)
    network.register_buffer("average", torch.zeros(()))
    return network


INDIFFERENT = {
    "plain": lambda: layered(nn.Tanh()),
    "dropout of rate zero": lambda: layered(nn.Dropout(0.0), nn.Dropout1d(0.0)),
    "instance norm": lambda: layered(nn.InstanceNorm1d(3)),
    "layer norm": lambda: layered(nn.LayerNorm(6)),
    "attention": lambda: layered(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)),
    "reads the mode": lambda: between(lambda self, h: F.dropout(h, 0.0, self.training)),
    "counts": lambda: between(counting),
}

DIFFERENT = {
    "instance norm": lambda: layered(nn.InstanceNorm1d(3, track_running_stats=True)),
    "randomized relu": lambda: layered(nn.RReLU()),
    "functional dropout": lambda: between(lambda self, h: F.dropout(h, 1e-6, self.training)),
    "recurrent dropout": lambda: between(
        lambda self, h: self.part(h)[0], part=nn.LSTM(6, 6, 2, dropout=0.5, batch_first=True)
    ),
    "attention dropout": lambda: between(
        lambda self, h: self.part(h, h, h)[0],
        part=nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True),
    ),
    "branches": lambda: between(lambda self, h: h.relu() if self.training else h.tanh()),
    "rare branches": lambda: between(rare),
    "python's generator": lambda: between(lambda m, h: h * (random.random() if m.training else 1)),
    "buffers": with_buffer,
    "spectral norm": lambda: layered(parametrizations.spectral_norm(nn.Linear(6, 6))),
}


def build(make) -> nn.Module:
    torch.manual_seed(1)
    return make().double().train()


@pytest.mark.parametrize("name", INDIFFERENT)
def test_a_mode_that_changes_nothing_is_taken(name: str) -> None:
    network = build(INDIFFERENT[name])
    linearized = linearize(network)
    found = linearized(x()), linearized.kernel()(x()), linearized.jacobian(x())
    assert network.training
    other = linearize(copy.deepcopy(network).eval())
    expected = other(x()), other.kernel()(x()), other.jacobian(x())
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_mode_that_changes_something_is_refused(name: str) -> None:
    network = build(DIFFERENT[name])
    state = copy.deepcopy(network.state_dict())
    for use in (
        linearize(network),
        linearize(network).jacobian,
        linearize(network).kernel(),
        lambda x: linearize(network).vjp(x, torch.ones(len(x), 3).double()),
    ):
        with pytest.raises(NetworkError, match=REFUSED):
            use(x())
    assert network.training
    for key, value in network.state_dict().items():
        torch.testing.assert_close(value, state[key], rtol=0, atol=0)
    network.eval()
    assert linearize(network).kernel()(x()).shape == (15, 15)


@pytest.mark.parametrize("layer", [nn.Dropout(0.1), nn.AlphaDropout(0.1), nn.BatchNorm1d(3)])
def test_layers_that_are_known_are_refused_before_there_are_points(layer: nn.Module) -> None:
    message = rf"training mode \({type(layer).__name__} would .*, … \(5 in all\)\. Call network"
    with pytest.raises(NetworkError, match=message):
        linearize(build(lambda: layered(layer)))


def test_neither_the_network_nor_a_generator_is_changed_by_the_look() -> None:
    network = build(DIFFERENT["python's generator"])
    network.calls, network.moving = 3, torch.zeros(2)

    def forward(self: nn.Module, h: Tensor) -> Tensor:
        self.calls += 1
        self.moving += 1
        self.last = h
        np.random.rand()  # noqa: NPY002
        return h + torch.rand(()) if self.training else h

    network.function = lambda self, x: self.head(forward(self, self.inner(x))).flatten(1)
    states = lambda: (
        torch.get_rng_state().tolist(),
        random.getstate(),
        repr(np.random.get_state(legacy=False)),  # noqa: NPY002
    )
    before = states()
    with pytest.raises(NetworkError, match=REFUSED):
        linearize(network)(x())
    assert states() == before
    assert network.calls == 3
    assert not hasattr(network, "last")
    assert torch.equal(network.moving, torch.zeros(2))


def test_the_mode_may_change_behind_the_linearization() -> None:
    """What was seen in one mode and at one shape is not taken for another."""
    network = build(lambda: between(lambda m, h: F.dropout(h, 0.5 * m.noisy, m.training)))
    network.noisy = 0.0
    linearized = linearize(network)
    kernel = linearized.kernel()
    expected = kernel(x())
    for step in (network.eval, network.train, network.eval):
        step()
        assert torch.equal(kernel(x()), expected)
    network.train()
    network.noisy = 1.0
    with pytest.raises(NetworkError, match=REFUSED):
        kernel(x())
    network.eval()
    assert torch.equal(kernel(x()), expected)


def test_the_look_is_taken_once_for_each_shape() -> None:
    network, count = build(INDIFFERENT["plain"]), 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    network.register_forward_pre_hook(note)
    linearized = linearize(network)
    for expected in (5, 6, 7):
        linearized(x())
        assert count == expected


def test_methods_take_a_network_in_training_mode() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    inputs = torch.randn(12, 2).double()
    data, likelihood = (inputs, inputs.sin().sum(1, keepdim=True)), n2g.Gaussian(0.1)
    for structure in (n2g.Full(), n2g.Kron(), n2g.Diagonal(), n2g.LastLayer()):
        laws = []
        for each in (network.eval(), network.train()):
            posterior = quietly(each, data, likelihood, prior_var=0.5, structure=structure)
            laws.append(posterior.predict(inputs))
        assert torch.equal(laws[0].mean, laws[1].mean)
        assert torch.equal(laws[0].variance, laws[1].variance)
    optimizer = AdamSettings(num_steps=3)
    many = [
        train_many([network.train(mode)] * 2, data, likelihood, optimizer=optimizer)
        for mode in (False, True)
    ]
    assert network.training
    assert not many[1][0].training
    assert torch.equal(many[0].objective, many[1].objective)
