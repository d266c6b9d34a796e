"""Both parts of a prediction's variance are differentiable in x, as the prediction is."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import net2gp as n2g

CASES = {
    "Gaussian": (n2g.Gaussian(0.1), 1, lambda f: f),
    "noise per input": (n2g.HeteroscedasticGaussian(), 2, lambda f: f[:, :1] + 0.1),
    "Categorical": (n2g.Categorical(), 3, lambda f: f.argmax(1)),
    "Bernoulli": (n2g.Bernoulli(), 1, lambda f: (f > 0).double()),
}


@pytest.mark.parametrize("way", ["laplace", "condition"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_parts_follow_finite_differences_in_x(case, way: str) -> None:
    likelihood, num_outputs, labels = case
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, num_outputs)).double().eval()
    x = torch.randn(8, 2, dtype=torch.float64)
    data = x, labels(network(x).detach())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way == "laplace":
            posterior = n2g.laplace(network, data, likelihood, prior_var=1.0)
        else:
            posterior = n2g.condition(n2g.linearize(network).kernel(), data, likelihood)
    new = torch.randn(2, 2, dtype=torch.float64)
    assert not n2g.explain.split(posterior, new).total.requires_grad

    def parts(z):
        found = n2g.explain.split(posterior, z)
        return torch.cat([found.epistemic, found.aleatoric])

    step = 1e-5 * torch.eye(2, dtype=torch.float64)
    wanted = torch.stack([(parts(new + s) - parts(new - s)) / 2e-5 for s in step], -1)
    z = new.clone().requires_grad_()
    values = parts(z)
    got = torch.zeros_like(wanted)
    for row in range(len(values)):
        for target in range(values.shape[1]):
            (g,) = torch.autograd.grad(values[row, target], z, retain_graph=True)
            got[row, target] = g[row % 2]
    assert float(wanted.abs().max()) > 1e-3
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)
