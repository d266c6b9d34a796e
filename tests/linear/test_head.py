"""The last layer, wherever it is applied: its features and Laplace's approximation over it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp.errors import NetworkError, NotStationary
from net2gp.linear.curvatures.head import features_and_outputs, has_features, last_linearized

N, C = 9, 3


class Tokens(nn.Module):
    """A linear layer at each of five tokens, then what `pool` makes of them."""

    def __init__(self, pool) -> None:
        super().__init__()
        self.body, self.score = nn.Linear(4, 6), nn.Linear(6, C)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.score(self.body(x).tanh()), x)


class Atoms(nn.Module):
    """All atoms of a batch in one table, summed by molecule; an offset that is not the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, C)

    def forward(self, x: Tensor) -> Tensor:
        present = x[:, :, 0] > -0.5
        owner = present.nonzero()[:, 0]
        energies = self.head(self.body(x[present]).tanh())
        return torch.zeros(len(x), C).to(x).index_add(0, owner, energies) + x.sum((1, 2))[:, None]


class Answer(nn.Module):
    """The head, an auxiliary head that is called after it, and both in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aux = nn.Linear(4, 6), nn.Linear(6, C), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x[:, 0]).tanh()
        return {"logits": self.head(h), "aux": self.aux(h)}


def conv(kind: type, pool: nn.Module) -> nn.Module:
    return nn.Sequential(kind(2, 5, 1), nn.Tanh(), kind(5, C, 1), pool)


def pooled(dims: int) -> Tensor:
    return torch.randn(N, 2, *[3] * dims, dtype=torch.float64)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mean(-1)


def tokens() -> Tensor:
    return torch.randn(N, 5, 4, dtype=torch.float64)


HEADS = {
    "mean of tokens": (lambda: Tokens(lambda z, x: z.mean(1)), tokens, None),
    "sum of tokens": (lambda: Tokens(lambda z, x: 2 * z.sum(1)), tokens, None),
    "picked token": (
        lambda: Tokens(lambda z, x: z[torch.arange(len(z)), x[:, :, 0].argmax(1)]),
        tokens,
        None,
    ),
    "atoms": (Atoms, tokens, None),
    "output= of a dict": (Answer, tokens, lambda out: out["logits"]),
    "Conv1d": (lambda: conv(nn.Conv1d, Mean()), lambda: pooled(1), None),
    "Conv2d": (lambda: conv(nn.Conv2d, Mean()), lambda: pooled(2), None),
    "Conv3d": (lambda: conv(nn.Conv3d, Mean()), lambda: pooled(3), None),
    "a scale behind it": (
        lambda: Tokens(lambda z, x: z[:, 0] * (1 + x[:, 0, :1] ** 2)),
        tokens,
        None,
    ),
    "without a bias": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(20, 6), nn.Tanh(), nn.Linear(6, C, False)),
        tokens,
        None,
    ),
}
PLACES = {
    "every pixel": (lambda: conv(nn.Conv2d, nn.Flatten()), lambda: pooled(2), None),
    "every token": (lambda: Tokens(lambda z, x: z), tokens, None),
}


def build(case):
    torch.manual_seed(0)
    make, points, output = case
    return n2g.linearize(make().double().eval(), output=output), points()


def fitted(linearized, x, likelihood, **settings):
    torch.manual_seed(1)
    f = linearized(x)
    y = f.argmax(1) if isinstance(likelihood, n2g.Categorical) else f + 0.1 * torch.randn_like(f)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return n2g.laplace(linearized, (x, y), likelihood, prior_var=0.7, **settings)


@pytest.mark.parametrize("case", HEADS.values(), ids=HEADS.keys())
def test_features_are_the_jacobian_of_the_head(case) -> None:
    linearized, x = build(case)
    found = last_linearized(linearized, x)
    assert has_features(found, x)
    phi, out = features_and_outputs(found, x)
    torch.testing.assert_close(out, linearized(x))
    J = found.jacobian(x)  # (N, C, P), the weight's columns before the bias's
    width = found.example[0].numel()
    expected = torch.einsum("ni,cd->ncdi", phi[:, :width], torch.eye(C).double()).flatten(2)
    torch.testing.assert_close(J[..., : C * width], expected)
    if len(found.params) == 2:
        bias = phi[:, width:, None] * torch.eye(C).double()
        torch.testing.assert_close(J[..., C * width :], bias)


@pytest.mark.parametrize("likelihood", [n2g.Categorical(n2g.links.Probit()), n2g.Gaussian(0.3)])
@pytest.mark.parametrize(
    ("name", "inner"),
    [
        *[(name, inner) for name in ("atoms", "Conv2d") for inner in (n2g.Full(), n2g.Diagonal())],
        # for several places the factors of `Kron()` are sums over places, and not of sums over places
        *[("output= of a dict", inner) for inner in (n2g.Full(), n2g.Diagonal(), n2g.Kron())],
    ],
)
def test_it_is_laplace_over_the_parameters_of_the_head(name, inner, likelihood) -> None:
    linearized, x = build(HEADS[name])
    names = list(last_linearized(linearized, x).params)
    same = n2g.linearize(linearized.network, only=names, output=linearized.output)
    ours = fitted(linearized, x, likelihood, structure=n2g.LastLayer(inner))
    plain = fitted(same, x, likelihood, structure=inner)
    assert list(ours.linearized.params) == names
    new = x.flip(0) * 0.7
    torch.testing.assert_close(
        ours.marginal(new).covariance_matrix, plain.marginal(new).covariance_matrix
    )
    torch.testing.assert_close(ours.evidence, plain.evidence)


@pytest.mark.parametrize("case", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("inner", [None, n2g.Full(), n2g.Diagonal(), n2g.Kron()])
def test_outputs_at_every_place_go_through_the_jacobian(case, inner) -> None:
    linearized, x = build(case)
    found = last_linearized(linearized, x)
    assert not has_features(found, x)
    ours = fitted(linearized, x, n2g.Gaussian(0.3), structure=n2g.LastLayer(inner))
    same = n2g.linearize(linearized.network, only=list(found.params))
    plain = fitted(same, x, n2g.Gaussian(0.3), structure=inner or n2g.Full())
    torch.testing.assert_close(
        ours.marginal(x[:2]).covariance_matrix, plain.marginal(x[:2]).covariance_matrix
    )


def test_it_keeps_the_values_that_were_linearized() -> None:
    """Training the network further changes neither the linearization nor its last layer."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double().eval()
    x = torch.randn(8, 2, dtype=torch.float64)
    linearized = n2g.linearize(network)
    before = fitted(linearized, x, n2g.Gaussian(0.1), structure=n2g.LastLayer())
    with torch.no_grad():
        network[2].weight.mul_(3)
        network[0].weight.mul_(3)
    after = fitted(linearized, x, n2g.Gaussian(0.1), structure=n2g.LastLayer())
    torch.testing.assert_close(after.marginal(x).mean, before.marginal(x).mean)
    torch.testing.assert_close(after.marginal(x).variance, before.marginal(x).variance)


