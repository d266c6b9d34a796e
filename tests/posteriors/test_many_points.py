"""Solvers for many points: sketch-and-project, and the mean from centers."""

import pytest
import torch
from torch import nn

from net2gp import RBF, Bernoulli, Gaussian, condition, linearize, load, nngp
from net2gp.errors import InputError, NotAvailable, NotConverged, TooLarge
from net2gp.posteriors.conditioning import matrix_free
from net2gp.posteriors.conditioning.sketching import sketched
from net2gp.solvers import ADASAP, CG, Centers, Cholesky, Pathwise, RandomPivots
from posteriors.ways import network, points, real_targets


def relu():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    return nngp(net.double(), weight_var=2.0, bias_var=0.1)


def data(count=120, outputs=1):
    x = points(count)
    return x, real_targets(x, outputs)


MEAN = ADASAP(block_size=40, tol=1e-7, variance=None)


@pytest.mark.parametrize("noise", [0.5, 0.02])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("kernel", [RBF(0.6), relu()], ids=["rbf", "nngp"])
@pytest.mark.parametrize("solver", [MEAN, Centers(120, tol=1e-9)], ids=["ADASAP", "Centers"])
def test_the_mean_is_the_exact_one(solver, kernel, outputs, noise):
    test, likelihood = points(6, seed=5), Gaussian(noise)
    found = condition(kernel, data(120, outputs), likelihood, solver=solver)
    exact = condition(kernel, data(120, outputs), likelihood, solver=Cholesky())
    torch.testing.assert_close(found.mean(test), exact.mean(test), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("solver", [MEAN, Centers(60, tol=1e-9)], ids=["ADASAP", "Centers"])
def test_coupled_outputs_and_kernels_with_features(solver):
    test, noise = points(6, seed=5), Gaussian(torch.tensor([0.1, 0.3]).double())
    kernel = linearize(network(2, hidden=20)).kernel()
    found = condition(kernel, data(60, 2), noise, solver=solver)
    exact = condition(kernel, data(60, 2), noise, solver=Cholesky())
    torch.testing.assert_close(found.mean(test), exact.mean(test), rtol=1e-4, atol=1e-4)


def test_variances_come_from_draws_that_are_solved_for_with_the_mean():
    test = points(6, seed=5)
    solver = ADASAP(block_size=40, tol=1e-6, variance=Pathwise(200))
    found = condition(RBF(), data(), Gaussian(0.1), solver=solver).marginal(test)
    exact = condition(RBF(), data(), Gaussian(0.1), solver=Cholesky()).marginal(test)
    torch.testing.assert_close(found.mean, exact.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.variance, exact.variance, rtol=0.3, atol=0)


@pytest.mark.parametrize("solver", [MEAN, Centers(120)], ids=["ADASAP", "Centers"])
def test_the_order_of_the_data_changes_nothing_beyond_the_tolerance(solver):
    (x, y), test = data(), points(6, seed=5)
    order = torch.randperm(120, generator=torch.Generator().manual_seed(2))
    one = condition(RBF(), (x, y), Gaussian(0.1), solver=solver)
    other = condition(RBF(), (x[order], y[order]), Gaussian(0.1), solver=solver)
    torch.testing.assert_close(one.mean(test), other.mean(test), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("solver", [MEAN, Centers(50)], ids=["ADASAP", "Centers"])
def test_more_data_and_files(solver, tmp_path):
    (x, y), test = data(), points(6, seed=5)
    first = condition(RBF(), (x[:100], y[:100]), Gaussian(0.1), solver=solver)
    updated = first.update((x[100:], y[100:]))
    whole = condition(RBF(), (x, y), Gaussian(0.1), solver=solver)
    torch.testing.assert_close(updated.mean(test), whole.mean(test), rtol=1e-4, atol=1e-4)
    updated.save(tmp_path / "posterior.safetensors")
    assert torch.equal(load(tmp_path / "posterior.safetensors").mean(test), updated.mean(test))


def test_what_there_is_no_variance_for_is_refused():
    x = points(4)
    centers = condition(RBF(), data(), Gaussian(0.1), solver=Centers(20))
    for ask in (centers.marginal, centers.joint, centers.predict, centers.novelty):
        with pytest.raises(
            NotAvailable, match=r"Centers\(\) gives the mean alone\. Pass solver=ADASAP"
        ):
            ask(x)
    mean = condition(RBF(), data(), Gaussian(0.1), solver=MEAN)
    with pytest.raises(
        NotAvailable, match=r"variance=None\) gives the mean alone\. Pass solver=ADASAP"
    ):
        mean.marginal(x)
    with pytest.raises(InputError, match="leave the evidence out"):
        mean.log_marginal_likelihood()


def test_a_checkpoint_answers_and_belongs_to_one_problem(tmp_path):
    solver = ADASAP(
        block_size=40, tol=1e-6, variance=None, checkpoint=str(tmp_path / "solve.safetensors")
    )
    one = condition(RBF(), data(), Gaussian(0.1), solver=solver)
    again = condition(RBF(), data(), Gaussian(0.1), solver=solver)
    assert torch.equal(one.process.alpha, again.process.alpha)
    for kernel, noise in ((RBF(0.5), 0.1), (RBF(), 0.2)):
        with pytest.raises(InputError, match="belongs to another problem"):
            condition(kernel, data(), Gaussian(noise), solver=solver)


def test_too_few_passes_are_told_of():
    solver = ADASAP(block_size=40, passes=2, rank=5, tol=1e-9, variance=None)
    with pytest.warns(NotConverged, match="sketch-and-project stopped at a relative residual of"):
        condition(RBF(0.3), data(), Gaussian(1e-3), solver=solver)


def test_more_centers_come_closer():
    test = points(20, seed=5)
    exact = condition(RBF(), data(), Gaussian(0.1), solver=Cholesky()).mean(test)
    gaps = []
    for count in (5, 20, 80):
        found = condition(RBF(), data(), Gaussian(0.1), solver=Centers(count)).mean(test)
        gaps.append(float((found - exact).norm()))
    assert gaps[2] < 0.1 * gaps[1] < 0.1 * gaps[0]


def test_a_rank_that_does_not_fit_is_refused_with_one_that_does(monkeypatch):
    monkeypatch.setattr(matrix_free, "available_memory", lambda device: 120 * 8 * 60)
    monkeypatch.setattr("net2gp.memory.available_memory", lambda device: 120 * 8 * 60)
    solver = CG(preconditioner=RandomPivots(100), store_gram=False)
    with pytest.raises(
        TooLarge, match=r"rank 100 for 120 rows .*RandomPivots\(rank=\d+\)\), which fits"
    ):
        condition(RBF(), data(), Gaussian(0.1), solver=solver)
    monkeypatch.setattr(sketched, "available_memory", lambda device: 32 * 20**2)
    monkeypatch.setattr("net2gp.memory.available_memory", lambda device: 32 * 20**2)
    with pytest.raises(TooLarge, match=r"block of 100 points .*ADASAP\(block_size=10\)"):
        condition(RBF(), data(), Gaussian(0.1), solver=ADASAP(100, variance=None))


def test_bad_options():
    for make, name in (
        (lambda: ADASAP(block_size=0), "block_size"),
        (lambda: Centers(0), "num_centers"),
    ):
        with pytest.raises(InputError, match=f"{name} must be positive, but is 0"):
            make()
    with pytest.raises(InputError, match=r"ADASAP gives variances by Pathwise\(\)"):
        ADASAP(variance="exact")
    with pytest.raises(InputError, match="checkpoint must be the path of a file or None"):
        ADASAP(checkpoint=3)
    x, y = data()
    for solver in (ADASAP(), Centers()):
        with pytest.raises(InputError, match=r"\(\) needs noise_var > 0"):
            condition(RBF(), data(), Gaussian(0.0), solver=solver)
        with pytest.raises(InputError, match=r"\(\) is for Gaussian noise\. Pass solver=CG\(\)"):
            condition(RBF(), (x, (y > 0).double()), Bernoulli(), solver=solver)
