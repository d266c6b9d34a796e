"""Laplace and variational inference, against autograd, quadrature and importance sampling."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from net2gp import (
    RBF,
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    condition,
    linearize,
)
from net2gp.errors import NotConverged
from net2gp.likelihoods import expected_derivatives
from net2gp.links import LogVariance, MonteCarlo, SoftplusScale
from net2gp.solvers import Cholesky, Laplace, Variational, WeightCholesky
from posteriors.ways import (
    Way,
    binary_targets,
    class_targets,
    network,
    points,
    real_targets,
    unseen_points,
)
from reference import gp

LIKELIHOODS: dict[str, Way] = {
    "bernoulli": Way(Bernoulli(), targets=binary_targets),
    "categorical": Way(Categorical(MonteCarlo(2048)), outputs=3, targets=class_targets),
    "heteroscedastic": Way(HeteroscedasticGaussian(LogVariance())),
    "heteroscedastic, softplus": Way(HeteroscedasticGaussian(SoftplusScale(0.1))),
}
EACH = pytest.mark.parametrize("name", LIKELIHOODS)
CONCAVE = pytest.mark.parametrize("name", ["bernoulli", "categorical"])


def assert_close(a: Tensor, b: Tensor, tol: float) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@dataclass(frozen=True)
class Case:
    """A way on few points, with what the slow references need."""

    way: Way
    x: Tensor
    y: Tensor

    @classmethod
    def of(cls, name: str, num_points: int = 5) -> Case:
        way = replace(LIKELIHOODS[name], kernel=lambda linearized: linearized.kernel(0.5))
        x = points(num_points)
        return cls(way, x, way.targets(x, way.num_targets))

    def build(self, solver, inference):
        return replace(self.way, solver=solver, inference=inference).build(self.x, self.y)

    def law(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """A full-rank prior, which explicit inverses need."""
        return linearize(self.way.network()).kernel(0.5)(x, z)

    @property
    def mean(self) -> Tensor:
        return linearize(self.way.network())(self.x).reshape(-1)

    def log_prob(self, f: Tensor) -> Tensor:
        shape = (len(self.x), self.way.outputs)
        return self.way.likelihood.log_prob(f.reshape(shape), self.y).sum()

    def curvature(self, f: Tensor) -> Tensor:
        shape = (len(self.x), self.way.outputs)
        return torch.block_diag(*self.way.likelihood.curvature(f.reshape(shape)))


@EACH
@pytest.mark.parametrize("solver", [Cholesky(), WeightCholesky()], ids=["function", "weight"])
def test_laplace_is_newton_s_method_with_autograd(name, solver):
    case, test = Case.of(name), unseen_points()
    K = case.law(case.x)
    slow = gp.laplace(case.log_prob, K, case.mean, case.curvature)
    expected = slow.predict(K, case.law(case.x, test), case.law(test), case.mean)
    posterior = case.build(solver, Laplace())
    joint = posterior.joint(test)
    assert_close(joint.mean - linearize(case.way.network())(test).reshape(-1), expected.mean, 1e-7)
    assert_close(joint.covariance_matrix, expected.covariance, 1e-7)
    assert_close(posterior.log_marginal_likelihood(), expected.evidence, 1e-8)


@CONCAVE
def test_the_curvature_of_a_concave_likelihood_is_the_hessian(name):
    case = Case.of(name)
    K = case.law(case.x)
    fisher = gp.laplace(case.log_prob, K, case.mean, case.curvature)
    hessian = gp.laplace(case.log_prob, K, case.mean)
    assert_close(fisher.curvature, hessian.curvature, 1e-9)


@EACH
@pytest.mark.parametrize("inference", [Laplace(), Variational(tol=1e-10, max_iterations=1000)])
def test_function_space_is_weight_space(name, inference):
    case, test = Case.of(name, 4), unseen_points()
    function, weight = (case.build(solver, inference) for solver in (Cholesky(), WeightCholesky()))
    # L-BFGS, where the likelihood is not concave, amplifies rounding up to its own tolerance
    searched = isinstance(inference, Variational) and name.startswith("heteroscedastic")
    tol = 1e-4 if searched else 1e-8
    assert_close(function.joint(test).mean, weight.joint(test).mean, tol)
    assert_close(function.joint(test).covariance_matrix, weight.joint(test).covariance_matrix, tol)
    assert_close(function.log_marginal_likelihood(), weight.log_marginal_likelihood(), 1e-8)


def test_inference_on_a_nearly_gaussian_likelihood_is_exact():
    """Raw scales that the prior holds at zero leave a unit-variance Gaussian likelihood."""
    way = Way(HeteroscedasticGaussian(LogVariance()))
    x, test = points(), unseen_points()
    y = real_targets(x, 1)
    linearized = linearize(network(1))
    exact = condition(linearized.kernel(), (x, y), Gaussian(1.0))

    class MeanOnly(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network(1)

        def forward(self, x):
            return torch.cat([self.body(x), torch.zeros_like(x[:, :1])], 1)

    kernel = linearize(MeanOnly().eval()).kernel()
    for inference in (Laplace(), Variational()):
        found = condition(kernel, (x, y), way.likelihood, inference=inference)
        assert_close(found.marginal(test).mean[:, :1], exact.marginal(test).mean, 1e-5)
        assert_close(
            found.marginal(test).covariance_matrix[:, :1, :1],
            exact.marginal(test).covariance_matrix,
            1e-5,
        )
        assert_close(found.log_marginal_likelihood(), exact.log_marginal_likelihood(), 1e-6)


@EACH
def test_the_variational_bound_is_below_the_evidence_and_above_that_of_laplace(name):
    case = Case.of(name, 3)
    K = case.law(case.x)
    found = case.build(Cholesky(), Variational())
    joint = found.joint(case.x)
    wide = gp.Gaussian(joint.mean, 1.5 * joint.covariance_matrix + 1e-9 * torch.eye(len(K)), None)
    evidence, error = gp.evidence_by_importance(case.log_prob, K, case.mean, wide, 50_000)
    bound = float(found.log_marginal_likelihood())
    assert bound < evidence + 4 * error
    assert bound > evidence - 0.3
    laplace = case.build(Cholesky(), Laplace()).joint(case.x)
    assert bound > bound_of(case, laplace.mean, laplace.covariance_matrix) - 1e-6


def bound_of(case: Case, mean: Tensor, V: Tensor) -> float:
    """E_q log p(y | f) − KL(q ‖ prior) for q = N(mean, V), by the formula for two Gaussians."""
    N, C = len(case.x), case.way.outputs
    blocks = V.reshape(N, C, N, C).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    expected = expected_derivatives(case.way.likelihood, mean.reshape(N, C), blocks, case.y)
    inverse, shift = torch.linalg.inv(case.law(case.x)), mean - case.mean
    divergence = 0.5 * (
        (inverse * V).sum()
        + shift @ inverse @ shift
        - len(V)
        - torch.logdet(V)
        - torch.logdet(inverse)
    )
    return float(expected.log_prob.sum() - divergence)


@EACH
def test_the_reported_bound_is_that_of_the_reported_gaussian(name):
    case = Case.of(name, 3)
    found = case.build(Cholesky(), Variational())
    joint = found.joint(case.x)
    expected = bound_of(case, joint.mean, joint.covariance_matrix)
    assert float(found.log_marginal_likelihood()) == pytest.approx(expected, abs=1e-6)


@EACH
def test_no_gaussian_nearby_has_a_larger_bound(name):
    """Means move freely; covariances as sites that are positive semi-definite let them."""
    case = Case.of(name, 3)
    found = case.build(Cholesky(), Variational(tol=1e-10, max_iterations=1000))
    joint = found.joint(case.x)
    best = bound_of(case, joint.mean, joint.covariance_matrix)
    inverse = torch.linalg.inv(case.law(case.x))
    Lam = found.process.sites.curvature
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        mean = joint.mean + 0.03 * torch.randn(
            len(joint.mean), generator=generator, dtype=torch.float64
        )
        noise = torch.randn(Lam.shape, generator=generator, dtype=torch.float64)
        values, vectors = torch.linalg.eigh(Lam + 0.03 * (noise + noise.mT))
        moved = (vectors * values.clamp(min=0)[:, None]) @ vectors.mT
        V = torch.linalg.inv(inverse + torch.block_diag(*moved))
        # the quasi-random sample of the categorical likelihood moves its optimum by about 1e-5
        slack = 2e-5 if name == "categorical" else 1e-7
        assert bound_of(case, mean, joint.covariance_matrix) < best + slack
        assert bound_of(case, joint.mean, V) < best + slack


def test_laplace_and_bound_bracket_a_two_point_evidence_by_quadrature():
    x = torch.tensor([[0.0], [0.7]], dtype=torch.float64)
    y = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    kernel = RBF(1.0, 4.0)
    log_prob = lambda f: Bernoulli().log_prob(f[:, None], y).sum()
    exact = gp.evidence_by_quadrature(log_prob, kernel(x), torch.zeros(2, dtype=torch.float64))
    variational = condition(kernel, (x, y), Bernoulli(), inference=Variational())
    laplace = condition(kernel, (x, y), Bernoulli())
    assert exact - 0.05 < float(variational.log_marginal_likelihood()) < exact
    assert float(laplace.log_marginal_likelihood()) == pytest.approx(exact, abs=0.1)


def test_predicted_probabilities_follow_the_data():
    x = points(60)
    y = (x[:, 0] > -0.4).long() + (x[:, 0] > 0.4).long()
    for kernel in (RBF(0.7, 10.0), linearize(network(3, hidden=20)).kernel(5.0)):
        posterior = condition(kernel, (x, y), Categorical())
        predicted = posterior.predict(x).probs
        assert_close(predicted.sum(1), torch.ones(60, dtype=torch.float64), 1e-9)
        assert float((predicted.argmax(1) == y).double().mean()) > 0.95


def test_far_from_the_data_a_classifier_says_it_does_not_know():
    x = points(30)
    posterior = condition(RBF(0.7, 10.0), (x, class_targets(x, 3)), Categorical())
    far = posterior.predict(torch.full((1, 2), 50.0, dtype=torch.float64)).probs
    assert_close(far, torch.full((1, 3), 1 / 3, dtype=torch.float64), 5e-3)


def test_a_mode_far_from_the_prior_mean_is_found():
    """A first Fisher step from here would overshoot to a log variance of 1e6 without a line search."""
    x = points(10)
    y = 1000.0 + real_targets(x, 1)
    posterior = condition(
        RBF(1.0, 1.0), (x, y), HeteroscedasticGaussian(LogVariance()), inference=Laplace(500)
    )
    mode = posterior.marginal(x).mean
    assert bool(mode.isfinite().all())
    case = HeteroscedasticGaussian(LogVariance())
    log_prob = lambda f: case.log_prob(f.reshape(10, 2), y).sum()
    K = posterior.kernel(x)
    objective = lambda f: log_prob(f) - 0.5 * f @ torch.linalg.solve(K, f)
    gradient = torch.func.grad(objective)(mode.reshape(-1))
    assert float(gradient.abs().max()) < 1e-5


@pytest.mark.parametrize("inference", [Laplace(max_iterations=1), Variational(max_iterations=1)])
def test_it_says_when_the_iterations_run_out(inference):
    x = points(20)
    with pytest.warns(NotConverged, match="stopped after 1 iteration"):
        condition(RBF(0.5, 100.0), (x, class_targets(x, 3)), Categorical(), inference=inference)


def test_a_warm_start_needs_fewer_newton_steps(monkeypatch):
    from net2gp.posteriors.conditioning.systems import DenseSystem

    x = points(30)
    y = class_targets(x, 3)
    kernel = RBF(0.7, 10.0)
    before = condition(kernel, (x[:-1], y[:-1]), Categorical())
    counts = []
    solve = DenseSystem.solve
    monkeypatch.setattr(
        DenseSystem, "solve", lambda self, *a, **k: counts.append(1) or solve(self, *a, **k)
    )
    before.update((x[-1:], y[-1:]))
    warm = len(counts)
    condition(kernel, (x, y), Categorical())
    assert warm < len(counts) - warm
