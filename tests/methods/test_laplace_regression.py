"""Prior and noise of regressions by default: the evidence at the linear model's own mode."""

from __future__ import annotations

import contextlib
import itertools
import math
from functools import cache

import pytest
import torch
from torch import nn

import net2gp as n2g
from methods.laplace_cases import X, labels, mlp, quietly
from net2gp import metrics
from net2gp.errors import TuningAtEdge
from net2gp.methods.laplace_approximation.noise import likely_noise
from net2gp.methods.laplace_approximation.regression import (
    Regression,
    regression,
    scale_of,
)
from net2gp.methods.laplace_approximation.task import make_task

DOUBLE = torch.float64
INEXACT = [
    n2g.Kron(),
    n2g.Diagonal(),
    n2g.structures.Subnetwork(50),
    n2g.LastLayer(),
    n2g.LastLayer(n2g.Diagonal()),
]


def problem(count=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(count, 1, generator=generator, dtype=DOUBLE) - 2
    y = (2 * x).sin() + 0.3 * torch.randn(count, 1, generator=generator, dtype=DOUBLE)
    return x, y


@cache
def trained(count=40, steps=300, decay=0.0):
    """Rows, and a network that was trained on them."""
    x, y = problem(count)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh())
    network = nn.Sequential(*network, nn.Linear(30, 1)).double()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, weight_decay=decay)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(network(x), y).backward()
        optimizer.step()
    return x, y, network.eval().requires_grad_(False)


def model_of(network, x, y):
    task, structure = make_task(network, (x, y), n2g.Gaussian(), n2g.Full())
    return regression(task, structure.traits())


def own_targets(network, x, y):
    """y − f(x; θ*) + J(x)θ* and J, from the Jacobian itself."""
    linearized = n2g.linearize(network)
    J = linearized.jacobian(x).flatten(0, 1)
    theta = linearized.flatten(linearized.params)
    return (y - network(x)).detach().flatten() + J @ theta, J


@pytest.mark.parametrize("count", [10, 60], ids=["function space", "weight space"])
def test_the_evidence_is_that_of_the_linear_model_at_its_own_mode(count):
    network, x = mlp(2), torch.randn(count, 3, dtype=DOUBLE)
    y = torch.randn(count, 2, dtype=DOUBLE)
    t, J = own_targets(network, x, y)
    noise, prior = 0.3, 0.7
    law = torch.distributions.MultivariateNormal(
        torch.zeros_like(t), prior * J @ J.T + noise * torch.eye(len(t), dtype=DOUBLE)
    )
    found = model_of(network, x, y)
    torch.testing.assert_close(
        found.spectrum.log_marginal_likelihood(noise, prior), law.log_prob(t)
    )
    K = J @ J.T
    share = torch.linalg.solve(K + noise / prior * torch.eye(len(K)), K).trace() / len(K)
    torch.testing.assert_close(found.determined(torch.tensor(noise / prior, dtype=DOUBLE)), share)


@pytest.mark.parametrize("structure", [None, n2g.structures.FunctionSpace(), n2g.Full()], ids=str)
def test_no_possible_neighbor_has_more_evidence(structure):
    x, y, network = trained()
    posterior = quietly(network, (x, y), n2g.Gaussian(), structure=structure)
    noise, prior = posterior.likelihood.noise_var, posterior.prior_var
    t, J = own_targets(network, x, y)
    values, Q = torch.linalg.eigh(J @ J.T)
    energy, error = (Q.T @ t).square(), float((y - network(x)).square().mean())
    spread = float(y.var(correction=0))
    size = float(torch.cat([p.flatten() for p in network.parameters()]).square().mean())

    def objective(noise, prior):
        share = float((values / (values + noise / prior)).mean())
        total = prior * values + noise
        away = [math.log(noise / (0.01 * spread)), math.log(prior / size)]
        evidence = -0.5 * float((energy / total + total.log()).sum())
        evidence -= 0.5 * sum((log / math.log(100)) ** 2 for log in away)
        return evidence if noise * (1 + share) >= error * (1 - 1e-6) else -math.inf

    best = objective(noise, prior)
    assert best > -math.inf
    for a, b in itertools.product((0.9, 0.98, 1.0, 1.02, 1.1), repeat=2):
        assert objective(noise * a, prior * b) <= best + 1e-3


