"""Laws of kernels estimated from draws of the parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from net2gp.errors import InputError, NetworkError
from net2gp.limits.initialization import as_built
from net2gp.limits.kernels import infinite_width
from net2gp.limits.sampling import kernel_samples, monte_carlo
from net2gp.limits.sampling.monte_carlo import monte_carlo_kernel
from net2gp.limits.sampling.twin import twin
from net2gp.linear import linearize
from net2gp.types import Kernel


def mlp(width: int = 32, outputs: int = 2) -> nn.Sequential:
    layers = (
        nn.Linear(3, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, outputs),
    )
    return nn.Sequential(*layers).double()


def points(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


VARIANCES = {"weight_var": 1.5, "bias_var": 0.2}


class Reader(nn.Module):
    """An LSTM, softmax attention with logits divided by √d, and control flow that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(x)
        if float(h.detach().abs().max()) > 1e9:
            h = h / 2
        return self.head(self.attention(h, h, h)[0].amax(1))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


ANY = {
    "mlp": (lambda: mlp(8), (5, 3)),
    "lstm and attention": (lambda: Reader().double(), (5, 4, 2)),
    "max pooling": (lambda: Pooled().double(), (5, 1, 4, 4)),
}


@pytest.mark.parametrize("name", ANY)
@pytest.mark.parametrize("variances", [{}, VARIANCES])
@pytest.mark.parametrize("tangent", [False, True])
def test_blocks_of_the_kernel_are_one_positive_matrix(name, variances, tangent):
    build, shape = ANY[name]
    x = points(*shape)
    kernel = monte_carlo_kernel(build(), 4, tangent=tangent, **variances)
    assert isinstance(kernel, Kernel)
    k = kernel(x)
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(k, k.T, **close)
    assert float(torch.linalg.eigvalsh(k).min()) > -1e-10 * float(k.max())
    torch.testing.assert_close(kernel(x[:2], x[2:]), k[:2, 2:], **close)
    torch.testing.assert_close(kernel(x[[3, 1]]), k[[3, 1]][:, [3, 1]], **close)
    torch.testing.assert_close(kernel.diag(x), k.diagonal(), **close)
    torch.testing.assert_close(kernel.blocks(x)[:, 0, 0], k.diagonal(), **close)
    v = points(5, 2)
    torch.testing.assert_close(kernel.matmul(x, x, v), k @ v, **close)
    torch.testing.assert_close(kernel.scaled(2.0)(x), 2 * k, **close)


def test_means_and_errors_are_those_of_single_networks():
    x, network = points(4, 3), mlp(8, outputs=1)
    kernel = monte_carlo_kernel(network, 7, tangent=True, **VARIANCES)
    nngp, ntk = kernel.estimates(x)
    outputs, tangents = [], []
    for number in range(7):
        drawn = kernel.draws(number)
        copied = copy.deepcopy(network)
        copied.load_state_dict(drawn)
        outputs.append(copied(x).detach() @ copied(x).detach().T)
        rates = {name: torch.full_like(v, kernel.draws.rates[name]) for name, v in drawn.items()}
        jacobians = linearize(copied.eval()).jacobian(x)[:, 0]
        scale = torch.cat([rates[name].reshape(-1) for name, _ in copied.named_parameters()])
        tangents.append((jacobians * scale) @ jacobians.T)
    for estimate, samples in ((nngp, outputs), (ntk, tangents)):
        stacked = torch.stack(samples)
        torch.testing.assert_close(estimate.mean, stacked.mean(0), rtol=1e-9, atol=1e-10)
        error = stacked.std(0) / 7**0.5
        torch.testing.assert_close(estimate.standard_error, error, rtol=1e-9, atol=1e-10)
        assert estimate.num_samples == 7


def test_rates_are_the_variances_of_the_entries():
    rates = monte_carlo_kernel(mlp(8), 2, weight_var={"0": 3.0, "*": 1.0}, bias_var=0.2).draws.rates
    assert rates == pytest.approx(
        {
            "0.weight": 1.0,
            "0.bias": 0.2,
            "2.weight": 1 / 8,
            "2.bias": 0.2,
            "4.weight": 1 / 8,
            "4.bias": 0.2,
        }
    )
    standard = monte_carlo_kernel(mlp(8), 2, parameterization="standard", **VARIANCES)
    assert set(standard.draws.rates.values()) == {1.0}


