"""VOGN, VOGGN and OGGN: what they converge to, and that they are proper torch optimizers."""

from __future__ import annotations

import inspect
import io
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import vmap

from methods.training import DOUBLE, flat_mean, random, seeded, small_network
from net2gp.errors import InputError, NetworkError
from net2gp.likelihoods import Bernoulli, Categorical, Gaussian
from net2gp.linear import linearize
from net2gp.methods.training.from_variances import from_variances
from net2gp.methods.training.ivon import IVON
from net2gp.methods.training.ivon import Options as IvonOptions
from net2gp.methods.training.natural_gradient import (
    GaussianPrior,
    NaturalState,
    converged_evidence,
    divergence,
    iteration_evidence,
    natural_step,
)
from net2gp.methods.training.vogn import OGGN, VOGGN, VOGN, Options
from net2gp.posteriors import Posterior
from net2gp.posteriors.recipes.around_network import around_network
from net2gp.posteriors.weights.diagonal import DiagonalCovariance
from net2gp.types import Params
from shared_data import shared_reference


def linear_network() -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(3, 1).double().eval()


def linear_task(noise_var: float = 0.5, prior_var: float = 2.0, count: int = 40):
    """Data, and the exact posterior of a linear model: mean (P,) and precision (P, P)."""
    x = random(count, 3) + 0.5
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=DOUBLE) + 0.3 + random(count, 1, seed=1)
    features = torch.cat([x, torch.ones(count, 1, dtype=DOUBLE)], 1)
    precision = features.T @ features / noise_var + torch.eye(4, dtype=DOUBLE) / prior_var
    mean = torch.linalg.solve(precision, features.T @ y[:, 0] / noise_var)
    return x, y, mean, precision


def test_oggn_on_a_linear_model_is_the_exact_diagonal_posterior():
    x, y, mean, precision = linear_task()
    network = linear_network()
    optimizer = OGGN(
        network, Gaussian(0.5), 40, prior_var=2.0, learning_rate=0.5, decays=(0.0, 0.9)
    )
    for _ in range(150):
        optimizer.step(x, y)
    torch.testing.assert_close(flat_mean(optimizer), mean, rtol=1e-6, atol=1e-6)
    diagonal = precision.diagonal().reciprocal()
    torch.testing.assert_close(optimizer.variance, diagonal, rtol=1e-6, atol=1e-6)


def test_the_momentum_does_not_move_the_point_of_rest():
    x, y, mean, _ = linear_task()
    network = linear_network()
    optimizer = OGGN(
        network, Gaussian(0.5), 40, prior_var=2.0, learning_rate=0.5, decays=(0.5, 0.8)
    )
    for _ in range(150):
        optimizer.step(x, y)
    torch.testing.assert_close(flat_mean(optimizer), mean, rtol=1e-6, atol=1e-6)