@pytest.mark.filterwarnings("ignore:the noise ends at the variance of y")
@pytest.mark.parametrize(("steps", "decay"), [(300, 0.0), (30, 0.0), (300, 0.03), (0, 0.0)])
def test_predictions_at_training_rows_are_no_surer_than_the_network_is_right(steps, decay):
    x, y, network = trained(40, steps, decay)
    error = float((network(x) - y).square().mean())
    posterior = quietly(network, (x, y), n2g.Gaussian(), structure=n2g.structures.FunctionSpace())
    assert float(posterior.predict(x).variance.mean()) >= error * (1 - 1e-3)
    assert posterior.likelihood.noise_var <= max(float(y.var(correction=0)), error) * (1 + 1e-9)


def test_the_noise_of_a_linear_model_is_recovered():
    torch.manual_seed(0)
    x = torch.randn(300, 4, dtype=DOUBLE)
    y = x @ torch.randn(4, 1, dtype=DOUBLE) + 0.5 * torch.randn(300, 1, dtype=DOUBLE)
    network = nn.Linear(4, 1).double().eval()
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones(300, 1)], 1), y).solution
    with torch.no_grad():
        network.weight.copy_(solution[:4].T)
        network.bias.copy_(solution[4])
    for structure in (n2g.Full(), n2g.Kron(), n2g.structures.FunctionSpace()):
        posterior = n2g.laplace(network, (x, y), n2g.Gaussian(), structure=structure)
        # 300 squares know their variance to √(2/300) = 8 %
        assert posterior.likelihood.noise_var == pytest.approx(0.25, rel=0.25)


@pytest.mark.parametrize("structure", INEXACT, ids=str)
def test_structures_are_as_unsure_of_the_data_as_the_model_is_of_rows_left_out(structure):
    x, y, network = trained(40, decay=0.03)
    posterior = quietly(network, (x, y), n2g.Gaussian(), structure=structure)
    whole = quietly(network, (x, y), n2g.Gaussian(), structure=n2g.structures.FunctionSpace())
    noise, prior = whole.likelihood.noise_var, whole.prior_var
    J = n2g.linearize(network).jacobian(x).flatten(0, 1)
    K = J @ J.T
    ratio = noise / prior * torch.eye(len(K), dtype=DOUBLE)
    gamma = float(torch.linalg.solve(K + ratio, K).trace())
    wanted = noise + noise * gamma / (len(K) - gamma)
    noisy = posterior.marginal(x).variance + posterior.likelihood.noise_var
    assert float(noisy.mean()) == pytest.approx(wanted, rel=0.05)
    assert posterior.prior_var <= prior * 1.001
    assert noise * 0.999 <= posterior.likelihood.noise_var <= wanted


def test_intervals_of_a_network_that_knows_its_rows_by_heart_hold_what_they_promise():
    x, y, network = trained(60, 1000)
    new, targets = problem(400, seed=7)
    error = float((network(x) - y).square().mean())
    law = quietly(network, (x, y), n2g.Gaussian()).predict(new)
    bare = metrics.gaussian_nll((law.mean, torch.full_like(law.mean, error)), targets)
    assert float(metrics.gaussian_nll(law, targets)) < float(bare)
    assert 0.8 < float(metrics.coverage(law.mean, law.variance, targets, 0.9)) < 0.98


@pytest.mark.parametrize("structure", [None, n2g.Kron(), n2g.Diagonal(), n2g.LastLayer()], ids=str)
@pytest.mark.parametrize("count", [1, 2, 5, 10])
def test_few_points_bring_neither_certainty_nor_noise_without_bounds(count, structure):
    x, y, network = trained(count, 200)
    says = pytest.warns(TuningAtEdge, match="the data do not determine it")
    with says if count <= 2 else contextlib.nullcontext():
        posterior = quietly(network, (x, y), n2g.Gaussian(), structure=structure)
    error, scale = float((network(x) - y).square().mean()), scale_of(y)
    noise = posterior.likelihood.noise_var
    assert scale / count**2 * (1 - 1e-9) <= noise <= max(scale, error) * (1 + 1e-9)
    if structure is None:
        far = posterior.marginal(torch.full((1, 1), 6.0, dtype=DOUBLE)).stddev
        assert float(far) > 0.1 * scale**0.5


