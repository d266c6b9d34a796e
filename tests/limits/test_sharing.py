"""Weights that several inputs share, and what a walk over the module must not overlook."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from net2gp.errors import NetworkError
from net2gp.limits import UnsupportedLayer, infinite_width, nngp

x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
images = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Written(nn.Module):
    """A forward given as a function of the module and its inputs."""

    def __init__(self, function: Callable, **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def dense(function: Callable, **more: nn.Module) -> Written:
    return Written(function, a=nn.Linear(3, 8), h=nn.Linear(8, 1), **more)


def test_shared_weights_on_opposite_inputs_cancel():
    both = infinite_width(dense(lambda s, x: s.h(s.a(x) + s.a(-x))), weight_var=1.5)
    for kernel in both(x):
        torch.testing.assert_close(kernel, torch.zeros(4, 4, dtype=x.dtype), rtol=0, atol=1e-12)


def test_twin_towers_agree_where_their_inputs_do():
    towers = dense(lambda s, x: s.h(torch.tanh(s.a(x)) - torch.tanh(s.a(x.flip(1)))))
    palindromes = torch.stack([x[:, 0], x[:, 1], x[:, 0]], 1)
    assert float(nngp(towers, weight_var=1.5)(palindromes).abs().max()) < 1e-9
    assert float(nngp(towers, weight_var=1.5).diag(x).min()) > 1e-3


def test_equal_tokens_share_their_vector():
    network = Written(
        lambda s, t: s.h(s.e(t[:, 0]) - s.e(t[:, 1])), e=nn.Embedding(9, 8), h=nn.Linear(8, 1)
    )
    found = nngp(network)(torch.tensor([[3, 3], [5, 2]]))
    assert found.tolist() == [[0.0, 0.0], [0.0, 2.0]]


def test_a_shared_convolution_may_see_two_sizes():
    function = lambda s, x: s.h(
        torch.relu(s.a(x)).mean(-1) - torch.relu(s.a(F.avg_pool1d(x, 2))).mean(-1)
    )
    network = Written(function, a=nn.Conv1d(2, 8, 3, padding=1), h=nn.Linear(8, 1))
    K = nngp(network, weight_var=1.5, bias_var=0.1)(images)
    assert float(torch.linalg.eigvalsh(K).min()) > -1e-12
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(4000, 64, 2, 3, generator=generator, dtype=x.dtype) * (1.5 / 6) ** 0.5
    bias = torch.randn(4000, 64, generator=generator, dtype=x.dtype) * 0.1**0.5
    features = []
    for given in (images, F.avg_pool1d(images, 2)):
        patches = F.pad(given, (1, 1)).unfold(-1, 3, 1)
        hidden = torch.einsum("ncpk,sock->snop", patches, draws) + bias[:, None, :, None]
        features.append(hidden.relu().mean(-1))
    difference = features[0] - features[1]
    sampled = 1.5 * torch.einsum("sno,smo->snm", difference, difference) / 64 + 0.1
    error = sampled.std(0) / 4000**0.5
    assert float(((sampled.mean(0) - K) / error).abs().max()) < 5


@pytest.mark.parametrize("name", ["round", "floor", "ceil", "trunc", "frac"])
def test_stairs_are_refused(name):
    with pytest.raises(UnsupportedLayer, match=f"the function {name} .* jump at every step"):
        nngp(dense(lambda s, x: s.h(getattr(torch, name)(s.a(x)))))(x)


def rectified_in_place(s: nn.Module, x: Tensor) -> Tensor:
    u = s.a(x)
    F.relu(u, inplace=True)
    return s.h(u)


def activated_in_place(s: nn.Module, x: Tensor) -> Tensor:
    u = s.a(x)
    return s.h(s.b(s.act(u)) + u)


@pytest.mark.parametrize("function", [rectified_in_place, activated_in_place])
def test_values_changed_in_place_are_not_used_again(function):
    network = dense(function, b=nn.Linear(8, 8), act=nn.ReLU(inplace=True))
    with pytest.raises(NetworkError, match=r"is changed in place by .* Write the operation out of"):
        nngp(network)


def test_results_of_operations_in_place_may_be_used():
    plain = nngp(dense(lambda s, x: s.h(torch.relu(s.a(x)))))(x)
    torch.testing.assert_close(nngp(dense(lambda s, x: s.h(s.a(x).relu_())))(x), plain)


def test_hooks_are_refused():
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    network[1].register_forward_hook(lambda module, given, output: 2 * output)
    with pytest.raises(NetworkError, match=r"'1' \(ReLU\) has forward hooks"):
        nngp(network)


@pytest.mark.parametrize(
    "function",
    [lambda s, x: s.h(torch.relu(s.a(x))) + 3, lambda s, x: s.h(torch.relu(s.a(x))) + x[:, :1]],
    ids=["a number", "the inputs"],
)
def test_outputs_have_no_fixed_part(function):
    with pytest.raises(UnsupportedLayer, match="adds something fixed"):
        nngp(dense(function))(x)


def test_stopped_gradients_are_refused():
    with pytest.raises(UnsupportedLayer, match="detach"):
        nngp(dense(lambda s, x: s.h(s.a(x).detach())))(x)


def test_tied_embeddings_are_refused():
    network = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 8))
    network[3].weight = network[0].weight
    with pytest.raises(UnsupportedLayer, match="weights of another kind of layer"):
        nngp(network)(torch.tensor([[1, 2]]))


@pytest.mark.parametrize("function", [lambda x: x - x[:1], lambda x: x.cumsum(0)])
def test_points_do_not_see_those_before_them(function):
    network = dense(lambda s, x: s.h(torch.relu(s.a(function(x)))))
    with pytest.raises(
        UnsupportedLayer, match=r"depends on the other inputs|does not give one row"
    ):
        nngp(network)(x)


def test_functions_that_lose_the_points_are_refused():
    with pytest.raises(UnsupportedLayer, match="does not give one row per point"):
        nngp(dense(lambda s, x: s.h(s.a(x) / x.abs().max())))(x)


def test_inputs_get_gradients():
    network = dense(lambda s, x: s.h(torch.tanh(s.a(x))))
    given = x.clone().requires_grad_()
    kernel = nngp(network, weight_var=1.5, bias_var=0.1)
    (found,) = torch.autograd.grad(kernel(given)[0, 1], given)
    step = 1e-5
    moved = x.clone()
    moved[0, 0] += step
    slope = (kernel(moved)[0, 1] - kernel(x)[0, 1]) / step
    assert float(found[0, 0] - slope) == pytest.approx(0.0, abs=1e-5)


def test_kernels_can_be_pickled_after_use():
    kernel = nngp(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)))
    before = kernel(x)
    assert torch.equal(pickle.loads(pickle.dumps(kernel))(x), before)
