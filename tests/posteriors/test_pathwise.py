"""Variances from drawn functions, of which a part of low rank is known exactly."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from net2gp import RBF, Categorical, Gaussian, condition, linearize, load, nngp, ntk
from net2gp.errors import InputError, WideVariances
from net2gp.kernels import BaseFeatureKernel, BaseKernel, Periodic
from net2gp.kernels.stretched import Stretched
from net2gp.posteriors.conditioning import gaussian
from net2gp.posteriors.conditioning.large.pathwise import draw
from net2gp.posteriors.conditioning.problem import make_problem
from net2gp.solvers import CG, Cholesky, Exact, Pathwise
from posteriors.ways import class_targets, network, points, real_targets


@dataclass(frozen=True)
class Quadratic(BaseFeatureKernel):
    num_features = 6

    def features(self, x):
        a, b = x[:, 0], x[:, 1]
        return torch.stack([a**0, a, b, a * b, a**2, b**2], -1)[:, None]


@dataclass(frozen=True)
class Unknown(BaseKernel):
    def __call__(self, x, y=None):
        return RBF(1.0)(x, x if y is None else y)

    def diag(self, x):
        return torch.ones_like(x[:, 0])


def relu():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    return nngp(net.double(), weight_var=2.0, bias_var=0.1)


KERNELS = {
    "rbf": RBF(0.7, 1.3),
    "length scales": RBF(torch.tensor([0.5, 2.0]).double()),
    "periodic": Periodic(2.0),
    "sum": RBF(0.5) + 0.5 * RBF(2.0),
    "product": RBF(1.0) * Periodic(3.0),
    "features": Quadratic(),
    "stretched": Stretched(RBF(), torch.tensor([0.5, 1.5]).double()),
}


def estimates(kernel, chosen, x, noise, test, seeds):
    """Variances at test points for many seeds, with dense solves."""
    problem = make_problem(kernel, (x, real_targets(x, 1)), Gaussian(noise), None)
    S = torch.full((len(x), 1, 1), noise**-0.5, dtype=torch.float64)
    A = torch.eye(len(x), dtype=torch.float64) + problem.gram() / noise
    precise, found = problem.precise_kernel, []
    for seed in range(seeds):
        drawn = draw(problem, S, None, replace(chosen, seed=seed))
        variances = drawn.finish(S[:, :, 0] * torch.linalg.solve(A, drawn.right))
        found.append(variances.covariance(precise, test, precise(x, test), 1).flatten())
    return torch.stack(found)


def exact(kernel, x, noise, test):
    posterior = condition(kernel, (x, real_targets(x, 1)), Gaussian(noise), solver=Cholesky())
    return posterior.marginal(test).variance.flatten()


@pytest.mark.parametrize("rank", [0, 10, None])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_variances_are_unbiased(kernel, rank):
    x, test = points(40), points(6, seed=5)
    found = estimates(kernel, Pathwise(16, rank), x, 0.05, test, 100)
    error = found.std(0) / 10
    assert bool(((found.mean(0) - exact(kernel, x, 0.05, test)).abs() < 4.5 * error + 1e-12).all())


@pytest.mark.parametrize("rank", [0, None])
def test_the_standard_error_is_at_most_that_of_plain_draws(rank):
    x, test = points(60), points(6, seed=5)
    found = estimates(RBF(1.0), Pathwise(64, rank), x, 0.05, test, 40)
    relative = (found / exact(RBF(1.0), x, 0.05, test) - 1).square().mean().sqrt()
    assert float(relative) < 1.3 * (2 / 64) ** 0.5


def test_a_part_of_low_rank_leaves_little_to_chance():
    x, test = points(100), points(6, seed=5)
    truth = exact(RBF(1.0), x, 0.05, test)
    errors = [
        float((estimates(RBF(1.0), Pathwise(64, r), x, 0.05, test, 10) / truth - 1).abs().mean())
        for r in (0, 10, 60)
    ]
    assert errors[2] < 0.4 * errors[0]
    assert errors[1] < errors[0]


def test_drawn_networks_have_the_variances_of_their_limit():
    x, test = points(60), points(6, seed=5)
    found = estimates(relu(), Pathwise(64), x, 0.05, test, 3).mean(0)
    torch.testing.assert_close(found, exact(relu(), x, 0.05, test), rtol=0.3, atol=0)


def solved(kernel, variance=None, likelihood=None, count=80, outputs=1, **options):
    x = points(count)
    solver = CG(variance=variance, num_probes=0, store_gram=False, tol=1e-8, **options)
    likelihood = Gaussian(0.05) if likelihood is None else likelihood
    targets = real_targets(x, outputs)
    return condition(kernel, (x, targets), likelihood, solver=solver)


def test_the_default_at_1500_points_is_right_within_a_factor_of_two():
    x, test = points(1500), points(20, seed=5)
    data, noise = (x, real_targets(x, 1)), Gaussian(0.05)
    posterior = condition(RBF(0.3), data, noise, solver=CG(num_probes=0, store_gram=False))
    assert posterior.process.draws is not None
    truth = condition(RBF(0.3), data, noise, solver=Cholesky()).marginal(test).variance
    ratio = posterior.marginal(test).variance / truth
    assert 0.5 < float(ratio.min()) <= float(ratio.max()) < 2.0
    assert abs(float(ratio.log().mean())) < 0.1


@pytest.mark.parametrize("kernel", [ntk(network(1)), Unknown()], ids=["ntk", "own"])
def test_where_no_functions_can_be_drawn_the_default_solves(kernel):
    posterior, test = solved(kernel), points(4, seed=5)
    assert posterior.process.draws is None
    assert posterior.process.cache is None
    x = points(80)
    truth = condition(kernel, (x, real_targets(x, 1)), Gaussian(0.05), solver=Cholesky())
    torch.testing.assert_close(
        posterior.marginal(test).variance, truth.marginal(test).variance, rtol=0.01, atol=1e-12
    )
    with pytest.raises(InputError, match=r"Pathwise\(\) draws functions .* variance=Exact\(\)"):
        solved(kernel, Pathwise())


def test_the_mean_does_not_depend_on_the_draws():
    test = points(4, seed=5)
    found = [solved(RBF(), v).marginal(test).mean for v in (Exact(), Pathwise(), Pathwise(8, 0, 3))]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-6, atol=1e-6)


def test_the_order_of_the_data_changes_nothing():
    x, test = points(80), points(4, seed=5)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(3))
    solver = CG(tol=1e-9, num_probes=0, store_gram=False)
    y = real_targets(x, 1)
    one, other = (
        condition(RBF(), data, Gaussian(0.05), solver=solver).marginal(test)
        for data in ((x, y), (x[order], y[order]))
    )
    torch.testing.assert_close(one.mean, other.mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(one.variance, other.variance, rtol=0.5, atol=0)


def test_a_joint_law_is_positive_semi_definite_with_the_variances_of_each_point():
    posterior, test = solved(RBF(0.5)), points(30, seed=5)
    joint = posterior.joint(test).covariance_matrix
    torch.testing.assert_close(
        joint.diagonal(), posterior.marginal(test).variance.flatten(), rtol=1e-6, atol=1e-12
    )
    assert torch.linalg.eigvalsh(joint).min() > -1e-9


def test_a_joint_law_comes_close_to_the_exact_one():
    test, x = points(5, seed=5), points(80)
    found = solved(RBF(0.7), Pathwise(1000)).joint(test).covariance_matrix
    truth = condition(RBF(0.7), (x, real_targets(x, 1)), Gaussian(0.05), solver=Cholesky())
    expected = truth.joint(test).covariance_matrix
    assert (found - expected).norm() < 0.15 * expected.norm()


@pytest.mark.parametrize("coupled", [False, True], ids=["shared", "coupled"])
def test_several_outputs(coupled):
    noise = Gaussian(torch.tensor([0.05, 0.2]).double()) if coupled else Gaussian(0.05)
    test, x = points(5, seed=5), points(80)
    found = solved(RBF(0.7), Pathwise(400), noise, outputs=2).marginal(test)
    expected = condition(RBF(0.7), (x, real_targets(x, 2)), noise, solver=Cholesky()).marginal(test)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.variance, expected.variance, rtol=0.35, atol=0)


def test_networks_with_coupled_outputs_and_other_likelihoods():
    kernel, x, test = linearize(network(3, hidden=20)).kernel(), points(30), points(4, seed=5)
    data = (x, class_targets(x, 3))
    options = {"num_probes": 0, "store_gram": False, "tol": 1e-8}
    found, expected = (
        condition(kernel, data, Categorical(), solver=CG(variance=v, **options)).marginal(test)
        for v in (Pathwise(400), Exact())
    )
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.variance, expected.variance, rtol=0.35, atol=0)
    full, truth = found.covariance_matrix, expected.covariance_matrix
    assert (full - truth).norm() < 0.2 * truth.norm()


@pytest.mark.parametrize(
    "kernel", [RBF(0.5) + Periodic(2.0), Quadratic()], ids=["waves", "features"]
)
def test_a_saved_posterior_gives_the_same_variances(kernel, tmp_path):
    if isinstance(kernel, Quadratic):
        kernel = linearize(network(1)).kernel()
    posterior, test = solved(kernel), points(4, seed=5)
    posterior.save(tmp_path / "posterior.safetensors")
    module = network(1) if hasattr(kernel, "linearized") else None
    again = load(tmp_path / "posterior.safetensors", module)
    assert torch.equal(again.marginal(test).variance, posterior.marginal(test).variance)


def test_networks_that_are_too_narrow_are_told_of(monkeypatch):
    monkeypatch.setattr(gaussian, "ALLOWED", 1.0001)
    with pytest.warns(WideVariances, match=r"networks of finite width are \d\S* times those"):
        solved(relu(), Pathwise(16), count=20)


def test_bad_options():
    with pytest.raises(InputError, match="num_samples must be at least 4, but is 2"):
        Pathwise(2)
    with pytest.raises(InputError, match="rank must be 0 or positive, but is -1"):
        Pathwise(rank=-1)
    with pytest.raises(
        InputError, match=r"by Exact\(\) or Lanczos\(rank=\.\.\.\), but variance is Path"
    ):
        Cholesky(variance=Pathwise())
