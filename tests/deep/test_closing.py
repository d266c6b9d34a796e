"""The end of a fit: the last layer and the noise at their optimum for all rows; the prior on relevances."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import net2gp as n2g
from net2gp import RBF, Gaussian
from net2gp.deep import Ascent, SparseLayer, collapsed_bound, fit
from net2gp.deep.inference.ascent import Climb
from net2gp.deep.inference.problem import make_problem
from net2gp.deep.inference.starts import batch_of, chosen_rows, initial, shallow_fit
from net2gp.deep.inference.steps import closing
from net2gp.deep.inference.steps.relevances import STD, relevance_penalty

BATCHES = Ascent(num_steps=40, num_inducing=8, batch_size=40, num_samples=2, starts=("linear",))
ZERO = [SparseLayer(RBF(1.0), mean="zero")]


def waves(count: int, noise: float, outputs: int = 1, columns: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(count, columns, generator=generator, dtype=torch.float64)
    y = torch.stack([(x[:, 0] * (1 + c)).sin() for c in range(outputs)], 1)
    return x, y + noise * torch.randn(count, outputs, generator=generator, dtype=torch.float64)


def ready(data: tuple[Tensor, Tensor], likelihood: Gaussian, layers: int = 2) -> Climb:
    """A climb before its first step."""
    problem = make_problem(layers, data, likelihood, BATCHES)
    rows = chosen_rows(problem.x, 100, torch.Generator().manual_seed(0))
    shallow = shallow_fit(problem, rows, BATCHES)
    stack = initial(problem, shallow, rows, "linear", BATCHES, 0)
    return Climb(problem, stack, BATCHES, "linear", 0)


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_fit_from_batches_ends_at_the_closed_bound(outputs):
    x, y = waves(150, 0.3, outputs)
    posterior = fit(ZERO, (x, y), Gaussian(), ascent=BATCHES)
    last, likelihood = posterior.process.last, posterior.likelihood
    closed = collapsed_bound(last.kernel, (x, y), likelihood, last.points)
    assert abs(float(posterior.log_marginal_likelihood() - closed)) < 1e-6


@pytest.mark.parametrize("outputs", [1, 2])
def test_no_other_noise_has_a_larger_bound(outputs):
    x, y = waves(150, 0.3, outputs)
    posterior = fit(ZERO, (x, y), Gaussian(), ascent=BATCHES)
    last, noise = posterior.process.last, torch.as_tensor(posterior.likelihood.noise_var)
    bounds = [
        float(collapsed_bound(last.kernel, (x, y), Gaussian(noise * (1 + change)), last.points))
        for change in (0.0, -0.01, 0.01)
    ]
    assert bounds[0] > max(bounds[1:])


def test_noise_of_each_row_is_used_as_it_is():
    x, y = waves(150, 0.3)
    noise = Gaussian(torch.linspace(0.05, 0.5, 150, dtype=torch.float64)[:, None])
    posterior = fit(ZERO, (x, y), noise, ascent=BATCHES)
    last = posterior.process.last
    closed = collapsed_bound(last.kernel, (x, y), noise, last.points)
    assert abs(float(posterior.log_marginal_likelihood() - closed)) < 1e-6


@pytest.mark.parametrize("parts", [30, 8192])
def test_the_optimum_of_a_deep_process_is_one_for_its_draws(monkeypatch, parts):
    """Also if rows are taken in parts of unequal sizes."""
    monkeypatch.setattr(closing, "PART", parts)
    monkeypatch.setattr(closing, "DRAWS", 1)
    climb = ready(waves(100, 0.2), Gaussian())
    stack, problem = climb.stack, climb.problem

    def bound() -> float:
        generator, total = torch.Generator().manual_seed(3), 0.0
        for rows in torch.arange(100).split(parts // 2):
            batch = batch_of(problem, rows)._replace(weight=1.0)
            found = stack.estimate(batch, 2, generator)
            total += float(found.log_probs.mean(0).sum())
        return total - float(found.divergence)

    with torch.no_grad():
        before = bound()
        closing.close(problem, stack, 2, 3, torch.arange(100))
        after = bound()
        assert after > before
        for value in (stack.leaves["log_noise"], stack.shift):
            kept = value.clone()
            for change in (-1e-2, 1e-2):
                value.copy_(kept + change)
                assert bound() < after
            value.copy_(kept)


def test_targets_without_noise_are_not_lost_by_batches():
    """The last layer must follow kernels whose steps are large beside the noise."""
    data = waves(400, 1e-3)
    settings = Ascent(num_steps=200, num_inducing=20, batch_size=100, learning_rate=0.03)
    posterior = fit(1, data, Gaussian(), ascent=settings)
    assert float(posterior.log_marginal_likelihood()) > 400 * 3
    assert posterior.likelihood.noise_var < 1e-4
    assert float(posterior.recipe.bounds[-1]) > 0


def test_relevances_are_compared_in_units_of_their_columns():
    x, y = waves(60, 0.1, columns=3)
    factors = torch.tensor([1.0, 10.0, 100.0]).double()
    penalties = []
    for scaled, units in ((x, torch.ones(3)), (x * factors, factors)):
        climb = ready((scaled, y), Gaussian(), 1)
        logs = torch.tensor([0.0, 1.0, -1.0]).double() + units.log()
        with torch.no_grad():
            climb.stack.leaves["0.kernel.lengthscale"].copy_(logs)
        penalties.append(relevance_penalty(climb.problem, climb.stack))
    own = torch.tensor([0.0, 1.0, -1.0]).double() - x.std(0, correction=0).log()
    wanted = 0.5 * (own - own.mean()).square().sum() / STD**2
    torch.testing.assert_close(torch.stack(penalties).detach(), wanted.expand(2))


def test_there_is_no_prior_on_one_column_or_on_deep_processes():
    one = ready(waves(30, 0.1), Gaussian(), 1)
    deep = ready(waves(30, 0.1, columns=2), Gaussian(), 2)
    for climb in (one, deep):
        assert relevance_penalty(climb.problem, climb.stack) == 0


def test_a_column_that_says_nothing_is_not_switched_off_by_a_few_rows():
    x, y = waves(60, 0.3, columns=2)
    posterior = fit(1, (x, y), Gaussian(), ascent=Ascent(num_steps=200, learning_rate=0.1))
    scales = posterior.process.last.kernel.lengthscale / x.std(0, correction=0)
    assert 1 < float(scales[1] / scales[0]) < 30


def test_a_column_that_says_nothing_is_found_from_many_rows():
    x, y = waves(2000, 0.1, columns=2)
    settings = Ascent(num_steps=100, num_inducing=30, batch_size=500, learning_rate=0.05)
    posterior = fit(1, (x, y), Gaussian(), ascent=settings)
    scales = posterior.process.last.kernel.lengthscale / x.std(0, correction=0)
    assert float(scales[1] / scales[0]) > 3
    exact = n2g.metrics.rmse(posterior.predict(x[:200]).mean, waves(2000, 0.0, columns=2)[1][:200])
    assert float(exact) < 0.05
