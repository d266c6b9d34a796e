"""The structures, networks and data that the tests of Laplace's approximation share."""

import warnings

import torch
from torch import nn

import net2gp as n2g
from net2gp.errors import NotStationary

STRUCTURES = [
    n2g.Full(),
    n2g.Diagonal(),
    n2g.Kron(),
    n2g.structures.LowRank(rank=12),
    n2g.LastLayer(),
    n2g.LastLayer(n2g.Kron()),
    n2g.LastLayer(n2g.Diagonal()),
    n2g.structures.Subnetwork(20),
    n2g.structures.FunctionSpace(),
]
X = torch.randn(30, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NEW = torch.randn(6, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def mlp(outputs=3, inputs=3):
    torch.manual_seed(0)
    layers = [nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs)]
    return nn.Sequential(*layers).double().eval()


class Poisson:
    """Counts with log-rate f, as a user would write a likelihood."""

    def check(self, f, y):
        assert f.shape == y.shape

    def log_prob(self, f, y):
        return torch.distributions.Poisson(f.exp()).log_prob(y).sum(-1)

    def residual(self, f, y):
        return y - f.exp()

    def curvature(self, f):
        return torch.diag_embed(f.exp())

    def predict(self, f):
        rate = (f.mean + f.variance / 2).exp()
        return torch.distributions.Independent(torch.distributions.Poisson(rate), 1)


def labels(likelihood, count=30, outputs=3):
    generator = torch.Generator().manual_seed(1)
    if isinstance(likelihood, Poisson):
        return torch.randint(0, 4, (count, outputs), generator=generator).double()
    if isinstance(likelihood, n2g.HeteroscedasticGaussian):
        return torch.randn(count, outputs // 2, generator=generator, dtype=torch.float64)
    if isinstance(likelihood, n2g.Categorical):
        return torch.randint(0, outputs, (count,), generator=generator)
    if isinstance(likelihood, n2g.Bernoulli):
        return torch.randint(0, 2, (count, outputs), generator=generator)
    return torch.randn(count, outputs, generator=generator, dtype=torch.float64)


def quietly(*arguments, **keywords):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotStationary)
        return n2g.laplace(*arguments, **keywords)


def trained_linear(likelihood, y, prior_var):
    """A linear network at the mode of log p(y | θ) + log N(θ | 0, prior_var)."""
    network = nn.Linear(3, y.shape[1] if y.dim() > 1 else 3).double().eval()
    theta = list(network.parameters())
    optimizer = torch.optim.LBFGS(
        theta, max_iter=500, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def loss():
        optimizer.zero_grad()
        decay = 0.5 * sum((p**2).sum() for p in theta) / prior_var
        value = -likelihood.log_prob(network(X), y).sum() + decay
        value.backward()
        return value

    optimizer.step(loss)
    return network
