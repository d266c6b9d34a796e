"""Laplace's approximation where each point has its own noise: chunks of points change nothing."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, jacrev

import net2gp as n2g
from methods.laplace_cases import NEW, X, labels, mlp, quietly
from net2gp.linear.linearized import expand_prior
from net2gp.methods.laplace_approximation.task import make_task
from net2gp.posteriors.weights.sampled import Precision
from net2gp.posteriors.weights.structure import prior_vector

NOISES = {
    "of points": 0.1 + torch.rand(30, 1, generator=torch.Generator().manual_seed(3)).double(),
    "of points and outputs": 0.1
    + torch.rand(30, 2, generator=torch.Generator().manual_seed(4)).double(),
}
EACH = pytest.mark.parametrize("name", NOISES)
STRUCTURES = [
    n2g.Full(),
    n2g.Kron(),
    n2g.Diagonal(),
    n2g.structures.LowRank(rank=12),
    n2g.structures.Subnetwork(20),
    n2g.structures.FunctionSpace(),
    n2g.Diagonal(n2g.structures.EmpiricalFisher()),
    n2g.LastLayer(n2g.Full()),
    n2g.LastLayer(n2g.Kron()),
    n2g.LastLayer(n2g.Diagonal(n2g.structures.EmpiricalFisher())),
]


def found(noise, structure, prior_var=0.7):
    data = (X, labels(n2g.Gaussian(), outputs=2))
    return quietly(mlp(2), data, n2g.Gaussian(noise), prior_var=prior_var, structure=structure)


def in_small_chunks(monkeypatch) -> None:
    """Few points at a time: in curvatures, in products, and in tuning by Kronecker factors."""
    monkeypatch.setattr("net2gp.linear.curvatures.curvature.CHUNK_BYTES", 5000)
    monkeypatch.setattr("net2gp.posteriors.weights.last_layer.CHUNK_NUMBERS", 200)
    monkeypatch.setattr("net2gp.posteriors.weights.function_space.SPECTRUM_ROWS", 1)


def curvature(noise):
    """Σ_n J_nᵀ diag(1/v_n) J_n by autograd of each output."""
    network = mlp(2)
    params = dict(network.named_parameters())
    parts = jacrev(lambda p: functional_call(network, p, (X,)))(params)
    J = torch.cat([part.flatten(2) for part in parts.values()], 2).detach()
    return torch.einsum("ncp,nc,ncq->pq", J, 1 / noise.expand(30, 2), J)


@EACH
@pytest.mark.parametrize("structure", [n2g.Full(), n2g.structures.FunctionSpace()], ids=str)
def test_the_covariance_is_the_inverse_of_the_textbook_precision(name, structure, monkeypatch):
    in_small_chunks(monkeypatch)
    H = curvature(NOISES[name])
    Sigma = torch.linalg.inv(H + torch.eye(len(H), dtype=torch.float64) / 0.7)
    posterior = found(NOISES[name], structure)
    J = n2g.linearize(mlp(2)).jacobian(NEW).flatten(0, 1)
    torch.testing.assert_close(
        posterior.joint(NEW).covariance_matrix, J @ Sigma @ J.T, rtol=1e-8, atol=1e-10
    )


@EACH
@pytest.mark.parametrize("prior_var", [0.7, None])
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_chunks_change_nothing(name, structure, prior_var, monkeypatch):
    monkeypatch.setattr("net2gp.posteriors.weights.function_space.SPECTRUM_ROWS", 1)
    whole = found(NOISES[name], structure, prior_var)
    in_small_chunks(monkeypatch)
    parts = found(NOISES[name], structure, prior_var)
    assert float(parts.evidence) == pytest.approx(float(whole.evidence), rel=1e-6)
    torch.testing.assert_close(
        parts.marginal(NEW).covariance_matrix,
        whole.marginal(NEW).covariance_matrix,
        rtol=1e-4,
        atol=1e-8,
    )


@EACH
@pytest.mark.parametrize(
    "fisher", [n2g.structures.ExactFisher(), n2g.structures.MonteCarloFisher(3)], ids=str
)
def test_the_root_of_a_chunk_has_the_noise_of_its_points(name, fisher):
    """Random signs leave the diagonal of R Rᵀ as it is, where R is diagonal."""
    f = torch.zeros(10, 2, dtype=torch.float64)
    R = fisher.root(n2g.Gaussian(NOISES[name]), f, f, start=7)
    expected = 1 / NOISES[name][7:17].expand(10, 2)
    torch.testing.assert_close(R.square().sum(2), expected)


@EACH
@pytest.mark.parametrize("some", [None, torch.tensor([1, 4, 5, 17, 29])], ids=["all", "some"])
def test_products_with_the_precision_take_the_noise_of_their_points(name, some, monkeypatch):
    monkeypatch.setattr("net2gp.linear.curvatures.ggn.memory_budget", lambda device: 50)
    monkeypatch.setattr("net2gp.posteriors.weights.sampled.memory_budget", lambda device: 50)
    noise = NOISES[name]
    data = (X, labels(n2g.Gaussian(), outputs=2))
    task, _ = make_task(mlp(2), data, n2g.Gaussian(noise), n2g.structures.Sampled())
    root = prior_vector(expand_prior(0.7, task.params), task.params).sqrt()
    v = torch.randn(len(root), 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    product = Precision(task, root, 1.0).curvature(v, some)
    if some is not None:  # points without information are those of infinite noise
        rest = torch.full_like(noise, torch.inf)
        rest[some] = noise[some] * len(some) / 30
        noise = rest
    torch.testing.assert_close(product, 0.7 * curvature(noise) @ v, rtol=1e-9, atol=1e-9)


@EACH
def test_draws_have_the_covariance_of_the_whole_precision(name, monkeypatch):
    # so little that a pass with this many columns takes 16 of the 30 points
    monkeypatch.setattr("net2gp.linear.curvatures.ggn.memory_budget", lambda device: 2**16)
    monkeypatch.setattr("net2gp.posteriors.weights.sampled.memory_budget", lambda device: 2**16)
    in_small_chunks(monkeypatch)
    many = n2g.structures.Sampled(num_samples=2000, tol=1e-9, num_probes=0, rank=2, num_points=8)
    drawn, exact = (found(NOISES[name], structure) for structure in (many, n2g.Full()))
    a, b = (p.joint(NEW).covariance_matrix for p in (drawn, exact))
    # Wishart: entries of a covariance from S draws have the variance (Σ_ij² + Σ_ii Σ_jj) / S
    spread = (b.square() + torch.outer(b.diag(), b.diag())) / 2000
    assert ((a - b).abs() < 5 * spread.sqrt()).all()


@EACH
def test_a_subset_of_points_takes_their_noise_along(name):
    data = (X, labels(n2g.Gaussian(), outputs=2))
    whole = quietly(
        mlp(2),
        data,
        n2g.Gaussian(NOISES[name]),
        prior_var=0.7,
        structure=n2g.structures.FunctionSpace(11),
    )
    generator = torch.Generator().manual_seed(n2g.structures.FunctionSpace(11).seed)
    chosen = torch.randperm(30, generator=generator)[:11].sort().values
    part = quietly(
        mlp(2),
        (X[chosen], data[1][chosen]),
        n2g.Gaussian(NOISES[name][chosen]),
        prior_var=0.7,
        structure=n2g.structures.FunctionSpace(),
    )
    torch.testing.assert_close(
        whole.marginal(NEW).covariance_matrix, part.marginal(NEW).covariance_matrix
    )
