"""Networks with narrow layers as deep Gaussian processes, beside the networks themselves."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from scipy.stats import ks_2samp
from torch import nn

from net2gp.deep import Layer, draw, layers_of
from net2gp.errors import InputError, NetworkError
from net2gp.limits import HiddenLayer, excess_kurtosis, nngp, sample_outputs


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(*widths: int, activation: type[nn.Module] = nn.GELU) -> nn.Sequential:
    sizes = [2, *widths]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


X = torch.tensor([[1.0, 1.0], [1.0, -0.4]], dtype=torch.float64)


@pytest.mark.parametrize("widths", [(300, 4, 1), (4, 300, 1), (200, 4, 200, 1)])
def test_draws_have_the_law_of_wide_networks_with_a_narrow_layer(widths):
    module = network(*widths)
    layers = layers_of(module, narrow=4, weight_var=1.5, bias_var=0.1)
    assert [layer.width for layer in layers] == [4, 1]
    f = draw(layers, X, 2000, generator=generator()).outputs[..., 0]
    g = sample_outputs(module, X, 2000, weight_var=1.5, bias_var=0.1, generator=generator(1))[
        ..., 0
    ]
    for one, other in ((f[:, 0], g[:, 0]), (f[:, 0] - f[:, 1], g[:, 0] - g[:, 1])):
        assert ks_2samp(one.numpy(), other.numpy()).pvalue > 1e-3


def test_a_narrow_layer_keeps_its_kurtosis():
    """GELU, units of variance one, eight of them: 3 (E φ⁴ / E[φ²]² − 1) / 8 = 2.331."""
    x = torch.ones(1, 2, dtype=torch.float64)
    layers = [Layer(nngp(nn.Linear(2, 8)), 8), layers_of(network(8, 1), narrow=8)[1]]
    g = draw(layers[:1], x, 20_000, generator=generator()).outputs
    # given g, f is Gaussian with this variance, which estimates with less noise than f itself
    variance = nn.functional.gelu(g).square().mean((1, 2)).reshape(40, -1)
    estimates = 3 * variance.square().mean(1) / variance.mean(1).square() - 3
    exact = excess_kurtosis([HiddenLayer(nn.GELU(), 8)], x).item()
    assert exact == pytest.approx(2.33, abs=0.005)
    assert abs(estimates.mean() - exact) < 4 * estimates.std() / 40**0.5 + 0.02
    conditional = torch.stack([layers[1].kernel.diag(one) for one in g[:5]]).flatten()
    torch.testing.assert_close(conditional, variance.flatten()[:5])


def test_a_network_without_narrow_layers_is_one_gaussian_process():
    module = network(50, 50, 3, activation=nn.ReLU)
    (layer,) = layers_of(module, narrow=8, weight_var=2.0)
    assert layer.width == 3
    torch.testing.assert_close(layer.kernel(X), nngp(module, weight_var=2.0)(X))


def test_the_last_process_is_that_of_the_layers_behind_the_activation():
    inner = nn.Sequential(nn.Linear(2, 64), nn.ReLU())
    module = nn.Sequential(inner, nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, 64), nn.ReLU())
    module.append(nn.Linear(64, 2))
    layers = layers_of(module, narrow=4, weight_var=1.3, bias_var=0.2)
    options = {"weight_var": 1.3, "bias_var": 0.2}
    torch.testing.assert_close(
        layers[0].kernel(X), nngp(nn.Sequential(*inner, module[1]), **options)(X)
    )
    h, outer = math.pi * X.repeat(1, 2), nngp(module[3:], **options)
    torch.testing.assert_close(layers[1].kernel(h), outer(torch.tanh(h)))
    torch.testing.assert_close(layers[1].kernel(h, h[:1]), outer(torch.tanh(h), torch.tanh(h[:1])))


def test_networks_of_another_form_are_refused():
    with pytest.raises(NetworkError, match=r"ends in a Linear layer, but got a Sequential"):
        layers_of(nn.Sequential(nn.Linear(2, 4), nn.ReLU()), narrow=4)
    with pytest.raises(NetworkError, match=r"but got a Linear.*nn\.Sequential"):
        layers_of(nn.Linear(2, 1), narrow=4)
    odd = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 1))
    with pytest.raises(NetworkError, match="after a narrow layer, but found LayerNorm, ReLU"):
        layers_of(odd, narrow=4)
    soft = nn.Sequential(nn.Linear(2, 4), nn.Softmax(-1), nn.Linear(4, 1))
    with pytest.raises(NetworkError, match=r"act on each number by itself.*found Softmax"):
        layers_of(soft, narrow=4)
    with pytest.raises(InputError, match="narrow"):
        layers_of(network(4, 1), narrow=0)
    with pytest.raises(InputError, match="an activation acts on a tensor"):
        layers_of(network(4, 1), narrow=4)[1].kernel((X, X))
