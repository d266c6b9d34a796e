"""Conjugate gradients, preconditioners, and variances from a Lanczos cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from net2gp import RBF, Categorical, Gaussian, condition, linearize, ntk
from net2gp.errors import NotConverged
from net2gp.kernels import BaseFeatureKernel, IndependentOutputs
from net2gp.linalg import block_cg, log_det_quadrature
from net2gp.linalg.cg import transposed_root
from net2gp.posteriors.conditioning import systems
from net2gp.solvers import CG, Cholesky, Exact, Lanczos, Nystrom, PivotedCholesky, RandomPivots
from posteriors.ways import class_targets, network, points, real_targets

PRECONDITIONERS = [
    None,
    PivotedCholesky(10),
    Nystrom(10),
    RandomPivots(10),
    PivotedCholesky(500),
    Nystrom(500),
    RandomPivots(500),
    RandomPivots(),
]
NAMED = pytest.mark.parametrize("preconditioner", PRECONDITIONERS, ids=str)


def wide():
    """More parameters than rows, so that nothing is low-rank."""
    return linearize(network(2, hidden=30))


def assert_close(a: Tensor, b: Tensor, tol: float) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def solve(solver, *, kernel=None, num_points=40, noise=0.05):
    linearized, x = wide(), points(num_points)
    kernel = linearized.kernel() if kernel is None else kernel
    return condition(kernel, (x, real_targets(x, 2)), Gaussian(noise), solver=solver)


@NAMED
@pytest.mark.parametrize("store", [True, False], ids=["stored", "matrix-free"])
def test_conjugate_gradients_reach_the_cholesky_solution(preconditioner, store):
    exact, test = solve(Cholesky()), points(5, seed=5)
    solver = CG(tol=1e-10, preconditioner=preconditioner, variance=Exact(), store_gram=store)
    iterative = solve(solver)
    assert_close(iterative.process.alpha, exact.process.alpha, 1e-7)
    assert_close(iterative.marginal(test).mean, exact.marginal(test).mean, 1e-8)
    assert_close(iterative.joint(test).covariance_matrix, exact.joint(test).covariance_matrix, 1e-7)


@NAMED
def test_the_residual_is_within_the_tolerance(preconditioner):
    solver = CG(tol=1e-4, preconditioner=preconditioner)
    posterior = solve(solver)
    A = posterior.kernel(posterior.x) + 0.05 * torch.eye(80, dtype=torch.float64)
    t = posterior.y.reshape(-1, 1)
    assert (A @ posterior.process.alpha - t).norm() <= 1e-4 * t.norm()


@NAMED
def test_the_evidence_is_estimated_within_its_standard_error(preconditioner):
    exact = solve(Cholesky())
    posterior = solve(CG(tol=1e-10, preconditioner=preconditioner, num_probes=64))
    factor = posterior.process.factor
    M = factor.preconditioner
    inner = factor.inner
    if M is not None:
        inner = lambda v: M.inverse_sqrt(factor.inner(transposed_root(M)(v)))
    _, error = log_det_quadrature(
        inner, 80, num_probes=64, rank=64, generator=torch.Generator().manual_seed(1)
    )
    difference = posterior.log_marginal_likelihood() - exact.log_marginal_likelihood()
    assert abs(float(difference)) < 4 * 0.5 * float(error) + 1e-6


def test_a_better_preconditioner_leaves_less_of_the_evidence_to_chance():
    exact = float(solve(Cholesky()).log_marginal_likelihood())
    errors = [
        abs(float(solve(CG(preconditioner=PivotedCholesky(r))).log_marginal_likelihood()) - exact)
        for r in (5, 40, 80)
    ]
    assert errors[2] < 1e-6 < errors[1] < errors[0]


def count_iterations(monkeypatch) -> list[int]:
    counts: list[int] = []

    def counting(*args, **kwargs):
        solution = block_cg(*args, **kwargs)
        counts.append(solution.iterations)
        return solution

    monkeypatch.setattr(systems, "block_cg", counting)
    return counts


def test_preconditioning_saves_iterations(monkeypatch):
    counts = count_iterations(monkeypatch)
    for preconditioner in (None, PivotedCholesky(20), PivotedCholesky(80)):
        solve(CG(preconditioner=preconditioner), noise=1e-3)
    assert counts[0] > counts[1] > counts[2]


def test_an_update_starts_from_the_present_solution(monkeypatch):
    linearized, x = wide(), points(41)
    y = real_targets(x, 2)
    kernel, solver = linearized.kernel(), CG(tol=1e-6, preconditioner=None, variance=Exact())
    before = condition(kernel, (x[:-1], y[:-1]), Gaussian(1.0), solver=solver)
    counts = count_iterations(monkeypatch)
    updated = before.update((x[-1:], y[-1:]))
    anew = condition(kernel, (x, y), Gaussian(1.0), solver=solver)
    assert counts[0] < counts[1]
    assert_close(updated.process.alpha, anew.process.alpha, 1e-4)


def test_it_says_when_the_iterations_run_out():
    with pytest.warns(NotConverged, match="2 iterations"):
        solve(CG(max_iterations=2, preconditioner=None, variance=Exact()), noise=1e-4)


def test_newton_on_conjugate_gradients_reaches_the_mode_beyond_the_solver_s_tolerance():
    linearized, x = linearize(network(3, hidden=30)), points(40)
    y = class_targets(x, 3)
    build = lambda solver: condition(linearized.kernel(30.0), (x, y), Categorical(), solver=solver)
    iterative, exact = build(CG(preconditioner=None)), build(Cholesky())
    test = points(5, seed=5)
    assert_close(iterative.process.alpha, exact.process.alpha, 1e-9)
    assert_close(iterative.marginal(test).mean, exact.marginal(test).mean, 1e-9)


@pytest.mark.parametrize("kernel", [None, RBF(0.5)], ids=["features", "rbf"])
def test_cached_variances_fall_towards_the_exact_ones_as_the_rank_grows(kernel):
    test = points(20, seed=5)
    exact = solve(Cholesky(), kernel=kernel).joint(test).covariance_matrix
    previous = torch.full((len(exact),), torch.inf, dtype=torch.float64)
    for rank in (1, 3, 10, 30, 80):
        cached = solve(Cholesky(Lanczos(rank)), kernel=kernel).joint(test).covariance_matrix
        lowest = torch.linalg.eigvalsh(cached - exact).min()
        assert float(lowest) > -1e-9
        assert bool((cached.diagonal() <= previous + 1e-9).all())
        previous = cached.diagonal()
    rows = 80 if kernel is None else 40
    assert solve(Cholesky(Lanczos(rows)), kernel=kernel).process.cache.shape[1] == rows
    assert_close(cached, exact, 1e-8)


@dataclass(frozen=True)
class Parabolas(BaseFeatureKernel):
    """Few features of independent outputs: most eigenvalues of a Gram matrix are zero."""

    num_features = 3

    def features(self, x):
        return torch.stack([x[:, 0] ** 0, x[:, 0], x[:, 0] ** 2], 1)[:, None]


REPEATED = {
    "features": 2.0 * Parabolas(),
    "outputs as copies": IndependentOutputs(2.0 * Parabolas(), 3),
    "a product": IndependentOutputs(RBF(0.5), 3),
}


@pytest.mark.parametrize("likelihood", [Gaussian(0.1), Categorical()], ids=["real", "classes"])
@pytest.mark.parametrize("name", REPEATED)
def test_a_cache_with_as_many_columns_as_rows_is_exact_where_eigenvalues_repeat(name, likelihood):
    x, test = points(12), points(20, seed=5)
    y = class_targets(x, 3) if isinstance(likelihood, Categorical) else real_targets(x, 3)
    build = lambda solver: condition(REPEATED[name], (x, y), likelihood, solver=solver)
    exact = build(Cholesky()).marginal(test).variance
    for rank in (1, 4, 9, 36, 50):
        cached = build(Cholesky(Lanczos(rank))).marginal(test).variance
        assert bool((cached >= exact - 1e-9).all())
    assert_close(cached, exact, 1e-8)


def test_the_cache_of_conjugate_gradients_is_that_of_cholesky_at_full_rank():
    test = points(5, seed=5)
    iterative = solve(CG(tol=1e-10, variance=Lanczos(200))).joint(test)
    assert_close(iterative.covariance_matrix, solve(Cholesky()).joint(test).covariance_matrix, 1e-7)


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_a_cached_prediction_does_not_touch_the_training_points(likelihood):
    linearized, x, test = linearize(network(3)), points(), points(4, seed=5)
    if likelihood == "gaussian":
        posterior = condition(
            linearized.kernel(),
            (x, real_targets(x, 3)),
            Gaussian(0.1),
            solver=CG(variance=Lanczos()),
        )
    else:
        data = (x, class_targets(x, 3))
        posterior = condition(
            linearized.kernel(), data, Categorical(), solver=CG(variance=Lanczos())
        )
    expected = posterior.marginal(test)
    process = replace(posterior.process, x=None, factor=None, gram=None, sites=None)
    forgetful = replace(posterior, x=None, y=None, process=process)
    again = forgetful.marginal(test)
    assert torch.equal(again.mean, expected.mean)
    assert torch.equal(again.covariance_matrix, expected.covariance_matrix)


def test_the_mean_of_a_network_s_posterior_does_not_touch_the_training_points():
    linearized, x, test = linearize(network(1)), points(), points(4, seed=5)
    posterior = condition(
        linearized.kernel(), (x, real_targets(x, 1)), Gaussian(0.1), solver=Cholesky()
    )
    process = replace(posterior.process, x=None, factor=None, alpha=None)
    forgetful = replace(posterior, x=None, y=None, process=process)
    assert torch.equal(forgetful.centered(test), posterior.centered(test))


def test_seeds_make_conjugate_gradients_deterministic():
    solver = CG(preconditioner=Nystrom(10))
    one, other = solve(solver), solve(solver)
    assert torch.equal(one.process.alpha, other.process.alpha)
    assert torch.equal(one.log_marginal_likelihood(), other.log_marginal_likelihood())
    different = solve(replace(solver, seed=1))
    assert not torch.equal(one.log_marginal_likelihood(), different.log_marginal_likelihood())


RECTIFIER = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)).double()
KERNELS = {
    "tangent": lambda: linearize(network(1, hidden=30)).kernel(),
    "rbf": lambda: RBF(0.3),
    "ntk": lambda: ntk(RECTIFIER, weight_var=2.0),
}


@pytest.mark.parametrize("name", KERNELS)
def test_variances_are_those_of_cholesky_by_default_where_a_cache_would_not_do(name):
    kernel, x, test = KERNELS[name](), points(1500), points(3, seed=5)
    data, noise = (x, real_targets(x, 1)), Gaussian(1e-2)
    exact = condition(kernel, data, noise, solver=Cholesky()).marginal(test).variance
    found = condition(kernel, data, noise, solver=CG(num_probes=0)).marginal(test).variance
    torch.testing.assert_close(found, exact, rtol=0.01, atol=0)


def test_variances_that_are_a_small_part_of_the_prior_are_solved_for_more_closely():
    kernel, x, test = linearize(network(1, hidden=30)).kernel(), points(200), points(5, seed=5)
    data, noise = (x, real_targets(x, 1)), Gaussian(1e-4)
    exact = condition(kernel, data, noise, solver=Cholesky()).marginal(test)
    solver = CG(tol=1e-3, preconditioner=PivotedCholesky(5), num_probes=0)
    rough = condition(kernel, data, noise, solver=solver)
    torch.testing.assert_close(rough.marginal(test).variance, exact.variance, rtol=0.01, atol=0)
    cross, prior = kernel(x, test), kernel.diag(test)
    plain = prior - (cross * rough.process.factor.solve(cross)).sum(0)
    assert float((plain / exact.variance.flatten()).max()) > 2


def test_a_variance_that_cannot_be_reached_is_told_of():
    x, test = points(200), points(5, seed=5)
    solver = CG(max_iterations=3, preconditioner=None, num_probes=0)
    with pytest.warns(NotConverged):
        posterior = condition(RBF(0.3), (x, real_targets(x, 1)), Gaussian(1e-6), solver=solver)
    with pytest.warns(NotConverged, match=r"may be far too wide: .*solver=Cholesky"):
        posterior.marginal(test)
