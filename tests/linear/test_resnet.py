"""A trained residual network: deep, with convolutions, strides, batch norms and shortcuts."""

from __future__ import annotations

import torch

from net2gp import data
from net2gp.linear import linearize
from net2gp.linear.planning.probe import plan
from reference.jacobians import brute_force_jacobian, flat
from shared_data import shared_data


def test_the_kernel_of_the_trained_resnet_is_that_of_its_jacobian(monkeypatch) -> None:
    monkeypatch.setenv("NET2GP_DATA", str(shared_data()))
    network = data.pretrained("resnet20_cifar10").double()
    x = data.IMAGENET(data.cifar10("test")[0][:3].double())
    linearized = linearize(network)
    assert plan(linearized, x).leftover == ()
    J = flat(brute_force_jacobian(network, x)).flatten(0, 1)
    expected = J @ J.T
    scale = expected.abs().max()
    K = linearized.kernel()(x)
    assert (K - expected).abs().max() <= 1e-9 * scale
    cross = linearized.kernel()(x[:1], x[1:])
    assert (cross - expected[:10, 10:]).abs().max() <= 1e-9 * scale
    blocks = linearized.kernel().blocks(x)
    own = J.unflatten(0, (3, 10))
    assert (blocks - own @ own.mT).abs().max() <= 1e-9 * scale
    v = torch.randn(30, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    product = linearized.kernel().matmul(x, x, v)
    assert (product - expected @ v).abs().max() <= 1e-9 * (expected @ v).abs().max()
