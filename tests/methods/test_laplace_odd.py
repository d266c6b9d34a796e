"""Laplace's approximation of odd networks, of few points, and in odd surroundings."""

import warnings

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.errors import InputError
from net2gp.methods.laplace_approximation.matching import without_own

X = torch.randn(30, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(0, 2, (30,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def mlp(outputs=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).double().eval()


@pytest.mark.parametrize(
    "structure", [n2g.Full(), n2g.LastLayer(), n2g.structures.FunctionSpace()], ids=str
)
def test_a_prior_can_have_a_variance_for_each_entry(structure):
    prior = {"*": 1.0, "2.weight": torch.ones(2, 6, dtype=torch.float64)}
    each, same = (
        n2g.laplace(mlp(), (X, Y), n2g.Categorical(), prior_var=one, structure=structure)
        for one in (prior, 1.0)
    )
    torch.testing.assert_close(
        each.marginal(X[:3]).covariance_matrix, same.marginal(X[:3]).covariance_matrix
    )
    torch.testing.assert_close(each.log_marginal_likelihood(), same.log_marginal_likelihood())


@pytest.mark.parametrize(
    "structure",
    [None, n2g.Kron(), n2g.structures.LowRank(5), n2g.LastLayer(), n2g.structures.FunctionSpace()],
    ids=str,
)
def test_inference_mode_changes_nothing(structure):
    outside = n2g.laplace(mlp(), (X, Y), n2g.Categorical(), structure=structure)
    with torch.inference_mode():
        inside = n2g.laplace(mlp(), (X * 1, Y * 1), n2g.Categorical(), structure=structure)
    assert torch.equal(inside.predict(X[:3]).probs, outside.predict(X[:3]).probs)


def test_the_last_layer_is_the_one_that_is_called_last():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.body = nn.Linear(4, 2), nn.Linear(3, 4)

        def forward(self, x):
            return self.head(self.body(x).tanh())

    network = Backwards().double().eval()
    posterior = n2g.laplace(network, (X, Y), n2g.Categorical(), structure=n2g.LastLayer())
    assert list(posterior.linearized.params) == ["head.weight", "head.bias"]


def test_integer_labels_of_their_own_can_be_validated():
    y = torch.randint(0, 2, (30, 2), generator=torch.Generator().manual_seed(2))
    tuning = n2g.tuning.Validation((X, y), (0.1, 1.0))
    posterior = n2g.laplace(mlp(), (X, y), n2g.Bernoulli(), tuning=tuning)
    assert posterior.prior_var in (pytest.approx(0.1), pytest.approx(1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "structure",
    [n2g.Full(), n2g.structures.LowRank(4), n2g.structures.Subnetwork(10), n2g.Kron()],
    ids=str,
)
def test_few_points_of_a_network_that_interpolates_give_finite_scales(structure, dtype):
    network = mlp().to(dtype)
    with torch.no_grad():
        network[-1].weight *= 20
    x = X[:6].to(dtype)
    y = network(x).argmax(-1)
    posterior = n2g.laplace(network, (x, y), n2g.Categorical(), structure=structure)
    assert 1e-6 < posterior.prior_var < 1e6
    assert posterior.likelihood.link.scale < 1e3
    assert torch.equal(posterior.predict(x).probs.argmax(-1), y)


def test_float32_tunes_what_float64_tunes():
    single, double = (
        n2g.laplace(mlp().to(dtype), (X.to(dtype), Y), n2g.Categorical(), structure=n2g.Full())
        for dtype in (torch.float32, torch.float64)
    )
    assert single.prior_var == pytest.approx(double.prior_var, rel=0.02)
    assert single.likelihood.link.scale == pytest.approx(double.likelihood.link.scale, rel=0.02)


def test_a_point_that_alone_determines_its_output_leaves_a_finite_rest():
    covariance = torch.full((1, 1, 1), 1 - 1e-12, dtype=torch.float64)
    left = without_own(covariance, torch.ones(1, 1, 1, dtype=torch.float64))
    assert 100 < float(left) < 1e4


def test_the_subnetwork_has_the_largest_variances_under_the_prior():
    prior = {"*": 1e-4, "2.*": 10.0}
    posterior = n2g.laplace(
        mlp(), (X, Y), n2g.Categorical(), prior_var=prior, structure=n2g.structures.Subnetwork(8)
    )
    assert bool((posterior.covariance.index >= 24).all())  # layer 0 has 24 parameters


def test_points_cannot_be_taken_out_of_covariances_that_never_saw_them_whole():
    network = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 1)).double().eval()
    y = torch.randn(30, 1, dtype=torch.float64)
    posterior = n2g.laplace(
        network, (X, y), n2g.Gaussian(0.01), prior_var=1.0, structure=n2g.Diagonal()
    )
    with pytest.raises(InputError, match=r"cannot be taken out.*structure=Full\(\)"):
        n2g.explain.leave_one_out(posterior)


@pytest.mark.parametrize("kind", [n2g.training.VOGN, n2g.training.VOGGN, n2g.training.OGGN])
def test_frozen_weights_stay_where_they_are(kind):
    network = mlp()
    network[0].weight.requires_grad_(False)
    before = network[0].weight.clone()
    optimizer = kind(network, n2g.Categorical(), num_data=30, prior_var=1.0, learning_rate=0.1)
    optimizer.step(X, Y)
    assert torch.equal(network[0].weight, before)
    assert "0.weight" not in optimizer.posterior((X, Y)).linearized.params


def test_function_space_says_its_structure_prior_and_dual():
    posterior = n2g.laplace(
        mlp(), (X, Y), n2g.Categorical(), prior_var=0.7, structure=n2g.structures.FunctionSpace()
    )
    assert posterior.structure == n2g.structures.FunctionSpace()
    assert posterior.prior_var == 0.7
    weights = n2g.laplace(mlp(), (X, Y), n2g.Categorical(), prior_var=0.7, structure=n2g.Full())
    torch.testing.assert_close(
        posterior.dual().log_marginal_likelihood(), weights.dual().log_marginal_likelihood()
    )


def test_many_classes_are_matched_on_fewer_points():
    counts = {
        classes: n2g.tuning.Matched().count(classes) for classes in (2, 10, 40, 100, 1000, 10_000)
    }
    assert counts == {2: 500, 10: 500, 40: 500, 100: 200, 1000: 20, 10_000: 20}
    assert n2g.tuning.Matched(7).count(1000) == 7


def test_a_wide_prior_of_a_last_layer_needs_no_jitter_in_float32():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 10)).eval()
    with torch.no_grad():
        module[2].weight.mul_(8)  # sure of its classes
    x = 3 * torch.randn(400, 4)
    y = module(x).argmax(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", n2g.errors.JitterAdded)
        warnings.simplefilter("ignore", n2g.errors.EmptyClass)
        warnings.simplefilter("ignore", n2g.errors.NotStationary)
        options = {"prior_var": 1e6, "structure": n2g.LastLayer(n2g.Full())}
        likelihood = n2g.Categorical(n2g.links.Probit())
        found = n2g.laplace(module, (x, y), likelihood, **options).marginal(x[:20]).variance
        exact = n2g.laplace(module.double(), (x.double(), y), likelihood, **options)
    torch.testing.assert_close(
        found.double(), exact.marginal(x[:20].double()).variance, rtol=1e-3, atol=0
    )


def test_a_subnetwork_is_of_weights_that_matter():
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(0)).double()
    x[:, 3:] = 0  # the weights of three inputs have no curvature, and are the least known
    y = (x[:, 0] > 0).long()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = n2g.laplace(
            module,
            (x, y),
            n2g.Categorical(),
            prior_var=1.0,
            structure=n2g.structures.Subnetwork(10),
        )
    assert float(found.marginal(x).variance.sum(1).min()) > 0
