"""What has no limit is refused by name, and a rule that is wrong is found out by a finite draw."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limits.test_traps import MAPS, TOKENS, VECTORS, Module, conv, head, kernels, wide
from net2gp.errors import NetworkError
from net2gp.limits.duals.activations import UnsupportedLayer
from net2gp.limits.graph.function_registry import FUNCTIONS


def shared(m: Module, x: Tensor) -> Tensor:
    h = torch.relu(m.a(x))
    return m.o(m.f(h.flatten(1)) + m.f(h.transpose(1, 2).flatten(1)))


def attention(change: Callable[[Tensor], Tensor], **buffers: Tensor) -> nn.Module:
    """Attention of two heads, whose logits are changed before the softmax or whose weights after it."""

    def forward(m: Module, x: Tensor) -> Tensor:
        q, v = (
            layer(x).view(x.shape[0], x.shape[1], 2, -1).transpose(1, 2) for layer in (m.q, m.v)
        )
        logits = q @ q.transpose(2, 3) / q.shape[-1]
        mixed = change(m, logits) @ v
        return m.o(mixed.transpose(1, 2).flatten(2).mean(1))

    network = Module(forward, q=nn.Linear(6, 8), v=nn.Linear(6, 8), o=head(), d=nn.Dropout(0.5))
    for name, value in buffers.items():
        network.register_buffer(name, value)
    return network


SLOPES = torch.tensor([1.0, 2.0])[:, None, None] * torch.ones(4, 4)


def shuffled(h: Tensor) -> Tensor:
    return h.view(-1, 2, 4).transpose(1, 2).flatten(1)


def through_relu(function: Callable) -> nn.Module:
    return Module(lambda m, x: m.o(function(m, torch.relu(m.a(x)), x)), a=wide(), o=head())


def no_grad(m: Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = torch.relu(m.a(x))
    return m.o(h)


def in_place(view: Callable[[Module, Tensor], Tensor]) -> nn.Module:
    def forward(m: Module, x: Tensor) -> Tensor:
        h = m.a(x)
        return m.o(F.relu(view(m, h), inplace=True) + h)

    return Module(forward, a=wide(), o=head(), i=nn.Identity(), d=nn.Dropout(0.2)).eval()


def augmented(m: Module, x: Tensor) -> Tensor:
    h = u = m.a(x)
    u += m.b(torch.relu(h))
    return m.o(u + h)


class Masked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * torch.ones(self.weight.shape).tril(), self.bias)


class Standardized(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2), keepdim=True)
        return F.conv1d(x, weight, self.bias)


def wrapped(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    del call.__wrapped__
    return call


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 1)

    @wrapped
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


REFUSED = {
    "masked weights": (nn.Sequential(Masked(5, 8), head()), VECTORS, "product with the parameter"),
    "standardized weights": (
        Module(lambda m, x: m.o(torch.relu(m.a(x)).mean(2)), a=Standardized(4, 8, 3), o=head()),
        MAPS,
        "the function mean",
    ),
    "a shuffle of channels": (
        through_relu(lambda m, h, x: h + shuffled(h)),
        VECTORS,
        "puts channels in another order",
    ),
    "every second channel": (
        Module(
            lambda m, x: (lambda h: m.o(h[:, ::2] + h[:, 1::2]))(torch.relu(m.a(x))),
            a=wide(),
            o=head(4),
        ),
        VECTORS,
        "channels that are taken one by one",
    ),
    "channels from the last to the first": (
        through_relu(lambda m, h, x: h + h.flip(1)),
        VECTORS,
        "channels that are taken one by one",
    ),
    "one layer, two orders": (
        Module(shared, a=nn.Conv1d(4, 8, 1), f=nn.Linear(48, 8), o=head()),
        MAPS,
        "'f', which are shared between layers of different geometry",
    ),
    "in place through a view": (
        in_place(lambda m, h: h.flatten(1)),
        VECTORS,
        "what the network does at 'add'.*changed in place through a view",
    ),
    "in place through contiguous": (
        in_place(lambda m, h: h.contiguous()),
        VECTORS,
        "what the network does at 'add'",
    ),
    "in place through an identity": (
        in_place(lambda m, h: m.i(h)),
        VECTORS,
        "what the network does at 'add'",
    ),
    "in place through dropout": (
        in_place(lambda m, h: m.d(h)),
        VECTORS,
        "what the network does at 'add'",
    ),
    "an augmented assignment": (
        Module(augmented, a=wide(), b=wide(8), o=head()),
        VECTORS,
        "'a' is changed in place by 'iadd' and used again",
    ),
    "dropout of attention weights": (
        attention(lambda m, t: F.dropout(t.softmax(-1), 0.5, m.training)).train(),
        MAPS,
        "dropout of attention weights in training",
    ),
    "a dropout module of attention weights": (
        attention(lambda m, t: m.d(t.softmax(-1))).train(),
        MAPS,
        "dropout of attention weights in training",
    ),
    "a bias for each head": (
        attention(lambda m, t: (t + m.slopes).softmax(-1), slopes=SLOPES),
        MAPS[:2],
        "a mask or bias that differs between heads",
    ),
    "a mask for each head": (
        attention(lambda m, t: t.masked_fill(m.mask, -5.0).softmax(-1), mask=SLOPES > 1),
        MAPS,
        "a mask or bias that differs between heads",
    ),
    "a mean under a scale": (
        Module(lambda m, x: 2 * (m.o(torch.relu(m.a(x))) + x), a=wide(), o=nn.Linear(8, 5)),
        VECTORS,
        "adds something fixed",
    ),
    "a mean under a pooling": (
        Module(
            lambda m, x: (m.o(torch.relu(m.a(x))) + x).mean(2),
            a=nn.Conv1d(4, 8, 1),
            o=nn.Conv1d(8, 4, 1),
        ),
        MAPS,
        "adds something fixed",
    ),
    "vectors that are cut": (
        Module(lambda m, x: m.o(m.e(x).mean(1)), e=nn.Embedding(5, 8, max_norm=1.0), o=head()),
        TOKENS,
        "an Embedding with max_norm",
    ),
    "a gate of one channel": (
        Module(
            lambda m, x: m.o(m.b(x * torch.sigmoid(m.g(torch.relu(m.a(x)))))),
            a=wide(),
            g=nn.Linear(8, 1),
            b=wide(),
            o=head(),
        ),
        VECTORS,
        "a factor from the data that differs between channels",
    ),
    "no gradient": (
        Module(no_grad, a=wide(), o=head()),
        VECTORS,
        r"'a' is computed from weights under torch\.no_grad\(\)",
    ),
    "data without gradient": (
        through_relu(lambda m, h, x: h + h.data),
        VECTORS,
        r"the attribute \.data",
    ),
    "the number of points": (
        Module(lambda m, x: m.o(torch.relu(m.a(x))) / x.shape[0], a=wide(), o=head()),
        VECTORS,
        "depends on the other points of the batch, or on their number",
    ),
    "points moved along": (
        through_relu(lambda m, h, x: h + torch.roll(h, 2, 0)),
        VECTORS,
        "the function roll",
    ),
    "whole numbers": (
        Module(lambda m, x: m.o(m.a(x).to(torch.int64).to(x.dtype)), a=wide(), o=head()),
        VECTORS,
        "a signal as torch.int64",
    ),
    "a shared layer of another kind": (
        Module(lambda m, x: F.linear(m.e(x).mean(1), m.e.weight), e=nn.Embedding(5, 8)),
        TOKENS,
        "the function linear with 'e.weight' of Embedding",
    ),
    "an LSTM": (nn.LSTM(6, 8, batch_first=True), MAPS, "LSTM.*Products of gates that share"),
    "a GRU": (nn.GRU(6, 8, batch_first=True), MAPS, "GRU.*Products of gates that share"),
    "an encoder": (
        nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
        MAPS,
        "TransformerEncoderLayer.*scaled by 1/√d has no known closed form",
    ),
    "a bilinear layer": (
        Module(lambda m, x: m.b(x, x), b=nn.Bilinear(5, 5, 1)),
        VECTORS,
        "Bilinear.*pairs of channels",
    ),
    "a pooling function": (
        Module(lambda m, x: m.o(F.max_pool1d(m.a(x), 2).mean(2)), a=conv(), o=head()),
        MAPS,
        "the function max_pool1d.*The maximum of Gaussians",
    ),
    "a wrapped forward": (Decorated(), VECTORS, "wrapped by a decorator"),
    "the usual split of heads": (
        Module(
            lambda m, x: m.o(m.a(x).view(x.shape[0], 4, 3, 2, 4).permute(2, 0, 3, 1, 4)[0]),
            a=nn.Linear(6, 24),
            o=nn.Linear(4, 1),
        ),
        MAPS,
        r"moving the batch axis.*q, k, v = qkv\.chunk\(3, -1\)",
    ),
    "a step with a tensor": (
        Module(lambda m, x: m.o(torch.heaviside(m.a(x), m.v)), a=wide(), o=head()),
        VECTORS,
        r"the function heaviside.*RectifiedMonomial\(0\)",
    ),
}
REFUSED["a step with a tensor"][0].register_buffer("v", torch.tensor([0.5]))


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_limit_is_refused_by_name(name):
    network, x, message = REFUSED[name]
    with pytest.raises(NetworkError, match=f"(?s){message}"):
        kernels(network, x)


@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "parameter"])
def test_hooks_are_refused(kind):
    network = nn.Sequential(wide(), nn.ReLU(), head())
    if kind == "forward":
        network[1].register_forward_hook(lambda *_: None)
    elif kind == "pre":
        network[1].register_forward_pre_hook(lambda *_: None)
    elif kind == "backward":
        network[1].register_full_backward_hook(lambda *_: None)
    else:
        network[0].weight.register_hook(lambda g: 2 * g)
    with pytest.raises(NetworkError, match="hooks"):
        kernels(network, VECTORS)


WRONG = {
    "roll": lambda h: torch.roll(h, 1, 2),
    "cumsum": lambda h: h.cumsum(2),
    "flip": lambda h: h.flip(2),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_found_by_a_finite_draw(name, monkeypatch):
    function = WRONG[name]
    network = Module(
        lambda m, x: m.o((lambda h: h * torch.sigmoid(m.b(function(h))))(m.a(x)).mean(2)),
        a=nn.Conv1d(4, 8, 1),
        b=nn.Conv1d(8, 8, 1),
        o=head(),
    )
    assert kernels(network, MAPS)[0].isfinite().all()
    monkeypatch.setitem(FUNCTIONS, name, lambda translation, node, args, kwargs: args[0])
    with pytest.raises(UnsupportedLayer, match=f"what the network does at '{name}'"):
        kernels(network, MAPS)


def test_a_wrong_gradient_is_found_by_a_finite_draw(monkeypatch):
    def network(cut: Callable[[Tensor], Tensor]) -> nn.Module:
        return Module(
            lambda m, x: m.o(torch.relu(m.b(cut(torch.relu(m.a(x)))))),
            a=wide(),
            b=wide(8),
            o=head(),
        )

    monkeypatch.setitem(FUNCTIONS, "detach", lambda translation, node, args, kwargs: args[0])
    assert kernels(network(lambda h: h), VECTORS)[1].isfinite().all()
    with pytest.raises(
        UnsupportedLayer, match="gradients differ from the gradients of its operations"
    ):
        kernels(network(lambda h: h.detach()), VECTORS)
