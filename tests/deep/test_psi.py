"""Expectations of kernels over Gaussian inputs, and the collapsed bound, against slow references."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import net2gp as n2g
from net2gp import RBF, Gaussian
from net2gp.deep import collapsed_bound, psi_statistics
from net2gp.deep.latent.layer import LatentLayer, Targets
from net2gp.deep.latent.psi import GaussianRows
from net2gp.errors import InputError
from shared_data import shared_data


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def snelson() -> tuple[torch.Tensor, torch.Tensor]:
    found = np.load(shared_data() / "small1d.npz")
    x, y = (torch.from_numpy(found[n]).double()[:, None] for n in ("snelson_x", "snelson_y"))
    return x, y


def toy(count: int = 40, outputs: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    x = 6 * torch.rand(count, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    waves = torch.cat([(x * (1 + c)).sin() for c in range(outputs)], 1)
    return x, waves + 0.3 * normal(count, outputs)


def nodes(mean: torch.Tensor, variance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gauss–Hermite nodes of N(mean, variance) and their weights: (120,) each."""
    at, weights = np.polynomial.hermite_e.hermegauss(120)
    found = torch.from_numpy(weights) / math.sqrt(2 * math.pi)
    return mean + variance.sqrt() * torch.from_numpy(at), found


def layer(lengthscale, points, noise=0.08, variance=1.0) -> LatentLayer:
    numbers = [torch.as_tensor(v, dtype=torch.float64) for v in (lengthscale, variance, noise)]
    return LatentLayer(*(v.reshape(-1) for v in numbers), points)


@pytest.mark.parametrize("lengthscale", [0.4, 1.0, 3.0])
def test_expectations_in_one_dimension_are_those_of_quadrature(lengthscale):
    mean, variance, Z = normal(5, 1), normal(5, 1, seed=1).exp() * 0.3, normal(4, 1, seed=2)
    kernel = RBF(lengthscale, 1.7)
    psi0, psi1, psi2 = psi_statistics(kernel, mean, variance, Z)
    for n in range(len(mean)):
        x, weights = nodes(mean[n], variance[n])
        K = kernel(x[:, None], Z)
        torch.testing.assert_close(psi0[n], weights @ kernel.diag(x[:, None]), rtol=0, atol=1e-10)
        torch.testing.assert_close(psi1[n], weights @ K, rtol=0, atol=1e-10)
        torch.testing.assert_close(psi2[n], (K * weights[:, None]).mT @ K, rtol=0, atol=1e-10)


def test_expectations_with_one_length_scale_per_column_are_averages_of_draws():
    mean, variance, Z = normal(3, 2), normal(3, 2, seed=1).exp() * 0.5, normal(4, 2, seed=2)
    kernel, count = RBF(torch.tensor([0.7, 2.0], dtype=torch.float64), 1.3), 100_000
    _, psi1, psi2 = psi_statistics(kernel, mean, variance, Z)
    for n in range(len(mean)):
        draws = mean[n] + variance[n].sqrt() * normal(count, 2, seed=3 + n)
        K = kernel(draws, Z)
        products = K[:, :, None] * K[:, None]
        for found, sample in ((psi1[n], K), (psi2[n], products)):
            error = sample.std(0) / count**0.5
            assert bool(((found - sample.mean(0)).abs() < 5 * error).all())


def test_expectations_at_known_inputs_are_the_kernel():
    x, Z, kernel = normal(6, 2), normal(4, 2, seed=1), RBF(0.8, 2.0)
    K = kernel(x, Z)
    for variance in (None, torch.zeros_like(x)):
        _, psi1, psi2 = psi_statistics(kernel, x, variance, Z)
        torch.testing.assert_close(psi1, K, rtol=0, atol=1e-12)
        torch.testing.assert_close(psi2, K[:, :, None] * K[:, None], rtol=0, atol=1e-12)


