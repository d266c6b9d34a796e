"""Kernels inside of GPyTorch: the same numbers as here, and hyper-parameters that it learns."""

import warnings

import gpytorch
import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.errors import InputError, NotAvailable
from net2gp.interop.gpytorch import NetworkKernel

double = torch.float64


def relu(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, outputs)).double()


def points(count, seed=0, columns=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, columns, dtype=double, generator=generator)


def limit_kernel(kind):
    return NetworkKernel(kind(relu()), weight_var=1.7, bias_var=0.3).double()


class Exact(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def exact(kernel, x, y, noise=0.05):
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=None).double()
    likelihood.noise = torch.tensor(noise, dtype=double)
    return Exact(x, y, likelihood, kernel)


KINDS = {
    "nngp": lambda: limit_kernel(n2g.nngp),
    "ntk": lambda: limit_kernel(n2g.ntk),
    "fixed": lambda: NetworkKernel(n2g.RBF(0.8)),
    "scaled": lambda: NetworkKernel(n2g.RBF(0.8), output_var=2.0).double(),
    "tangent": lambda: NetworkKernel(
        lambda prior_var: n2g.linearize(relu()).kernel(prior_var=prior_var), prior_var=0.4
    ).double(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_exact_process_predicts_what_condition_predicts(kind):
    x, new = points(12), points(5, seed=1)
    y = x.sum(1).sin()
    kernel = KINDS[kind]()
    model = exact(kernel, x, y).eval()
    with torch.no_grad():
        law = model(new)
        ours = n2g.condition(kernel.kernel_at(), (x, y[:, None]), n2g.Gaussian(0.05)).joint(new)
    torch.testing.assert_close(law.mean, ours.mean, rtol=0, atol=1e-8)
    torch.testing.assert_close(law.covariance_matrix, ours.covariance_matrix, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", ["nngp", "ntk", "scaled"])
def test_gradients_of_the_evidence_are_differences(kind):
    x = points(8)
    y = x.sum(1).sin()
    kernel = KINDS[kind]()
    model = exact(kernel, x, y).train()
    likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    value = lambda: likelihood(model(x), y)
    raws = list(kernel.parameters())
    gradients = torch.autograd.grad(value(), raws)
    for raw, gradient in zip(raws, gradients, strict=True):
        sides = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                raw.add_(step)
                sides.append(value())
                raw.sub_(step)
        assert gradient.abs() > 1e-4
        torch.testing.assert_close(gradient, (sides[0] - sides[1]) / 2e-5, rtol=1e-6, atol=1e-9)


def test_the_evidence_is_the_one_of_condition():
    x = points(8)
    y = x.sum(1).sin()
    kernel = limit_kernel(n2g.nngp)
    model = exact(kernel, x, y).train()
    theirs = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)(model(x), y) * 8
    ours = n2g.condition(kernel.kernel_at(), (x, y[:, None]), n2g.Gaussian(0.05))
    torch.testing.assert_close(theirs, ours.log_marginal_likelihood(), rtol=0, atol=1e-8)


def test_learning_raises_the_evidence_and_keeps_variances_positive():
    x = points(15)
    y = 3 * x.sum(1).sin()
    kernel = limit_kernel(n2g.nngp)
    model = exact(kernel, x, y).train()
    evidence = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    found = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = -evidence(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(-loss.item())
    assert found[-1] > found[0] + 0.1
    assert kernel.weight_var > 0
    assert kernel.bias_var > 0
    assert kernel.weight_var != 1.7


def test_the_bound_of_a_sparse_process_rises():
    class Sparse(gpytorch.models.ApproximateGP):
        def __init__(self, inducing, kernel):
            law = gpytorch.variational.CholeskyVariationalDistribution(len(inducing))
            super().__init__(gpytorch.variational.VariationalStrategy(self, inducing, law))
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), kernel

        forward = Exact.forward

    x = points(40)
    y = x.sum(1).sin()
    model = Sparse(x[:8].clone(), limit_kernel(n2g.nngp)).double()
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=40)
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    found = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = -bound(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(-loss.item())
    assert found[-1] > found[0] + 0.1
    with torch.no_grad():
        mean = model.eval()(x).mean
    assert (mean - y).square().mean() < y.var()


def test_batches_are_stacked_kernels_each_with_its_own_variances():
    x = torch.stack([points(4), points(4, seed=1)])
    kernel = NetworkKernel(
        n2g.nngp(relu()), batch_shape=torch.Size([2]), weight_var=1.0, bias_var=0.1
    ).double()
    kernel.weight_var = torch.tensor([1.0, 2.0])
    found = kernel(x).to_dense()
    for index, variance in enumerate((1.0, 2.0)):
        alone = n2g.nngp(relu(), weight_var=variance, bias_var=0.1)(x[index])
        torch.testing.assert_close(found[index], alone)
    torch.testing.assert_close(kernel(x, diag=True), found.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(kernel[1](x[0]).to_dense(), kernel(x[0]).to_dense()[1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_diagonal_is_the_diagonal_of_the_matrix(kind):
    kernel, x, y = KINDS[kind](), points(6), points(6, seed=1)
    torch.testing.assert_close(kernel(x, diag=True), kernel(x).to_dense().diagonal())
    torch.testing.assert_close(kernel.forward(x, y, diag=True), kernel(x, y).to_dense().diagonal())


def test_points_that_are_images_are_reshaped():
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1))
    limit = n2g.nngp(network)
    x = points(5, columns=16)
    kernel = NetworkKernel(limit, input_shape=(1, 4, 4))
    torch.testing.assert_close(kernel(x).to_dense(), limit(x.reshape(5, 1, 4, 4)))
    with pytest.raises(InputError, match=r"x must have 16 columns"):
        kernel(x[:, :9]).to_dense()


def test_coupled_outputs_are_rows_beside_each_other():
    tangent = n2g.linearize(relu(outputs=2)).kernel(prior_var=0.5)
    kernel, x = NetworkKernel(tangent), points(4)
    assert kernel.num_outputs_per_input(x, x) == 2
    assert kernel(x).shape == (8, 8)
    torch.testing.assert_close(kernel(x).to_dense(), tangent(x))


def test_sums_with_kernels_of_gpytorch():
    x = points(4)
    total = limit_kernel(n2g.nngp) + gpytorch.kernels.RBFKernel().double()
    apart = (
        limit_kernel(n2g.nngp)(x).to_dense() + gpytorch.kernels.RBFKernel().double()(x).to_dense()
    )
    torch.testing.assert_close(total(x).to_dense(), apart)


def test_the_state_holds_variances_and_no_network():
    kernel = limit_kernel(n2g.nngp)
    state = kernel.state_dict()
    assert sum(value.numel() for value in state.values()) < 10
    other = NetworkKernel(n2g.nngp(relu()), weight_var=1.0, bias_var=1.0).double()
    other.load_state_dict(state)
    torch.testing.assert_close(other.weight_var, kernel.weight_var)


def test_what_cannot_be_is_said():
    x = points(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NotAvailable, match=r"needs all columns of a point"):
            limit_kernel(n2g.nngp)(x, last_dim_is_batch=True).to_dense()
    with pytest.raises(InputError, match=r"bias_var, output_var, weight_var, not depth"):
        NetworkKernel(n2g.nngp(relu()), depth=1.0)
    with pytest.raises(InputError, match=r"weight_var must be positive"):
        NetworkKernel(n2g.nngp(relu()), weight_var=-1.0)
    with pytest.raises(InputError, match=r"'lengthscale' is an attribute"):
        NetworkKernel(lambda lengthscale: n2g.RBF(lengthscale), lengthscale=1.0)