def test_batches_are_scaled_up_to_all_data():
    """Two halves of equal data say what both say together."""
    x, y, _, _ = linear_task()
    network = linear_network()
    twice = torch.cat([x, x]), torch.cat([y, y])
    optimizer = OGGN(
        network, Gaussian(1.0), 80, prior_var=2.0, learning_rate=0.5, decays=(0.0, 0.8)
    )
    for _ in range(120):
        optimizer.step(x, y)
    features = torch.cat([twice[0], torch.ones(80, 1, dtype=DOUBLE)], 1)
    expected = features.T @ features + torch.eye(4, dtype=DOUBLE) / 2.0
    exact = torch.linalg.solve(expected, features.T @ twice[1][:, 0])
    torch.testing.assert_close(flat_mean(optimizer), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(optimizer.variance, expected.diagonal().reciprocal())


def test_voggn_on_a_linear_model_is_the_exact_diagonal_posterior_within_sampling_error():
    x, y, mean, precision = linear_task()
    network = linear_network()
    total, lr = torch.zeros(4, dtype=DOUBLE), 0.2
    optimizer = VOGGN(
        network, Gaussian(0.5), 40, prior_var=2.0, learning_rate=lr, decays=(0.0, 0.8)
    )
    for step in range(500):
        optimizer.step(x, y)
        total += flat_mean(optimizer) * (step >= 100)
    # the Gauss–Newton matrix of a linear model does not depend on the draw
    torch.testing.assert_close(optimizer.variance, precision.diagonal().reciprocal())
    # a step of μ is −lr s⁻¹(P(μ − m) + H s^{−½}ε), H = P − δ: P(μ − m) averages to what the noise does
    noise = torch.linalg.solve(precision, precision - 0.5 * torch.eye(4, dtype=DOUBLE))
    error = (noise * precision.diagonal().rsqrt()).norm(dim=1) / 400**0.5
    assert bool(((total / 400 - mean).abs() < 4 * error).all())


def test_a_step_is_the_formula_of_the_paper():
    network, x = small_network(3), random(6, 2)
    y = torch.arange(6) % 3
    linearized = linearize(network)
    mu = linearized.flatten(linearized.params)
    options = {
        "prior_var": 0.5,
        "learning_rate": 0.02,
        "decays": (0.8, 0.95),
        "num_samples": 2,
        "seed": 4,
    }
    center = {name: torch.full_like(value, 0.1) for name, value in network.named_parameters()}
    optimizer = VOGN(network, Categorical(), 60, initial_var=0.01, prior_mean=center, **options)
    optimizer.step(x, y)
    noise, gradient, squares = seeded(4), 0.0, 0.0
    for _ in range(2):
        z = torch.randn(len(mu), generator=noise, dtype=DOUBLE)
        theta = {n: v.requires_grad_() for n, v in linearized.unflatten(mu + z * 0.1).items()}
        for n in range(6):
            loss = -Categorical().log_prob(linearized.evaluate(theta, x[n : n + 1]), y[n : n + 1])
            parts = torch.autograd.grad(loss.sum(), list(theta.values()))
            g = torch.cat([part.reshape(-1) for part in parts])
            gradient, squares = gradient + 60 / 6 * g / 2, squares + 60 / 6 * g.square() / 2
    s = 0.95 * 100.0 + 0.05 * (squares + 2.0)
    expected = mu - 0.02 * (0.2 * gradient + 2.0 * (mu - 0.1)) / s
    torch.testing.assert_close(flat_mean(optimizer), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(optimizer.variance, 1 / s, rtol=1e-10, atol=1e-12)


def test_oggn_at_rest_is_a_mode_with_the_diagonal_of_laplace():
    network, x = small_network(), random(30, 2)
    y = (x[:, 0] > 0).to(DOUBLE)
    optimizer = OGGN(network, Bernoulli(), 30, prior_var=1.0, learning_rate=0.3, decays=(0.5, 0.8))
    for _ in range(250):
        optimizer.step(x, y)
    params = {n: p.detach().requires_grad_() for n, p in network.named_parameters()}
    linearized = linearize(network)
    objective = -Bernoulli().log_prob(linearized.evaluate(params, x), y).sum()
    objective = objective + sum(p.square().sum() for p in params.values()) / 2
    gradient = torch.autograd.grad(objective, list(params.values()))
    assert max(float(g.abs().max()) for g in gradient) < 1e-3
    J, Lam = linearized.jacobian(x), Bernoulli().curvature(linearized(x))
    diagonal = torch.einsum("ncp,ncd,ndp->p", J, Lam, J) + 1.0
    torch.testing.assert_close(1 / optimizer.variance, diagonal, rtol=1e-3, atol=0.0)


def test_the_divergence_is_that_of_torch():
    mean, precision, prior = random(7), random(7, seed=1).exp(), random(7, seed=2).exp()
    own = divergence(mean, precision, GaussianPrior(torch.full_like(mean, 0.3), prior))
    law = Normal(mean, precision.rsqrt()), Normal(0.3, prior.rsqrt())
    torch.testing.assert_close(own, kl_divergence(*law).sum())


def test_the_elbo_is_a_lower_bound_and_its_gap_the_divergence_from_the_posterior():
    """On a linear model everything is known: log p(y) = ELBO + KL(q ‖ posterior)."""
    x, y, mean, precision = linear_task()
    network = linear_network()
    optimizer = OGGN(
        network, Gaussian(0.5), 40, prior_var=2.0, learning_rate=0.5, decays=(0.0, 0.9)
    )
    for _ in range(60):
        optimizer.step(x, y)
    features = torch.cat([x, torch.ones(40, 1, dtype=DOUBLE)], 1)
    law = torch.distributions.MultivariateNormal(
        torch.zeros(40, dtype=DOUBLE),
        features @ features.T * 2.0 + 0.5 * torch.eye(40, dtype=DOUBLE),
    )
    q = torch.distributions.MultivariateNormal(flat_mean(optimizer), optimizer.variance.diag())
    posterior = torch.distributions.MultivariateNormal(mean, precision_matrix=precision)
    expected = law.log_prob(y[:, 0]) - kl_divergence(q, posterior)
    found = [optimizer.elbo(x, y, num_samples=100, seed=seed) for seed in range(6)]
    error = torch.stack(found).std() / 6**0.5
    assert abs(float(torch.stack(found).mean() - expected)) < 4 * float(error)
    assert (
        float(optimizer.posterior((x, y)).log_marginal_likelihood())
        < float(law.log_prob(y[:, 0])) + 4 * float(error) * 60**0.5
    )


def test_the_posterior_is_the_gaussian_of_the_optimizer_seen_through_the_network():
    network, x = small_network(2), random(9, 2)
    y = torch.arange(9) % 2
    optimizer = VOGN(network, Categorical(), 9, prior_var=1.0, learning_rate=0.01)
    for _ in range(3):
        optimizer.step(x, y)
    posterior = optimizer.posterior((x, y))
    J = linearize(network).jacobian(x)
    blocks = torch.einsum("ncp,p,ndp->ncd", J, optimizer.variance, J)
    torch.testing.assert_close(posterior.marginal(x).covariance_matrix, blocks)
    torch.testing.assert_close(posterior.marginal(x).mean, network(x).detach())
    before = posterior.marginal(x).mean.clone()
    optimizer.step(x, y)
    torch.testing.assert_close(posterior.marginal(x).mean, before)
    assert not torch.equal(network(x), before)


@pytest.mark.parametrize("kind", [VOGN, VOGGN, OGGN])
def test_training_resumes_exactly(kind):
    x, y = random(12, 2), torch.arange(12) % 3
    network = small_network(3)
    optimizer = kind(
        network, Categorical(), 12, learning_rate=0.05, prior_var={"*": 1.0, "*.bias": 0.5}
    )
    for _ in range(3):
        optimizer.step(x, y)
    file = io.BytesIO()
    torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for _ in range(3):
        optimizer.step(x, y)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = small_network(3, seed=5)
    again.load_state_dict(saved["network"])
    resumed = kind(
        again, Categorical(), 12, learning_rate=0.9, prior_var={"*": 1.0, "*.bias": 0.5}, seed=8
    )
    resumed.load_state_dict(saved["optimizer"])
    for _ in range(3):
        resumed.step(x, y)
    assert torch.equal(flat_mean(resumed), flat_mean(optimizer))
    assert torch.equal(resumed.variance, optimizer.variance)


def test_schedulers_of_torch_set_the_learning_rate():
    network, x, y = small_network(), random(4, 2), random(4, 1)
    optimizer = VOGN(network, Gaussian(1.0), 4, learning_rate=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=5)
    rates = []
    for _ in range(4):
        optimizer.step(x, y)
        scheduler.step()
        rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"][0]))
    assert rates[-1][0] < 0.01
    assert len({beta for _, beta in rates}) > 1
    optimizer.param_groups[0]["lr"] = 0.0
    before = flat_mean(optimizer)
    optimizer.step(x, y)
    assert torch.equal(flat_mean(optimizer), before)


def test_chosen_parameters_alone_are_trained():
    network, x, y = small_network(), random(4, 2), random(4, 1)
    optimizer = VOGGN(linearize(network, only="2.*"), Gaussian(1.0), 4, learning_rate=0.1)
    frozen, head = network[0].weight.detach().clone(), network[2].weight.detach().clone()
    optimizer.step(x, y)
    assert torch.equal(network[0].weight, frozen)
    assert not torch.equal(network[2].weight, head)
    assert optimizer.posterior((x, y)).linearized.num_params == 6


def test_steps_are_pure_and_run_many_at_once():
    count, size = 5, 8
    parts = [random(count, size, seed=s) for s in range(5)]
    states = NaturalState(parts[0], parts[1].exp(), parts[2])
    priors = GaussianPrior(torch.zeros(size, dtype=DOUBLE), torch.ones(size, dtype=DOUBLE))
    before = [value.clone() for value in states]

    def step(state: NaturalState, g: Tensor, h: Tensor) -> NaturalState:
        return natural_step(state, g, h, priors, learning_rate=0.1, decays=(0.5, 0.9))

    together = vmap(step)(states, parts[3], parts[4].square())
    for n in range(count):
        one = NaturalState(*(value[n] for value in states))
        alone = step(one, parts[3][n], parts[4][n].square())
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[n], b)
    assert all(torch.equal(a, b) for a, b in zip(states, before, strict=True))


def diagonal_posterior(likelihood, y: Tensor, outputs: int) -> Posterior:
    network, x = small_network(outputs), random(len(y), 2, seed=3)
    linearized = linearize(network)
    variance = 0.1 * random(linearized.num_params, seed=4).exp()
    covariance, prior_var = DiagonalCovariance(variance), {"*": 0.7, "*.bias": 1.3}
    return around_network(linearized, covariance, prior_var, likelihood, (x, y))


def dense_evidence(posterior: Posterior, rate: float, weights: Params | None = None) -> Tensor:
    """log N(ỹ | J m, J S Jᵀ + Λ⁻¹/rate), from the definitions, with J at `weights`."""
    linearized, x, y = posterior.linearized, posterior.x, posterior.y
    mu = linearized.flatten(linearized.params)
    linearized = linearize(linearized.network, weights)
    f, at = linearized(x), linearized.flatten(linearized.params)
    J = linearized.jacobian(x).flatten(0, 1)
    delta = {n: torch.full_like(p, 1 / 0.7) for n, p in linearized.params.items()}
    delta |= {n: torch.full_like(delta[n], 1 / 1.3) for n in delta if n.endswith("bias")}
    precision = (1 - rate) / posterior.covariance.variance + rate * linearized.flatten(delta)
    m = (1 - rate) / posterior.covariance.variance * mu / precision
    noise = torch.linalg.inv(posterior.likelihood.curvature(f))
    targets = J @ at + torch.einsum(
        "ncd,nd->nc", noise, posterior.likelihood.residual(f, y)
    ).reshape(-1)
    covariance = (J / precision) @ J.T + torch.block_diag(*noise) / rate
    return torch.distributions.MultivariateNormal(J @ m, covariance).log_prob(targets)


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
@pytest.mark.parametrize(
    ("likelihood", "targets"),
    [(Gaussian(0.3), lambda: random(7, 2)), (Bernoulli(), lambda: (random(7, 2) > 0).double())],
    ids=["Gaussian", "Bernoulli"],
)
def test_the_evidence_of_an_iteration_is_a_dense_gaussian_density(likelihood, targets, rate):
    posterior = diagonal_posterior(likelihood, targets(), 2)
    found = iteration_evidence(posterior, rate=rate)
    torch.testing.assert_close(found, dense_evidence(posterior, rate), rtol=1e-9, atol=1e-9)


def test_the_linear_model_may_be_taken_at_drawn_weights():
    posterior = diagonal_posterior(Gaussian(0.3), random(7, 2), 2)
    draws = posterior.sample_weights(1, generator=seeded(3))
    weights = {name: value[0] for name, value in draws.items()}
    for rate in (0.2, 1.0):
        found = iteration_evidence(posterior, rate=rate, weights=weights)
        expected = dense_evidence(posterior, rate, weights)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(converged_evidence(posterior, weights=weights), found)


def test_the_evidence_at_convergence_is_that_of_the_dual():
    posterior = diagonal_posterior(Gaussian(0.3), random(7, 2), 2)
    found = converged_evidence(posterior)
    torch.testing.assert_close(found, posterior.dual().log_marginal_likelihood())
    torch.testing.assert_close(found, iteration_evidence(posterior, rate=1.0))


@pytest.mark.parametrize(("index", "evidence"), [(0, -111.61857), (1, -106.02857), (2, -107.59343)])
def test_the_evidence_at_a_mode_is_that_of_the_reference(index, evidence):
    """Log marginal likelihoods of Khan et al. (2019) for their toy data, at δ = 1.585."""
    stored = np.load(shared_reference() / "dnn2gp_toy_delta_original.npz")
    delta = float(stored["params"][11])
    x, y = (torch.from_numpy(stored[f"data_{name}_train"][0]) for name in "xy")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(77)
        layers = nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1)
        network = nn.Sequential(*layers).double().eval()
    params = list(network.parameters())
    search = torch.optim.LBFGS(params, max_iter=2000, tolerance_grad=1e-9, tolerance_change=1e-14,
                               history_size=50, line_search_fn="strong_wolfe")  # fmt: skip

    def closure() -> Tensor:
        search.zero_grad()
        penalty = sum(p.square().sum() for p in params)
        loss = (network(x)[:, 0] - y).square().sum() / 2 + delta * penalty / 2
        loss.backward()
        return loss

    search.step(closure)
    optimizer = OGGN(
        network, Gaussian(1.0), 100, prior_var=1 / delta, learning_rate=0.0, decays=(0.0, 0.0)
    )
    optimizer.step(x, y)
    posterior = optimizer.posterior((x, y))
    evidence = float(stored["mlh"][11, 0])
    assert evidence == pytest.approx(-111.61857, abs=1e-3)
    assert float(converged_evidence(posterior)) == pytest.approx(evidence, abs=1e-3)


