"""Deep sigma point processes: the objective is the density of the prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import net2gp as n2g
from net2gp import RBF, Gaussian
from net2gp.deep import Ascent, fit
from net2gp.deep.inference.sigma_points import log_densities
from net2gp.errors import InputError, NotAvailable

QUICK = Ascent(objective="predictive", num_steps=15, num_inducing=8, num_samples=4, look_every=5)


def toy(count: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    return x, x.sin() + 0.1 * torch.randn(count, 1, generator=generator, dtype=torch.float64)


def test_the_objective_is_the_log_density_of_the_prediction():
    x, y = toy()
    posterior = fit(2, (x, y), Gaussian(), ascent=QUICK)
    means, variances = posterior.process.components(x)
    logs = posterior.process.weights.log()
    found = log_densities(posterior.likelihood, means, variances, y, logs)
    torch.testing.assert_close(found, posterior.predict(x).log_prob(y))
    assert means.shape == (4, len(x), 1)


def weighted() -> tuple[n2g.Posterior, torch.Tensor, torch.Tensor]:
    """A posterior whose sigma points have weights .7, .1, .1 and .1, with its means and variances."""
    x, y = toy()
    posterior = fit(2, (x, y), Gaussian(), ascent=QUICK)
    weights = torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.float64)
    inner = replace(posterior.process.inner, weights=weights)
    process = replace(posterior.process, inner=inner)
    return replace(posterior, process=process), *process.components(x)


def test_weights_are_learned_and_add_up_to_one():
    weights = weighted()[0].process.weights
    found = fit(2, toy(), Gaussian(), ascent=replace(QUICK, num_steps=80)).process.weights
    assert float(found.sum()) == pytest.approx(1.0)
    assert float(found.std()) > 1e-4
    assert float(weights[0]) == 0.7


def test_moments_are_those_of_the_weighted_mixture():
    posterior, means, variances = weighted()
    x, _ = toy()
    w = posterior.process.weights[:, None, None]
    mean = (w * means).sum(0)
    variance = (w * (variances + means.square())).sum(0) - mean.square()
    law = posterior.marginal(x)
    torch.testing.assert_close(law.mean, mean)
    torch.testing.assert_close(law.variance, variance)
    torch.testing.assert_close(posterior.process.mean(x), mean)
    torch.testing.assert_close(posterior.process.moments(x)[1][:, :, 0], variance)
    torch.testing.assert_close(posterior.process.joint(x)[1].diagonal(), variance[:, 0])
    torch.testing.assert_close(posterior.predict(x).mean, mean)


def test_draws_follow_the_weights():
    posterior = weighted()[0]
    x, _ = toy()
    draws = posterior.process.draw(x[:1], 4000, torch.Generator().manual_seed(0))
    mean, variance = posterior.process.diagonal(x[:1])
    error = (float(draws.mean()) - float(mean)) / (float(variance) / 4000) ** 0.5
    assert abs(error) < 4


def test_points_that_integrate_outputs_give_the_density_of_gaussian_noise():
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(3, 5, 1, generator=generator, dtype=torch.float64)
    variance = torch.full((3, 5, 1), 1e-6, dtype=torch.float64)
    y = torch.randn(5, 1, generator=generator, dtype=torch.float64)

    class Plain:
        log_prob = staticmethod(Gaussian(0.5).log_prob)

    closed = log_densities(Gaussian(0.5), mean, variance, y)
    torch.testing.assert_close(log_densities(Plain(), mean, variance, y), closed, rtol=0, atol=1e-3)


@pytest.mark.parametrize("layers", [1, 3])
def test_it_is_a_posterior_that_can_be_saved_and_has_no_evidence(layers, tmp_path):
    x, y = toy()
    posterior = fit(layers, (x, y), Gaussian(), ascent=replace(QUICK, num_steps=3))
    posterior.save(tmp_path / "deep.safetensors")
    loaded = n2g.load(tmp_path / "deep.safetensors")
    assert torch.equal(loaded.predict(x).log_prob(y), posterior.predict(x).log_prob(y))
    with pytest.raises(NotAvailable, match="is no bound on the evidence"):
        posterior.log_marginal_likelihood()


def test_it_takes_labels_and_batches():
    x, y = toy()
    labels = (y[:, 0] > 0).double()
    posterior = fit(
        [RBF(), RBF()], (x, labels), n2g.Bernoulli(), ascent=replace(QUICK, batch_size=8)
    )
    assert posterior.predict(x).probs.shape == (24, 1)


def test_classes_average_with_the_weights():
    x, y = toy()
    labels = (y[:, 0] > 0).long() + (y[:, 0] > 0.5).long()
    posterior = fit(2, (x, labels), n2g.Categorical(), ascent=QUICK)
    process, likelihood = posterior.process, posterior.likelihood
    weights = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    first = replace(process, inner=replace(process.inner, weights=weights))
    means, variances = process.components(x)
    f = process._outputs(means, variances)
    probs = f[: len(f) // 4].softmax(-1)
    torch.testing.assert_close(first.predict(x, likelihood, True).probs, probs.mean(0))
    split = first.split(x, likelihood, True)
    torch.testing.assert_close(split.epistemic, probs.var(0, correction=0))


def test_objectives_are_checked():
    with pytest.raises(InputError, match='must be "bound" or "predictive"'):
        Ascent(objective="evidence")