def test_chunks_change_nothing(monkeypatch):
    x, kernel = points(5, 3), monte_carlo_kernel(mlp(8), 6, tangent=True, **VARIANCES)
    whole = kernel(x)
    for budget in (1, 8000, 40000):
        for module in (kernel_samples, monte_carlo):
            monkeypatch.setattr(module, "BUDGET", budget)
        torch.testing.assert_close(kernel(x), whole, rtol=1e-12, atol=1e-13)


def test_vectorized_draws_are_single_draws(monkeypatch):
    x, kernel = points(4, 3), monte_carlo_kernel(mlp(8), 5, **VARIANCES)
    fast = kernel.estimates(x)

    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("no batching rule")

    monkeypatch.setattr(kernel_samples, "vmap", refuse)
    for one, other in zip(fast, kernel.estimates(x), strict=True):
        torch.testing.assert_close(one.mean, other.mean, rtol=1e-11, atol=1e-12)


def test_a_stream_ends_with_the_estimate():
    x, kernel = points(3, 3), monte_carlo_kernel(mlp(8), 11, **VARIANCES)
    found = list(kernel.stream(x, every=4))
    assert [estimate.num_samples for estimate in found] == [4, 8, 11]
    torch.testing.assert_close(found[-1].mean, kernel(x))
    torch.testing.assert_close(found[0].mean, monte_carlo_kernel(mlp(8), 4, **VARIANCES)(x))
    first = next(kernel.stream(x, every=1))
    assert bool(first.standard_error.isinf().all())
    with pytest.raises(InputError, match="every must be at least 1"):
        next(kernel.stream(x, every=0))


def test_module_and_random_state_are_left_alone():
    network, x = mlp(8), points(3, 3)
    before, state = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    monte_carlo_kernel(network, 3).estimates(x)
    monte_carlo_kernel(network, 3, width=20, **VARIANCES).estimates(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())


def test_generators_decide_the_draws():
    x = points(3, 3)
    one, same, other = (
        monte_carlo_kernel(mlp(8), 3, generator=torch.Generator().manual_seed(n))(x)
        for n in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)


def test_the_modules_own_initialization_is_that_of_its_variances():
    x, network = points(3, 3), mlp(64, outputs=16)
    own = monte_carlo_kernel(network, 100).estimate(x)
    weight_var, bias_var = as_built(network)
    expected = infinite_width(network, weight_var=weight_var, bias_var=bias_var).nngp(x)
    assert bool(
        ((own.mean - expected).abs() < 5 * own.standard_error + 0.03 * expected.max()).all()
    )


@pytest.mark.parametrize("parameterization", ["ntk", "standard"])
def test_the_mean_is_the_limit(parameterization):
    x, network = points(3, 3), mlp(96, outputs=8)
    settings = {**VARIANCES, "parameterization": parameterization}
    found = monte_carlo_kernel(network, 100, **settings).estimates(x)
    for estimate, k in zip(found, infinite_width(network, **settings)(x), strict=True):
        slack = 5 * estimate.standard_error + 0.02 * float(k.max())
        assert bool(((estimate.mean - k).abs() < slack).all())


def slope(sizes: list[int], errors: list[float]) -> float:
    logs = torch.tensor([sizes, errors], dtype=torch.float64).log()
    centered = logs - logs.mean(1, keepdim=True)
    return float((centered[0] * centered[1]).sum() / centered[0].square().sum())


def test_the_error_of_one_network_falls_with_the_root_of_its_width():
    x, sizes = points(6, 3), [16, 48, 144, 432]
    limit = infinite_width(mlp(), **VARIANCES).ntk(x)
    errors = []
    for width in sizes:
        kernel = monte_carlo_kernel(mlp(1), 24, tangent=True, width=width, **VARIANCES)
        *_, whole = kernel.stream(x, every=24)
        spread = whole.standard_error * 24**0.5
        bias = whole.mean - limit
        errors.append(float((spread.square() + bias.square()).sum().sqrt() / limit.norm()))
    assert -0.6 < slope(sizes, errors) < -0.4


