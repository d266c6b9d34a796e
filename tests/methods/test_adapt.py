"""Adapting trained networks to tasks."""

from __future__ import annotations

import sys
import warnings
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp.data import digits
from net2gp.errors import UnequalScales
from net2gp.methods.adapt_tuning import left_out
from net2gp.posteriors.conditioning.problem import Problem, make_problem
from net2gp.posteriors.spectrum import decompose
from posteriors.ways import class_targets, network, points, real_targets, seeded

DOUBLE = torch.float64


def assert_close(a: Tensor, b: Tensor, tol: float = 1e-8) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def linear_task(noise_var: float, scale: float, count: int = 60, hidden: int = 20):
    """Data from the linearized network itself: y = f(θ*) + J Δθ + ε with Δθ ~ N(0, scale)."""
    linearized = n2g.linearize(network(1, hidden=hidden))
    x = points(count)
    step = torch.randn(linearized.num_params, 1, generator=seeded(3), dtype=DOUBLE)
    noise = torch.randn(count, 1, generator=seeded(4), dtype=DOUBLE)
    y = linearized(x) + linearized.kernel(scale).apply(x, step) + noise_var**0.5 * noise
    return linearized, x, y


@pytest.mark.parametrize("noise_var", [0.01, 0.3])
def test_it_recovers_the_noise_and_the_prior_of_its_own_model(noise_var):
    linearized, x, y = linear_task(noise_var, 0.5, count=300)
    posterior = n2g.adapt(linearized, (x, y), n2g.Gaussian())
    # 300 squared deviations know their variance to √(2/300) = 8 %, 30-odd directions the prior to 25 %
    assert posterior.likelihood.noise_var == pytest.approx(noise_var, rel=0.25)
    prior = float(next(iter(posterior.kernel.prior_var.values())))
    assert prior == pytest.approx(0.5, rel=0.75)


def test_what_is_given_is_kept():
    linearized, x, y = linear_task(0.1, 0.5)
    fixed_noise = n2g.adapt(linearized, (x, y), n2g.Gaussian(0.7))
    assert fixed_noise.likelihood.noise_var == 0.7
    fixed_prior = n2g.adapt(linearized, (x, y), n2g.Gaussian(), prior_var={"*": 2.0, "*.bias": 0.5})
    assert float(fixed_prior.kernel.prior_var["0.weight"]) == pytest.approx(2.0)
    assert float(fixed_prior.kernel.prior_var["0.bias"]) == pytest.approx(0.5)
    both = n2g.adapt(linearized, (x, y), n2g.Gaussian(0.7), prior_var=2.0)
    direct = n2g.condition(linearized.kernel(2.0), (x, y), n2g.Gaussian(0.7), mean=linearized)
    assert_close(both.marginal(x).mean, direct.marginal(x).mean)


@pytest.mark.parametrize("hidden", [3, 40])
@pytest.mark.parametrize("open_noise", [True, False])
def test_no_nearby_noise_or_prior_has_more_evidence(hidden, open_noise):
    linearized, x, y = linear_task(0.1, 0.5, hidden=hidden)
    given = n2g.Gaussian() if open_noise else n2g.Gaussian(0.2)
    posterior = n2g.adapt(linearized, (x, y), given)
    best = float(posterior.log_marginal_likelihood())
    noise, prior = posterior.likelihood.noise_var, posterior.kernel.prior_var["0.weight"]
    for a in (0.95, 1.05) if open_noise else (1.0,):
        for b in (0.95, 1.05):
            kernel = linearized.kernel(float(prior) * b)
            near = n2g.condition(kernel, (x, y), n2g.Gaussian(noise * a), mean=linearized)
            assert float(near.log_marginal_likelihood()) < best


def few_points_of_a_sinusoid(seed: int, count: int):
    """`count` points of a sinusoid with noise of variance 0.01, and others of it."""
    generator = seeded(seed)
    amplitude, phase = 1 + 3 * torch.rand(2, 1, 1, generator=generator, dtype=DOUBLE)
    x = 8 * torch.rand(count + 200, 1, generator=generator, dtype=DOUBLE) - 4
    noise = torch.randn(x.shape, generator=generator, dtype=DOUBLE)
    y = amplitude * (x + phase).sin() + 0.1 * noise
    return (x[:count], y[:count]), (x[count:], y[count:])


