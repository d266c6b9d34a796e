"""A Cholesky factor in float32, refined to float64."""

import pytest
import torch
from torch import nn

from net2gp import RBF, Bernoulli, Gaussian, condition, load, nngp
from net2gp.errors import InputError, NotConverged, NotPositiveDefinite, TooLarge
from net2gp.linalg.large import RoundedCholesky, refined_cg
from net2gp.posteriors.conditioning import problem as problems
from net2gp.posteriors.conditioning.large import rounded
from net2gp.solvers import CG, Cholesky
from posteriors.ways import points, real_targets

SINGLE = Cholesky(dtype=torch.float32)


def relu():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    return nngp(net.double(), weight_var=2.0, bias_var=0.1)


@pytest.mark.parametrize("noise", [0.1, 1e-3])
@pytest.mark.parametrize("kernel", [RBF(0.5), relu()], ids=["rbf", "nngp"])
@pytest.mark.parametrize("outputs", [1, 3])
def test_mean_variance_and_evidence_are_those_of_float64(kernel, noise, outputs):
    x, test = points(200), points(6, seed=5)
    data = (x, real_targets(x, outputs))
    one = condition(kernel, data, Gaussian(noise), solver=SINGLE)
    exact = condition(kernel, data, Gaussian(noise), solver=Cholesky())
    torch.testing.assert_close(one.mean(test), exact.mean(test), rtol=1e-9, atol=1e-9)
    quadratic = [(p.process.alpha * data[1].reshape(200, -1)).sum() for p in (one, exact)]
    torch.testing.assert_close(*quadratic, rtol=1e-10, atol=0)
    torch.testing.assert_close(
        one.marginal(test).variance, exact.marginal(test).variance, rtol=1e-2, atol=0
    )
    torch.testing.assert_close(
        one.log_marginal_likelihood(), exact.log_marginal_likelihood(), rtol=1e-4, atol=1e-4
    )


def test_noise_of_each_output_couples_the_rows():
    x, test = points(60), points(6, seed=5)
    data, noise = (x, real_targets(x, 2)), Gaussian(torch.tensor([0.05, 0.2]).double())
    one, exact = (condition(RBF(), data, noise, solver=s) for s in (SINGLE, Cholesky()))
    torch.testing.assert_close(one.mean(test), exact.mean(test), rtol=1e-9, atol=1e-9)


def test_the_factor_takes_the_memory_of_the_matrix():
    A = (torch.eye(5) + 0.1).contiguous()
    place, expected = A.data_ptr(), torch.linalg.cholesky(A)
    found = RoundedCholesky.of(A)
    assert found.L.data_ptr() == place
    torch.testing.assert_close(found.L.tril(), expected)


def test_refinement_reaches_float64_on_an_ill_conditioned_matrix():
    x = points(150)
    A = RBF(0.7)(x) / 1e-4 + torch.eye(150, dtype=torch.float64)
    b = torch.stack([torch.ones(150), torch.zeros(150)], 1).double()
    factor = RoundedCholesky.of(A.float())
    solution = refined_cg(lambda v: A @ v, b, preconditioner=factor, tol=1e-12)
    assert solution.converged
    assert float((A @ solution.x - b).norm() / b.norm()) < 1e-12
    with pytest.warns(NotConverged, match=r"factor in float32 stopped at .* solver=Cholesky\(\)"):
        refined_cg(lambda v: A @ v, b, preconditioner=factor, tol=1e-12, max_iterations=1)


def test_a_factor_that_fails_says_which_noise_would_do():
    x = points(200)
    data = (x, real_targets(x, 1))
    with pytest.raises(
        NotPositiveDefinite, match=r"float32: .* Gaussian\(noise_var=\S+\) would do"
    ) as e:
        condition(RBF(3.0), data, Gaussian(1e-9), solver=SINGLE)
    enough = float(str(e.value).split("noise_var=")[1].split(")")[0])
    exact = condition(RBF(3.0), data, Gaussian(enough), solver=Cholesky())
    found = condition(RBF(3.0), data, Gaussian(enough), solver=SINGLE)
    torch.testing.assert_close(found.mean(x), exact.mean(x), rtol=1e-6, atol=1e-6)


def test_more_data_and_files(tmp_path):
    x, test = points(90), points(6, seed=5)
    y = real_targets(x, 1)
    first = condition(RBF(), (x[:60], y[:60]), Gaussian(0.1), solver=SINGLE)
    updated = first.update((x[60:], y[60:]))
    whole = condition(RBF(), (x, y), Gaussian(0.1), solver=Cholesky())
    torch.testing.assert_close(updated.mean(test), whole.mean(test), rtol=1e-9, atol=1e-9)
    updated.save(tmp_path / "posterior.safetensors")
    again = load(tmp_path / "posterior.safetensors")
    assert torch.equal(again.marginal(test).variance, updated.marginal(test).variance)


def test_it_is_chosen_where_float64_does_not_fit(monkeypatch):
    x = points(100)
    data = (x, real_targets(x, 1))
    make = lambda noise: problems.make_problem(RBF(), data, Gaussian(noise), None)
    monkeypatch.setattr(problems, "available_memory", lambda device: 20 * 100**2)
    assert problems.choose_solver(make(0.1), None) == SINGLE
    assert problems.choose_solver(make(1e-6), None) == CG()  # below what float32 can hold
    monkeypatch.setattr(problems, "available_memory", lambda device: 7 * 100**2)
    assert problems.choose_solver(make(0.1), None) == CG()


def test_bad_input(monkeypatch):
    x = points(20)
    with pytest.raises(InputError, match=r"dtype must be .* but is torch\.float16"):
        Cholesky(dtype=torch.float16)
    with pytest.raises(InputError, match=r"is for Gaussian noise: .* Pass solver=Cholesky\(\)"):
        condition(RBF(), (x, (x[:, :1] > 0).double()), Bernoulli(), solver=SINGLE)
    monkeypatch.setattr(rounded, "PART_BYTES", 2**60)
    with pytest.raises(TooLarge, match="20 × 20 Gram matrix in float32 would take"):
        condition(RBF(), (x, real_targets(x, 1)), Gaussian(0.1), solver=SINGLE)