def test_rows_beyond_the_limit_are_tuned_on_some(monkeypatch):
    x, y, network = trained(300, 100)
    whole = quietly(network, (x, y), n2g.Gaussian(), structure=n2g.Kron())
    monkeypatch.setattr("net2gp.methods.laplace_approximation.regression.NUM_ROWS", 100)
    some = quietly(network, (x, y), n2g.Gaussian(), structure=n2g.Kron())
    assert some.likelihood.noise_var == pytest.approx(whole.likelihood.noise_var, rel=0.3)
    assert float(some.predict(x).variance.mean()) == pytest.approx(
        float(whole.predict(x).variance.mean()), rel=0.3
    )


def test_what_is_given_is_kept():
    data = (X, labels(n2g.Gaussian()))
    fixed = quietly(mlp(), data, n2g.Gaussian(0.4))
    assert fixed.likelihood.noise_var == 0.4
    prior = {"*": 1.0, "*.bias": 0.3}
    posterior = quietly(mlp(), data, n2g.Gaussian(), prior_var=prior)
    assert posterior.prior_var == prior
    each = n2g.Gaussian(torch.full((30, 1), 0.5, dtype=DOUBLE))
    evidence = quietly(mlp(), data, each, tuning=n2g.tuning.Evidence())
    assert quietly(mlp(), data, each).prior_var == pytest.approx(evidence.prior_var)


def test_ends_of_the_range_are_warned_of():
    x, y, network = trained()
    model: Regression = model_of(network, x, y)
    (quiet, loud), (narrow, wide) = model.ranges()
    for noise, scale, said in (
        (10**quiet, None, "the noise ends at the smallest that is tried"),
        (10**loud, None, "the noise ends at the variance of y"),
        (None, 10**narrow, "the prior variance ends at an end of its range"),
        (None, 10**wide, "the prior variance ends at an end of its range"),
    ):
        with pytest.warns(TuningAtEdge, match=said):
            model.warn_at_edges(noise, scale)
    model.warn_at_edges(10 ** (0.5 * (quiet + loud)), 10 ** (0.5 * (narrow + wide)))


def test_held_out_rows_choose_prior_and_noise_together():
    (x, y, network), held_out = trained(), problem(40, seed=3)
    grid = (1e-3, 1e-1, 10.0)
    options = {"structure": n2g.Kron()}
    found = quietly(
        network, (x, y), n2g.Gaussian(), tuning=n2g.tuning.Validation(held_out, grid), **options
    )
    score = lambda posterior: float(posterior.predict(held_out[0]).log_prob(held_out[1]).mean())
    assert any(found.prior_var == pytest.approx(value) for value in grid)
    best, error = score(found), float((network(held_out[0]) - held_out[1]).square().mean())
    for prior, part in itertools.product(grid, (0.05, 0.2, 0.5, 0.8, 1.0)):
        other = quietly(network, (x, y), n2g.Gaussian(part * error), prior_var=prior, **options)
        assert score(other) <= best + 0.01


def test_the_likely_noise_makes_residuals_the_most_probable():
    generator = torch.Generator().manual_seed(0)
    variances = torch.rand(300, 1, generator=generator, dtype=DOUBLE)
    squares = (variances + 0.5) * torch.randn(300, 1, generator=generator, dtype=DOUBLE).square()

    def density(noise):
        total = noise + variances
        return float(-(total.log() + squares / total).sum())

    found = likely_noise(0.01, variances, squares, 10.0)
    assert all(density(found) > density(found * factor) for factor in (0.9, 1.1))
    assert likely_noise(2.0, variances, squares, 10.0) == pytest.approx(2.0)
    assert likely_noise(0.01, variances, squares, 0.1) == pytest.approx(0.1)