def wide_network(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)
        return nn.Sequential(*layers).double().eval()


@pytest.mark.filterwarnings("ignore::net2gp.errors.NothingToTune")
@pytest.mark.parametrize("count", [5, 10])
@pytest.mark.parametrize("zero_mean", [False, True])
def test_few_points_are_not_taken_for_free_of_noise(count, zero_mean):
    """On average over tasks no surprise is worse than a few nats a point: no tuned noise has vanished."""
    losses, noises = [], []
    for seed in range(20):
        known, (x, y) = few_points_of_a_sinusoid(seed, count)
        posterior = n2g.adapt(wide_network(seed), known, n2g.Gaussian(), zero_mean=zero_mean)
        losses.append(-posterior.predict(x).log_prob(y).mean())
        noises.append(posterior.likelihood.noise_var / float(known[1].var()))
    assert min(noises) > 1e-7
    assert float(torch.stack(losses).mean()) < 6


def test_few_points_that_change_nothing_are_warned_of():
    stayed, count = 0, 5
    for seed in range(20):
        known, (x, _) = few_points_of_a_sinusoid(seed, count)
        network = wide_network(seed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            posterior = n2g.adapt(network, known, n2g.Gaussian())
        said = any(f"{count} rows prefer no change" in str(one.message) for one in caught)
        stays = torch.allclose(posterior.marginal(x).mean, network(x))
        assert said == stays
        stayed += stays
    assert 0 < stayed < 20


@pytest.mark.filterwarnings("ignore::net2gp.errors.NotStationary")
def test_outputs_of_very_different_scales_are_warned_of():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 2)).double().eval()
    x = torch.linspace(-2, 2, 30, dtype=DOUBLE)[:, None]
    y = torch.cat([x.sin(), 0.01 * x.cos()], 1)
    for fit in (n2g.adapt, n2g.laplace):
        with pytest.warns(UnequalScales, match="go from 0.0047 to 0.79") as caught:
            fit(network, (x, y), n2g.Gaussian())
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnequalScales)
            fit(network, (x, y / y.std(0)), n2g.Gaussian())
            fit(network, (x, y), n2g.Gaussian(0.01))


@pytest.mark.filterwarnings("ignore::net2gp.errors.NothingToTune")
@pytest.mark.parametrize("count", [5, 20])
def test_the_evidence_is_that_of_the_data_at_the_chosen_noise_and_prior(count):
    """What is expected of the noise counts in its choice alone."""
    (x, y), _ = few_points_of_a_sinusoid(0, count)
    linearized = n2g.linearize(wide_network(0))
    posterior = n2g.adapt(linearized, (x, y), n2g.Gaussian())
    prior_var, noise = posterior.kernel.prior_var["0.weight"], posterior.likelihood.noise_var
    K = linearized.kernel(float(prior_var))(x) + noise * torch.eye(count, dtype=DOUBLE)
    law = torch.distributions.MultivariateNormal(linearized(x)[:, 0], K)
    assert_close(posterior.log_marginal_likelihood(), law.log_prob(y[:, 0]), 1e-6)


def test_every_solver_gives_the_same_posterior():
    linearized, x, y = linear_task(0.1, 0.5)
    default = n2g.adapt(linearized, (x, y), n2g.Gaussian())
    test = points(5, seed=5)
    for solver in (
        n2g.solvers.Cholesky(),
        n2g.solvers.WeightCholesky(),
        n2g.solvers.CG(tol=1e-10, variance=n2g.solvers.Exact()),
    ):
        other = n2g.adapt(linearized, (x, y), n2g.Gaussian(), solver=solver)
        assert other.solver == solver
        assert_close(other.marginal(test).mean, default.marginal(test).mean, 1e-6)
        assert_close(
            other.marginal(test).covariance_matrix, default.marginal(test).covariance_matrix, 1e-6
        )


