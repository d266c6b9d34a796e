"""Draws of composed processes, against their moments, the laws of their layers and slow references."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import ks_2samp, kstest
from torch import nn

import net2gp as n2g
from net2gp import RBF
from net2gp.deep import Layer, composed, draw, increment_kurtosis, log_distances
from net2gp.deep.grams import grams
from net2gp.errors import InputError
from net2gp.kernels import Linear, Periodic
from net2gp.limits import nngp

PAIR = torch.tensor([[0.0], [0.5]], dtype=torch.float64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def mlp(activation: nn.Module, inputs: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), activation, nn.Linear(8, 1))


def test_two_layers_have_the_covariance_and_kurtosis_of_the_closed_forms():
    """Covariance .670574 and kurtosis 5.457 at a distance of one half."""
    inner, outer = RBF(0.8, 1.3**2), RBF(0.7)
    f = draw([inner, outer], PAIR, 200_000, generator=generator()).outputs[..., 0]
    kernel = composed(outer, inner)
    products = f[:, 0] * f[:, 1]
    assert kernel(PAIR)[0, 1].item() == pytest.approx(0.670574, abs=1e-6)
    assert abs(products.mean() - kernel(PAIR)[0, 1]) < 4 * products.std() / len(f) ** 0.5
    parts = (f[:, 0] - f[:, 1]).reshape(40, -1)
    estimates = parts.pow(4).mean(1) / parts.square().mean(1).square()
    expected = increment_kurtosis(kernel, PAIR)[0, 1]
    assert expected.item() == pytest.approx(5.457, abs=1e-3)
    assert abs(estimates.mean() - expected) < 4 * estimates.std() / 40**0.5


@pytest.mark.parametrize("connected", [False, True])
def test_every_layer_is_marginally_gaussian(connected):
    layers = [Layer(RBF(0.9, variance), 2) for variance in (0.5, 2.0, 1.0, 3.0)]
    draws = draw(
        layers, normal(3, 2, seed=1), 20_000, input_connected=connected, generator=generator()
    )
    for values, layer in zip(draws.values, layers, strict=True):
        assert values.shape == (20_000, 3, 2)
        scale = layer.kernel.output_var**0.5
        for n in range(3):
            assert kstest((values[:, n, n % 2] / scale).numpy(), "norm").pvalue > 1e-3


@pytest.mark.parametrize("connected", [False, True])
def test_two_layers_are_those_of_a_plain_loop(connected):
    """The second moments given the layer before, averaged over draws that a loop makes."""
    x = normal(3, 2, seed=3)
    inner, outer = RBF(0.8, 1.3), nngp(mlp(nn.ReLU(), 4 if connected else 2), weight_var=2.0)
    f = draw(
        [Layer(inner, 2), outer], x, 4000, input_connected=connected, generator=generator()
    ).outputs[..., 0]
    root = torch.linalg.cholesky(inner(x))
    conditional = []
    for seed in range(300):
        h = root @ normal(3, 2, seed=seed)
        conditional.append(outer(torch.cat([h, x], 1) if connected else h))
    found = torch.stack(conditional)
    products = f[:, :, None] * f[:, None]
    error = (found.var(0) / len(found) + products.var(0) / len(f)).sqrt()
    assert ((products.mean(0) - found.mean(0)).abs() < 4 * error).all()


KERNELS = {
    "RBF": RBF(torch.tensor([0.7, 1.3], dtype=torch.float64), 1.5),
    "Periodic": Periodic(2.0, 0.8, 1.2),
    "Linear": Linear(0.7, 0.3),
    "sum and product": 2.0 * RBF() * Linear() + Periodic(3.0),
    "limit of a network": nngp(mlp(nn.ReLU()), weight_var=2.0),
    "tangent kernel": n2g.linearize(mlp(nn.Tanh()).double().eval()).trace_kernel(),
}


@pytest.mark.parametrize("name", KERNELS)
def test_matrices_of_many_sets_are_those_of_each(name):
    kernel = KERNELS[name].precise()
    a, b = normal(70, 3, 2, seed=1), normal(70, 2, 2, seed=2)
    torch.testing.assert_close(
        grams(kernel, a, b)[::23], torch.stack([kernel(a[i], b[i]) for i in range(0, 70, 23)])
    )
    torch.testing.assert_close(
        grams(kernel, a, a)[::23], torch.stack([kernel(one) for one in a[::23]])
    )


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_can_be_a_layer(name):
    layers = [Layer(RBF(), 2), Layer(KERNELS[name], 2), Layer(KERNELS[name], 1)]
    draws = draw(layers, normal(6, 3), 5, generator=generator())
    assert [values.shape[-1] for values in draws.values] == [2, 2, 1]
    assert all(torch.isfinite(values).all() for values in draws.values)
    assert torch.equal(draws.outputs, draws.values[-1])


def test_the_first_layer_takes_what_its_kernel_takes():
    images = torch.randn(4, 1, 6, 6, generator=generator())
    convolution = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 1))
    draws = draw([Layer(nngp(convolution), 3), RBF()], images, 5, generator=generator())
    assert draws.outputs.shape == (5, 4, 1)
    assert draws.outputs.dtype == torch.float64


@pytest.mark.parametrize("place", [0, 1])
def test_outputs_that_a_kernel_couples_are_drawn_together(place):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    kernel, x = n2g.linearize(network).kernel(), normal(2, 2)
    layers = [Layer(RBF(), 2), Layer(kernel, 3)] if place else [Layer(kernel, 3)]
    draws = draw(layers, x, 120, generator=generator())
    f = draws.outputs.flatten(1)
    given = [kernel(h) for h in draws.values[0]] if place else [kernel(x)] * len(f)
    products = f[:, :, None] * f[:, None] - torch.stack(given)
    assert (products.mean(0).abs() < 4.5 * products.std(0) / len(f) ** 0.5).all()
    assert torch.stack(given).mean(0)[0, 1].abs() > 0.02


@pytest.mark.parametrize(("output_var", "width"), [(2.0, 1), (6.0, 1), (0.5, 3)])
def test_distances_over_depth_have_the_law_of_the_chain(output_var, width):
    layer = RBF(lengthscale=0.9, output_var=output_var * 0.81)
    x = torch.tensor([[0.0], [0.6]], dtype=torch.float64)
    draws = draw([Layer(layer, width)] * 120, x, 2000, generator=generator())
    chain = log_distances(layer, 0.6, 120, width=width, num_samples=10_000, generator=generator(1))
    found = draws.log_distances()[..., 1]
    for depth in (1, 2, 10, 40, 120):
        assert ks_2samp(found[:, depth - 1].numpy(), chain[:, depth].numpy()).pvalue > 1e-3


def test_a_collapse_over_many_layers_stays_finite_and_its_points_become_one():
    x = torch.linspace(-1, 1, 12)[:, None]
    for layer in (RBF(), nngp(mlp(nn.ReLU(), 1))):
        draws = draw([layer] * 150, x, 2, generator=generator())
        assert all(torch.isfinite(values).all() for values in draws.values)
    draws = draw([RBF()] * 300, x[::4], 10, generator=generator())
    spread = draws.offsets[-1].abs().amax(1).log()
    assert (spread.median() < math.log(1e-60)) & (spread.median() > -math.inf)
    assert (draws.outputs - draws.outputs[:, :1]).abs().max() == 0


def test_one_point_and_many_columns_are_no_trouble():
    x = normal(1, 3000)
    assert draw([RBF(50.0), nngp(mlp(nn.ReLU(), 1)), RBF()], x, 4).outputs.shape == (4, 1, 1)
    far, near = normal(40, 3000), normal(40, 3000, seed=1)
    torch.testing.assert_close(
        grams(RBF(50.0), far[None], near[None])[0], RBF(50.0)(far, near), rtol=1e-9, atol=1e-12
    )


def test_offsets_are_differences_of_values_and_seeds_decide():
    layers = [Layer(RBF(), 2), nngp(mlp(nn.GELU()))]
    one, other = (draw(layers, normal(5, 2), 3, generator=generator(7)) for _ in range(2))
    for values, offsets, again in zip(one.values, one.offsets, other.values, strict=True):
        torch.testing.assert_close(values - values[:, :1], offsets)
        assert torch.equal(values, again)


def test_inputs_keep_functions_apart_where_layers_see_them():
    x = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]
    draws = draw([RBF()] * 100, x, 20, input_connected=True, generator=generator())
    assert draws.log_distances()[:, -1, -1].median() > math.log(0.1)


def test_layers_that_cannot_be_drawn_are_refused():
    x = normal(3, 2)
    coupled = n2g.linearize(nn.Linear(2, 3).double().eval()).kernel()
    with pytest.raises(InputError, match=r"layers is empty.*layers=\[n2g\.RBF\(\)\]"):
        draw([], x)
    with pytest.raises(InputError, match="must be a list from the inputs to the outputs"):
        draw(RBF(), x)
    with pytest.raises(InputError, match=r"Layer needs a kernel.*but got a Linear"):
        draw([nn.Linear(2, 1)], x)
    with pytest.raises(InputError, match="width"):
        Layer(RBF(), 0)
    with pytest.raises(InputError, match=r"layer 1 couples 3 outputs, but its width is 1"):
        draw([coupled], x)
    with pytest.raises(InputError, match=r"layer 2 couples 3 outputs.*width=3"):
        draw([Layer(RBF(), 2), coupled], x)
    with pytest.raises(InputError, match="one for each of the 1 columns"):
        draw([RBF(), RBF(torch.ones(2))], x)
    with pytest.raises(InputError, match="num_samples"):
        draw([RBF()], x, 0)
    with pytest.raises(InputError, match="input_connected=True appends the inputs"):
        draw([RBF()], {"a": x}, input_connected=True)
    with pytest.raises(InputError, match="NaN"):
        draw([RBF()], x * torch.nan)