def test_softmax_has_an_evidence_on_the_directions_that_it_sees():
    """A basis Q of the complement of (1, …, 1) leaves an ordinary density of Qᵀỹ."""
    posterior = diagonal_posterior(Categorical(), torch.arange(7) % 3, 3)
    linearized, x = posterior.linearized, posterior.x
    f = linearized(x)
    Q = torch.linalg.qr(torch.ones(3, 1, dtype=DOUBLE), mode="complete")[0][:, 1:]
    J = torch.einsum("ncp,cd->ndp", linearized.jacobian(x), Q).flatten(0, 1)
    noise = torch.linalg.inv(Q.T @ posterior.likelihood.curvature(f) @ Q)
    mu = linearized.flatten(linearized.params)
    shifts = torch.einsum("nde,cd,nc->ne", noise, Q, posterior.likelihood.residual(f, posterior.y))
    variance = {n: torch.full_like(p, 0.7) for n, p in linearized.params.items()}
    variance |= {n: torch.full_like(variance[n], 1.3) for n in variance if n.endswith("bias")}
    covariance = (J * linearized.flatten(variance)) @ J.T + torch.block_diag(*noise)
    law = torch.distributions.MultivariateNormal(torch.zeros(14, dtype=DOUBLE), covariance)
    expected = law.log_prob(J @ mu + shifts.reshape(-1))
    torch.testing.assert_close(converged_evidence(posterior), expected, rtol=1e-9, atol=1e-9)