def test_the_network_is_the_mean_of_the_prior_unless_told_otherwise():
    """Data that say nothing, or nothing new, leave the prior mean: the network, or zero."""
    module, x = network(1), points(10)
    near = n2g.adapt(module, (x, module(x).detach()), n2g.Gaussian(0.1), prior_var=1.0)
    assert_close(near.marginal(x).mean, module(x).detach())
    zero = n2g.adapt(
        module,
        (x, torch.zeros(10, 1, dtype=DOUBLE)),
        n2g.Gaussian(0.1),
        prior_var=1.0,
        zero_mean=True,
    )
    assert float(zero.marginal(x).mean.abs().max()) == 0.0
    huge = n2g.Gaussian(1e12)
    y = real_targets(x, 1)
    with_mean = n2g.adapt(module, (x, y), huge, prior_var=1.0)
    without = n2g.adapt(module, (x, y), huge, prior_var=1.0, zero_mean=True)
    assert_close(with_mean.marginal(x).mean, module(x).detach(), 1e-6)
    assert_close(without.marginal(x).mean, torch.zeros(10, 1, dtype=DOUBLE), 1e-6)


def test_a_task_like_the_first_is_better_served_by_the_network_as_mean():
    """Composability: with task two near task one, few points suffice around f₁, not around zero."""
    module = network(1, hidden=20)
    x, test = points(4), points(200, seed=5)
    truth = lambda z: module(z).detach() + 0.1 * z[:, :1]
    data, likelihood = (x, truth(x)), n2g.Gaussian(1e-4)
    errors = [
        float(
            (n2g.adapt(module, data, likelihood, zero_mean=zero).marginal(test).mean - truth(test))
            .square()
            .mean()
        )
        for zero in (False, True)
    ]
    assert errors[0] < 0.5 * errors[1]


def test_the_kernel_is_the_jacobian_s_over_the_prior_precision():
    """K = δ⁻¹JJᵀ for a prior precision δ: the tangent kernel over δ, exactly."""
    linearized, x, delta = n2g.linearize(network(2)), points(6), 4.0
    J = linearized.jacobian(x).flatten(0, 1)
    posterior = n2g.adapt(
        linearized, (x, real_targets(x, 2)), n2g.Gaussian(0.1), prior_var=1 / delta
    )
    assert_close(posterior.kernel(x), J @ J.T / delta, 1e-13)
    assert_close(posterior.kernel(x), linearized.kernel()(x) / delta, 1e-13)


def test_adapting_the_head_is_bayesian_linear_regression_on_the_last_features():
    """The Jacobian of the last layer is (φ(x), 1): adaptive Bayesian linear regression."""
    module = network(1, hidden=7)
    x, test = points(20), points(6, seed=5)
    y = real_targets(x, 1)
    head = n2g.linearize(module, only="2.*")
    features = lambda z: torch.cat([module[:2](z), torch.ones(len(z), 1)], 1).detach()
    assert_close(head.jacobian(x)[:, 0], features(x), 1e-14)
    posterior = n2g.adapt(head, (x, y), n2g.Gaussian(0.1), prior_var=0.6, zero_mean=True)
    Phi, Phis = features(x), features(test)
    A = torch.eye(8, dtype=DOUBLE) / 0.6 + Phi.T @ Phi / 0.1
    w = torch.linalg.inv(A) @ Phi.T @ y / 0.1
    assert_close(posterior.marginal(test).mean, Phis @ w, 1e-10)
    assert_close(
        posterior.joint(test).covariance_matrix, Phis @ torch.linalg.inv(A) @ Phis.T, 1e-10
    )


def test_all_parameters_know_more_than_the_head():
    module, x = network(1, hidden=7), points(20)
    data = (x, real_targets(x, 1))
    whole, head = (
        n2g.adapt(chosen, data, n2g.Gaussian()).log_marginal_likelihood()
        for chosen in (module, n2g.linearize(module, only="2.*"))
    )
    assert float(whole) > float(head)


def test_a_network_in_training_mode_is_refused_if_the_mode_matters():
    module, data = network(1), (points(3), real_targets(points(3), 1))
    with pytest.raises(n2g.errors.NetworkError, match=r"Call network.eval\(\) first"):
        n2g.adapt(nn.Sequential(module, nn.Dropout(0.1)).train(), data, n2g.Gaussian())
    expected = n2g.adapt(module, data, n2g.Gaussian()).predict(points(4))
    found = n2g.adapt(module.train(), data, n2g.Gaussian()).predict(points(4))
    assert module.training
    assert torch.equal(found.mean, expected.mean)
    assert torch.equal(found.variance, expected.variance)


