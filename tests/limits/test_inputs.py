"""What may happen to the inputs before the first weights, and what a forward may say about shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from net2gp.errors import InputError, NetworkError
from net2gp.limits import UnsupportedLayer, infinite_width, nngp

x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
sequences = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Before(nn.Module):
    """Something done to the inputs, then a network."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, x):
        return self.layers(self.function(x))


def test_fixed_functions_of_each_input_are_part_of_the_data():
    plain = nngp(Before(lambda x: x))
    torch.testing.assert_close(nngp(Before(lambda x: 2 * x - 1))(x), plain(2 * x - 1))
    normalized = nn.functional.layer_norm(x, (3,))
    torch.testing.assert_close(
        nngp(nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 1)))(x),
        nngp(nn.Sequential(nn.Linear(3, 1)))(normalized),
    )


@pytest.mark.parametrize(
    "function",
    [lambda x: x - x.mean(0), lambda x: x + torch.randn_like(x)],
    ids=["couples the batch", "random"],
)
def test_functions_that_are_not_of_each_input_alone_are_refused(function):
    with pytest.raises(UnsupportedLayer, match="is random, or depends on the other inputs"):
        nngp(Before(function))(x)


def test_layers_before_the_first_weights_are_fixed():
    with pytest.raises(
        UnsupportedLayer, match=r"Dropout of the inputs in training .*network\.eval"
    ):
        nngp(nn.Sequential(nn.Dropout(), nn.Linear(3, 1)))(x)
    norm = nn.LayerNorm(3)
    nn.init.constant_(norm.weight, 3.0)
    with pytest.raises(UnsupportedLayer, match="scale or shift that is not 1 and 0"):
        nngp(nn.Sequential(norm, nn.Linear(3, 1)))(x)


def test_weights_that_are_functions_of_others_are_refused():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    with pytest.raises(UnsupportedLayer, match="Linear whose weights are a function of others"):
        nngp(nn.Sequential(layer, nn.ReLU(), nn.Linear(4, 1)))(x)


class Recurrent(nn.Module):
    def __init__(self, pick) -> None:
        super().__init__()
        self.pick = pick
        self.rnn = nn.RNN(3, 4, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        output, last = self.rnn(x)
        return self.head(self.pick(output, last))


def test_the_last_output_of_a_recurrent_layer_is_its_last_state():
    variances = {"weight_var": 1.4, "bias_var": 0.1}
    one = infinite_width(Recurrent(lambda output, last: output[:, -1]), **variances)
    other = infinite_width(Recurrent(lambda output, last: last[0]), **variances)
    for a, b in zip(one(sequences), other(sequences), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_the_mean_over_time_is_the_mean_of_all_pairs_of_times():
    variances = {"weight_var": 1.4, "bias_var": 0.1}
    mean = nngp(Recurrent(lambda output, last: output.mean(1)), **variances)(sequences)
    every = nngp(Recurrent(lambda output, last: output), **variances)(sequences)
    parts = every.reshape(4, 5, 4, 5).mean((1, 3))
    torch.testing.assert_close(mean, parts, rtol=1e-10, atol=0)


class Sized(nn.Module):
    """Uses sizes, and an argument that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x, mask=None, gain: float = 1.0):
        q = self.q(x)
        logits = q @ q.transpose(-2, -1) / q.size(-1) * gain
        if mask is not None:
            logits = logits + mask
        return self.head((logits.softmax(-1) @ self.v(x)).mean(1))


class Written(Sized):
    def forward(self, x):
        return super().forward(x)


def test_arguments_with_defaults_keep_them():
    torch.testing.assert_close(nngp(Sized())(sequences), nngp(Written())(sequences))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (x[0], "one number per point"),
        (x.long(), "cannot take inputs of shape .* dtype"),
        (x.to(torch.complex128), "must hold real numbers"),
    ],
    ids=["one axis", "integers", "complex"],
)
def test_inputs_of_other_kinds_are_refused(given, message):
    with pytest.raises(InputError, match=message):
        nngp(Before(lambda x: x))(given)


def test_tokens_lie_within_the_table():
    network = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 1))
    with pytest.raises(InputError, match=r"must lie in 0 … 4, but lie in 0 … 7"):
        nngp(network)(torch.tensor([[0, 7]]))


def test_wrappers_name_what_they_wrap():
    with pytest.raises(NetworkError, match=r"pass network\.module"):
        nngp(nn.DataParallel(nn.Linear(3, 1)))


def test_names_in_mappings_are_strings():
    with pytest.raises(InputError, match="has the key 0"):
        nngp(nn.Sequential(nn.Linear(3, 1)), weight_var={0: 1.0})