@pytest.mark.parametrize("behind", [nn.Softmax(1), nn.ReLU(), nn.Sigmoid()])
def test_a_function_behind_the_last_layer_is_refused(behind: nn.Module) -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, C), behind).double().eval()
    x = torch.randn(N, 4, dtype=torch.float64)
    message = (
        r"found no layer in whose weights the output of Sequential is linear\. It looked at '2', '0'\. "
        r"Return the logits.*linearize\(network, output=\.\.\.\).*only=\['2\.\*'\]"
    )
    with pytest.raises(NetworkError, match=message):
        last_linearized(n2g.linearize(head), x)


def test_a_network_without_linear_layers_is_refused() -> None:
    network = nn.Sequential(nn.Conv1d(2, C, 3), nn.Flatten()).eval()
    message = r"needs an nn\.Linear, or a convolution .* but Sequential calls none\. Pass only="
    with pytest.raises(NetworkError, match=message):
        last_linearized(n2g.linearize(network), torch.randn(4, 2, 3))


def test_features_are_differentiable_in_x() -> None:
    linearized, x = build(HEADS["atoms"])
    found = last_linearized(linearized, x)
    x = x[:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: features_and_outputs(found, v)[0], (x,))


def test_inference_mode_and_training_data_of_a_pooled_head() -> None:
    linearized, x = build(HEADS["mean of tokens"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotStationary)
        posterior = fitted(linearized, x, n2g.Gaussian(0.1), structure=n2g.LastLayer())
    with torch.inference_mode():
        inside = posterior.predict(x.clone()).variance
    torch.testing.assert_close(inside, posterior.predict(x).variance)