def test_adapting_leaves_the_network_as_it_was():
    module = network(1)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    n2g.adapt(module, (points(5), real_targets(points(5), 1)), n2g.Gaussian())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(value.grad is None for value in module.parameters())


def test_later_training_does_not_change_the_posterior():
    module, x = network(1), points(5)
    posterior = n2g.adapt(module, (x, real_targets(x, 1)), n2g.Gaussian())
    before = posterior.marginal(x).mean
    with torch.no_grad():
        for value in module.parameters():
            value.add_(1.0)
    assert torch.equal(posterior.marginal(x).mean, before)


def test_tuning_on_a_subset_still_conditions_on_everything(monkeypatch):
    linearized, x, y = linear_task(0.1, 0.5, hidden=20)
    module = sys.modules["net2gp.methods.adapt"]  # the function hides it in its package
    monkeypatch.setattr(module, "SPECTRUM_ROWS", 30)
    sizes = []

    def recording(problem):
        sizes.append(len(problem.x))
        return decompose(problem)

    monkeypatch.setattr(module, "decompose", recording)
    posterior = n2g.adapt(linearized, (x, y), n2g.Gaussian())
    assert sizes == [30]
    assert len(posterior.x) == 60
    whole = n2g.condition(posterior.kernel, (x, y), posterior.likelihood, mean=linearized)
    assert_close(posterior.marginal(x).mean, whole.marginal(x).mean)


def test_data_that_the_network_already_explains_needs_nothing():
    module, x = network(1), points(8)
    posterior = n2g.adapt(module, (x, module(x).detach()), n2g.Gaussian())
    assert_close(posterior.marginal(x).mean, module(x).detach())


def test_a_kernel_that_is_zero_at_the_data_is_named():
    module = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 2, bias=False))
    module = module.double().eval()
    x = torch.zeros(4, 2, dtype=DOUBLE)
    with pytest.raises(n2g.errors.InputError, match="the tangent kernel is zero at the data"):
        n2g.adapt(module, (x, torch.tensor([0, 1, 0, 1])), n2g.Categorical())


def count_decompositions(monkeypatch) -> list[int]:
    sizes: list[int] = []
    eigh = torch.linalg.eigh

    def counting(matrix, *args, **kwargs):
        sizes.append(len(matrix))
        return eigh(matrix, *args, **kwargs)

    monkeypatch.setattr(torch.linalg, "eigh", counting)
    return sizes


@pytest.mark.parametrize("hidden", [2, 30], ids=["weight space", "function space"])
def test_tasks_with_the_same_inputs_share_one_decomposition(hidden, monkeypatch):
    module, x, z = network(1, hidden=hidden), points(20), points(20, seed=9)
    tasks = {
        "one": (x, real_targets(x, 1)),
        "two": (x, real_targets(x, 1).flip(0)),
        "three": (x.clone(), -real_targets(x, 1)),
        "other": (z, real_targets(z, 1)),
    }
    sizes = count_decompositions(monkeypatch)
    n2g.adapt_tasks(module, tasks)
    assert len(sizes) == 2


@pytest.mark.parametrize("hidden", [2, 30], ids=["weight space", "function space"])
def test_tasks_at_shared_hyper_parameters_are_tasks_alone(hidden):
    module, x, z = network(2, hidden=hidden), points(20), points(12, seed=9)
    linearized = n2g.linearize(module)
    tasks = {
        "one": (x, real_targets(x, 2)),
        "two": (x, real_targets(x, 2).flip(0)),
        "other": (z, real_targets(z, 2)),
    }
    posteriors = n2g.adapt_tasks(linearized, tasks)
    assert list(posteriors) == list(tasks)
    noises = {posterior.likelihood.noise_var for posterior in posteriors.values()}
    assert len(noises) == 1
    test = points(5, seed=5)
    for name, posterior in posteriors.items():
        alone = n2g.condition(posterior.kernel, tasks[name], posterior.likelihood, mean=linearized)
        assert_close(posterior.joint(test).mean, alone.joint(test).mean)
        assert_close(posterior.joint(test).covariance_matrix, alone.joint(test).covariance_matrix)
        assert_close(posterior.log_marginal_likelihood(), alone.log_marginal_likelihood())


