"""Bounds by importance weights, against exact and brute-force evidences."""

from __future__ import annotations

import math

import pytest
import torch

import net2gp as n2g
from net2gp import RBF, Gaussian
from net2gp.deep import Ascent, SparseLayer, fit, importance_bound
from net2gp.errors import InputError

FIXED = Ascent(
    num_steps=60, learning_rate=0.1, tune=False, move_points=False, num_draws=4, starts=("linear",)
)
LAYERS = [SparseLayer(RBF(1.0, 0.5), mean="zero"), SparseLayer(RBF(0.7, 1.0), mean="zero")]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor([[-1.0], [0.0], [0.6], [1.5]], dtype=torch.float64)
    return x, torch.tensor([[-0.7], [0.3], [0.8], [0.2]], dtype=torch.float64)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def brute_force(x: torch.Tensor, y: torch.Tensor, noise: float, count: int = 40_000) -> float:
    """log E N(y | 0, k₂(h, h) + σ² I) over draws of h from the prior of the first layer."""
    root = torch.linalg.cholesky(LAYERS[0].kernel(x))
    h = torch.randn(count, len(x), generator=generator(), dtype=torch.float64) @ root.mT
    K = torch.exp(-0.5 * (h[:, :, None] - h[:, None]).square() / 0.7**2)
    law = torch.distributions.MultivariateNormal(
        torch.zeros(len(x), dtype=torch.float64), K + noise * torch.eye(len(x))
    )
    return float(law.log_prob(y[:, 0]).logsumexp(0) - math.log(count))


def test_more_weights_lift_the_bound_towards_the_evidence():
    x, y = data()
    posterior = fit(LAYERS, (x, y), Gaussian(0.05), ascent=FIXED)
    one = importance_bound(posterior, 1, num_estimates=60, generator=generator())
    many = importance_bound(posterior, 30, num_estimates=5, generator=generator())
    found = [float(v) for v in (posterior.log_marginal_likelihood(), one.mean(), many.mean())]
    assert found == sorted(found)
    assert found[-1] < brute_force(x, y, 0.05)


def test_many_weights_find_the_evidence_where_data_say_little():
    x, y = data()
    posterior = fit(LAYERS, (x, y), Gaussian(2.0), ascent=FIXED)
    many = importance_bound(posterior, 60, num_estimates=8, generator=generator())
    error = float(many.std()) / len(many) ** 0.5
    assert error < 0.05
    assert abs(float(many.mean()) - brute_force(x, y, 2.0)) < 4 * error


def test_one_layer_has_its_evidence():
    x, y = data()
    posterior = fit(LAYERS[1:], (x, y), Gaussian(0.05), ascent=FIXED)
    exact = n2g.condition(LAYERS[1].kernel, (x, y), Gaussian(0.05)).log_marginal_likelihood()
    torch.testing.assert_close(importance_bound(posterior, 1, num_estimates=1)[0], exact)


def test_it_needs_a_deep_fit_and_gaussian_noise():
    x, y = data()
    with pytest.raises(InputError, match=r"posteriors that deep\.fit returned"):
        importance_bound(n2g.condition(RBF(), (x, y), Gaussian(0.1)))
    labels = fit(1, (x, (y > 0.25).double()), n2g.Bernoulli(), ascent=Ascent(num_steps=2))
    with pytest.raises(InputError, match="but the likelihood is Bernoulli"):
        importance_bound(labels)
