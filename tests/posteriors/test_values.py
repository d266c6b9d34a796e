"""A posterior is a value, wherever and however it is used."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp.errors import InputError
from net2gp.posteriors.move import move


@pytest.fixture
def data():
    x = torch.linspace(-2, 2, 20)[:, None]
    return x, torch.sin(x)


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1)).eval()


SOLVERS = [n2g.solvers.Cholesky(), n2g.solvers.WeightCholesky(), n2g.solvers.CG()]


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: type(solver).__name__)
def test_editing_the_data_in_place_changes_nothing(data, network, solver):
    x, y = data[0].clone(), data[1].clone()
    posterior = n2g.condition(
        n2g.linearize(network).kernel(), (x, y), n2g.Gaussian(0.01), solver=solver
    )
    before = posterior.marginal(data[0])
    x.zero_()
    y.zero_()
    after = posterior.marginal(data[0])
    assert torch.equal(before.mean, after.mean)
    assert torch.equal(before.variance, after.variance)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_adapting_works_without_autograd(data, network, mode):
    expected = n2g.adapt(network, data, n2g.Gaussian())
    with mode():
        posterior = n2g.adapt(network, data, n2g.Gaussian())
    assert posterior.likelihood.noise_var == pytest.approx(expected.likelihood.noise_var, rel=1e-6)


@pytest.mark.parametrize("way", ["adapt", "tangent", "weights", "RBF", "limit", "update"])
def test_what_was_made_in_inference_mode_has_gradients_later(data, network, way):
    kernel = n2g.linearize(network).kernel()
    makers = {
        "adapt": lambda: n2g.adapt(network, own, n2g.Gaussian()),
        "tangent": lambda: n2g.condition(kernel, own, n2g.Gaussian(0.01)),
        "weights": lambda: n2g.condition(
            kernel, own, n2g.Gaussian(0.01), solver=n2g.solvers.WeightCholesky()
        ),
        "RBF": lambda: n2g.condition(n2g.RBF(), own, n2g.Gaussian(0.01)),
        "limit": lambda: n2g.condition(n2g.nngp(network), own, n2g.Gaussian(0.01)),
        "update": lambda: n2g.condition(n2g.RBF(), own, n2g.Gaussian(0.01)).update(own),
    }

    def gradient(posterior):
        x = data[0].clone().requires_grad_()
        law = posterior.marginal(x)
        return torch.autograd.grad(law.mean.sum() + law.variance.sum(), x)[0]

    own = data
    expected = gradient(makers[way]())
    with torch.inference_mode():
        own = (data[0].clone(), data[1].clone())
        posterior = makers[way]()
    torch.testing.assert_close(gradient(posterior), expected)


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: type(solver).__name__)
def test_points_of_another_shape_are_refused(data, network, solver):
    linearized = n2g.linearize(network)
    posterior = n2g.condition(linearized.kernel(), data, n2g.Gaussian(0.01), solver=solver)
    odd = data[0].reshape(4, 5, 1)
    for use in (posterior.marginal, posterior.joint, posterior.predict):
        with pytest.raises(InputError, match=r"gives 5 outputs for a point of x, .* but gave 1"):
            use(odd)
    with pytest.raises(InputError, match="gives 5 outputs for a point of x"):
        posterior.sample(odd, 2)


def test_the_noise_of_training_points_is_not_that_of_others(data, network):
    noise = torch.full((20, 1), 0.01)
    posterior = n2g.condition(n2g.linearize(network).kernel(), data, n2g.Gaussian(noise))
    with pytest.raises(InputError, match="holds the noise of 20 points, the training data"):
        posterior.predict(data[0].flip(0))
    assert posterior.predict(data[0], likelihood=n2g.Gaussian(noise)).mean.shape == (20, 1)


def test_small_variances_are_not_raised_to_a_floor(data, network):
    x, y = data
    kernel = n2g.linearize(network).kernel(1e-8)
    law = n2g.condition(kernel, (x, 1e-4 * y), n2g.Gaussian(1e-10)).predict(x)
    assert torch.allclose(law.stddev[:, 0], law.covariance_matrix[:, 0, 0].sqrt())
    assert float(law.stddev.max()) < 1e-4


def test_threads_may_share_a_network(data, network):
    linearized = n2g.linearize(network)
    posterior = n2g.condition(linearized.kernel(), data, n2g.Gaussian(0.01), mean=linearized)
    expected = posterior.marginal(data[0]).mean
    with ThreadPoolExecutor(4) as pool:
        means = list(pool.map(lambda _: posterior.marginal(data[0]).mean, range(40)))
    assert all(torch.allclose(mean, expected, atol=1e-5) for mean in means)


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_draws_are_counted_in_positive_whole_numbers(data, network, count):
    for kernel in (n2g.linearize(network).kernel(), n2g.RBF()):
        posterior = n2g.condition(kernel, data, n2g.Gaussian(0.01))
        with pytest.raises(InputError, match="num_samples must be a positive whole number, but is"):
            posterior.sample(data[0], count)


def test_a_posterior_names_its_network(data, network):
    posterior = n2g.condition(n2g.linearize(network).kernel(), data, n2g.Gaussian(0.01))
    assert "Linearized(Sequential, 31 parameters)" in repr(posterior)


def test_a_network_that_computes_something_else_is_not_loaded(data, network, tmp_path):
    linearized = n2g.linearize(network)
    posterior = n2g.condition(linearized.kernel(), data, n2g.Gaussian(0.01), mean=linearized)
    n2g.save(posterior, tmp_path / "posterior")
    other = nn.Sequential(nn.Linear(1, 10), nn.ReLU(), nn.Linear(10, 1)).eval()
    with pytest.raises(InputError, match="parameters but computes something else"):
        n2g.load(tmp_path / "posterior", other)


def test_moving_goes_by_what_a_part_is_and_not_by_its_name():
    @dataclass(frozen=True)
    class Parts:
        inner: object
        center: object
        factor: Tensor
        x: Tensor

    one = torch.ones(2, 2, dtype=torch.float64)
    module = nn.Linear(2, 1).double()
    moved = move(Parts(n2g.RBF(one[0]), module, one, one), None, torch.float32)
    assert moved.inner(one.float()).dtype == torch.float32
    assert moved.center.weight.dtype == torch.float32
    assert module.weight.dtype == torch.float64
    assert moved.factor.dtype == torch.float64
    assert moved.x.dtype == torch.float32