def test_shared_hyper_parameters_maximize_the_summed_evidence():
    linearized = n2g.linearize(network(1, hidden=20))
    x, z = points(20), points(5, seed=9)
    tasks = {"many": (x, real_targets(x, 1)), "few": (z, real_targets(z, 1))}
    posteriors = n2g.adapt_tasks(linearized, tasks)
    best = sum(float(p.log_marginal_likelihood()) for p in posteriors.values())
    prior = float(posteriors["few"].kernel.prior_var["0.weight"])
    noise = posteriors["few"].likelihood.noise_var
    for a, b in ((0.9, 1.0), (1.1, 1.0), (1.0, 0.9), (1.0, 1.1)):
        moved = n2g.adapt_tasks(
            linearized, tasks, n2g.Gaussian(noise * a), prior_var=prior * b
        ).values()
        assert sum(float(p.log_marginal_likelihood()) for p in moved) < best


def test_one_task_is_adapt():
    module, x = network(1), points(20)
    data = (x, real_targets(x, 1))
    one, other = n2g.adapt(module, data, n2g.Gaussian()), n2g.adapt_tasks(module, {"task": data})
    assert_close(one.marginal(x).mean, other["task"].marginal(x).mean, 1e-6)


@pytest.mark.parametrize("inference", [n2g.solvers.Laplace(), n2g.solvers.Variational()])
def test_the_prior_of_a_classifier_has_the_largest_evidence(inference):
    linearized, x = n2g.linearize(network(3)), points(30)
    data = (x, class_targets(x, 3))
    posterior = n2g.adapt(linearized, data, n2g.Categorical(), inference=inference)
    best, prior = float(posterior.log_marginal_likelihood()), posterior.kernel.prior_var["0.weight"]
    for factor in (0.5, 0.8, 1.25, 2.0):
        kernel = linearized.kernel(float(prior) * factor)
        near = n2g.condition(kernel, data, n2g.Categorical(), mean=linearized, inference=inference)
        assert float(near.log_marginal_likelihood()) < best


@pytest.mark.parametrize("inference", [n2g.solvers.Laplace(), n2g.solvers.Variational()])
def test_a_classifier_is_tuned_and_conditioned_with_one_gram_matrix(inference, monkeypatch):
    linearized, x, sizes = n2g.linearize(network(3, hidden=40)), points(30), []
    data, gram = (x, class_targets(x, 3)), Problem.gram
    monkeypatch.setattr(Problem, "gram", lambda self: sizes.append(self.num_rows) or gram(self))
    posterior = n2g.adapt(linearized, data, n2g.Categorical(), inference=inference)
    assert sizes == [90]
    alone = n2g.condition(
        posterior.kernel, data, n2g.Categorical(), mean=linearized, inference=inference
    )
    z = points(5, seed=5)
    assert_close(posterior.joint(z).mean, alone.joint(z).mean)
    assert_close(posterior.joint(z).covariance_matrix, alone.joint(z).covariance_matrix)
    assert_close(posterior.log_marginal_likelihood(), alone.log_marginal_likelihood())
    assert repr(posterior) == repr(alone)


def test_a_network_with_its_own_noise_is_adapted():
    module, x = network(2), points(30)
    y = real_targets(x, 1)
    posterior = n2g.adapt(module, (x, y), n2g.HeteroscedasticGaussian())
    before = n2g.HeteroscedasticGaussian().log_prob(module(x).detach(), y).mean()
    assert float(posterior.predict(x).log_prob(y).mean()) > float(before)


def small_convolution() -> nn.Sequential:
    """For 8 × 8 images, with five outputs."""
    body = (nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 5))


@cache
def source_network() -> nn.Sequential:
    """Trained on the digits 0 to 4."""
    x, y = digits("train")
    x, y = x[y < 5], y[y < 5]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = small_convolution()
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    for _ in range(120):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    return module.eval()


def accuracy(scores: Tensor, y: Tensor) -> float:
    return float((scores.argmax(1) == y).double().mean())


