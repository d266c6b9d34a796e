"""Layers of several groups: each group has weights of its own, which no other group's gradients meet."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from net2gp.likelihoods import Gaussian
from net2gp.linear import linearize
from net2gp.linear.forward.factors import (
    Outer,
    accumulate,
    add_blocks,
    jacobian,
    mirror,
    pulled,
    pushed,
)
from net2gp.methods import laplace
from net2gp.posteriors import Kron
from reference.jacobians import brute_force_jacobian, flat

CONVOLUTIONS = {
    "depthwise, one place": (nn.Conv2d(16, 16, 5, padding=2, groups=16, bias=False), (16, 1, 1)),
    "depthwise, several maps a channel": (nn.Conv2d(4, 12, 3, groups=4), (4, 3, 3)),
    "two groups, one place": (nn.Conv2d(8, 6, 4, groups=2), (8, 4, 4)),
    "two groups, four places": (nn.Conv2d(16, 16, 5, padding=2, groups=2), (16, 2, 2)),
    "as many groups as points": (nn.Conv1d(10, 20, 3, groups=5), (10, 4)),
    "three dimensions": (nn.Conv3d(4, 4, (1, 3, 3), groups=2), (4, 1, 3, 3)),
}


def network_of(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layer, shape = CONVOLUTIONS[name]
    x = torch.randn(5, *shape, dtype=torch.float64)
    size = layer.double()(x)[0].numel()
    layers = layer, nn.Tanh(), nn.Flatten(), nn.Linear(size, 3)
    return nn.Sequential(*layers).double().eval(), x


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_kernels_of_grouped_convolutions_on_small_maps_are_exact(name: str) -> None:
    network, x = network_of(name)
    J = flat(brute_force_jacobian(network, x))
    K = J.flatten(0, 1) @ J.flatten(0, 1).mT
    kernel = linearize(network).kernel()
    torch.testing.assert_close(kernel(x), K, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kernel(x[:2], x), K[:6], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kernel.blocks(x), J @ J.mT, rtol=1e-12, atol=1e-12)
    trace = sum(J[:, c] @ J[:, c].mT for c in range(3)) / 3
    torch.testing.assert_close(linearize(network).trace_kernel()(x), trace, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("places", [1, 2, 7])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("inputs", [2, 300])
def test_every_product_of_a_factor_with_groups_is_a_product_of_its_gradients(
    places: int, groups: int, inputs: int
) -> None:
    torch.manual_seed(0)
    a = torch.randn(4, groups, places, inputs, dtype=torch.float64)
    g = torch.randn(4, 2, groups, 3, places, dtype=torch.float64)
    factor = Outer(a, g, torch.ones((), dtype=torch.float64))
    J = torch.einsum("bsti,bcsot->bcsoi", a, g).reshape(8, -1)
    close = {"rtol": 1e-12, "atol": 1e-11}
    torch.testing.assert_close(jacobian(factor).flatten(0, 1), J, **close)
    K = torch.zeros(8, 8, dtype=torch.float64)
    accumulate(K, factor, factor, 2)
    mirror(K, 2)
    torch.testing.assert_close(K, J @ J.mT, **close)
    cross = torch.zeros(8, 8, dtype=torch.float64)
    accumulate(cross, factor, Outer(a.flip(0), g.flip(0), factor.scale), 2)
    flipped = J.reshape(4, 2, -1).flip(0).flatten(0, 1)
    torch.testing.assert_close(cross, J @ flipped.mT, **close)
    blocks = torch.zeros(4, 2, 2, dtype=torch.float64)
    add_blocks(blocks, factor)
    by_point = J.reshape(4, 2, -1)
    torch.testing.assert_close(blocks, by_point @ by_point.mT, **close)
    v, w = torch.randn(4, 2, dtype=torch.float64), torch.randn(J.shape[1], dtype=torch.float64)
    torch.testing.assert_close(pulled(factor, v), J.mT @ v.flatten(), **close)
    torch.testing.assert_close(pushed(factor, w).flatten(), J @ w, **close)


@pytest.mark.parametrize("name", ["depthwise, one place", "two groups, four places"])
def test_variances_under_kronecker_factors_equal_those_of_the_covariance_written_out(
    name: str,
) -> None:
    network, x = network_of(name)
    y = network(x).detach()
    posterior = laplace(network, (x, y), Gaussian(0.1), prior_var=1.0, structure=Kron())
    J = flat(brute_force_jacobian(network, x))
    draws = posterior.covariance.draw(4000, torch.Generator().manual_seed(0))
    joint = posterior.joint(x).covariance_matrix
    blocks = joint.reshape(5, 3, 5, 3).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    variance = posterior.marginal(x).variance
    torch.testing.assert_close(blocks.diagonal(dim1=1, dim2=2), variance, rtol=1e-9, atol=1e-12)
    sampled = (J.flatten(0, 1) @ draws).var(1).reshape(5, 3)
    torch.testing.assert_close(sampled, variance, rtol=0.15, atol=1e-6)