def test_a_deterministic_full_batch_step_is_exact_inference_in_its_linear_model():
    """The step of the mean and precision from q is conjugate inference with the prior q^{1−β} p₀^β."""
    x, y, _, _ = linear_task()
    features = torch.cat([x, torch.ones(40, 1, dtype=DOUBLE)], 1)
    rate, s = 0.3, random(4).exp() * 10
    mu = random(4, seed=2)
    prior = GaussianPrior(torch.zeros(4, dtype=DOUBLE), torch.full((4,), 0.5, dtype=DOUBLE))
    gradient = features.T @ (features @ mu - y[:, 0]) / 0.5
    curvature = features.square().sum(0) / 0.5
    state = NaturalState(mu, s, torch.zeros_like(mu))
    moved = natural_step(
        state, gradient, curvature, prior, learning_rate=rate, decays=(0.0, 1 - rate)
    )
    own, zero = (1 - rate) * s, rate * prior.precision
    center = own * mu / (own + zero)
    # diagonal of the exact precision of the linear model with noise Λ⁻¹/β
    assert torch.allclose(moved.precision, own + zero + rate * curvature)
    score = (own + zero) * (center - mu) - rate * gradient
    torch.testing.assert_close(moved.mean, mu + score / moved.precision)


def test_networks_in_training_mode_are_refused():
    network = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1)).double()
    with pytest.raises(NetworkError, match=r"Call network.eval\(\) first"):
        VOGN(network, Gaussian(1.0), 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_data": 0},
            "num_data must be a positive whole number, the number of training points",
        ),
        ({"prior_var": 0.0}, "prior_var for '0.weight' must be positive"),
        ({"learning_rate": -1.0}, "learning_rate must be zero or positive"),
        ({"decays": (0.9, 1.0)}, r"decays must be two numbers from 0 up to below 1"),
        ({"num_samples": 0}, "num_samples must be a positive whole number"),
        ({"initial_var": 0.0}, "initial_var must be positive"),
        ({"prior_mean": {"x": torch.zeros(1)}}, "prior_mean has 'x'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        VOGN(small_network(), Gaussian(1.0), **({"num_data": 4} | options))


@pytest.mark.parametrize(
    ("optimizer", "known"), [(VOGN, Options), (OGGN, Options), (IVON, IvonOptions)]
)
def test_the_signature_lists_every_option_with_the_default_that_it_has(optimizer, known):
    listed = inspect.signature(optimizer).parameters
    assert known.__annotations__.keys() <= listed.keys()
    defaults = {name: listed[name].default for name in known.__annotations__}
    first = () if optimizer is IVON else (Gaussian(1.0),)
    given, left_out = (
        optimizer(small_network(), *first, 4, **options) for options in (defaults, {})
    )
    assert given.num_samples == left_out.num_samples
    assert torch.equal(given.variance, left_out.variance)
    assert torch.equal(given.generator.get_state(), left_out.generator.get_state())


def test_unknown_options_and_draws_at_the_mean_are_refused():
    with pytest.raises(TypeError, match="there is no option 'momentum'"):
        VOGN(small_network(), Gaussian(1.0), 4, momentum=0.9)
    with pytest.raises(InputError, match="OGGN takes its gradients at the mean"):
        OGGN(small_network(), Gaussian(1.0), 4, num_samples=3)


def test_a_second_group_and_a_foreign_state_are_refused():
    optimizer = VOGN(small_network(), Gaussian(1.0), 4)
    with pytest.raises(InputError, match="VOGN has one group of parameters"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(InputError, match="the state has no 'generator'"):
        optimizer.load_state_dict(torch.optim.SGD(small_network().parameters()).state_dict())


@pytest.mark.parametrize("rate", [0.0, 1.5, math.nan])
def test_rates_that_are_no_rates_are_refused(rate):
    posterior = diagonal_posterior(Gaussian(0.3), random(7, 2), 2)
    with pytest.raises(InputError, match="rate must be above 0 and at most 1"):
        iteration_evidence(posterior, rate=rate)


def test_variances_of_your_own_inference_become_the_posterior_that_vogn_gives():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double().eval()
    x = torch.randn(12, 2, dtype=torch.float64)
    y = torch.randn(12, 1, dtype=torch.float64)
    optimizer = VOGN(network, Gaussian(0.1), 12, prior_var=0.5, learning_rate=0.05)
    for _ in range(3):
        optimizer.step(x, y)
    expected = optimizer.posterior((x, y))
    own = from_variances(network, optimizer.variance, (x, y), Gaussian(0.1), prior_var=0.5)
    torch.testing.assert_close(own.predict(x).mean, expected.predict(x).mean)
    torch.testing.assert_close(own.predict(x).variance, expected.predict(x).variance)
    torch.testing.assert_close(own.novelty(x), expected.novelty(x))


def test_variances_must_be_one_positive_number_per_parameter():
    network, data = nn.Linear(2, 1).eval(), (torch.randn(4, 2), torch.randn(4, 1))
    with pytest.raises(
        InputError, match=r"variance must be a tensor of shape \(3,\), one number per"
    ):
        from_variances(network, torch.ones(2), data, Gaussian(0.1))
    with pytest.raises(InputError, match="variance must be positive"):
        from_variances(network, torch.zeros(3), data, Gaussian(0.1))
