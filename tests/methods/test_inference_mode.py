"""What is computed in inference mode is what is computed outside, and can be differentiated with later."""

import warnings

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.errors import Net2GPWarning

ACTIVATIONS = [nn.Tanh(), nn.SiLU(), nn.ELU(), nn.Softplus(), nn.Hardtanh(), nn.ReLU(), nn.GELU()]


def mlp(activation: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(2, 6), activation or nn.Tanh(), nn.Linear(6, 1)
    return nn.Sequential(*layers).double().eval()


def points(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda one: type(one).__name__)
def test_limits_are_the_same_in_inference_mode(activation):
    x = points(5)
    expected = n2g.infinite_width(mlp(activation), weight_var=2.0, bias_var=0.1)(x)
    with torch.inference_mode():
        found = n2g.infinite_width(mlp(activation), weight_var=2.0, bias_var=0.1)(x.clone())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def posteriors(name: str, folder):
    x = points(12)
    labels, network = (x.sum(1) > 0).long(), mlp()
    kinds = {
        "adapt": lambda: n2g.adapt(network, (x, x[:, :1].sin() + 1), n2g.Gaussian()),
        "weights": lambda: n2g.adapt(
            network, (x, x[:, :1].sin() + 1), n2g.Gaussian(0.1), solver=n2g.solvers.WeightCholesky()
        ),
        "all rows": lambda: n2g.laplace(
            network, (x, labels), n2g.Bernoulli(), structure=n2g.structures.FunctionSpace()
        ),
        "some rows": lambda: n2g.laplace(
            network, (x, labels), n2g.Bernoulli(), structure=n2g.structures.FunctionSpace(tol=0.1)
        ),
        "last layer": lambda: n2g.laplace(
            network, (x, labels), n2g.Bernoulli(), structure=n2g.LastLayer()
        ),
        "classes": lambda: n2g.condition(n2g.RBF(), (x, labels), n2g.Categorical()),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        posterior = kinds[name]()
    if name != "classes":
        n2g.save(posterior, folder / "posterior.safetensors")
    return posterior, network


@pytest.mark.parametrize(
    "name", ["adapt", "weights", "all rows", "some rows", "last layer", "classes"]
)
def test_a_posterior_used_or_loaded_in_inference_mode_has_gradients_later(name, tmp_path):
    posterior, network = posteriors(name, tmp_path)

    def gradient(one):
        x = points(3, seed=2).requires_grad_()
        law = one.marginal(x)
        return torch.autograd.grad(law.mean.sum() + law.variance.sum(), x)[0]

    expected = gradient(posteriors(name, tmp_path)[0])
    with torch.inference_mode():
        posterior.predict(points(3, seed=2))
    torch.testing.assert_close(gradient(posterior), expected)
    x = points(3, seed=2).requires_grad_()
    law = posterior.predict(x)
    assert (law.probs if hasattr(law, "probs") else law.mean).requires_grad
    if name != "classes":
        with torch.inference_mode():
            loaded = n2g.load(tmp_path / "posterior.safetensors", network)
        torch.testing.assert_close(gradient(loaded), expected)
