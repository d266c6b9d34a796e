"""What cannot have a limit, or cannot be an input, is refused with words that say what to type instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import net2gp as n2g
from net2gp.errors import InputError, NetworkError
from net2gp.limits import UnsupportedLayer, infinite_width, nngp, ntk

WAY_OUT = r"@net2gp\.limits\.rule\.register, or use monte_carlo_kernel\(network\)"

x = torch.linspace(-1, 1, 12).reshape(4, 3)
sequences = torch.linspace(-1, 1, 30).reshape(2, 5, 3)
images = torch.linspace(-1, 1, 216).reshape(2, 3, 6, 6)


class Written(nn.Module):
    """A module with these parts and this forward."""

    def __init__(self, forward: Callable, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.written = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.written(self, x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))


def with_layer(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), *layers)


def attention(scale: float, weights: Callable[[Tensor], Tensor]) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        return self.head((weights(q @ k.transpose(1, 2) * scale) @ v).mean(1))

    parts = {name: nn.Linear(3, 8) for name in ("query", "key", "value")}
    return Written(forward, **parts, head=nn.Linear(8, 1))


def recurrent(layer: nn.Module) -> nn.Module:
    forward = lambda self, x: self.head(self.layer(self.embed(x))[0].mean(1))
    return Written(forward, embed=nn.Linear(3, 4), layer=layer, head=nn.Linear(8, 1))


CONVOLUTION, ENCODER = nn.Conv2d(3, 4, 3), nn.TransformerEncoderLayer(8, 2, batch_first=True)

WITHOUT_LIMIT: dict[str, tuple[nn.Module, Tensor, str]] = {
    "max pooling": (
        nn.Sequential(CONVOLUTION, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 1)),
        images,
        r"MaxPool2d \('2'\)\. The maximum of Gaussians .* average pooling is",
    ),
    "the maximum of positions": (
        Written(lambda self, x: self.body(x).amax(1), body=nn.Linear(3, 8)),
        sequences,
        r"the function amax \('amax'\)",
    ),
    "batch norm": (
        with_layer(nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)),
        x,
        r"BatchNorm1d \('1'\)\. It couples the inputs of a batch; LayerNorm and GroupNorm have",
    ),
    "batch norm in eval mode": (
        with_layer(nn.BatchNorm1d(8), nn.Linear(8, 1)).eval(),
        x,
        r"BatchNorm1d \('1'\)\. In eval mode it has fixed statistics of one training",
    ),
    "batch norm of the data": (
        nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)),
        x,
        r"BatchNorm1d of the inputs in training \('0'\)\. Call network\.eval",
    ),
    "instance norm": (
        nn.Sequential(CONVOLUTION, nn.InstanceNorm2d(4), nn.Flatten(), nn.Linear(64, 1)),
        images,
        r"InstanceNorm2d \('1'\)\. Its statistics are over finitely many positions",
    ),
    "softmax of the outputs": (
        with_layer(nn.ReLU(), nn.Linear(8, 2), nn.Softmax(-1)),
        x,
        r"Softmax \('3'\)\. It couples the channels\. Leave it out",
    ),
    "softmax as a function": (
        Written(lambda self, x: F.softmax(self.body(x), dim=-1), body=nn.Linear(3, 2)),
        x,
        r"the function softmax \('softmax'\)\. It couples the channels",
    ),
    "multi-head attention": (
        Written(
            lambda self, x: self.layer(*[self.embed(x)] * 3)[0],
            embed=nn.Linear(3, 8),
            layer=nn.MultiheadAttention(8, 2, batch_first=True),
        ),
        sequences,
        r"MultiheadAttention \('layer'\)\. Softmax of logits scaled by 1/√d .*scale=1/d",
    ),
    "a transformer layer": (
        nn.Sequential(nn.Linear(3, 8), ENCODER, nn.Linear(8, 1)),
        sequences,
        r"TransformerEncoderLayer \('1'\)\. Softmax of logits scaled by 1/√d .*scale=1/d",
    ),
    "an LSTM": (
        recurrent(nn.LSTM(4, 8, batch_first=True)),
        sequences,
        r"LSTM \('layer'\)\. Products of gates .* nn\.RNN has a rule",
    ),
    "a GRU": (
        recurrent(nn.GRU(4, 8, batch_first=True)),
        sequences,
        r"GRU \('layer'\)\. Products of gates .* nn\.RNN has a rule",
    ),
    "Linear over positions": (
        Written(
            lambda self, x: self.head(self.mix(self.body(x).transpose(1, 2)).transpose(1, 2)),
            body=nn.Linear(3, 8),
            mix=nn.Linear(5, 5),
            head=nn.Linear(8, 1),
        ),
        sequences,
        r"Linear over positions, which are finitely many, \('mix'\)",
    ),
    "a product with a parameter": (
        Written(
            lambda self, x: self.head(self.body(x) * self.gain),
            body=nn.Linear(3, 8),
            gain=nn.Parameter(torch.ones(8)),
            head=nn.Linear(8, 1),
        ),
        x,
        r"a product with the parameter 'gain' \('mul'\)\. A scale that is held fixed may be a buffer",
    ),
    "weights used by a function": (
        Written(lambda self, x: F.linear(x, self.w), w=nn.Parameter(torch.ones(2, 3))),
        x,
        r"the function linear \('linear'\)\. Use the module of that name, e\.g\. nn\.Linear",
    ),
    "an activation after pooling": (
        nn.Sequential(nn.Conv1d(5, 4, 1), nn.ReLU(), nn.AvgPool1d(3), nn.ReLU(), nn.Flatten()),
        sequences,
        r"an activation of a signal that is not Gaussian \('3'\)\..* put a Linear or convolution in between",
    ),
    "an activation after dropout": (
        with_layer(nn.ReLU(), nn.Dropout(), nn.ReLU(), nn.Linear(8, 1)),
        x,
        r"an activation of a signal that is not Gaussian \('3'\)\..* put a Linear or convolution in between",
    ),
    "attention without a scale": (
        attention(1.0, lambda logits: logits.softmax(-1)),
        sequences,
        r"attention logits without a scale of 1/d or 1/√d .*Here d = 8: divide by d or by d\*\*0\.5",
    ),
    "softmax attention scaled by the root": (
        attention(8**-0.5, lambda logits: logits.softmax(-1)),
        sequences,
        r"attention with logits scaled by 1/√d .* with logits scaled by 1/d it is known",
    ),
    "a mean over the batch": (
        Written(lambda self, x: self.body(x) - self.body(x).mean(0), body=nn.Linear(3, 8)),
        x,
        r"the function mean \('mean'\)",
    ),
    "channels dropped whole": (
        nn.Sequential(CONVOLUTION, nn.Dropout2d(), nn.Flatten(), nn.Linear(64, 1)),
        images,
        r"Dropout2d in training \('1'\)\. Call network\.eval\(\)",
    ),
}


@pytest.mark.parametrize("name", WITHOUT_LIMIT)
def test_what_has_no_limit_is_named_with_its_place_and_the_way_out(name):
    network, inputs, message = WITHOUT_LIMIT[name]
    with pytest.raises(UnsupportedLayer, match=rf"no infinite-width rule for {message}") as caught:
        nngp(network)(inputs)
    caught.match(WAY_OUT)
    with pytest.raises(UnsupportedLayer, match=message):
        infinite_width(network).diag(inputs)


def test_monte_carlo_takes_what_the_error_sends_to_it():
    network, inputs, _ = WITHOUT_LIMIT["max pooling"]
    estimate = n2g.limits.monte_carlo_kernel(network, 20, weight_var=2.0, bias_var=0.1).estimate(
        inputs
    )
    assert estimate.mean.shape == (2, 2)
    assert bool((estimate.standard_error > 0).all())


def test_an_activation_of_the_raw_inputs_is_refused():
    message = (
        r"the activation ReLU \('0'\) acts on the raw inputs.*Put a Linear or convolution before"
    )
    with pytest.raises(UnsupportedLayer, match=message):
        nngp(nn.Sequential(nn.ReLU(), nn.Linear(3, 1)))(x)
    written = Written(lambda self, x: self.head(torch.tanh(x)), head=nn.Linear(3, 1))
    with pytest.raises(UnsupportedLayer, match=r"the activation Tanh \('tanh'\) acts on the raw"):
        nngp(written)(x)


def test_outputs_of_different_laws_are_refused():
    forward = lambda self, x: torch.cat([self.one(x), self.other(x)], 1)
    network = Written(forward, one=nn.Linear(3, 2), other=nn.Linear(3, 2))
    message = r"returns a concatenation of channels: .* Take the limit of each part"
    with pytest.raises(UnsupportedLayer, match=message):
        nngp(network)(x)


@pytest.mark.parametrize(
    ("forward", "what"),
    [
        (lambda self, x: (self.body(x), self.body(x)), "tuple"),
        (lambda self, x: {"logits": self.body(x)}, "dict"),
        (lambda self, x: 2 * x, "data that no weights have touched"),
    ],
)
def test_a_network_returns_one_tensor_that_its_weights_made(forward, what):
    message = rf"must return one tensor that its weights made, but returns \w*{what}"
    with pytest.raises(UnsupportedLayer, match=message):
        nngp(Written(forward, body=nn.Linear(3, 1)))(x)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.body(x)
        return self.body(-x)


def test_control_flow_on_the_inputs_is_refused_with_its_line():
    message = r"Branching cannot be walked by torch\.fx: .*in forward, line \d+: if x\.sum\(\) > 0"
    with pytest.raises(NetworkError, match=message) as caught:
        nngp(Branching())
    caught.match(r"depend on attributes of the module, or use monte_carlo_kernel\(network\)")


@pytest.mark.parametrize("network", [lambda x: x, nn.Linear, None, "mlp"])
def test_only_modules_have_a_limit(network):
    with pytest.raises(NetworkError, match=r"needs an nn\.Module, but got \w+"):
        nngp(network)


@pytest.mark.parametrize("argument", ["weight_var", "bias_var"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), torch.tensor(-0.1)])
def test_variances_are_not_negative_or_infinite(argument, value):
    message = rf"{argument} must be zero or positive and finite.*Pass for example {argument}=0\.1"
    with pytest.raises(InputError, match=message):
        nngp(mlp(), **{argument: value})
    with pytest.raises(InputError, match=message):
        nngp(mlp(), **{argument: {"0": value, "*": 1.0}})


@pytest.mark.parametrize("argument", ["weight_var", "bias_var"])
@pytest.mark.parametrize("value", [[1.0, 2.0], "2", True, 1j, {"0": "a", "*": 1.0}])
def test_variances_are_numbers(argument, value):
    message = (
        rf"{argument} must be a number, a tensor of one element or a mapping .*for '0' it is .*"
    )
    with pytest.raises(InputError, match=message + rf"Pass for example {argument}=1\.0"):
        nngp(mlp(), **{argument: value})


@pytest.mark.parametrize("argument", ["weight_var", "bias_var"])
def test_a_variance_for_each_layer_is_a_mapping_and_no_vector(argument):
    message = rf"{argument} of '0' must have one element, but has shape \(3,\).*{argument}=\{{'0': \.\.\.\}}"
    with pytest.raises(InputError, match=message):
        nngp(mlp(), **{argument: torch.ones(3)})


@pytest.mark.parametrize("argument", ["weight_var", "bias_var"])
def test_a_mapping_names_layers_that_are_there(argument):
    message = rf"{argument} names 'head', but no layer .* has such a name\. There are: 0, 2\."
    with pytest.raises(InputError, match=message):
        nngp(mlp(), **{argument: {"head": 1.0, "*": 1.0}})


@pytest.mark.parametrize("value", [{"0": 1.0}, {}])
@pytest.mark.parametrize("argument", ["weight_var", "bias_var"])
def test_a_mapping_covers_every_layer(argument, value):
    message = rf"{argument} says nothing about '\d'\. Add '\d' to the mapping, or '\*' for all"
    with pytest.raises(InputError, match=message):
        nngp(mlp(), **{argument: value})


@pytest.mark.parametrize("argument", ["weight_var", "bias_var"])
def test_a_pattern_behind_a_wider_one_is_refused(argument):
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    message = rf"{argument}\['\[2\]'\] decides nothing: .* Put '\[2\]' in front of '\*'"
    with pytest.raises(InputError, match=message):
        infinite_width(network, **{argument: {"*": 2.0, "[2]": 1.0}})
    infinite_width(network, **{argument: {"0": 2.0, "2": 1.0, "*": 3.0}})


@pytest.mark.parametrize("value", ["mup", None, {"0": "mup", "*": "ntk"}])
def test_a_parameterization_is_one_of_two(value):
    message = r"parameterization must be 'ntk' or 'standard', but for '0' it is ('mup'|None)"
    with pytest.raises(InputError, match=message):
        ntk(mlp(), parameterization=value)


def test_an_initialization_is_read_off_or_given_but_not_both():
    message = r"initialization must be 'as_built', without weight_var and bias_var, or left out"
    with pytest.raises(InputError, match=message):
        nngp(mlp(), initialization="he")
    with pytest.raises(InputError, match=message):
        nngp(mlp(), initialization="as_built", weight_var=2.0)


@pytest.mark.parametrize("shape", [(4, 5), (4, 2, 2)])
def test_inputs_have_a_shape_that_the_network_takes(shape):
    message = (
        r"the network cannot take inputs of shape \(4, .*Check that network\(x\) runs on such an x"
    )
    with pytest.raises(InputError, match=message):
        nngp(mlp())(torch.ones(shape))
    with pytest.raises(InputError, match=message):
        nngp(mlp()).check(torch.ones(shape))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 1)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.body(first + second)


def test_there_are_as_many_inputs_as_arguments():
    for given, count in ((x, 1), ((x, x, x), 3)):
        with pytest.raises(InputError, match=rf"takes 2 inputs \(first, second\), but {count} "):
            nngp(TwoInputs())(given)
    with pytest.raises(InputError, match=r"takes 1 inputs \(input\), but 2 were given"):
        nngp(mlp())((x, x))


def test_dicts_name_the_arguments_in_any_order():
    kernel = nngp(TwoInputs())
    given = kernel({"second": 2 * x, "first": x})
    torch.testing.assert_close(given, kernel((x, 2 * x)))
    message = r"x has the names \['first', 'third'\], but the network takes \['first', 'second'\]"
    with pytest.raises(InputError, match=message + r"\. Pass a dict with those names"):
        kernel({"first": x, "third": x})


def test_inputs_are_finite():
    spoiled = x.clone()
    spoiled[2, 1] = float("nan")
    kernel = nngp(mlp())
    for call in (kernel, kernel.diag, kernel.check, lambda bad: kernel(x, bad)):
        with pytest.raises(InputError, match=r"must be finite, but 1 of 12 .*first in row 2.*Drop"):
            call(spoiled)


def test_inputs_have_at_least_one_point():
    for call in (nngp(mlp()), nngp(mlp()).diag, lambda empty: nngp(mlp())(x, empty)):
        with pytest.raises(InputError, match=r"is empty: at least one point is needed"):
            call(x[:0])


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ([x], r"torch\.stack\(x\)"),
        (x.numpy(), r"torch\.as_tensor\(x, dtype=torch\.float32\)"),
        ("x", r"Objects go into the module"),
        (None, r"torch\.as_tensor\(x\)"),
    ],
    ids=["list", "array", "text", "nothing"],
)
def test_inputs_are_tensors(given, advice):
    with pytest.raises(InputError, match=rf"x must be a tensor.*{advice}"):
        nngp(mlp())(given)


def test_both_sets_of_points_have_one_shape():
    steps = [nn.Conv1d(5, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 1)]
    message = r"need inputs of one shape, but got \(2, 5, 3\) and \(2, 5, 2\)"
    with pytest.raises(InputError, match=message):
        nngp(nn.Sequential(*steps))(sequences, sequences[..., :2])


def test_both_sets_of_points_have_one_dtype_and_device():
    with pytest.raises(
        InputError, match=r"is torch\.float64, but x is torch\.float32\. Convert it"
    ):
        nngp(mlp())(x, x.double())
    with pytest.raises(InputError, match=r"is on meta, but x is on cpu\. Move it"):
        nngp(mlp())(x, x.to("meta"))


def test_tokens_are_integers():
    network = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 1))
    with pytest.raises(InputError, match=r"cannot take inputs of shape \(4, 3\).*Long, Int"):
        nngp(network)(x)


def test_a_kernel_is_scaled_by_something_positive():
    with pytest.raises(InputError, match=r"variance must be positive.*Pass for example variance"):
        nngp(mlp()).scaled(-1.0)


RAW_WEIGHTS = {
    "LSTM": (nn.LSTM(3, 8, batch_first=True), lambda out: out[0], sequences),
    "MultiheadAttention": (nn.MultiheadAttention(3, 1), lambda out: out[0], sequences),
    "TransformerEncoderLayer": (nn.TransformerEncoderLayer(3, 1), lambda out: out, sequences),
    "EmbeddingBag": (nn.EmbeddingBag(7, 8), lambda out: out, torch.tensor([[1, 2], [3, 4]])),
}


@pytest.mark.parametrize("name", RAW_WEIGHTS)
def test_weights_without_a_rule_are_refused_on_the_raw_inputs_too(name):
    layer, chosen, inputs = RAW_WEIGHTS[name]
    arguments = 3 if isinstance(layer, nn.MultiheadAttention) else 1
    forward = lambda self, x: self.head(chosen(self.layer(*[x] * arguments)))
    network = Written(forward, layer=layer, head=nn.LazyLinear(1))
    network(inputs)
    with pytest.raises(UnsupportedLayer, match=rf"no infinite-width rule for {name} \('layer'\)"):
        nngp(network)(inputs)
