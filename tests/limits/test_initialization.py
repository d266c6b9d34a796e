"""Laws of reading the variances from how a module was initialized."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from net2gp.errors import InputError
from net2gp.limits.initialization import as_built, slots
from net2gp.limits.kernels import infinite_width

SCHEMES = {
    "kaiming_normal": (nn.init.kaiming_normal_, {"nonlinearity": "relu"}, lambda i, o: 2.0),
    "kaiming_uniform": (nn.init.kaiming_uniform_, {"nonlinearity": "relu"}, lambda i, o: 2.0),
    "kaiming_fan_out": (
        nn.init.kaiming_normal_,
        {"nonlinearity": "relu", "mode": "fan_out"},
        lambda i, o: 2.0 * i / o,
    ),
    "lecun_normal": (nn.init.kaiming_normal_, {"nonlinearity": "linear"}, lambda i, o: 1.0),
    "lecun_uniform": (nn.init.kaiming_uniform_, {"nonlinearity": "linear"}, lambda i, o: 1.0),
    "xavier_normal": (nn.init.xavier_normal_, {}, lambda i, o: 2.0 * i / (i + o)),
    "xavier_uniform": (nn.init.xavier_uniform_, {}, lambda i, o: 2.0 * i / (i + o)),
    "orthogonal": (nn.init.orthogonal_, {}, lambda i, o: i / max(i, o)),
    "orthogonal_gain": (nn.init.orthogonal_, {"gain": 2**0.5}, lambda i, o: 2 * i / max(i, o)),
    "transformer": (nn.init.trunc_normal_, {"std": 0.02}, lambda i, o: 4e-4 * i),
    "standard_normal": (nn.init.normal_, {}, lambda i, o: 1.0 * i),
    "zeros": (nn.init.zeros_, {}, lambda i, o: 0.0),
}


@pytest.fixture(autouse=True)
def seed():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(30, 80), nn.ReLU(), nn.Linear(80, 60), nn.ReLU(), nn.Linear(60, 5)
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_recognized(scheme):
    draw, options, expected = SCHEMES[scheme]
    network = mlp()
    for layer in network[::2]:
        draw(layer.weight, **options)
        nn.init.zeros_(layer.bias)
    weight_var, bias_var = as_built(network)
    for name, layer in (("0", network[0]), ("2", network[2]), ("4", network[4])):
        wanted = expected(layer.in_features, layer.out_features)
        assert weight_var[name] == pytest.approx(wanted, rel=1e-6)
        assert bias_var[name] == 0.0


@pytest.mark.parametrize("number", range(20))
def test_pytorch_defaults_are_recognized_in_small_layers_too(number):
    torch.manual_seed(number)
    network = nn.Sequential(
        nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)
    )
    weight_var, bias_var = as_built(network)
    assert list(weight_var.values()) == pytest.approx([1 / 3] * 3)
    assert list(bias_var.values()) == pytest.approx([1 / 3, 1 / 150, 1 / 150])


def test_convolutions_count_their_kernels():
    network = nn.Sequential(
        nn.Conv2d(3, 16, 5),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, groups=2),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 2),
        nn.ReLU(),
        nn.Conv2d(8, 8, 1, bias=False),
    )
    weight_var, bias_var = as_built(network)
    # torch draws the weights of transposed convolutions by their number of outputs
    assert weight_var == pytest.approx({"0": 1 / 3, "2": 1 / 3, "4": 16 / 8 / 3, "6": 1 / 3})
    expected = {"0": 1 / (3 * 75), "2": 1 / (3 * 72), "4": 1 / (3 * 32), "6": 0.0}
    assert bias_var == pytest.approx(expected)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32, padding_idx=0)
        self.position = nn.Parameter(0.02 * torch.randn(1, 7, 32))
        self.norm, self.rnn = nn.LayerNorm(32), nn.RNN(32, 40, batch_first=True)
        self.head = nn.Linear(40, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.norm(self.embedding(tokens) + self.position))[1][0])


def test_embeddings_positions_and_recurrent_layers_are_recognized():
    weight_var, bias_var = as_built(Encoder())
    assert weight_var["embedding"] == 1.0
    assert weight_var["position"] == pytest.approx(4e-4)
    assert weight_var["rnn.weight_ih_l0"] == pytest.approx(32 / (3 * 40))
    assert weight_var["rnn.weight_hh_l0"] == pytest.approx(1 / 3)
    assert bias_var["rnn.weight_ih_l0"] == pytest.approx(1 / (3 * 40))


def test_the_result_is_what_infinite_width_takes():
    network, x = mlp().double(), torch.randn(4, 30, dtype=torch.float64)
    weight_var, bias_var = as_built(network)
    expected = infinite_width(network, weight_var=1 / 3, bias_var=bias_var).nngp(x)
    found = infinite_width(network, weight_var=weight_var, bias_var=bias_var).nngp(x)
    torch.testing.assert_close(found, expected)


def test_a_trained_network_is_refused_by_the_name_of_its_layer():
    network, x = mlp(), torch.randn(64, 30)
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(100):
        optimizer.zero_grad()
        (network(x) - x[:, :5]).square().mean().backward()
        optimizer.step()
    with pytest.raises(
        InputError, match=r"how '\d\.\w+' .* fits no known scheme \(was the network trained"
    ):
        as_built(network)


def test_a_scaled_layer_is_refused():
    network = mlp()
    with torch.no_grad():
        network[2].weight.mul_(1.2)
    with pytest.raises(
        InputError, match=r"'2\.weight'.*variance · fan_in is 0\.4.*PyTorch's default 0\.333"
    ):
        as_built(network)


def test_what_fits_several_schemes_is_refused():
    network = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        network[0].weight.copy_(torch.tensor([[0.3], [-0.4]]))
        network[2].weight.copy_(torch.tensor([[0.2, -0.5]]))
    with pytest.raises(InputError, match="fits several schemes"):
        as_built(network)


def test_a_constant_bias_is_refused():
    network = mlp()
    nn.init.constant_(network[0].bias, 0.7)
    with pytest.raises(InputError, match=r"'0\.bias'.*its variance is 0\.49.*bias_var="):
        as_built(network)


def test_slots_name_every_parameter_once():
    network = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.LayerNorm(3))
    network[2].weight = network[0].weight
    names = [slot.name for slot in slots(network)]
    assert names == [name for name, _ in network.named_parameters()]
    assert [slot.name for slot in slots(network, shared=True)].count("2.weight") == 1
    assert {slot.name for slot in slots(network) if slot.kind == "gain"} == {"3.weight", "3.bias"}


def test_fan_ins_are_numbers_of_terms():
    layers = [
        (nn.Conv1d(4, 6, 3, groups=2), 6),
        (nn.ConvTranspose2d(4, 6, (2, 3)), 24),
        (nn.Embedding(9, 4), 1),
        (nn.Bilinear(3, 4, 5), 12),
    ]
    for layer, expected in layers:
        assert next(slots(layer)).fan_in == expected
    assert math.prod(nn.Conv1d(4, 6, 3, groups=2).weight.shape[1:]) == 6


class Backwards(nn.Module):
    """Calls its layers in another order than it holds them, with weights that two share."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.second, self.first = nn.Linear(40, 2), nn.Linear(40, 40), nn.Linear(40, 40)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def test_shared_weights_have_one_name_and_one_variance():
    weight_var, bias_var = as_built(Backwards())
    assert weight_var == pytest.approx({"first": 1 / 3, "last": 1 / 3})
    assert bias_var == pytest.approx({"first": 1 / 120, "last": 1 / 120})