def test_the_error_falls_with_the_root_of_the_number_of_draws():
    x, sizes = points(6, 3), [4, 16, 64]
    limit = infinite_width(mlp(), **VARIANCES).nngp(x)
    errors = []
    for size in sizes:
        found = 0.0
        for seed in range(8):
            generator = torch.Generator().manual_seed(seed)
            kernel = monte_carlo_kernel(mlp(), size, width=64, generator=generator, **VARIANCES)
            found += float((kernel(x) - limit).square().sum() / limit.square().sum()) / 8
        errors.append(found**0.5)
    assert -0.6 < slope(sizes, errors) < -0.4


def test_means_are_precise_in_double():
    network, x = mlp(8).float(), points(3, 3).float()
    kernel = monte_carlo_kernel(network, 5, tangent=True, **VARIANCES)
    assert kernel(x).dtype == torch.float32
    assert kernel.precise()(x).dtype == torch.float64
    torch.testing.assert_close(kernel.precise()(x).float(), kernel(x))
    assert kernel.to(dtype=torch.float64)(x.double()).dtype == torch.float64


def test_both_kernels_come_from_the_same_draws():
    x, kernel = points(3, 3), monte_carlo_kernel(mlp(8), 5, **VARIANCES)
    nngp, ntk = kernel.estimates(x)
    assert torch.equal(kernel.nngp(x), nngp.mean)
    assert torch.equal(kernel.ntk(x), ntk.mean)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.matrix = nn.Linear(3, 4), nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) @ self.matrix


def test_parameters_that_nothing_draws_are_named():
    with pytest.raises(NetworkError, match=r"no layer's reset_parameters\(\) draws 'matrix'"):
        monte_carlo_kernel(Scaled(), 3)
    with pytest.raises(InputError, match=r"fan-in of the parameter 'matrix' is not known"):
        monte_carlo_kernel(Scaled(), 3, weight_var=1.0)
    kernel = monte_carlo_kernel(Scaled(), 3, weight_var={"matrix": 0.25, "*": 1.0})
    assert kernel.draws.rates["matrix"] == 0.25


def test_what_cannot_be_estimated_is_refused():
    with pytest.raises(InputError, match="num_samples must be at least 1, but 0"):
        monte_carlo_kernel(mlp(), 0)
    with pytest.raises(NetworkError, match="a module with parameters is needed"):
        monte_carlo_kernel(nn.ReLU(), 3)
    with pytest.raises(InputError, match="parameterization='ntk' needs the variances"):
        monte_carlo_kernel(mlp(), 3, parameterization="ntk")
    with pytest.raises(NetworkError, match=r"BatchNorm1d \('1'\) in training couples"):
        monte_carlo_kernel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 3)
    with pytest.raises(InputError, match=r"x is torch\.float32, but the network is torch\.float64"):
        monte_carlo_kernel(mlp(), 3)(torch.zeros(2, 3))
    with pytest.raises(NetworkError, match="one row for each of the 1 points, but returns a tuple"):
        monte_carlo_kernel(nn.RNN(3, 4, batch_first=True).double(), 2)(points(2, 5, 3))


def test_a_twin_redraws_itself():
    network, x = mlp(4), points(3, 3)
    wide = twin(network, 16, **VARIANCES)
    kernel = monte_carlo_kernel(wide, 400)
    same = monte_carlo_kernel(network, 400, width=16, **VARIANCES)
    pairs = zip(kernel.estimates(x), same.estimates(x), strict=True)
    for one, other in pairs:
        slack = 5 * (one.standard_error.square() + other.standard_error.square()).sqrt()
        assert bool(((one.mean - other.mean).abs() < slack).all())


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(x)).mean(1))


def test_weights_shared_by_layers_of_different_fan_in_need_a_twin():
    with pytest.raises(
        NetworkError, match=r"'embedding\.weight' and 'head\.weight' are the same weights"
    ):
        monte_carlo_kernel(TiedHead(), 3, weight_var=1.0)
    kernel = monte_carlo_kernel(twin(TiedHead(), 8), 3)
    assert kernel(torch.randint(9, (2, 5))).shape == (2, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("variances", [{}, VARIANCES])
def test_the_device_does_not_change_the_estimate(variances):
    network, x = mlp(8), points(3, 3)
    here = monte_carlo_kernel(network, 4, **variances).estimates(x)
    there = monte_carlo_kernel(network.cuda(), 4, **variances).estimates(x.cuda())
    for one, other in zip(here, there, strict=True):
        assert other.mean.device.type == "cuda"
        torch.testing.assert_close(one.mean, other.mean.cpu(), rtol=1e-10, atol=1e-12)
