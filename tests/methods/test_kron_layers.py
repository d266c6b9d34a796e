"""`Kron()` of layers that use a weight at many places: the factors are sums over points and places.

Each layer is computed by hand, place by place, and what goes into a weight and the gradient of what comes out
are added up as the definition says: A = Σ a aᵀ, G = Σ g gᵀ, H = A ⊗ G / places.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import net2gp as n2g
from architectures import Apply
from net2gp.errors import Net2GPWarning
from net2gp.posteriors.weights import kron
from reference.jacobians import brute_force_jacobian, flat

B, C, PRIOR = 5, 2, 0.7
Names = tuple[str, ...]


class Places:
    """What goes into the weights `names`, and zeros that are added to what comes out."""

    def __init__(self) -> None:
        self.found: dict[Names, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, names: Names, a: Tensor, y: Tensor) -> Tensor:
        zero = torch.zeros_like(y).requires_grad_()
        a = torch.cat([a, torch.ones_like(a[:, :1])], 1) if len(names) == 2 else a
        self.found.setdefault(names, []).append((a.detach(), zero))
        return y + zero

    def linear(self, layer: nn.Module, names: Names, a: Tensor) -> Tensor:
        own = dict(layer.named_parameters())
        weight, *bias = (own[name.split(".", 1)[1]] for name in names)
        return self(names, a, F.linear(a, weight, *bias))

    def factors(self, names: Names, out: Tensor) -> tuple[Tensor, Tensor, int]:
        """A, G and the number of places of a Gaussian likelihood of unit noise."""
        inputs, zeros = zip(*self.found[names], strict=True)
        A = sum(a.T @ a for a in inputs)
        G = torch.zeros(zeros[0].shape[1], zeros[0].shape[1], dtype=torch.float64)
        for c in range(C):
            for g in torch.autograd.grad(out[:, c].sum(), zeros, retain_graph=True):
                G += g.T @ g
        return A, G, B * len(inputs)


By = Callable[[nn.Module, Tensor, Places], Tensor]
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], By, list[Names]]] = {}


def case(build, points, *names: Names) -> Callable[[By], By]:
    def add(by_hand: By) -> By:
        CASES[by_hand.__name__] = build, points, by_hand, list(names)
        return by_hand

    return add


def vectors(*shape: int) -> Tensor:
    return torch.randn(B, *shape, dtype=torch.float64)


def ids() -> Tensor:
    return torch.randint(5, (B, 4))


def recurrent(layer: nn.Module) -> Callable[[], nn.Module]:
    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])

    return lambda: Apply(forward, layer=layer, head=nn.Linear(3, C))


INTO = ("layer.weight_ih_l0", "layer.bias_ih_l0")
ON = ("layer.weight_hh_l0", "layer.bias_hh_l0")


@case(recurrent(nn.LSTM(2, 3, batch_first=True)), lambda: vectors(4, 2), INTO, ON)
def lstm(network: nn.Module, x: Tensor, places: Places) -> Tensor:
    h = c = x.new_zeros(B, 3)
    for t in range(x.shape[1]):
        gates = places.linear(network.layer, INTO, x[:, t]) + places.linear(network.layer, ON, h)
        i, f, g, o = gates.split(3, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return network.head(h)


@case(recurrent(nn.GRU(2, 3, batch_first=True)), lambda: vectors(4, 2), INTO, ON)
def gru(network: nn.Module, x: Tensor, places: Places) -> Tensor:
    h = x.new_zeros(B, 3)
    for t in range(x.shape[1]):
        r, z, n = places.linear(network.layer, INTO, x[:, t]).split(3, 1)
        s, y, m = places.linear(network.layer, ON, h).split(3, 1)
        z = (z + y).sigmoid()
        h = (1 - z) * (n + (r + s).sigmoid() * m).tanh() + z * h
    return network.head(h)


@case(
    recurrent(nn.RNN(2, 3, batch_first=True, bias=False)), lambda: vectors(4, 2), INTO[:1], ON[:1]
)
def elman(network: nn.Module, x: Tensor, places: Places) -> Tensor:
    h = x.new_zeros(B, 3)
    for t in range(x.shape[1]):
        from_input = places.linear(network.layer, INTO[:1], x[:, t])
        h = (from_input + places.linear(network.layer, ON[:1], h)).tanh()
    return network.head(h)


CELL = ("cell.weight_hh", "cell.bias_hh")


def twice() -> nn.Module:
    def forward(self, x):
        return self.head(self.cell(x, self.cell(x.cos())))

    return Apply(forward, cell=nn.RNNCell(2, 3), head=nn.Linear(3, C))


@case(twice, lambda: vectors(2), CELL)
def cell(network: nn.Module, x: Tensor, places: Places) -> Tensor:
    own, h = network.cell, x.new_zeros(B, 3)
    for now in (x.cos(), x):
        from_input = F.linear(now, own.weight_ih, own.bias_ih)
        h = (from_input + places.linear(own, CELL, h)).tanh()
    return network.head(h)


def attending() -> nn.Module:
    def forward(self, x):
        return self.head(self.layer(x, x, x)[0].tanh().sum(1))

    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    nn.init.normal_(layer.in_proj_bias)
    nn.init.normal_(layer.out_proj.bias)
    return Apply(forward, layer=layer, head=nn.Linear(4, C))


IN, OUT = (
    ("layer.in_proj_weight", "layer.in_proj_bias"),
    ("layer.out_proj.weight", "layer.out_proj.bias"),
)


@case(attending, lambda: vectors(3, 4), IN, OUT)
def attention(network: nn.Module, x: Tensor, places: Places) -> Tensor:
    projected = torch.stack([places.linear(network.layer, IN, x[:, t]) for t in range(3)], 1)
    q, k, v = projected.reshape(B, 3, 3, 2, 2).permute(2, 0, 3, 1, 4)
    mixed = ((q @ k.mT) / 2**0.5).softmax(-1) @ v
    mixed = mixed.transpose(1, 2).reshape(B, 3, 4)
    total = sum(places.linear(network.layer, OUT, mixed[:, t]).tanh() for t in range(3))
    return network.head(total)


FILTERS = ("layer.weight",)


def transposed() -> nn.Module:
    def forward(self, x):
        return self.head(self.layer(x).tanh().sum(2))

    layer = nn.ConvTranspose1d(2, 3, 2, stride=2, bias=False)
    return Apply(forward, layer=layer, head=nn.Linear(3, C))


@case(transposed, lambda: vectors(2, 4), FILTERS)
def transposed_convolution(network: nn.Module, x: Tensor, places: Places) -> Tensor:
    weight = network.layer.weight.flatten(1)  # (inputs, outputs · kernel)
    patches = [places(FILTERS, x[:, :, t], x[:, :, t] @ weight) for t in range(4)]
    whole = torch.cat([patch.reshape(B, 3, 2) for patch in patches], 2)
    return network.head(whole.tanh().sum(2))


PAIR = ("layer.weight", "layer.bias")


def pairs() -> nn.Module:
    def forward(self, x):
        return self.head(self.layer(x, x.sin()).tanh())

    return Apply(forward, layer=nn.Bilinear(2, 2, 3), head=nn.Linear(3, C))


@case(pairs, lambda: vectors(2), PAIR)
def bilinear(network: nn.Module, x: Tensor, places: Places) -> Tensor:
    products = torch.einsum("bi,bj->bij", x, x.sin()).flatten(1)
    own = network.layer
    y = places(PAIR, products, F.linear(products, own.weight.flatten(1), own.bias))
    return network.head(y.tanh())


def matrix() -> nn.Module:
    return Apply(lambda self, x: self.head((x @ self.layer).tanh()), head=nn.Linear(3, C))


def with_matrix() -> nn.Module:
    network = matrix()
    network.layer = nn.Parameter(torch.randn(2, 3))
    return network


@case(with_matrix, lambda: vectors(2), ("layer",))
def product_with_a_matrix(network: nn.Module, x: Tensor, places: Places) -> Tensor:
    return network.head(places(("layer",), x, x @ network.layer).tanh())


def table(layer: nn.Module) -> Callable[[], nn.Module]:
    def forward(self, x):
        h = self.layer(x)
        return self.head(h.mean(1).tanh() if h.dim() == 3 else h.tanh())

    return lambda: Apply(forward, layer=layer, head=nn.Linear(3, C))


@case(table(nn.Embedding(5, 3)), ids, FILTERS)
def embedding(network: nn.Module, x: Tensor, places: Places) -> Tensor:
    one_hot = F.one_hot(x, 5).double()
    rows = [places(FILTERS, one_hot[:, t], one_hot[:, t] @ network.layer.weight) for t in range(4)]
    return network.head(torch.stack(rows).mean(0).tanh())


CASES["embedding_bag"] = table(nn.EmbeddingBag(5, 3)), ids, embedding, [FILTERS]


def curvature_of(A: Tensor, G: Tensor, count: int, names: Names, rows_are_inputs: bool) -> Tensor:
    """H in the order of the parameters' own entries."""
    if rows_are_inputs:
        return torch.kron(A, G) / count
    I, O = len(A), len(G)
    where = torch.arange(O * I).reshape(O, I)
    if len(names) == 2:
        order = torch.cat([where[:, :-1].flatten(), where[:, -1]])
        return (torch.kron(G, A) / count)[order][:, order]
    return torch.kron(G, A) / count