def retrained_head(module: nn.Sequential, x: Tensor, y: Tensor, decay: float) -> nn.Module:
    """The last layer alone, refitted from zero by L-BFGS with weight decay."""
    head = nn.Linear(16, 5)
    nn.init.zeros_(head.weight)
    features = module[:-1](x).detach()
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in head.parameters())
        loss = nn.functional.cross_entropy(head(features), y) + decay * penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    return nn.Sequential(module[:-1], head)


def test_a_classifier_of_other_digits_is_at_least_a_retrained_last_layer():
    """Trained on 0 to 4, adapted to 5 to 9 with ten digits each: the whole network against its head."""
    module = source_network()
    x, y = digits("train")
    chosen = torch.cat([(y == label).nonzero()[:10, 0] for label in range(5, 10)])
    x, y = x[chosen], y[chosen] - 5
    test, labels = digits("test")
    test, labels = test[labels >= 5], labels[labels >= 5] - 5
    posterior = n2g.adapt(module, (x, y), n2g.Categorical(n2g.links.Probit()), zero_mean=True)
    ours = accuracy(posterior.predict(test).probs, labels)
    decays = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # the best on the test digits, in favor of the head
    head = max(accuracy(retrained_head(module, x, y, d)(test), labels) for d in decays)
    assert head > 0.4  # the baseline works
    assert ours >= head
    independent = n2g.condition(
        n2g.linearize(module).trace_kernel(0.1), (x, y), n2g.Categorical(n2g.links.Probit())
    )
    assert accuracy(independent.predict(test).probs, labels) >= head


def trained_network(x: Tensor, y: Tensor, steps: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    optimizer = torch.optim.Adam(module.parameters(), lr=2e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
    return module.eval()


def noisy_curve(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = 4 * torch.rand(count, 1, generator=seeded(seed), dtype=DOUBLE) - 2
    return x, x.sin() + 0.2 * torch.randn(count, 1, generator=seeded(seed + 1), dtype=DOUBLE)


def test_what_a_network_was_trained_on_leaves_its_outputs_as_they_are():
    x, y = noisy_curve(40)
    module = trained_network(x, y, 300)
    with pytest.warns(
        n2g.errors.NothingToTune, match=r"Use laplace\(network, data, Gaussian\(\)\)"
    ):
        posterior = n2g.adapt(module, (x, y), n2g.Gaussian())
    new = torch.linspace(-3, 3, 20, dtype=DOUBLE)[:, None]
    assert_close(posterior.marginal(new).mean, module(new).detach(), 1e-6)
    inside, far = posterior.marginal(x).stddev.mean(), posterior.marginal(new[-1:]).stddev
    assert float(far) > 1.5 * float(inside) > 0.01
    error = float((module(x) - y).square().mean())
    assert 0.3 * error < posterior.likelihood.noise_var < float(y.var())
    # a new task still moves it
    other = n2g.adapt(module, (x, y + x), n2g.Gaussian())
    assert float((other.marginal(x).mean - y - x).square().mean()) < 3 * error


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("where", ["old", "new"])
def test_one_or_two_points_bring_no_certainty(count, where):
    x, y = noisy_curve(40)
    module = trained_network(x, y, 300)
    few = (x[:count], y[:count]) if where == "old" else noisy_curve(count, seed=5)
    posterior = n2g.adapt(module, few, n2g.Gaussian())
    assert posterior.likelihood.noise_var > 1e-4
    law = posterior.marginal(torch.linspace(-3, 3, 20, dtype=DOUBLE)[:, None])
    assert float(law.stddev.mean()) > 0.1


@pytest.mark.parametrize("count", [15, 120], ids=["function space", "weight space"])
def test_residuals_of_points_left_out_are_those_of_the_other_points(count):
    linearized = n2g.linearize(network(1, hidden=5))
    x, ratio = points(count), 0.3
    problem = make_problem(
        linearized.kernel(), (x, real_targets(x, 1)), n2g.Gaussian(1.0), linearized
    )
    found = left_out(decompose(problem), ratio, problem.target)
    K, r = linearized.kernel()(x), problem.target
    for n in (0, 3, count - 1):
        rest = torch.arange(count) != n
        A = K[rest][:, rest] + ratio * torch.eye(count - 1, dtype=DOUBLE)
        predicted = K[n, rest] @ torch.linalg.solve(A, r[rest])
        assert_close(found[n], r[n] - predicted, 1e-8)
