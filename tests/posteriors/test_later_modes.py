"""A posterior does not change with the mode of its network, which may be trained further."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import net2gp as n2g

NOISY = n2g.Gaussian(0.1)
WAYS: dict[str, Callable[[nn.Module, Any], n2g.Posterior]] = {
    "adapt": lambda net, data: n2g.adapt(net, data, NOISY, prior_var=1.0),
    "adapt in weight space": lambda net, data: n2g.adapt(
        net, data, NOISY, prior_var=1.0, solver=n2g.solvers.WeightCholesky()
    ),
    "codes of classes": lambda net, data: n2g.adapt_classes(
        net, (data[0], (data[1][:, 0] > 0).long())
    ),
    "sum of kernels": lambda net, data: n2g.condition(
        n2g.linearize(net).kernel() + 2.0 * n2g.RBF(), data, NOISY
    ),
    "dual": lambda net, data: n2g.explain.dual(net, data, NOISY, prior_var=1.0).condition(),
    "flow": lambda net, data: (
        n2g.gradient_flow(n2g.linearize(net), data, ridge=0.1).ntk_gp().posterior(5.0)
    ),
    "laplace": lambda net, data: n2g.laplace(net, data, NOISY, prior_var=1.0),
}


def with_dropout() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(2, 9), nn.Tanh(), nn.Dropout(0.5), nn.Linear(9, 1)
    return nn.Sequential(*layers).double()


def answers(posterior: n2g.Posterior, x: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    laws, predicted = (posterior.marginal(x), posterior.joint(x)), posterior.predict(x)
    return [
        posterior.mean(x),
        *(law.mean for law in laws),
        *(law.covariance_matrix for law in laws),
        predicted.probs if isinstance(predicted, Categorical) else predicted.variance,
        posterior.novelty(x),
        posterior.sample(x, 2, generator=generator),
    ]


@pytest.mark.parametrize("name", WAYS)
def test_training_the_network_further_changes_nothing_and_is_left_alone(name, tmp_path):
    network = with_dropout().eval()
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", n2g.errors.NotStationary)
        posterior = WAYS[name](network, (x, x[:, :1].sin()))
    z = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(4, 2)
    expected = answers(posterior, z)
    network.train()
    for one, other in zip(answers(posterior, z), expected, strict=True):
        assert torch.equal(one, other)
    assert all(module.training for module in network.modules())
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = n2g.load(tmp_path / "posterior.safetensors", with_dropout())
    for one, other in zip(answers(loaded, z), expected, strict=True):
        assert torch.equal(one, other)
