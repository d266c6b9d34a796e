"""GP → network → posterior → weights → network: what comes back is what went in."""

import math

import gpytorch
import pytest
import torch
from torch import nn

from net2gp import bayes, condition, laplace, linearize, nngp
from net2gp.bayes.matching.fitting import Search
from net2gp.bayes.matching.network_like import _distance
from net2gp.errors import InputError
from net2gp.kernels import RBF, Linear, Periodic
from net2gp.likelihoods import Gaussian
from net2gp.posteriors.recipes.drawn import drawn_posterior
from net2gp.posteriors.recipes.members import Members

X = torch.linspace(-2, 2, 20, dtype=torch.float64)[:, None]


def relative(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (RBF(0.5, 2.0), "1 × rbf"),
        (Periodic(1.3, 0.7, 1.5), "1 × rbf + period 1.3"),
        (Linear(2.0, 0.3), "linear"),
    ],
    ids=["length scale", "period", "trend"],
)
def test_priors_that_are_limits_of_networks_are_found_exactly(target, words):
    match = bayes.network_like(target, X, width=16)
    assert str(match.shape) == words
    assert match.distance < 1e-6
    assert relative(match.kernel(X), target(X)) < 1e-6
    apart = X[:5] + 0.37  # points that the search has not seen
    torch.testing.assert_close(match.kernel(X, apart), target(X, apart), rtol=0, atol=1e-6)


def test_a_sum_takes_a_network_with_a_trend():
    target = RBF(0.8) + Linear(0.5)
    family = bayes.Family(("rbf",), depths=(1,))
    match = bayes.network_like(target, X, family=family, width=16)
    assert match.shape.trend
    assert relative(match.kernel(X), target(X)) < 1e-6
    assert len(match.trials) == 2
    assert match.trials[0].distance > 0.1
    assert match.weight_var["trend"] == pytest.approx(0.5, rel=1e-4)


def test_length_scales_of_several_inputs_count_the_fan_in():
    x = torch.randn(15, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    match = bayes.network_like(RBF(1.5), x, family=bayes.Family(("rbf",), (1,), (False,)), width=8)
    assert match.distance < 1e-6
    assert match.weight_var["0"] == pytest.approx(3 / 1.5**2, rel=1e-4)
    assert match.prior.variance["0.weight"] == pytest.approx(1 / 1.5**2, rel=1e-4)


def test_the_network_behind_a_limit_is_found_again():
    network = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
    target = nngp(network, weight_var={"0": 1.0, "2": 1.7}, bias_var=0.2)
    family = bayes.Family(("relu",), depths=(0, 1), trends=(False,))
    match = bayes.network_like(target, X[::2], family=family, width=8)
    # the variances of a ReLU network are not unique, since factors move between layers, but its law is
    assert match.shape.depth == 1
    assert match.distance < 1e-4 < match.trials[0].distance
    torch.testing.assert_close(match.kernel(X), target(X), rtol=0, atol=1e-3)


def test_gradients_are_those_of_finite_differences():
    search = Search.of(
        bayes.Shape("erf", 2, 1.7, True), X[:7], _distance(RBF()(X[:7])), None, False
    )
    at = next(search.starts(1.0))
    value, slope = search.with_gradient(at)
    assert math.isfinite(value)
    for place in range(len(at)):
        step = torch.zeros(len(at), dtype=torch.float64).numpy()
        step[place] = 1e-5
        ahead, behind = (search.with_gradient(at + sign * step)[0] for sign in (1, -1))
        assert slope[place] == pytest.approx((ahead - behind) / 2e-5, rel=1e-4, abs=1e-6 * value)


def test_drawn_networks_have_the_covariance_of_the_process():
    target = RBF(0.7, 1.5)
    x = torch.linspace(-1, 1, 6, dtype=torch.float64)[:, None]
    match = bayes.network_like(target, x, width=256)
    values = match.sample(x, 500, generator=torch.Generator().manual_seed(1))[..., 0]
    wanted = target(x)
    found = values.mT @ values / 500
    variances = wanted.diagonal()
    error = ((variances[:, None] * variances + wanted.square()) / 500).sqrt()
    assert float(((found - wanted) / error).abs().max()) < 4.5
    # the test can fail: networks of another prior are far outside
    other = RBF(0.35, 1.5)(x)
    assert float(((found - other) / error).abs().max()) > 6


def test_the_module_is_a_draw_of_its_prior():
    family = bayes.Family(("rbf",), (1,), (False,))
    match, again, other = (
        bayes.network_like(RBF(0.5), X, family=family, width=400, seed=seed) for seed in (3, 3, 0)
    )
    params = {name: value.detach() for name, value in match.module.named_parameters()}
    assert float(params["0.weight"].var()) == pytest.approx(4.0, rel=0.3)
    assert float(params["2.weight"].var() * 400) == pytest.approx(1.0, rel=0.3)
    match.prior.check(params)
    assert torch.equal(match.module(X), again.module(X))
    assert not torch.equal(match.module(X), other.module(X))


def test_data_choose_variances_by_their_evidence():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(X.shape, generator=generator, dtype=torch.float64)
    y = torch.sin(3 * X) + 0.1 * noise
    family = bayes.Family(("rbf",), (0, 1), (False,))
    match = bayes.network_like((X, y), family=family, width=16)
    assert match.shape.depth == 1
    assert match.distance is None
    assert 0.003 < match.noise_var < 0.03
    own = condition(match.kernel, (X, y), Gaussian(match.noise_var)).log_marginal_likelihood()
    assert match.log_evidence == pytest.approx(float(own), abs=1e-4)
    for factor in (0.8, 1.25):  # a maximum: neither shorter nor longer scales are more likely
        changed = {**match.weight_var, "0": match.weight_var["0"] * factor}
        kernel = nngp(match.module, weight_var=changed, bias_var=match.bias_var)
        other = condition(kernel, (X, y), Gaussian(match.noise_var)).log_marginal_likelihood()
        assert float(other) < match.log_evidence


def test_a_kernel_of_gpytorch_is_a_target_too():
    kernel = gpytorch.kernels.RBFKernel().double()
    kernel.lengthscale = 0.5
    family = bayes.Family(("rbf",), (1,), (False,))
    match = bayes.network_like(kernel, X, family=family, width=8)
    assert relative(match.kernel(X), RBF(0.5)(X)) < 1e-6


def test_drawn_weights_become_modules_that_compute_the_draw():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).double().eval()
    before = [p.detach().clone() for p in network.parameters()]
    posterior = laplace(network, (X, network(X).detach()), Gaussian(0.1), prior_var=1.0)
    values = posterior.sample(X, 3, generator=torch.Generator().manual_seed(4), linear=False)
    weights = posterior.sample_weights(3, generator=torch.Generator().manual_seed(4))
    modules = [bayes.module_with(network, weights, index) for index in range(3)]
    for module, value in zip(modules, values, strict=True):
        torch.testing.assert_close(module(X).detach(), value, rtol=0, atol=1e-12)
    one = {name: value[1] for name, value in weights.items()}
    torch.testing.assert_close(bayes.module_with(network, one)(X), modules[1](X), rtol=0, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))


