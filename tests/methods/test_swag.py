"""SWAG: the Gaussian of an optimizer's path."""

from __future__ import annotations

import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov
from torch import Tensor, nn

from methods.training import DOUBLE, random, seeded
from net2gp.errors import InputError
from net2gp.likelihoods import Categorical, Gaussian
from net2gp.linear import linearize
from net2gp.methods.training.swag import Swag
from net2gp.posteriors.weights.diagonal import DiagonalCovariance, LowRankPlusDiagonal


def set_weights(network: nn.Linear, weights: Tensor) -> None:
    with torch.no_grad():
        network.weight.copy_(weights[:-1])
        network.bias.copy_(weights[-1:])


def collected(weights: Tensor, **options) -> tuple[Swag, nn.Linear]:
    network, swag = nn.Linear(weights.shape[1] - 1, 1).double(), Swag(**options)
    for row in weights:
        set_weights(network, row)
        swag = swag.collect(network)
    return swag, network


def dense(covariance: DiagonalCovariance | LowRankPlusDiagonal) -> Tensor:
    if isinstance(covariance, DiagonalCovariance):
        return covariance.variance.diag()
    return covariance.diagonal.diag() + covariance.factor @ covariance.factor.T


def test_with_every_deviation_kept_it_is_half_the_sample_covariance_and_half_its_diagonal():
    weights = random(12, 5)
    swag, _ = collected(weights, rank=12)
    sample = torch.cov(weights.T)
    expected = (sample + sample.diagonal().diag()) / 2
    torch.testing.assert_close(dense(swag.covariance()), expected)
    torch.testing.assert_close(
        torch.cat([value.reshape(-1) for value in swag.mean.values()]), weights.mean(0)
    )


def test_rank_zero_is_the_diagonal():
    weights = random(12, 5)
    swag, _ = collected(weights, rank=0)
    covariance = swag.covariance()
    assert isinstance(covariance, DiagonalCovariance)
    torch.testing.assert_close(covariance.variance, weights.var(0))


def test_only_the_last_deviations_are_kept_and_they_are_from_the_mean_of_all():
    weights = random(12, 5)
    swag, _ = collected(weights, rank=3)
    D = (weights[-3:] - weights.mean(0)).T
    expected = weights.var(0).diag() / 2 + D @ D.T / (2 * 3 * 11 / 12)
    torch.testing.assert_close(dense(swag.covariance()), expected)
    assert swag.covariance().factor.shape == (5, 3)


def test_small_steps_far_from_zero_do_not_cancel():
    weights = 1e4 + 1e-3 * random(200, 5)
    swag, _ = collected(weights, rank=0)
    torch.testing.assert_close(swag.covariance().variance, weights.var(0), rtol=1e-6, atol=0.0)


def test_it_recovers_the_stationary_covariance_of_stochastic_gradients_on_a_quadratic():
    """θ ← θ − η(Aθ + ξ), ξ ~ N(0, C): Σ = (1 − ηA)Σ(1 − ηA)ᵀ + η²C."""
    A = torch.diag(torch.tensor([0.3, 0.6, 1.0, 1.5], dtype=DOUBLE))
    turn = torch.linalg.qr(random(4, 4))[0]
    A = turn @ A @ turn.T
    root, rate = random(4, 4, seed=1), 0.5
    stationary = torch.from_numpy(
        solve_discrete_lyapunov(
            (torch.eye(4, dtype=DOUBLE) - rate * A).numpy(), (rate**2 * root @ root.T).numpy()
        )
    )
    theta, network, swag = torch.zeros(4, dtype=DOUBLE), nn.Linear(3, 1).double(), Swag(rank=3000)
    noise = random(3000, 20, 4, seed=2) @ root.T
    with torch.no_grad():
        for moment in noise:
            # twenty steps apart the weights are all but independent
            for step in moment:
                theta = theta - rate * (A @ theta + step)
            set_weights(network, theta)
            swag = swag.collect(network)
    covariance = swag.covariance()
    spread = stationary.diagonal()
    # the error of a sample covariance of n Gaussian draws is √((Σ_ij² + Σ_ii Σ_jj)/n)
    error = ((stationary.square() + spread[:, None] * spread) / 3000).sqrt()
    low_rank = 2 * covariance.factor @ covariance.factor.T
    assert bool(((low_rank - stationary).abs() < 4 * error).all())
    assert bool(((2 * covariance.diagonal - spread).abs() < 4 * error.diagonal()).all())
    mean = torch.cat([value.reshape(-1) for value in swag.mean.values()])
    assert bool((mean.abs() < 4 * (spread / 3000).sqrt()).all())


def test_collecting_changes_neither_the_value_nor_the_network():
    weights = random(4, 3)
    swag, network = collected(weights, rank=2)
    before = dense(swag.covariance())
    later = swag.collect(network)
    set_weights(network, 100 * weights[0])
    assert swag.count == 4
    assert later.count == 5
    torch.testing.assert_close(dense(swag.covariance()), before)
    torch.testing.assert_close(
        later.mean["bias"], (weights[:, -1].sum() + weights[-1, -1])[None] / 5
    )


def test_the_posterior_is_at_the_mean_with_that_covariance():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
        x, y, swag = torch.randn(6, 2), torch.arange(6) % 2, Swag(rank=3)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()
            swag = swag.collect(network)
    posterior = swag.posterior(network, (x, y), Categorical())
    network.load_state_dict(swag.mean, strict=False)
    torch.testing.assert_close(posterior.marginal(x).mean, network(x).detach())
    J = linearize(network).jacobian(x).double()
    expected = J @ dense(swag.covariance()) @ J.mT
    found = posterior.marginal(x).covariance_matrix.double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-8)
    draws = posterior.sample_weights(3, generator=seeded())
    assert draws["0.weight"].shape == (3, 4, 2)
    with pytest.raises(InputError, match="without an evidence"):
        posterior.log_marginal_likelihood()


def test_chosen_parameters_alone_are_random():
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double().eval()
    swag = Swag(rank=2, only="2.*")
    for seed in range(3):
        nn.init.normal_(network[2].weight, generator=seeded(seed))
        swag = swag.collect(network)
    posterior = swag.posterior(network, (random(3, 2), random(3, 1)), Gaussian(1.0))
    assert list(posterior.linearized.params) == ["2.weight", "2.bias"]


def test_too_little_another_network_and_bad_ranks_are_refused():
    with pytest.raises(
        InputError, match="2 collected weights are needed at least, but there are 1"
    ):
        Swag().collect(nn.Linear(2, 1)).covariance()
    with pytest.raises(
        InputError, match="1 collected weights are needed at least, but there are 0"
    ):
        _ = Swag().mean
    with pytest.raises(InputError, match="Collect one network with one Swag"):
        Swag().collect(nn.Linear(2, 1)).collect(nn.Linear(3, 1))
    with pytest.raises(InputError, match="rank must be a whole number, zero for a diagonal"):
        Swag(rank=-1)
