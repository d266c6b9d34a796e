"""A network at its optimum is the posterior of a linear model, and of a Gaussian process."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev

import net2gp as n2g
from net2gp.errors import InputError, TooLarge
from net2gp.methods.explain.dual import AroundZero, dual
from net2gp.posteriors import Posterior
from net2gp.posteriors.conditioning.conditioned import Conditioned
from net2gp.posteriors.conditioning.whitened import Whitened
from shared_data import shared_reference

LIKELIHOODS = {
    "gaussian": (n2g.Gaussian(0.1), 2),
    "bernoulli": (n2g.Bernoulli(), 2),
    "categorical": (n2g.Categorical(), 3),
    "heteroscedastic": (n2g.HeteroscedasticGaussian(n2g.links.LogVariance()), 2),
}
NAMES = list(LIKELIHOODS)
PRIOR = {"0.*": 0.5, "2.weight": 0.3, "2.bias": 2.0}
NEW = torch.tensor([[0.3, -1.0], [2.0, 2.5], [-4.0, 0.1]], dtype=torch.float64)


@cache
def problem(name):
    """Data with noise, and an untrained network."""
    likelihood, outputs = LIKELIHOODS[name]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    clean = torch.stack([(x[:, 0] * (1 + c)).sin() + 0.3 * x[:, 1] for c in range(outputs)], 1)
    noisy = clean + 0.3 * torch.randn(clean.shape, generator=generator, dtype=torch.float64)
    y = {
        "gaussian": noisy,
        "bernoulli": (noisy > 0.1).double(),
        "categorical": noisy.argmax(1),
        "heteroscedastic": noisy[:, :1],
    }[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double().eval()
    return network, x, y, likelihood


@cache
def trained(name):
    """The same network at a stationary point of log p(y | θ) + log N(θ | 0, PRIOR)."""
    network, x, y, likelihood = problem(name)
    linearized = n2g.linearize(network)
    variances = prior_vector(linearized)

    def loss(theta):
        f = linearized.evaluate(linearized.unflatten(theta), x)
        return -likelihood.log_prob(f, y).sum() + 0.5 * (theta.square() / variances).sum()

    def step():
        optimizer.zero_grad()
        value = loss(theta)
        value.backward()
        return value

    theta = linearized.flatten(linearized.params).clone().requires_grad_()
    optimizer = torch.optim.LBFGS([theta], max_iter=500, line_search_fn="strong_wolfe")
    optimizer.step(step)
    theta = theta.detach()
    for _ in range(4):  # Newton's method adds the last digits
        theta = theta - torch.linalg.solve(hessian(loss)(theta), grad(loss)(theta))
    assert float(grad(loss)(theta).abs().max()) < 1e-10
    return n2g.linearize(network, params=linearized.unflatten(theta)), x, y, likelihood


def prior_vector(linearized):
    kernel = linearized.kernel(PRIOR)
    return torch.cat(
        [kernel.prior_var[n].expand(p.shape).reshape(-1) for n, p in linearized.params.items()]
    )


def at_optimum(name):
    linearized, x, y, likelihood = trained(name)
    return dual(linearized, (x, y), likelihood, PRIOR)


def anywhere(name):
    network, x, y, likelihood = problem(name)
    return dual(network, (x, y), likelihood, PRIOR)


def dense_jacobian(linearized, x):
    """J (N, C, P) by autograd of each output."""
    parts = jacrev(
        lambda params: functional_call(linearized.network, params, (x,)).reshape(len(x), -1)
    )(linearized.params)
    return torch.cat([parts[n].flatten(2) for n in linearized.params], 2)


def textbook(found):
    """m, S, H and J of the linear model by explicit inverses."""
    J = dense_jacobian(found.linearized, found.x)
    H = torch.einsum("ncp,ncd,ndq->pq", J, found.curvature, J)
    S = torch.linalg.inv(torch.diag(1 / prior_vector(found.linearized)) + H)
    theta = found.linearized.flatten(found.linearized.params)
    b = (found.curvature @ (J @ theta)[..., None])[..., 0] + found.residual
    return S @ torch.einsum("ncp,nc->p", J, b), S, H, J


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", [at_optimum, anywhere])
def test_the_linear_model_is_the_textbook_posterior(name, where):
    found = where(name)
    m, S, _, _ = textbook(found)
    posterior = found.linear_model()
    roots = prior_vector(found.linearized).sqrt()
    assert torch.allclose(posterior.process.weights[:, 0] * roots, m, atol=1e-9)
    J = dense_jacobian(found.linearized, NEW).flatten(0, 1)
    assert torch.allclose(posterior.joint(NEW).covariance_matrix, J @ S @ J.T, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", [at_optimum, anywhere])
def test_the_linear_model_is_the_gaussian_process(name, where):
    found = where(name)
    weights, functions = found.linear_model(), found.gaussian_process()
    assert isinstance(weights, Posterior)
    assert isinstance(functions, Posterior)
    for x in (found.x, NEW):
        one, other = weights.joint(x), functions.joint(x)
        assert torch.allclose(one.mean, other.mean, rtol=0, atol=1e-8)
        assert torch.allclose(one.covariance_matrix, other.covariance_matrix, rtol=0, atol=1e-8)
    evidences = [p.log_marginal_likelihood() for p in (weights, functions, found)]
    assert float(evidences[0]) == pytest.approx(float(evidences[1]), abs=1e-8)
    assert float(evidences[2]) == pytest.approx(float(evidences[1]), abs=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_the_mean_at_a_stationary_point_is_the_network(name):
    found = at_optimum(name)
    theta = found.linearized.flatten(found.linearized.params)
    weights = found.linear_model().process.weights[:, 0] * prior_vector(found.linearized).sqrt()
    assert torch.allclose(weights, theta, atol=1e-7)
    for posterior in (found.linear_model(), found.gaussian_process()):
        assert torch.allclose(posterior.marginal(NEW).mean, found.linearized(NEW), atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_the_mean_elsewhere_is_one_gauss_newton_step_away(name):
    found = anywhere(name)
    m = textbook(found)[0]
    step = m - found.linearized.flatten(found.linearized.params)
    J = dense_jacobian(found.linearized, NEW)
    expected = found.linearized(NEW) + J @ step
    assert torch.allclose(found.gaussian_process().marginal(NEW).mean, expected, atol=1e-8)
    assert float((J @ step).abs().max()) > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_the_evidence_at_a_stationary_point_is_that_of_laplace(name):
    found = at_optimum(name)
    _, _, H, _ = textbook(found)
    variances = prior_vector(found.linearized)
    theta = found.linearized.flatten(found.linearized.params)
    root = torch.diag(variances.sqrt())
    expected = (
        found.likelihood.log_prob(found.linearized(found.x), found.y).sum()
        - 0.5 * (theta.square() / variances).sum()
        - 0.5 * torch.logdet(torch.eye(len(H)).double() + root @ H @ root)
    )
    assert float(found.log_marginal_likelihood()) == pytest.approx(float(expected), abs=1e-8)


def density_of_targets(found):
    """log N(ỹ | 0, K + Λ⁻¹)."""
    size = found.f.numel()
    noise = torch.block_diag(*found.noise)
    law = torch.distributions.MultivariateNormal(
        torch.zeros(size, dtype=torch.float64), found.kernel(found.x) + noise
    )
    return law.log_prob(found.targets.reshape(-1))


@pytest.mark.parametrize("where", [at_optimum, anywhere])
def test_the_evidence_under_gaussian_noise_is_the_density_of_the_targets(where):
    found = where("gaussian")
    expected = float(density_of_targets(found))
    assert float(found.log_marginal_likelihood()) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("name", ["bernoulli", "heteroscedastic"])
def test_the_density_of_the_targets_becomes_the_evidence_of_the_data(name):
    found = anywhere(name)
    r = found.residual[..., None]
    change = (
        found.likelihood.log_prob(found.f, found.y)
        + 0.5 * (r.mT @ found.noise @ r)[:, 0, 0]
        + 0.5 * torch.logdet(2 * math.pi * found.noise)
    )
    expected = float(density_of_targets(found) + change.sum())
    assert float(found.log_marginal_likelihood()) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("name", ["bernoulli", "categorical"])
def test_the_evidence_is_the_integral_of_the_expansion_over_the_prior(name):
    likelihood = LIKELIHOODS[name][0]
    network = nn.Linear(1, 2, bias=False).double().eval()
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[0.4], [-0.3]]))
    x = torch.tensor([[1.0], [-0.5], [2.0]], dtype=torch.float64)
    y = torch.tensor([1, 0, 0])
    y = y if name == "categorical" else nn.functional.one_hot(y, 2).double()
    found = dual(network, (x, y), likelihood, 0.7)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    z = torch.cartesian_prod(*[torch.as_tensor(nodes)] * 2)
    logs = torch.cartesian_prod(*[torch.as_tensor(np.log(weights / weights.sum()))] * 2).sum(1)
    f = found.f
    d = torch.einsum("ni,sc->snc", x, z * 0.7**0.5) - f
    second = (found.residual * d).sum(-1) - 0.5 * torch.einsum(
        "snc,ncd,snd->sn", d, found.curvature, d
    )
    expected = float(((likelihood.log_prob(f, y) + second).sum(1) + logs).logsumexp(0))
    assert float(found.log_marginal_likelihood()) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_the_natural_parameters_are_those_of_targets_and_noise(name):
    found = anywhere(name)
    assert torch.allclose((found.curvature @ found.targets[..., None])[..., 0], found.natural)
    identity = found.curvature @ found.noise @ found.curvature
    assert torch.allclose(identity, found.curvature)


def test_the_noise_of_softmax_is_the_pseudo_inverse():
    found = anywhere("categorical")
    expected = torch.linalg.pinv(found.curvature, hermitian=True, rtol=1e-10)
    assert torch.allclose(found.noise, expected)
    ones = torch.ones(3, 1, dtype=torch.float64)
    assert float((found.noise @ ones).abs().max()) < 1e-12
    along = (found.targets - found.linear_part).sum(1)
    assert float(along.abs().max()) < 1e-12


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "heteroscedastic"])
def test_the_process_regresses_the_targets_with_the_tangent_kernel(name):
    found = anywhere(name)
    K, cross = found.kernel(found.x), found.kernel(found.x, NEW)
    inverse = torch.linalg.inv(K + torch.block_diag(*found.noise))
    expected = (cross.T @ inverse @ found.targets.reshape(-1)).reshape(len(NEW), -1)
    posterior = found.gaussian_process()
    assert torch.allclose(posterior.centered(NEW), expected, atol=1e-8)
    around = AroundZero(found.linearized)
    assert torch.allclose(posterior.marginal(NEW).mean, around(NEW) + expected, atol=1e-8)
    covariance = found.kernel(NEW) - cross.T @ inverse @ cross
    assert torch.allclose(posterior.joint(NEW).covariance_matrix, covariance, atol=1e-8)


def test_the_prior_covariance_is_the_tangent_kernel_over_the_weight_decay():
    network, x, y, likelihood = problem("gaussian")
    found = dual(network, (x, y), likelihood, prior_var=1 / 4.0)
    J = dense_jacobian(found.linearized, x).flatten(0, 1)
    assert torch.allclose(found.kernel(x), J @ J.T / 4.0, atol=1e-12)
    assert torch.allclose(found.features().flatten(0, 1), J, atol=1e-12)


def test_the_targets_of_a_linear_network_are_the_data():
    network = nn.Linear(2, 1).double().eval()
    _, x, y, _ = problem("heteroscedastic")
    found = dual(network, (x, y), n2g.Gaussian(0.2), 1.5)
    assert torch.allclose(found.targets, y)
    bayes = n2g.condition(found.kernel, (x, y), n2g.Gaussian(0.2))
    one, other = found.gaussian_process().marginal(NEW), bayes.marginal(NEW)
    assert torch.allclose(one.mean, other.mean, atol=1e-9)
    assert torch.allclose(one.variance, other.variance, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_conjugate_gradients_find_the_same_process(name):
    found = anywhere(name)
    solver = n2g.solvers.CG(tol=1e-12, variance=n2g.solvers.Exact(), num_probes=2000)
    one, other = found.gaussian_process(), found.gaussian_process(solver)
    assert torch.allclose(one.marginal(NEW).mean, other.marginal(NEW).mean, atol=1e-6)
    assert torch.allclose(one.marginal(NEW).variance, other.marginal(NEW).variance, atol=1e-6)
    assert float(other.evidence) == pytest.approx(float(one.evidence), abs=0.2)


def test_cached_variances_of_full_rank_are_exact():
    found = anywhere("categorical")
    solver = n2g.solvers.Cholesky(variance=n2g.solvers.Lanczos(rank=36))
    one, other = found.gaussian_process(), found.gaussian_process(solver)
    assert torch.allclose(one.marginal(NEW).variance, other.marginal(NEW).variance, atol=1e-7)


def test_the_smaller_system_is_solved():
    network, x, y, likelihood = problem("categorical")
    assert isinstance(dual(network, (x, y), likelihood, 1.0).condition().process, Whitened)
    few = dual(network, (x[:3], y[:3]), likelihood, 1.0)
    assert isinstance(few.condition().process, Conditioned)


def test_chosen_parameters_give_the_dual_of_the_last_layer():
    network, x, y, likelihood = problem("categorical")
    linearized = n2g.linearize(network, only="2.*")
    found = dual(linearized, (x, y), likelihood, 0.5)
    assert found.features().shape == (12, 3, 15)
    # the last layer is linear, so its linear part is the output itself
    assert torch.allclose(found.linear_part, found.f)
    one, other = found.linear_model().joint(NEW), found.gaussian_process().joint(NEW)
    assert torch.allclose(one.covariance_matrix, other.covariance_matrix, atol=1e-8)


def test_the_evidence_has_the_gradient_of_its_finite_difference():
    network, x, y, likelihood = problem("categorical")
    evidence = lambda v: dual(network, (x, y), likelihood, v).gaussian_process().evidence
    variance = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(evidence(variance), variance)
    step = 1e-5
    difference = float(evidence(0.4 + step) - evidence(0.4 - step)) / (2 * step)
    assert float(slope) == pytest.approx(difference, rel=1e-6)


def test_float32_networks_give_the_numbers_of_float64():
    network, x, y, likelihood = problem("categorical")
    single = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).eval()
    single.load_state_dict({k: v.float() for k, v in network.state_dict().items()})
    precise = dual(network, (x, y), likelihood, PRIOR).gaussian_process()
    rough = dual(single, (x.float(), y), likelihood, PRIOR).gaussian_process()
    law = rough.marginal(NEW.float())
    assert law.mean.dtype == torch.float32
    assert torch.allclose(law.mean.double(), precise.marginal(NEW).mean, atol=1e-4)
    assert torch.allclose(law.variance.double(), precise.marginal(NEW).variance, atol=1e-4)
    assert float(rough.evidence) == pytest.approx(float(precise.evidence), abs=1e-4)


def test_more_data_update_the_process():
    network, x, y, likelihood = problem("gaussian")
    grown = dual(network, (x[:8], y[:8]), likelihood, PRIOR).gaussian_process()
    grown = grown.update((x[8:], y[8:]))
    whole = dual(network, (x, y), likelihood, PRIOR).gaussian_process()
    assert torch.allclose(grown.marginal(NEW).mean, whole.marginal(NEW).mean, atol=1e-8)
    assert float(grown.evidence) == pytest.approx(float(whole.evidence), abs=1e-8)


def test_moving_keeps_the_predictions():
    found = anywhere("bernoulli").gaussian_process()
    moved = found.to(dtype=torch.float32)
    law = moved.marginal(NEW.float())
    assert law.mean.dtype == torch.float32
    assert torch.allclose(law.mean.double(), found.marginal(NEW).mean, atol=1e-4)


def test_mistakes_say_what_to_pass(monkeypatch):
    network, x, y, likelihood = problem("gaussian")
    with pytest.raises(InputError, match=r"network must be a torch.nn.Module or a Linearized"):
        dual(network(x), (x, y), likelihood, 1.0)
    found, classes = dual(network, (x, y), likelihood, 1.0), anywhere("categorical")
    with pytest.raises(InputError, match=r"Pass solver=Cholesky\(\) or CG\(\), or call linear_mod"):
        found.gaussian_process(n2g.solvers.WeightCholesky())
    with pytest.raises(InputError, match="Gaussian\\(\\) has no noise variance yet"):
        dual(network, (x, y), n2g.Gaussian(), 1.0)
    with pytest.raises(InputError, match="labels must be 0 or 1"):
        dual(network, (x, y), n2g.Bernoulli(), 1.0)
    monkeypatch.setattr("net2gp.memory.available_memory", lambda device="cpu": 100)
    with pytest.raises(TooLarge, match="a Jacobian of 12 × 2 × 22 would take"):
        found.features()
    with pytest.raises(TooLarge, match=r"Gram matrix.*solver=CG\(\)"):
        classes.gaussian_process(n2g.solvers.Cholesky())


@pytest.fixture(scope="module")
def snelson():
    """The data and weights of the one-dimensional example of Khan et al. (2019), with its gap."""
    with np.load(shared_reference() / "snelson_dnn2gp_laplace.npz") as archive:
        stored = {name: torch.from_numpy(archive[name]) for name in archive.files}
    network = nn.Sequential(nn.Linear(1, 32), nn.Sigmoid(), nn.Linear(32, 1)).double().eval()
    pieces = stored["theta"].split([p.numel() for p in network.parameters()])
    with torch.no_grad():
        for parameter, piece in zip(network.parameters(), pieces, strict=True):
            parameter.copy_(piece.reshape(parameter.shape))
    data = stored["X"], stored["Y"]
    return dual(network, data, n2g.Gaussian(0.286**2), prior_var=1 / 0.1), stored


def test_the_evidence_of_the_snelson_network_is_the_stored_one(snelson):
    found, _ = snelson
    assert float(found.log_marginal_likelihood()) == pytest.approx(-94.41996968886896, abs=1e-8)


@pytest.mark.parametrize("way", ["linear_model", "gaussian_process"])
def test_the_uncertainty_of_the_snelson_network_is_the_stored_one(snelson, way):
    found, stored = snelson
    posterior = getattr(found, way)()
    law = posterior.marginal(stored["XT"])
    places = [int((stored["XT"][:, 0] - x).abs().argmin()) for x in (1.0, 2.25, 9.0)]
    std = law.variance.sqrt()[places, 0].tolist()
    assert std == pytest.approx(
        [0.0768623420649441, 1.1275924147131966, 1.6985534904072987], rel=1e-6
    )
    assert torch.allclose(law.variance[:, 0], stored["gp_var"], rtol=5e-5, atol=0)
    assert torch.allclose(found.linearized(stored["XT"])[:, 0], stored["map_mean"], atol=1e-10)
    assert torch.allclose(posterior.centered(stored["XT"])[:, 0], stored["gp_mean"], atol=1e-8)
