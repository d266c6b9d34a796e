"""A fit of one layer against exact Gaussian process regression and the closed bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import net2gp as n2g
from net2gp import RBF, Gaussian
from net2gp.deep import Ascent, SparseLayer, collapsed_bound, fit
from net2gp.errors import InputError
from shared_data import shared_data

KERNEL, NOISE = RBF(0.6, 1.0), Gaussian(0.08)
FIXED = Ascent(num_steps=2, natural_rate=1.0, tune=False, move_points=False, num_inducing=12)
ZERO = [SparseLayer(KERNEL, mean="zero")]


def snelson() -> tuple[torch.Tensor, torch.Tensor]:
    found = np.load(shared_data() / "small1d.npz")
    return tuple(
        torch.from_numpy(found[n]).double().reshape(-1, 1) for n in ("snelson_x", "snelson_y")
    )


def toy(count: int = 40, outputs: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 6 * torch.rand(count, 1, generator=generator, dtype=torch.float64)
    waves = torch.stack([(x[:, 0] * (1 + c)).sin() for c in range(outputs)], 1)
    return x, waves + 0.3 * torch.randn(count, outputs, generator=generator, dtype=torch.float64)


def test_with_all_points_inducing_the_bound_is_the_evidence():
    x, y = snelson()
    exact = n2g.condition(KERNEL, (x, y), NOISE).log_marginal_likelihood()
    assert abs(float(exact) + 56.192305) < 1e-6
    assert abs(float(collapsed_bound(KERNEL, (x, y), NOISE, x) - exact)) < 1e-6


def test_a_fit_with_all_points_inducing_is_exact_regression():
    x, y = toy()
    exact = n2g.condition(KERNEL, (x, y), NOISE)
    posterior = fit(ZERO, (x, y), NOISE, ascent=replace(FIXED, num_inducing=40))
    assert abs(float(posterior.log_marginal_likelihood() - exact.log_marginal_likelihood())) < 1e-6
    new = torch.linspace(0, 6, 9, dtype=torch.float64)[:, None]
    torch.testing.assert_close(posterior.mean(new), exact.mean(new), rtol=0, atol=1e-5)
    one, other = posterior.joint(new), exact.joint(new)
    torch.testing.assert_close(one.covariance_matrix, other.covariance_matrix, rtol=0, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 40))
def test_no_inducing_points_lift_the_bound_above_the_evidence(seed, count):
    x, y = toy()
    generator = torch.Generator().manual_seed(seed)
    points = 8 * torch.rand(count, 1, generator=generator, dtype=torch.float64) - 1
    exact = n2g.condition(KERNEL, (x, y), NOISE).log_marginal_likelihood()
    assert float(collapsed_bound(KERNEL, (x, y), NOISE, points)) <= float(exact) + 1e-8


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_fitted_bound_is_the_closed_one_at_its_optimum(outputs):
    x, y = toy(outputs=outputs)
    posterior = fit(ZERO, (x, y), NOISE, ascent=FIXED)
    closed = collapsed_bound(KERNEL, (x, y), NOISE, posterior.process.last.points)
    assert abs(float(posterior.log_marginal_likelihood() - closed)) < 1e-8


def test_natural_gradients_from_batches_come_near_the_closed_bound():
    x, y = toy(60)
    ascent = Ascent(
        num_steps=150,
        natural_rate=0.05,
        tune=False,
        move_points=False,
        num_inducing=12,
        batch_size=20,
    )
    posterior = fit(ZERO, (x, y), NOISE, ascent=ascent)
    closed = float(collapsed_bound(KERNEL, (x, y), NOISE, posterior.process.last.points))
    assert closed - 0.5 < float(posterior.log_marginal_likelihood()) <= closed + 1e-9


def test_training_finds_the_numbers_that_the_evidence_prefers():
    x, y = toy(30)
    best = n2g.tune(
        lambda scale, variance, noise: n2g.condition(RBF(scale, variance), (x, y), Gaussian(noise)),
        scale=1.0,
        variance=1.0,
        noise=0.1,
    )
    ascent = Ascent(num_steps=60, learning_rate=0.1, natural_rate=0.5, num_inducing=20)
    posterior = fit([SparseLayer(RBF(3.0, 0.2), mean="zero")], (x, y), Gaussian(), ascent=ascent)
    found = float(posterior.log_marginal_likelihood())
    exact = float(best.log_marginal_likelihood())
    assert exact - 0.05 < found <= exact + 1e-6
    assert abs(posterior.likelihood.noise_var / best.likelihood.noise_var - 1) < 0.05


def test_the_closed_bound_needs_gaussian_noise():
    x, y = toy()
    with pytest.raises(InputError, match="Gaussian noise of a known variance"):
        collapsed_bound(KERNEL, (x, y), Gaussian(), x)
