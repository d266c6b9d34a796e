"""What is computed in inference mode is what is computed outside, and can be differentiated with later."""

import copy
import warnings

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.errors import InputError, Net2GPWarning

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


def trained(name: str, network: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """What a training leaves of the network, and what its posterior says."""
    y, likelihood = x.sin().sum(1, keepdim=True), n2g.Gaussian(0.1)
    training = n2g.training
    if name == "train_many":
        settings = training.AdamSettings(num_steps=3)
        found = training.train_many([network] * 2, (x, y), likelihood, optimizer=settings)
        return [*found.params.values(), found.objective]
    if name == "train_by_evidence":
        schedule = training.Schedule(num_epochs=3)
        posterior = training.train_by_evidence(network, (x, y), likelihood, schedule=schedule)
    elif name == "VOGN":
        vogn = training.VOGN(network, likelihood, len(x), learning_rate=0.05)
        for _ in range(3):
            vogn.step(x, y)
        posterior = vogn.posterior((x, y))
    else:
        ivon = training.IVON(network, len(x), learning_rate=0.05)
        for _ in range(3):
            ivon.step(lambda: descend(network, ivon, x.clone(), y.clone()))
        posterior = ivon.posterior((x, y), likelihood)
    law = posterior.predict(x)
    return [*(p.detach().clone() for p in network.parameters()), law.mean, law.variance]


def descend(network, optimizer, x, y):
    optimizer.zero_grad()
    loss = (network(x) - y).square().mean()
    loss.backward()
    return loss


@pytest.mark.filterwarnings("ignore::net2gp.errors.NotStationary")
@pytest.mark.parametrize("name", ["VOGN", "IVON", "train_by_evidence", "train_many"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_is_the_same_whatever_the_caller_switched_off(name, mode):
    expected, network = trained(name, mlp(), points(8)), mlp()
    with mode():
        found = trained(name, network, points(8))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["VOGN", "IVON", "train_by_evidence"])
@pytest.mark.filterwarnings("ignore::net2gp.errors.NotStationary")
def test_a_network_made_in_inference_mode_cannot_be_trained_in_place(name):
    with torch.inference_mode():
        network = mlp()
    with pytest.raises(InputError, match=r"made within torch\.inference_mode.*copy\.deepcopy"):
        trained(name, network, points(8))
    trained(name, copy.deepcopy(network), points(8))
