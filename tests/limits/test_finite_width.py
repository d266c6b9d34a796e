"""Laws of networks of finite width: the spread of their kernels, against networks drawn at random."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import ks_2samp, kstest
from torch import Tensor, nn

from net2gp.errors import InputError, NetworkError
from net2gp.limits.duals.activations import activation_of
from net2gp.limits.finite_width import (
    excess_kurtosis,
    finite_width,
    kernel_variance,
    sample_kernels,
    sample_ntks,
    sample_outputs,
    square_correlation,
)
from net2gp.limits.kernels import nngp
from net2gp.limits.propagation.hidden_layers import HiddenLayer, hidden_layers

X = torch.tensor([[0.3, -1.2, 0.7], [1.0, 0.4, -0.5], [0.9, 0.6, -0.2]], dtype=torch.float64)
PRIOR = {"weight_var": 1.6, "bias_var": 0.1}
activations = pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU(), nn.GELU()], ids=str)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def networks(activation, widths, num_samples, *, num_outputs=1, seed=0, **prior) -> Tensor:
    """Outputs (S, N, C) at X of networks whose every weight is drawn."""
    generator, a = seeded(seed), X.T.expand(num_samples, -1, -1)
    for layer, width in enumerate([*widths, num_outputs]):
        a = activation(a) if layer else a
        shape = (num_samples, width, a.shape[1])
        weight = torch.randn(shape, dtype=torch.float64, generator=generator)
        bias = torch.randn(num_samples, width, 1, dtype=torch.float64, generator=generator)
        a = (prior["weight_var"] / a.shape[1]) ** 0.5 * weight @ a + prior["bias_var"] ** 0.5 * bias
    return a.mT


def assert_mean(samples: Tensor, expected: Tensor, *, resolves: Tensor) -> None:
    """The mean over the first axis is `expected` within 4 standard errors, far less than `resolves`."""
    error = samples.std(0) / len(samples) ** 0.5
    assert (error < resolves.abs() / 10).all()
    assert ((samples.mean(0) - expected).abs() < 4 * error).all()


@pytest.mark.parametrize("q", [0.3, 2.0])
def test_the_kurtosis_of_one_hidden_layer_is_its_formula_by_direct_quadrature(q):
    moment = lambda power: (
        quad(
            lambda z: np.tanh(math.sqrt(q) * z) ** power * math.exp(-z * z / 2),
            -12,
            12,
            epsabs=1e-13,
        )[0]
        / math.sqrt(2 * math.pi)
    )
    second, fourth = moment(2), moment(4)
    x = torch.tensor([[(q - 0.1) / 1.6]], dtype=torch.float64).sqrt()
    variance = 1.6 * second + 0.1
    expected = 3 * 1.6**2 * (fourth - second**2) / (7 * variance**2)
    found = excess_kurtosis([HiddenLayer(nn.Tanh(), 7)], x, **PRIOR)
    assert float(found) == pytest.approx(expected, rel=1e-8)


@activations
def test_one_hidden_layer_is_exact_at_any_width(activation):
    law = finite_width([HiddenLayer(activation, 3)], X, **PRIOR)
    outputs = networks(activation, [3], 200_000, num_outputs=2, **PRIOR)
    first, second = outputs.square().unbind(-1)
    spread = 3 * law.variance
    assert (law.shift == 0).all()
    assert_mean(first, law.kernel, resolves=law.kernel)
    assert_mean(first * second, law.kernel.square() + law.variance, resolves=spread)
    assert_mean(first.square(), 3 * (law.kernel.square() + law.variance), resolves=3 * spread)


@activations
def test_the_variance_of_deep_kernels_tends_to_the_recursion(activation):
    scaled = []
    for width in (24, 48):
        kernels = sample_kernels(
            [HiddenLayer(activation, width)] * 3, X[:1], 30_000, generator=seeded(), **PRIOR
        )
        scaled.append(width * float(kernels.var()))
    expected = 48 * float(finite_width([HiddenLayer(activation, 48)] * 3, X[:1], **PRIOR).variance)
    # the next order, 1/n, drops out of the extrapolation
    assert 2 * scaled[1] - scaled[0] == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.GELU()], ids=str)
def test_the_mean_of_deep_kernels_is_shifted_as_the_recursion_says(activation):
    found, error = 0.0, 0.0
    for width, factor in ((12, -1), (24, 2)):
        layers = [HiddenLayer(activation, width)] * 3
        law = finite_width(layers, X[:1], **PRIOR)
        kernels = sample_kernels(layers, X[:1], 150_000, generator=seeded(width), **PRIOR)
        found += factor * width * float(kernels.mean() - law.kernel)
        error = math.hypot(error, factor * width * float(kernels.std()) / len(kernels) ** 0.5)
    expected = 24 * float(law.shift)
    assert error < abs(expected) / 5
    assert abs(found - expected) < 4 * error


@activations
def test_the_shift_of_two_hidden_layers_is_the_curvature_of_the_second(activation):
    phi, width = activation_of(activation), 400
    first = [HiddenLayer(activation, width)]
    kernels = sample_kernels(first, X[:1], 20_000, generator=seeded(), **PRIOR)[:, 0, 0]
    q = finite_width(first, X[:1], **PRIOR).kernel.requires_grad_()
    value = phi.variance(q, False)[0]
    (derivative,) = torch.autograd.grad(value.sum(), q)
    # less its linear part, whose mean is zero, so that what is left has little noise
    bend = phi.variance(kernels, False)[0] - value.detach() - derivative * (kernels - q.detach())
    law = finite_width(first * 2, X[:1], **PRIOR)
    expected = float(law.shift) / PRIOR["weight_var"]
    error = float(bend.std()) / len(bend) ** 0.5
    assert abs(float(bend.mean()) - expected) < 4 * error + 0.02 * abs(expected) + 1e-12
    assert error < abs(expected) / 25 + 1e-12


def test_widths_add_up_as_inverses_in_a_critical_relu_network():
    layers = [HiddenLayer(nn.ReLU(), width) for width in (10, 40, 80)]
    expected = 15 * (1 / 10 + 1 / 40 + 1 / 80)
    found = excess_kurtosis(layers, X, weight_var=2.0)
    torch.testing.assert_close(found, torch.full((3,), expected, dtype=torch.float64))
    assert finite_width(layers, X, weight_var=2.0).shift.abs().max() < 1e-12


def test_a_deep_linear_network_has_its_known_fourth_moment():
    # E f⁴ = 3 K² Π (1 + 2/n): Hanin & Nica (2020)
    layers = [HiddenLayer(nn.Identity(), 500)] * 4
    exact = 3 * (1 + 2 / 500) ** 4 - 3
    found = excess_kurtosis(layers, X, weight_var=1.0)
    torch.testing.assert_close(found, torch.full((3,), exact).double(), rtol=0.01, atol=0)
    torch.testing.assert_close(found, torch.full((3,), 3 * 2 / 500 * 4).double())


@activations
def test_kernels_drawn_by_layers_have_the_law_of_networks_drawn_by_weights(activation):
    by_weights = networks(activation, [4, 6], 20_000, seed=1, **PRIOR)
    layers = [HiddenLayer(activation, 4), HiddenLayer(activation, 6)]
    by_layers = sample_outputs(layers, X, 20_000, generator=seeded(2), **PRIOR)
    for n in range(len(X)):
        assert ks_2samp(by_weights[:, n, 0], by_layers[:, n, 0]).pvalue > 1e-3
    products = [(f[:, 0, 0] * f[:, 1, 0]).numpy() for f in (by_weights, by_layers)]
    assert ks_2samp(*products).pvalue > 1e-3


def test_excess_kurtosis_times_width_tends_to_a_constant():
    scaled = []
    for width in (4, 8, 16):
        layers = [HiddenLayer(nn.ReLU(), width)]
        f = sample_outputs(layers, X[:1], 400_000, generator=seeded(), weight_var=2.0).flatten()
        scaled.append(width * float((f**4).mean() / f.square().mean() ** 2 - 3))
    assert scaled == pytest.approx([15.0] * 3, rel=0.1)


def test_wide_outputs_are_gaussian_and_narrow_ones_are_not():
    distance = []
    for width in (1, 8, 512):
        layers = [HiddenLayer(nn.ReLU(), width)]
        outputs = sample_outputs(layers, X[:1], 20_000, generator=seeded(), **PRIOR).flatten()
        scale = float(finite_width(layers, X[:1], **PRIOR).kernel) ** 0.5
        test = kstest(outputs.numpy() / scale, "norm")
        distance.append((test.statistic, test.pvalue))
    assert distance[0][0] > distance[1][0] > distance[2][0]
    assert distance[1][1] < 1e-3 < distance[2][1]


def test_outputs_are_uncorrelated_while_their_squares_share_a_kernel():
    for width in (3, 12):
        f = networks(nn.Tanh(), [width], 150_000, num_outputs=2, seed=width, **PRIOR)[:, 0]
        plain = float(torch.corrcoef(f.T)[0, 1])
        squares = float(torch.corrcoef(f.square().T)[0, 1])
        expected = float(square_correlation([HiddenLayer(nn.Tanh(), width)], X[:1], **PRIOR))
        sampling = len(f) ** -0.5
        assert abs(plain) < 4 * sampling
        assert expected > 2 * sampling
        assert abs(squares - expected) < 5 * sampling


def test_the_correlation_of_squares_falls_as_one_over_the_width():
    widths = (100, 200, 400, 800)
    found = [
        float(square_correlation([HiddenLayer(nn.Tanh(), n)] * 2, X[:1], **PRIOR)) for n in widths
    ]
    slope = np.polyfit(np.log(widths), np.log(found), 1)[0]
    assert slope == pytest.approx(-1, abs=0.02)


@activations
def test_the_variance_of_a_kernel_between_two_inputs_is_exact_at_one_hidden_layer(activation):
    layers = [HiddenLayer(activation, 4)]
    kernels = sample_kernels(layers, X, 100_000, generator=seeded(), **PRIOR)
    expected = kernel_variance(layers, X, **PRIOR)
    deviations = (kernels - kernels.mean(0)).square()
    assert_mean(deviations, expected, resolves=expected)


def test_the_variance_of_a_deep_kernel_between_two_inputs_tends_to_the_recursion():
    scaled = []
    for width in (24, 48):
        layers = [HiddenLayer(nn.Tanh(), width)] * 2
        kernels = sample_kernels(layers, X[:2], 30_000, generator=seeded(), **PRIOR)
        scaled.append(width * kernels.var(0))
    expected = 48 * kernel_variance(layers, X[:2], **PRIOR)
    torch.testing.assert_close(2 * scaled[1] - scaled[0], expected, rtol=0.06, atol=0)


@activations
def test_pairs_are_symmetric_and_agree_with_single_inputs_on_the_diagonal(activation):
    layers = [HiddenLayer(activation, 50), HiddenLayer(activation, 30)]
    square = kernel_variance(layers, X, **PRIOR)
    torch.testing.assert_close(square, square.T, rtol=1e-8, atol=0)
    single = finite_width(layers, X, **PRIOR).variance
    torch.testing.assert_close(square.diagonal(), single, rtol=1e-7, atol=0)
    part = kernel_variance(layers, X[:1], X[1:], **PRIOR)
    torch.testing.assert_close(part, square[:1, 1:], rtol=1e-8, atol=0)


def limit_ntk(activation, depth: int) -> Tensor:
    phi = activation_of(activation)
    kernel = PRIOR["weight_var"] * X @ X.T / 3 + PRIOR["bias_var"]
    ntk = kernel
    for _ in range(depth):
        var = kernel.diagonal()
        value, slopes = phi.dual(kernel, var[:, None], var[None, :], True)
        kernel = PRIOR["weight_var"] * value + PRIOR["bias_var"]
        ntk = kernel + PRIOR["weight_var"] * slopes * ntk
    return ntk


def autograd_ntk(activation, widths, generator) -> Tensor:
    """The tangent kernel of one network drawn by its weights, from gradients in all of them."""
    sizes = [X.shape[1], *widths, 1]
    shapes = [s for a, b in itertools.pairwise(sizes) for s in ((b, a), (b, 1))]
    params = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    params = [p.requires_grad_() for p in params]
    a = X.T
    for layer in range(len(sizes) - 1):
        a = activation(a) if layer else a
        scale = (PRIOR["weight_var"] / a.shape[0]) ** 0.5
        a = scale * params[2 * layer] @ a + PRIOR["bias_var"] ** 0.5 * params[2 * layer + 1]
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(f, params, retain_graph=True)])
        for f in a[0]
    ]
    jacobian = torch.stack(rows)
    return jacobian @ jacobian.T


def test_sampled_ntks_have_the_law_of_gradients_of_networks():
    generator = seeded(3)
    by_gradients = torch.stack([autograd_ntk(nn.Tanh(), (5, 4), generator) for _ in range(800)])
    layers = [HiddenLayer(nn.Tanh(), 5), HiddenLayer(nn.Tanh(), 4)]
    sampled = sample_ntks(layers, X, 4000, generator=seeded(4), **PRIOR)
    for entry in ((0, 0), (0, 1), (2, 2)):
        assert ks_2samp(by_gradients[:, *entry], sampled[:, *entry]).pvalue > 1e-3


def test_the_ntk_of_wide_networks_is_its_limit_and_spreads_as_one_over_the_width():
    draws = [
        sample_ntks([HiddenLayer(nn.Tanh(), width)] * 2, X, 4000, generator=seeded(width), **PRIOR)
        for width in (24, 48)
    ]
    errors = [ntks.std(0) / len(ntks) ** 0.5 for ntks in draws]
    # a mean that is off by O(1/n) is right in the extrapolation
    limit = 2 * draws[1].mean(0) - draws[0].mean(0)
    error = (4 * errors[1].square() + errors[0].square()).sqrt()
    expected = limit_ntk(nn.Tanh(), 2)
    assert ((limit - expected).abs() < 4 * error).all()
    assert (error < 0.02 * expected.diagonal().max()).all()
    spread = [float(ntks.var(0)[0, 0]) for ntks in draws]
    assert spread[0] / spread[1] == pytest.approx(2, rel=0.15)


def test_the_limit_is_the_kernel_of_infinite_width():
    network = nn.Sequential(
        nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 1)
    )
    expected = nngp(network.double(), **PRIOR).diag(X)
    torch.testing.assert_close(finite_width(network, X, **PRIOR).kernel, expected)


def test_a_network_is_read_as_its_hidden_layers():
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(3, 20), nn.Tanh(), nn.Sequential(nn.Linear(20, 30), nn.ReLU()),
        nn.Linear(30, 2),
    )  # fmt: skip
    assert [(type(h.activation), h.width) for h in hidden_layers(network)] == [
        (nn.Tanh, 20), (nn.ReLU, 30),
    ]  # fmt: skip
    torch.testing.assert_close(
        excess_kurtosis(network, X, **PRIOR), excess_kurtosis(hidden_layers(network), X, **PRIOR)
    )


def test_a_network_without_biases_has_no_bias_variance():
    network = nn.Sequential(nn.Linear(3, 9, bias=False), nn.Tanh(), nn.Linear(9, 1, bias=False))
    torch.testing.assert_close(
        excess_kurtosis(network, X, weight_var=1.6, bias_var=5.0),
        excess_kurtosis(hidden_layers(network), X, weight_var=1.6),
    )


def test_networks_and_inputs_that_do_not_fit_are_described():
    with pytest.raises(
        NetworkError, match="one activation between each two of them, but got Conv2d"
    ):
        excess_kurtosis(nn.Sequential(nn.Conv2d(1, 1, 3), nn.ReLU(), nn.Linear(4, 1)), X)
    mixed = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 1, bias=False))
    with pytest.raises(NetworkError, match="some Linear layers have a bias and some have none"):
        excess_kurtosis(mixed, X)
    with pytest.raises(InputError, match=r"inputs in rows, \(N, d\), but is a tensor of shape"):
        excess_kurtosis([HiddenLayer(nn.Tanh(), 5)], X[0])
    with pytest.raises(InputError, match="num_samples must be at least 1, but is 0"):
        sample_kernels([HiddenLayer(nn.Tanh(), 5)], X, 0)
