"""Laws of finite networks of the same architecture."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limits.random_architectures import Attention, ClassToken, Kind, Positions, architecture
from net2gp.errors import InputError, NetworkError
from net2gp.limits.kernels import infinite_width
from net2gp.limits.modules.layers import LocallyConnected2d
from net2gp.limits.sampling.channels import channels_of, widened
from net2gp.limits.sampling.twin import twin
from net2gp.linear import linearize


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def mlp() -> nn.Sequential:
    layers = (nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("seed", range(14))
def test_hidden_layers_are_wide_and_inputs_and_outputs_stay(seed):
    case = architecture(seed)
    wide = twin(case.network, 13, parameterization="standard", generator=seeded())
    widths = channels_of(case.network).widths()
    factor = max(-(-13 // width) for width in widths.values())
    assert {n: w * factor for n, w in widths.items()} == channels_of(wide).widths()
    assert wide(case.x).shape == case.network(case.x).shape
    assert bool(wide(case.x).isfinite().all())


def test_the_network_stays_as_it_was():
    network = mlp()
    before = copy.deepcopy(network.state_dict())
    twin(network, 50)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert widened(network, 4)[0].weight is not network[0].weight


def test_parameters_of_the_ntk_parameterization_are_standard_normal():
    wide = twin(mlp(), 400, weight_var=2.0, bias_var=0.3, generator=seeded())
    for value in map(Tensor.detach, wide.parameters()):
        assert abs(float(value.mean())) < 5 * value.numel() ** -0.5
        assert abs(float(value.square().mean()) - 1) < 5 * (2 / value.numel()) ** 0.5
    weight, bias = wide[2].weight.detach(), wide[2].bias.detach()
    assert float(weight.square().mean()) * wide[2].in_features == pytest.approx(2.0, rel=0.02)
    assert float(bias.square().mean()) == pytest.approx(0.3, rel=0.3)


def test_parameters_of_the_standard_parameterization_have_the_variances():
    variances = {"2": 3.0, "*": 1.0}
    wide = twin(mlp(), 400, weight_var=variances, parameterization="standard", generator=seeded())
    assert isinstance(wide[2].weight, nn.Parameter)
    assert float(wide[2].weight.detach().square().mean()) * wide[2].in_features == pytest.approx(
        3.0, rel=0.02
    )
    assert not bool(wide[2].bias.any())


def test_the_same_generator_gives_the_same_twin():
    one, other = (twin(mlp(), 20, generator=seeded(5)) for _ in range(2))
    x = torch.randn(2, 3, dtype=torch.float64)
    assert torch.equal(one(x), other(x))


@pytest.mark.parametrize("parameterization", ["ntk", "standard"])
def test_the_tangent_kernel_of_a_wide_twin_is_near_the_limit(parameterization):
    network = mlp()
    if (
        parameterization == "standard"
    ):  # whose limit grows with the width: that of the module itself counts
        layers = (nn.Linear(3, 400), nn.ReLU(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 2))
        network = nn.Sequential(*layers).double()
    settings = {"weight_var": 1.5, "bias_var": 0.1, "parameterization": parameterization}
    x = torch.randn(4, 3, dtype=torch.float64, generator=seeded(1))
    wide = twin(network, 400, generator=seeded(), **settings)
    found = linearize(wide.eval()).kernel()(x).reshape(4, 2, 4, 2).diagonal(dim1=1, dim2=3).mean(-1)
    expected = infinite_width(network, **settings).ntk(x)
    assert float((found - expected).norm() / expected.norm()) < 0.1


def test_norms_are_gains_of_one_that_do_not_train():
    network = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1))
    nn.init.normal_(network[1].weight)
    wide = twin(network, 10)
    assert torch.equal(wide[1].weight, torch.ones(12))
    assert not wide[1].weight.requires_grad
    assert not wide[1].bias.requires_grad


def test_shared_weights_stay_shared():
    network = nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1)
    )
    network[4].weight = network[2].weight
    wide = twin(network, 9)
    one, other = (wide[n].parametrizations.weight.original for n in (2, 4))
    assert one is other
    assert one.shape == (12, 12)


class TiedHead(nn.Module):
    """Its output layer has the weights of its embedding, which have another fan-in."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.mixing = nn.Linear(4, 4)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mixing(self.embedding(x).mean(1))))


def test_tied_embeddings_have_two_factors_or_are_refused():
    wide = twin(TiedHead(), 64, generator=seeded())
    assert torch.allclose(wide.head.weight * 8, wide.embedding.weight)
    with pytest.raises(NetworkError, match="fan-ins differ"):
        twin(TiedHead(), 64, parameterization="standard")


