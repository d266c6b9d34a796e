"""Modules that look like others: each has the kernels of the same function written plainly, or is refused."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from net2gp.limits.duals.activations import UnsupportedLayer
from net2gp.limits.kernels import infinite_width
from net2gp.limits.modules import Pointwise
from net2gp.limits.rules.layer_rules import rule

GENERATOR = torch.Generator().manual_seed(0)
VECTORS = torch.randn(3, 5, generator=GENERATOR, dtype=torch.float64)
MAPS = torch.randn(3, 4, 6, generator=GENERATOR, dtype=torch.float64)
TOKENS = torch.randint(5, (3, 4), generator=GENERATOR)


class Module(nn.Module):
    """Layers by name, and a function of them and the inputs as forward."""

    def __init__(self, function: Callable, **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def kernels(network: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return infinite_width(network.double(), weight_var=1.5, bias_var=0.3)(x)


def assert_same(one: nn.Module, other: nn.Module, x: Tensor) -> None:
    for ours, expected in zip(kernels(one, x), kernels(other, x), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Causal(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (self.kernel_size[0] - 1, 0)))


class Halved(nn.Conv1d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight, bias) / 2


class Tripled(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return 3 * super().forward(tokens)


class Squared(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) ** 2


class ChannelsLast(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.transpose(1, 2)


class DropsAlways(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, True)


class Named(nn.Linear):
    def extra_repr(self) -> str:
        return "only its name is other"


def head(width: int = 8) -> nn.Linear:
    return nn.Linear(width, 1)


def wide(inputs: int = 5, outputs: int = 8) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def replaced() -> nn.Module:
    layer = wide()
    layer.forward = lambda x: 2 * F.linear(x, layer.weight, layer.bias)
    return nn.Sequential(layer, nn.ReLU(), head())


def conv(size: int = 3) -> nn.Conv1d:
    return nn.Conv1d(4, 8, size)


def pooled(layer: nn.Module, before: Callable = lambda x: x, after: float = 1.0) -> nn.Module:
    return Module(lambda m, x: m.o(torch.relu(after * m.a(before(x))).mean(2)), a=layer, o=head())


TWICE = Module(lambda m, x: m.o(torch.relu(2 * m.a(x))), a=wide(), o=head())
SUBCLASSES = {
    "a linear layer times two": (nn.Sequential(Doubled(5, 8), nn.ReLU(), head()), TWICE, VECTORS),
    "an instance's own forward": (replaced(), TWICE, VECTORS),
    "a layer with another name": (
        nn.Sequential(Named(5, 8), nn.ReLU(), head()),
        nn.Sequential(wide(), nn.ReLU(), head()),
        VECTORS,
    ),
    "a causal convolution": (
        pooled(Causal(4, 8, 3)),
        pooled(conv(), lambda x: F.pad(x, (2, 0))),
        MAPS,
    ),
    "a method that forward calls": (pooled(Halved(4, 8, 3)), pooled(conv(), after=0.5), MAPS),
    "an embedding times three": (
        Module(lambda m, x: m.o(m.e(x).mean(1)), e=Tripled(5, 8), o=head()),
        Module(lambda m, x: m.o(3 * m.e(x).mean(1)), e=nn.Embedding(5, 8), o=head()),
        TOKENS,
    ),
    "a squared rectifier": (
        nn.Sequential(wide(), Squared(), head()),
        Module(lambda m, x: m.o(torch.relu(m.a(x)) ** 2), a=wide(), o=head()),
        VECTORS,
    ),
    "a norm of channels before positions": (
        Module(
            lambda m, x: m.o(torch.relu(m.n(m.a(x))).mean(2)),
            a=conv(),
            n=ChannelsLast(8),
            o=head(),
        ),
        Module(
            lambda m, x: m.o(torch.relu(m.n(m.a(x).transpose(1, 2))).mean(1)),
            a=conv(),
            n=nn.LayerNorm(8),
            o=head(),
        ),
        MAPS,
    ),
    "dropout in evaluation": (
        nn.Sequential(wide(), nn.ReLU(), DropsAlways(0.5), head()).eval(),
        nn.Sequential(wide(), nn.ReLU(), nn.Dropout(0.5), head()).train(),
        VECTORS,
    ),
    "a network that is a subclass of a layer": (
        Doubled(5, 1),
        Module(lambda m, x: 2 * m.a(x), a=nn.Linear(5, 1)),
        VECTORS,
    ),
}


@pytest.mark.parametrize("name", SUBCLASSES)
def test_a_forward_of_its_own_is_walked_into(name):
    assert_same(*SUBCLASSES[name])


def parts(function: Callable[[Tensor], Tensor], outputs: int = 8, inputs: int = 8) -> nn.Module:
    """o(function(relu(a(x))))."""
    return Module(
        lambda m, x: m.o(function(torch.relu(m.a(x)))), a=wide(5, inputs), o=head(outputs)
    )


def halves(h: Tensor) -> Tensor:
    first, second = h.chunk(2, 1)
    return first + second


CUTS = {
    "ends": (lambda h: h[:, :4] + h[:, -4:], 4, halves, 4),
    "narrow": (lambda h: h.narrow(1, 0, 4) + h.narrow(1, 4, 4), 4, halves, 4),
    "a roll by half": (
        lambda h: h + torch.roll(h, 4, 1),
        8,
        lambda h: torch.cat([halves(h), halves(h)], 1),
        8,
    ),
    "two rolls": (lambda h: h + h.roll(4, 1).roll(4, 1), 8, lambda h: 2 * h, 8),
    "keywords": (
        lambda h: torch.cat(tensors=[h, 2 * h], axis=1),
        16,
        lambda h: torch.cat([h, 2 * h], 1),
        16,
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_parts_of_the_channels_are_told_apart(name):
    one, width, other, plain_width = CUTS[name]
    assert_same(parts(one, width), parts(other, plain_width), VECTORS)


def test_a_part_counts_as_many_channels_as_it_has():
    def joined(m: Module, x: Tensor, cut: Callable) -> Tensor:
        h = torch.relu(m.a(x))
        return m.o(torch.cat([cut(h), 3 * torch.relu(m.b(h))], 1))

    one, other = (
        Module(lambda m, x, c=cut: joined(m, x, c), a=wide(), b=wide(8), o=head(12))
        for cut in (lambda h: h[:, :4], lambda h: h.chunk(2, 1)[0])
    )
    assert_same(one, other, VECTORS)


def tied(weight: bool, bias: bool) -> nn.Module:
    a, b = wide(), wide()
    if weight:
        b.weight = a.weight
    if bias:
        b.bias = a.bias
    return Module(lambda m, x: m.o(m.a(x) - m.b(x)), a=a, b=b, o=head())


def test_weights_and_biases_are_shared_one_by_one():
    inner = 1.5 * VECTORS @ VECTORS.T / 5
    ones = torch.ones_like(inner)
    for weight, bias, cov, own in (
        (True, False, 0.6 * ones, 0.6 * ones),
        (False, True, 2 * inner, 2 * inner),
        (True, True, 0 * ones, 0 * ones),
        (False, False, 2 * inner + 0.6 * ones, 2 * inner + 0.6 * ones),
    ):
        nngp, ntk = kernels(tied(weight, bias), VECTORS)
        torch.testing.assert_close(nngp, 1.5 * cov + 0.3)
        torch.testing.assert_close(ntk, 1.5 * cov + 0.3 + 1.5 * own)


def test_layers_that_share_weights_may_differ_in_having_biases():
    a, b = wide(), nn.Linear(5, 8, bias=False)
    b.weight = a.weight
    nngp, _ = kernels(Module(lambda m, x: m.o(m.a(x) + m.b(x)), a=a, b=b, o=head()), VECTORS)
    torch.testing.assert_close(nngp, 1.5 * (4 * 1.5 * VECTORS @ VECTORS.T / 5 + 0.3) + 0.3)


def test_recurrent_layers_that_share_weights_are_one():
    def network(shared: bool) -> nn.Module:
        first = nn.RNN(6, 8, nonlinearity="relu", batch_first=True)
        second = nn.RNN(6, 8, nonlinearity="relu", batch_first=True)
        for name, value in list(first.named_parameters()):
            setattr(second, name, value)
        return Module(
            lambda m, x: m.o(m.r(x)[0][:, -1] + (m.q if shared else m.r)(x.flip(1))[0][:, -1]),
            r=first,
            q=second,
            o=head(),
        )

    assert_same(network(True), network(False), MAPS)


def test_the_state_that_a_cell_starts_from_counts():
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.RNNCell(5, 8, nonlinearity="relu"), head()
            self.start = nn.Parameter(torch.zeros(1, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(x, self.start.expand(x.shape[0], -1)))

    before = 1.5 * VECTORS.square().mean(1) + 0.3 + 1.5 * 1.5 + 0.3
    torch.testing.assert_close(kernels(Cell(), VECTORS)[0].diagonal(), 1.5 * before / 2 + 0.3)


def test_dropout_between_recurrent_layers_counts_in_training():
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            options = {"nonlinearity": "relu", "batch_first": True}
            self.first, self.second = nn.RNN(6, 8, **options), nn.RNN(8, 8, **options)
            self.drop, self.head = nn.Dropout(0.4), head()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.second(self.drop(self.first(x)[0]))[0][:, -1])

    two = nn.RNN(6, 8, 2, nonlinearity="relu", batch_first=True, dropout=0.4)
    one = Module(lambda m, x: m.o(m.r(x)[0][:, -1]), r=two, o=head())
    for training in (True, False):
        assert_same(one.train(training), Stack().train(training), MAPS)


EXPANSIONS = {
    "expand_as": lambda h: h.mean(2, keepdim=True).expand_as(h).sum(2),
    "expand": lambda h: h.mean(2, keepdim=True).expand(-1, -1, h.shape[2]).sum(2),
    "repeat": lambda h: h.mean(2, keepdim=True).repeat(1, 1, 6).sum(2),
}


@pytest.mark.parametrize("name", EXPANSIONS)
def test_expansions_repeat_positions(name):
    function = EXPANSIONS[name]
    one = Module(lambda m, x: m.o(function(torch.relu(m.a(x)))), a=nn.Conv1d(4, 8, 1), o=head())
    other = Module(lambda m, x: m.o(6 * torch.relu(m.a(x)).mean(2)), a=nn.Conv1d(4, 8, 1), o=head())
    assert_same(one, other, MAPS)


def test_an_expanded_parameter_is_the_same_at_every_position():
    class Shifted(nn.Module):
        def __init__(self, everywhere: bool) -> None:
            super().__init__()
            self.a, self.o, self.everywhere = nn.Linear(6, 8), head(), everywhere
            self.shift = nn.Parameter(torch.zeros(1, 1, 8))

        def forward(self, x: Tensor) -> Tensor:
            shift = self.shift.expand(x.shape[0], 4, -1) if self.everywhere else self.shift
            return self.o(torch.relu(self.a(x) + shift).mean(1))

    assert_same(Shifted(True), Shifted(False), MAPS)


def test_gated_linear_units_are_products():
    def forward(m: Module, x: Tensor) -> Tensor:
        value, gate = m.a(x).chunk(2, 1)
        return m.o(value * torch.sigmoid(gate))

    plain = Module(forward, a=wide(), o=head(4))
    assert_same(nn.Sequential(wide(), nn.GLU(), head(4)), plain, VECTORS)


def test_the_eps_of_a_norm_is_that_of_the_dtype():
    x = 1e-4 * VECTORS
    default, given = (
        nn.Sequential(nn.Linear(5, 8, bias=False), nn.RMSNorm(8, eps=eps), head())
        for eps in (None, torch.finfo(torch.float64).eps)
    )
    assert_same(default, given, x)
    single = infinite_width(default.float(), weight_var=1.5)(x.float())[0].diagonal()
    square = 1.5 * x.square().mean(1)
    expected = 1.5 * square / (square + torch.finfo(torch.float32).eps)
    torch.testing.assert_close(single.double(), expected, rtol=1e-5, atol=0)


def test_functions_of_the_inputs_are_part_of_the_data():
    class Fourier(nn.Module):
        def __init__(self, inside: bool) -> None:
            super().__init__()
            frequencies = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
            self.register_buffer("frequencies", frequencies)
            self.inside, self.body = inside, nn.Sequential(wide(6), nn.ReLU(), head())

        def forward(self, x: Tensor) -> Tensor:
            return self.body(torch.sin(x @ self.frequencies) if self.inside else x)

    network = Fourier(True)
    features = torch.sin(VECTORS @ network.frequencies.double())
    for ours, expected in zip(
        kernels(network, VECTORS), kernels(Fourier(False), features), strict=True
    ):
        torch.testing.assert_close(ours, expected)


def test_logits_scaled_by_the_root_need_several_heads():
    def attention(heads: int) -> nn.Module:
        def forward(m: Module, x: Tensor) -> Tensor:
            q, k, v = (
                layer(x).view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)
                for layer in (m.q, m.k, m.v)
            )
            mixed = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) @ v
            return m.o(mixed.transpose(1, 2).flatten(2).mean(1))

        return Module(forward, **{name: nn.Linear(6, 8) for name in "qkv"}, o=head())

    assert kernels(attention(2), MAPS)[0].isfinite().all()
    with pytest.raises(UnsupportedLayer, match="attention of one head with logits scaled by 1/√d"):
        kernels(attention(1), MAPS)


def test_the_same_part_of_a_dropped_signal_has_the_same_mask():
    def twice(cut: Callable[[Tensor], Tensor]) -> nn.Module:
        def forward(m: Module, x: Tensor) -> Tensor:
            h = m.d(torch.relu(m.a(x)))
            return m.o(cut(h) + cut(h))

        return Module(forward, a=wide(), d=nn.Dropout(0.4), o=head(4)).train()

    once = Module(
        lambda m, x: m.o(2 * m.d(torch.relu(m.a(x)))), a=wide(), d=nn.Dropout(0.4), o=head()
    )
    assert_same(twice(lambda h: h[:, :4]), once.train(), VECTORS)
    assert_same(twice(lambda h: h.chunk(2, 1)[1]), once.train(), VECTORS)


def test_a_signal_and_its_dropped_values_share_what_came_before():
    def forward(m: Module, x: Tensor) -> Tensor:
        u = m.d(torch.relu(m.a(x)))
        return m.o(u + m.d(u))

    network = Module(forward, a=wide(), d=nn.Dropout(0.5), o=head()).train()
    square = (1.5 * VECTORS.square().mean(1) + 0.3) / 2
    # E[(u + u m / keep)²] = E[u²] (1 + 2 + 1 / keep), and E[u²] = square / keep
    expected = 1.5 * 2 * square * (3 + 2) + 0.3
    torch.testing.assert_close(kernels(network, VECTORS)[0].diagonal(), expected)


def test_shared_weights_of_parts_that_do_not_line_up_are_refused():
    def forward(m: Module, x: Tensor) -> Tensor:
        h = torch.relu(m.a(x))
        u, v = h[:, :4], torch.relu(m.b(h))
        return m.o(m.f(torch.cat([u, v], 1)) + m.f(torch.cat([v, u], 1)))

    network = Module(forward, a=wide(), b=wide(8), f=nn.Linear(12, 8), o=head())
    with pytest.raises(UnsupportedLayer, match="'f', which are shared between layers of different"):
        kernels(network, VECTORS)


def test_a_division_by_counts_keeps_its_precision():
    class Average(nn.Module):
        def __init__(self, whole: bool) -> None:
            super().__init__()
            self.a, self.o, self.whole = nn.Linear(6, 8), head(), whole

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            count = keep.sum(1, keepdim=True)
            count = count if self.whole else count.double()
            return self.o((torch.relu(self.a(x)) * keep[:, :, None]).sum(1) / count)

    keep = torch.arange(4) < torch.tensor([3, 2, 3])[:, None]
    assert_same(Average(True), Average(False), (MAPS, keep))


def test_a_partial_function_at_the_end_is_not_taken_for_a_shift():
    ends = Pointwise(functools.partial(torch.mul, 2.0)), Pointwise(lambda x: 2.0 * x)
    one, other = (nn.Sequential(wide(), nn.ReLU(), head(), end) for end in ends)
    assert_same(one, other, VECTORS)


def test_layers_of_other_packages_may_have_names_that_start_with_torch():
    class Projection(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 5))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    Projection.__module__ = "torchvision.ops"

    @rule.register(Projection)
    def _(layer, translation, node, value):
        return rule(nn.Linear(5, 8, bias=False), translation, node, value)

    own = nn.Sequential(nn.Linear(5, 8, bias=False), nn.ReLU(), head())
    assert_same(nn.Sequential(Projection(), nn.ReLU(), head()), own, VECTORS)