def test_with_all_points_inducing_the_collapsed_bound_is_the_evidence():
    x, y = snelson()
    found = layer(0.6, x).bound(GaussianRows(x), Targets(y))
    assert abs(float(found) + 56.192305) < 1e-6


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 30), outputs=st.integers(1, 2))
def test_at_known_inputs_the_bound_is_the_sparse_one_and_below_the_evidence(seed, count, outputs):
    x, y = toy(outputs=outputs)
    Z = 6 * torch.rand(count, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = float(layer(0.6, Z).bound(GaussianRows(x), Targets(y)))
    closed = float(collapsed_bound(RBF(0.6), (x, y), Gaussian(0.08), Z))
    assert abs(found - closed) < 1e-6 * abs(closed)
    exact = n2g.condition(RBF(0.6), (x, y), Gaussian(0.08)).log_marginal_likelihood()
    assert found <= float(exact) + 1e-8


def test_uncertain_inputs_give_the_written_formula():
    """Plain inverses and determinants, with expectations over uncertain targets."""
    x, s, Z = normal(8, 2), normal(8, 2, seed=1).exp() * 0.2, normal(4, 2, seed=2)
    t, u = normal(8, 3, seed=3), normal(8, 3, seed=4).exp() * 0.1
    v, noise = torch.tensor([0.5, 1.0, 2.0]).double(), torch.tensor([0.1, 0.3, 0.2]).double()
    total = torch.zeros(()).double()
    for d in range(3):
        kernel = RBF(0.9, v[d])
        psi0, psi1, psi2 = psi_statistics(kernel, x, s, Z)
        K = kernel(Z) + 1e-6 * v[d] * torch.eye(4)
        A, Psi2 = K + psi2.sum(0) / noise[d], psi2.sum(0)
        second = torch.outer(t[:, d], t[:, d]) + torch.diag(u[:, d])
        fit = second.trace() - (psi1 @ A.inverse() @ psi1.mT @ second).trace() / noise[d]
        total -= 0.5 * (8 * (2 * math.pi * noise[d]).log() + fit / noise[d])
        total += 0.5 * (K.logdet() - A.logdet())
        total -= 0.5 * (psi0.sum() - (K.inverse() @ Psi2).trace()) / noise[d]
    found = layer([0.9, 0.9], Z, noise, v).bound(GaussianRows(x, s), Targets(t, u))
    assert abs(float(found - total)) < 1e-9


def test_uncertain_inputs_never_lift_the_bound_above_the_average_evidence():
    """By Jensen's inequality E_q log p(y | x) is above, here by an average over draws."""
    x, y = toy(12)
    variance = torch.full_like(x, 0.05)
    found = float(layer(0.6, x).bound(GaussianRows(x, variance), Targets(y)))
    exact = [
        float(
            n2g.condition(
                RBF(0.6), (x + 0.05**0.5 * normal(12, 1, seed=k), y), Gaussian(0.08)
            ).log_marginal_likelihood()
        )
        for k in range(40)
    ]
    assert found < float(np.mean(exact)) - 2 * float(np.std(exact)) / 40**0.5


def test_missing_targets_are_left_out():
    x, y = toy(20, outputs=2)
    present = torch.ones_like(y)
    present[::3, 0] = 0
    rows, Z = GaussianRows(x, torch.full_like(x, 0.02)), x[::4]
    found = layer(0.6, Z).bound(rows, Targets(y * present, None, present))
    keep = present[:, 0] > 0
    part = GaussianRows(x[keep], torch.full_like(x[keep], 0.02))
    one = layer(0.6, Z).bound(part, Targets(y[keep, :1]))
    other = layer(0.6, Z).bound(rows, Targets(y[:, 1:]))
    assert abs(float(found - one - other)) < 1e-8


def test_moments_at_known_places_are_exact_regression():
    x, y = toy(15, outputs=2)
    fitted = layer(0.6, x).fitted(GaussianRows(x), Targets(y))
    new = torch.linspace(0, 6, 7, dtype=torch.float64)[:, None]
    exact = n2g.condition(RBF(0.6), (x, y), Gaussian(0.08)).marginal(new)
    found = fitted.moments(GaussianRows(new))
    torch.testing.assert_close(found.mean, exact.mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.variance, exact.variance, rtol=0, atol=1e-6)


def test_moments_at_uncertain_places_are_those_of_quadrature():
    """The law of total variance over the place, with nodes at known places."""
    x, y = toy(15, outputs=2)
    rows = GaussianRows(x, torch.full_like(x, 0.01))
    targets = Targets(y, torch.full_like(y, 0.03))
    numbers = torch.tensor([0.08, 0.2]).double(), torch.tensor([1.0, 0.5]).double()
    fitted = layer(0.6, x[::2], *numbers).fitted(rows, targets)
    mean, variance = torch.tensor([[2.0], [4.0]]).double(), torch.tensor([[0.3], [0.1]]).double()
    found = fitted.moments(GaussianRows(mean, variance))
    for n in range(2):
        at, weights = nodes(mean[n], variance[n])
        known = fitted.moments(GaussianRows(at[:, None]))
        center = weights @ known.mean
        spread = weights @ (known.variance + known.mean.square()) - center.square()
        torch.testing.assert_close(found.mean[n], center, rtol=0, atol=1e-8)
        torch.testing.assert_close(found.variance[n], spread, rtol=0, atol=1e-6)


def test_wrong_arguments_are_named():
    x = torch.zeros(2, 1)
    with pytest.raises(InputError, match=r"closed form for n2g\.RBF\(\), but the kernel is"):
        psi_statistics(n2g.kernels.Linear(), x, None, x)
    with pytest.raises(InputError, match=r"one shape \(N, Q\).*\(2, 1\), \(3, 1\) and \(2, 1\)"):
        psi_statistics(RBF(), x, torch.zeros(3, 1), x)
    with pytest.raises(InputError, match="variance must be zero or positive and finite"):
        psi_statistics(RBF(), x, x - 1, x)
