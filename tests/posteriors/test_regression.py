"""Regression with Gaussian noise, against dense inverses and other libraries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from net2gp import RBF, Gaussian, condition, linearize
from net2gp.solvers import CG, Cholesky, Lanczos, WeightCholesky
from net2gp.tuning import spectrum
from posteriors.ways import network, points, real_targets, seeded
from reference import gp

C = 2


def positive(*shape: int) -> Tensor:
    return 0.05 + torch.rand(*shape, generator=seeded(8), dtype=torch.float64)


NOISES = {
    "one number": 0.1,
    "one tensor": torch.tensor(0.1, dtype=torch.float64),
    "per output": positive(C),
    "per point": positive(14, 1),
    "per point and output": positive(14, C),
}
SOLVERS = {
    "cholesky": Cholesky(),
    "weight space": WeightCholesky(),
    "conjugate gradients": CG(tol=1e-13, preconditioner=None, variance=Lanczos(100)),
}


def problem():
    x, test = points(), points(6, seed=5)
    return linearize(network(C)), x, real_targets(x, C), test


def assert_close(a: Tensor, b: Tensor, tol: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("noise", NOISES)
def test_exact_regression_is_the_dense_inverse(noise, solver):
    linearized, x, y, test = problem()
    likelihood, kernel = Gaussian(NOISES[noise]), linearized.kernel(0.7)
    posterior = condition(kernel, (x, y), likelihood, mean=linearized, solver=SOLVERS[solver])
    variances = likelihood.noise_variance(y).reshape(-1)
    target = (y - linearized(x)).reshape(-1)
    expected = gp.regression(kernel(x), kernel(x, test), kernel(test), target, variances)
    joint = posterior.joint(test)
    assert_close(joint.mean - linearized(test).reshape(-1), expected.mean)
    assert_close(joint.covariance_matrix, expected.covariance)
    if solver != "conjugate gradients":
        assert_close(posterior.log_marginal_likelihood(), expected.evidence)


@pytest.mark.parametrize("noise", NOISES)
def test_weight_space_is_bayesian_linear_regression_on_the_jacobian(noise):
    linearized, x, y, test = problem()
    likelihood = Gaussian(NOISES[noise])
    kernel = linearized.kernel({"*": 1.0, "*.bias": 0.2})
    posterior = condition(kernel, (x, y), likelihood, solver=WeightCholesky())
    scale = torch.cat(
        [
            v.expand(p.shape).reshape(-1)
            for v, p in zip(kernel.prior_var.values(), linearized.params.values(), strict=True)
        ]
    ).sqrt()
    Phi, Phis = ((linearized.jacobian(z) * scale).flatten(0, 1) for z in (x, test))
    expected = gp.weight_regression(
        Phi, Phis, y.reshape(-1), likelihood.noise_variance(y).reshape(-1)
    )
    joint = posterior.joint(test)
    assert_close(joint.mean, expected.mean)
    assert_close(joint.covariance_matrix, expected.covariance)
    assert_close(posterior.log_marginal_likelihood(), expected.evidence)


@pytest.mark.parametrize("noise", NOISES)
def test_function_space_is_weight_space(noise):
    linearized, x, y, test = problem()
    by = lambda solver: condition(
        linearized.kernel(), (x, y), Gaussian(NOISES[noise]), mean=linearized, solver=solver
    )
    function, weight = by(Cholesky()), by(WeightCholesky())
    assert_close(function.joint(test).mean, weight.joint(test).mean, 1e-8)
    assert_close(function.joint(test).covariance_matrix, weight.joint(test).covariance_matrix, 1e-8)
    assert_close(function.log_marginal_likelihood(), weight.log_marginal_likelihood(), 1e-8)


@pytest.mark.parametrize("noise", NOISES)
def test_independent_outputs_are_separate_processes(noise):
    x, test = points(), points(6, seed=5)
    y, likelihood = real_targets(x, C), Gaussian(NOISES[noise])
    variances = likelihood.noise_variance(y)
    together = condition(RBF(0.8), (x, y), likelihood)
    alone = [
        condition(RBF(0.8), (x, y[:, c : c + 1]), Gaussian(variances[:, c : c + 1]))
        for c in range(C)
    ]
    joint = together.joint(test)
    means = torch.cat([one.joint(test).mean[:, None] for one in alone], 1)
    assert_close(joint.mean.reshape(len(test), C), means)
    covariance = joint.covariance_matrix.reshape(len(test), C, len(test), C)
    for c in range(C):
        assert_close(covariance[:, c, :, c], alone[c].joint(test).covariance_matrix)
        assert float(covariance[:, c, :, 1 - c].abs().max()) == 0.0
    evidence = sum(one.log_marginal_likelihood() for one in alone)
    assert_close(together.log_marginal_likelihood(), evidence)


def test_rbf_regression_is_that_of_scikit_learn():
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF as Peer

    x, test = points(25), points(9, seed=5)
    y = real_targets(x, 1)
    posterior = condition(RBF(0.7), (x, y), Gaussian(0.05))
    peer = GaussianProcessRegressor(Peer(0.7), alpha=0.05, optimizer=None)
    peer.fit(x.numpy(), y[:, 0].numpy())
    mean, covariance = peer.predict(test.numpy(), return_cov=True)
    joint = posterior.joint(test)
    assert_close(joint.mean, torch.as_tensor(mean))
    assert_close(joint.covariance_matrix, torch.as_tensor(covariance))
    evidence = torch.tensor(peer.log_marginal_likelihood_value_, dtype=torch.float64)
    assert_close(posterior.log_marginal_likelihood(), evidence)


def test_rbf_regression_is_that_of_gpytorch():
    import gpytorch

    double = lambda value: torch.tensor(value, dtype=torch.float64)

    class Peer(gpytorch.models.ExactGP):
        def __init__(self, x, y, likelihood):
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ZeroMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).double()
            self.kernel.base_kernel.lengthscale = double(0.7)
            self.kernel.outputscale = double(1.4)

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    x, test = points(25), points(9, seed=5)
    y = real_targets(x, 1)
    posterior = condition(RBF(0.7, 1.4), (x, y), Gaussian(0.05))
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = double(0.05)
    peer = Peer(x, y[:, 0], likelihood).eval()
    with torch.no_grad(), gpytorch.settings.fast_computations(False, False, False):
        expected = peer(test)
        assert_close(posterior.joint(test).mean, expected.mean)
        assert_close(posterior.joint(test).covariance_matrix, expected.covariance_matrix)
        prior = likelihood(peer.forward(x))
        assert_close(posterior.log_marginal_likelihood(), prior.log_prob(y[:, 0]))


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_spectrum_gives_the_same_posterior_in_either_space(outputs):
    for hidden in (2, 30):  # fewer and more parameters than rows
        linearized = linearize(network(outputs, hidden=hidden))
        x, test = points(), points(6, seed=5)
        y = real_targets(x, outputs)
        fixed = spectrum(linearized.kernel(0.7), (x, y), mean=linearized)
        assert (fixed.Q is None) == (hidden == 2)
        for noise, scale in ((0.1, 1.0), (0.01, 3.0)):
            direct = condition(
                linearized.kernel(0.7 * scale), (x, y), Gaussian(noise), mean=linearized
            )
            posterior = fixed.condition(noise, scale)
            assert_close(posterior.joint(test).mean, direct.joint(test).mean)
            assert_close(
                posterior.joint(test).covariance_matrix, direct.joint(test).covariance_matrix
            )
            evidence = direct.log_marginal_likelihood()
            assert_close(posterior.log_marginal_likelihood(), evidence)
            assert_close(fixed.log_marginal_likelihood(noise, scale), evidence)


def test_the_spectrum_of_a_degenerate_kernel_counts_the_zeros():
    """A linear network of one input in ten points: two features, eight rows that are noise alone."""
    linearized = linearize(torch.nn.Linear(1, 1).double().eval())
    x = points(10, inputs=1)
    y = x.sin()
    fixed = spectrum(linearized.kernel(), (x, y))
    assert (len(fixed.eigenvalues), fixed.num_zeros) == (2, 8)
    direct = condition(linearized.kernel(), (x, y), Gaussian(0.1), solver=Cholesky())
    assert_close(fixed.log_marginal_likelihood(0.1), direct.log_marginal_likelihood())


def test_without_noise_the_mean_interpolates_and_the_variance_vanishes():
    x = points(8)
    y = real_targets(x, 2)
    posterior = condition(RBF(0.5), (x, y), Gaussian(0.0))
    assert_close(posterior.marginal(x).mean, y, 1e-9)
    assert float(posterior.marginal(x).covariance_matrix.abs().max()) < 1e-9
    assert_close(posterior.predict(x).mean, y, 1e-9)


def test_prior_draws_have_the_covariance_of_the_kernel():
    linearized, x, y, test = problem()
    nothing = condition(linearized.kernel(), (x, y), Gaussian(1e12), solver=Cholesky())
    K, count = linearized.kernel()(test), 10_000
    draws = nothing.sample(test, count, generator=seeded(0)).reshape(count, -1)
    spread = (K.trace().square() + K.square().sum()) / count
    assert (draws.T.cov(correction=0) - K).norm() < 3 * spread.sqrt()
    assert draws.mean(0).norm() < 3 * (K.trace() / count).sqrt()


def test_one_dimensional_targets_are_one_output():
    x = points()
    y = real_targets(x, 1)
    kernel = linearize(network(1)).kernel()
    flat, column = (condition(kernel, (x, t), Gaussian(0.1)) for t in (y[:, 0], y))
    assert torch.equal(flat.marginal(x).mean, column.marginal(x).mean)
    assert torch.equal(flat.log_marginal_likelihood(), column.log_marginal_likelihood())


def test_a_loader_is_its_data():
    from torch.utils.data import DataLoader, TensorDataset

    linearized, x, y, test = problem()
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    one, other = (
        condition(linearized.kernel(), data, Gaussian(0.1), mean=linearized)
        for data in (loader, (x, y))
    )
    assert torch.equal(one.marginal(test).mean, other.marginal(test).mean)


def test_test_points_are_predicted_in_chunks(monkeypatch):
    linearized, x, y, test = problem()
    for solver in (Cholesky(), WeightCholesky()):
        posterior = condition(linearized.kernel(), (x, y), Gaussian(0.1), solver=solver)
        whole = posterior.marginal(test)
        monkeypatch.setattr("net2gp.posteriors.conditioning.conditioned.TEST_BYTES", 1)
        monkeypatch.setattr("net2gp.posteriors.conditioning.whitened.TEST_BYTES", 1)
        pieces = posterior.marginal(test)
        monkeypatch.undo()
        assert_close(pieces.mean, whole.mean, 1e-13)
        assert_close(pieces.covariance_matrix, whole.covariance_matrix, 1e-12)


def test_predicting_with_the_noise_of_new_points():
    linearized, x, y, test = problem()
    posterior = condition(linearized.kernel(), (x, y), Gaussian(positive(14, 1)))
    noise = positive(6, C)
    predicted = posterior.predict(test, likelihood=Gaussian(noise))
    covariance = posterior.marginal(test).covariance_matrix + torch.diag_embed(noise)
    assert_close(predicted.covariance_matrix, covariance)


def test_inputs_may_be_tuples_and_dicts():
    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network(1)

        def forward(self, a, b):
            return self.body(a + b)

    x, other = points(), points(seed=3)
    y = real_targets(x, 1)
    kernel = linearize(Sum().eval()).kernel()
    plain = linearize(network(1)).kernel()
    expected = condition(plain, (x + other, y), Gaussian(0.1)).marginal((x + other)[:3])
    for inputs, few in (
        ((x, other), (x[:3], other[:3])),
        ({"a": x, "b": other}, {"a": x[:3], "b": other[:3]}),
    ):
        posterior = condition(kernel, (inputs, y), Gaussian(0.1))
        assert_close(posterior.marginal(few).mean, expected.mean)
        updated = posterior.update((few, y[:3]))
        assert bool(updated.marginal(few).mean.isfinite().all())