@pytest.mark.parametrize("name", CASES)
def test_factors_are_sums_over_points_and_places(name: str, monkeypatch) -> None:
    monkeypatch.setattr(kron, "DENSE_BLOCK", 0)
    torch.manual_seed(0)
    build, points, by_hand, groups = CASES[name]
    network, x = build().double().eval(), points()
    for names in groups:
        places = Places()
        out = by_hand(network, x, places)
        torch.testing.assert_close(out, network(x))
        A, G, count = places.factors(names, out)
        weight = dict(network.named_parameters())[names[0]]
        turned = weight.shape[0] != len(G)
        H = curvature_of(A, G, count, names, turned)

        chosen = sorted(names, key=[n for n, _ in network.named_parameters()].index)
        linearized = n2g.linearize(network, only=list(names))
        assert list(linearized.params) == chosen == list(names)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Net2GPWarning)
            posterior = n2g.laplace(
                network, (x, torch.zeros(B, C).double()), n2g.Gaussian(1.0), prior_var=PRIOR,
                structure=n2g.Kron(), only=list(names),
            )  # fmt: skip
        found = brute_force_jacobian(network, x)
        J = flat({n: found[n] for n in names})
        Sigma = torch.linalg.inv(torch.eye(len(H)).double() / PRIOR + H)
        expected = torch.einsum("ncp,pq,ndq->ncd", J, Sigma, J)
        law = posterior.marginal(x)
        torch.testing.assert_close(law.covariance_matrix, expected, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(law.variance, expected.diagonal(dim1=1, dim2=2))
        draws = posterior.sample_weights(6000, generator=torch.Generator().manual_seed(0))
        means = linearized.params
        stacked = torch.cat([(draws[n] - means[n]).flatten(1) for n in names], 1)
        torch.testing.assert_close(stacked.T @ stacked / 6000, Sigma, rtol=0.0, atol=0.06)