def test_networks_of_a_chain_become_modules_too():
    network = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    architecture = linearize(network)
    prior = bayes.NormalPrior(0.7)
    draws = prior.sample(architecture.params, 9, torch.Generator().manual_seed(0))
    members = Members(architecture, draws)
    posterior = drawn_posterior(members, Gaussian(0.1), (X, X.sin()), prior=prior)
    values = posterior.sample(X, 4, generator=torch.Generator().manual_seed(2))
    weights = posterior.sample_weights(4, generator=torch.Generator().manual_seed(2))
    for index, value in enumerate(values):
        found = bayes.module_with(network, weights, index)(X).detach()
        torch.testing.assert_close(found, value, rtol=0, atol=1e-12)


def test_tied_weights_and_buffers_survive_the_round_trip():
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).double().eval()
    network[2].weight = network[0].weight
    weights = {
        "0.weight": torch.eye(2, dtype=torch.float64),
        "1.running_mean": torch.ones(2, dtype=torch.float64),
    }
    copied = bayes.module_with(network, weights)
    assert copied[2].weight is copied[0].weight
    assert torch.equal(copied[1].running_mean, weights["1.running_mean"])
    assert not torch.equal(network[1].running_mean, weights["1.running_mean"])


@pytest.mark.parametrize(
    ("weights", "index", "message"),
    [
        ({"wrong": torch.ones(1, 2)}, None, "'wrong', which the network does not have"),
        ({"weight": torch.ones(3, 1, 2)}, None, "Say which of the draws"),
        ({"weight": torch.ones(1, 2)}, 0, "Leave index out for one draw"),
        ({"weight": torch.ones(3, 1, 2)}, 3, "there are 3 draws, but index is 3"),
        (torch.ones(1), None, "weights are values by name"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, index, message):
    with pytest.raises(InputError, match=message):
        bayes.module_with(nn.Linear(2, 1), weights, index)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bayes.network_like(3.0), "takes a kernel"),
        (lambda: bayes.network_like(RBF(), X[:, 0]), "floating tensor"),
        (lambda: bayes.network_like(RBF(), X, noise_var=1.0), "noise_var is for data"),
        (lambda: bayes.network_like((X, X), X), "x is part of the target"),
        (lambda: bayes.network_like((X, X[:, 0].long())), "real targets"),
        (lambda: bayes.network_like(Linear(0.0), X), "zero at all points"),
        (lambda: bayes.Shape("swish"), "'swish' is not known here"),
        (lambda: bayes.Family(activations="relu"), "tuple with one entry or more"),
    ],
)
def test_targets_that_are_none_are_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_the_kernels_of_periods_and_trends_are_their_formulas():
    y = X[:4] + 0.1
    gap = (X - y.mT) * math.pi / 1.3
    wanted = 2.0 * torch.exp(-2 * gap.sin().square() / 0.7**2)
    torch.testing.assert_close(Periodic(1.3, 0.7, 2.0)(X, y), wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(Linear(2.0, 0.3)(X, y), 2 * X @ y.mT + 0.3, rtol=0, atol=1e-14)
    for kernel in (Periodic(1.3, 0.7, 2.0), Linear(2.0, 0.3)):
        torch.testing.assert_close(kernel.diag(X), kernel(X).diagonal(), rtol=0, atol=1e-12)
        assert kernel.precise()(X.float()).dtype == torch.float64
