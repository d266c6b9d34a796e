"""Predictions that hold the training points' side of the kernel are those that make it anew each time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import net2gp.linear.jacobians.tangent
from net2gp.likelihoods import Gaussian
from net2gp.methods import adapt, laplace


def network(num_outputs: int) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, num_outputs)
    return nn.Sequential(*layers).double().eval()


def data(num_outputs: int):
    x = torch.randn(20, 3, dtype=torch.float64)
    return x, torch.randn(20, num_outputs, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("num_outputs", [1, 2])
@pytest.mark.parametrize("method", [adapt, laplace])
def test_held_factors_give_the_same_law_and_gradient(method, num_outputs, monkeypatch):
    points, found = data(num_outputs), []
    for size in (2**26, 0):
        monkeypatch.setattr(net2gp.linear.jacobians.tangent, "KEPT_BYTES", size)
        posterior = method(network(num_outputs), points, Gaussian(0.1), prior_var=1.0)
        for num_points in (3, 20, 1):
            x = torch.linspace(-1, 1, 3 * num_points, dtype=torch.float64)
            x = x.reshape(-1, 3).requires_grad_()
            law = posterior.marginal(x)
            total = law.mean.sum() + law.covariance_matrix.square().sum()
            gradient = torch.autograd.grad(total, x)[0]
            found.append((size, law.mean.detach(), law.covariance_matrix.detach(), gradient))
    for (_, *held), (_, *anew) in zip(found[:3], found[3:], strict=True):
        for one, other in zip(held, anew, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", [adapt, laplace])
def test_a_prediction_does_not_run_over_the_training_points_again(method):
    model = network(1)
    posterior = method(model, data(1), Gaussian(0.1), prior_var=1.0)
    posterior.predict(torch.randn(4, 3, dtype=torch.float64))
    seen: list[int] = []
    model.register_forward_hook(lambda module, inputs, out: seen.append(len(out)))
    posterior.predict(torch.randn(4, 3, dtype=torch.float64))
    seen.clear()  # the hook is part of the network, which was looked at anew
    posterior.predict(torch.randn(4, 3, dtype=torch.float64))
    assert seen
    assert max(seen) == 4
    assert len(seen) <= 5
