"""A Gaussian process is a Gaussian for every finite set of points."""

import torch
from torch import nn

import net2gp as n2g


def kernel():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2)).double().eval()
    return n2g.linearize(network).kernel()


X = torch.linspace(-1, 1, 4, dtype=torch.float64)[:, None]


def test_the_law_of_some_points_is_the_marginal_of_the_law_of_more():
    few, many = n2g.posteriors.prior(kernel(), X[:2]), n2g.posteriors.prior(kernel(), X)
    assert torch.allclose(few.covariance_matrix, many.covariance_matrix[:4, :4])
    assert torch.equal(few.mean, many.mean[:4])


def test_sample_covariances_tend_to_the_kernel():
    K = n2g.RBF()(X)
    torch.manual_seed(0)
    draws = n2g.posteriors.prior(n2g.RBF(), X).rsample(torch.Size([10_000]))
    error = (K.diagonal()[:, None] * K.diagonal() + K**2).sqrt() / 100
    assert bool(((torch.cov(draws.mT) - K).abs() < 4 * error).all())


def test_the_mean_and_independent_outputs_are_respected():
    law = n2g.posteriors.prior(n2g.RBF(), X, mean=lambda x: torch.cat([x, 2 * x], 1), num_outputs=2)
    assert torch.equal(law.mean, torch.cat([X, 2 * X], 1).reshape(-1))
    assert float(law.covariance_matrix[0, 1]) == 0.0
    assert torch.allclose(law.covariance_matrix[::2, ::2], n2g.RBF()(X))