def test_depthwise_convolutions_grow_with_their_groups_and_others_keep_them():
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Conv2d(4, 4, 1, groups=2),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    wide = widened(network, 12)
    assert (wide[2].groups, wide[3].groups, wide[4].num_groups) == (12, 2, 2)
    assert wide[2].weight.shape == (12, 1, 3, 3)
    assert wide[3].weight.shape == (12, 6, 1, 1)
    assert wide[4].num_channels == 12
    assert wide(torch.randn(1, 2, 4, 4)).shape == (1, 3)


def test_local_and_transposed_convolutions_grow():
    network = nn.Sequential(
        nn.ConvTranspose2d(2, 4, 2, stride=2),
        nn.ReLU(),
        LocallyConnected2d((4, 4, 4), 6, 3),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 1, 2),
    )
    wide = twin(network, 8)
    assert wide[0].weight.shape == (2, 8, 2, 2)
    assert wide[2].weight.shape == (12, 8, 3, 3, 2, 2)
    assert wide[4].weight.shape == (12, 1, 2, 2)
    assert wide(torch.randn(1, 2, 2, 2)).shape == network(torch.randn(1, 2, 2, 2)).shape


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers_grow(kind):
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kind(3, 4, num_layers=2, batch_first=True)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    wide = widened(Reader(), 10)
    assert wide.rnn.hidden_size == 12
    for value in wide.parameters():
        nn.init.normal_(value)
    assert wide(torch.randn(2, 5, 3)).shape == (2, 2)


def test_positions_and_class_tokens_grow_along_their_channels():
    network = nn.Sequential(
        nn.Embedding(7, 4),
        ClassToken(4),
        Positions(6, 4),
        Attention(Kind(random.Random(0), 0), 4),
        nn.Flatten(),
        nn.Linear(24, 2),
    )
    wide = twin(network, 12)
    assert wide[1].token.shape == (1, 1, 12)
    assert wide[2].table.shape == (1, 6, 12)
    assert wide(torch.randint(7, (3, 5))).shape == (3, 2)


class FixedScale(nn.Module):
    """Divides logits by a number of its own, not by the width of q."""

    def __init__(self, view: int = -1) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(3, 4) for _ in range(3))
        self.head, self.view = nn.Linear(4, 1), view

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).view(x.shape[0], x.shape[1], self.view) for f in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(1, 2)
        scores = scores / q.size(-1) if self.view == 4 else scores / 4
        return self.head((F.softmax(scores, -1) @ v).mean(1))


def test_a_scale_that_does_not_follow_the_width_is_refused():
    with pytest.raises(
        NetworkError, match=r"multiplied with a number \('truediv'\).*q\.size\(-1\)"
    ):
        twin(FixedScale(), 64)
    assert twin(FixedScale(), 4)(torch.randn(2, 5, 3)).shape == (2, 1)


def test_a_shape_that_does_not_follow_the_width_is_refused_by_an_example():
    with pytest.raises(NetworkError, match="Write -1 in view"):
        twin(FixedScale(view=4), 64, example=torch.randn(2, 5, 3))


class ScaledByWidth(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.one, self.two, self.factor = nn.Linear(3, 4), nn.Linear(4, 1), factor

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.one(x))
        return self.two(self.factor * h.shape[-1] * h if self.factor else h)


def test_an_example_finds_a_limit_that_depends_on_the_width():
    x = torch.randn(2, 3)
    twin(ScaledByWidth(0.0), 64, example=x)
    with pytest.raises(NetworkError, match="has another limit"):
        twin(ScaledByWidth(0.25), 64, example=x)


class Skips(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.two, self.how = nn.Linear(3, 3), nn.Linear(3, 3), how
        self.three = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "added":
            return self.two(torch.relu(self.one(x) + x))
        if self.how == "concatenated":
            return self.three(torch.cat([self.one(x), x], 1))
        h = self.one(x)
        return h + self.two(torch.relu(h))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("added", "'one' cannot grow, since they are added to raw inputs, but 'two' sums over"),
        ("concatenated", "'three' sees both raw inputs and hidden channels"),
        ("returned", "'one' cannot grow, since they are part of the output, but 'two' sums over"),
    ],
)
def test_channels_that_cannot_grow_are_named(how, message):
    with pytest.raises(NetworkError, match=message):
        twin(Skips(how), 10)


def test_layers_without_a_known_width_are_named():
    network = nn.Sequential(nn.Linear(2, 4), nn.PReLU(4), nn.Linear(4, 1))
    with pytest.raises(NetworkError, match=r"another width of PReLU \('1'\)"):
        twin(network, 10)


def test_the_width_must_be_positive():
    with pytest.raises(InputError, match="width must be a positive integer, but 0"):
        twin(mlp(), 0)
