"""Conditioning on more data, beyond the law that every posterior obeys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from net2gp import RBF, Categorical, Gaussian, condition, linearize
from net2gp.errors import InputError
from net2gp.solvers import CG, Cholesky, Lanczos, WeightCholesky
from net2gp.tuning import spectrum
from posteriors.ways import class_targets, network, points, real_targets, seeded

SOLVERS = {
    "cholesky": Cholesky(),
    "weight space": WeightCholesky(),
    "conjugate gradients": CG(tol=1e-12, preconditioner=None, variance=Lanczos(100)),
}


def noise(*shape: int) -> Tensor:
    return 0.05 + torch.rand(*shape, generator=seeded(8), dtype=torch.float64)


def same(one, other, tol: float = 1e-8) -> None:
    x = points(5, seed=5)
    a, b = one.joint(x), other.joint(x)
    torch.testing.assert_close(a.mean, b.mean, rtol=tol, atol=tol)
    torch.testing.assert_close(a.covariance_matrix, b.covariance_matrix, rtol=tol, atol=tol)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    ("first", "second"),
    [(0.1, noise(4, 1)), (0.1, 0.3), (noise(10, 1), 0.3), (noise(2), noise(4, 2))],
    ids=["then per point", "then another", "per point first", "per output first"],
)
def test_new_points_may_have_their_own_noise(solver, first, second):
    linearized, x = linearize(network(2)), points()
    y = real_targets(x, 2)
    build = lambda data, likelihood: condition(
        linearized.kernel(), data, likelihood, mean=linearized, solver=SOLVERS[solver]
    )
    updated = build((x[:10], y[:10]), Gaussian(first)).update(
        (x[10:], y[10:]), likelihood=Gaussian(second)
    )
    parts = [Gaussian(first).noise_variance(y[:10]), Gaussian(second).noise_variance(y[10:])]
    anew = build((x, y), Gaussian(torch.cat(parts)))
    same(updated, anew)
    if solver != "conjugate gradients":
        torch.testing.assert_close(
            updated.log_marginal_likelihood(), anew.log_marginal_likelihood()
        )


@pytest.mark.parametrize(
    "solver",
    [Cholesky(), CG(tol=1e-12, preconditioner=None, variance=Lanczos(100))],
    ids=["cholesky", "conjugate gradients"],
)
def test_noise_that_tells_outputs_apart_may_come_later(solver):
    """Before, the outputs of an RBF share one Gram matrix; afterwards they cannot."""
    x, both = points(), noise(2)
    y = real_targets(x, 2)
    before = condition(RBF(0.8), (x[:10], y[:10]), Gaussian(0.1), solver=solver)
    updated = before.update((x[10:], y[10:]), likelihood=Gaussian(both))
    whole = torch.cat([torch.full((10, 2), 0.1, dtype=torch.float64), both.expand(4, 2)])
    same(updated, condition(RBF(0.8), (x, y), Gaussian(whole), solver=solver))


def test_a_spectral_posterior_can_be_updated():
    x = points()
    y = real_targets(x, 2)
    updated = spectrum(RBF(0.8), (x[:10], y[:10])).condition(0.1, 2.0).update((x[10:], y[10:]))
    same(updated, condition(RBF(0.8, 2.0), (x, y), Gaussian(0.1)))


def test_an_update_of_a_factor_evaluates_only_new_rows(monkeypatch):
    linearized, x = linearize(network(1)), points()
    y = real_targets(x, 1)
    posterior = condition(linearized.kernel(), (x[:10], y[:10]), Gaussian(0.1), solver=Cholesky())
    sizes = []
    kind = type(linearized.kernel())
    call = kind.__call__
    monkeypatch.setattr(
        kind, "__call__", lambda self, a, b=None: sizes.append(out := call(self, a, b)) or out
    )
    posterior.update((x[10:], y[10:]))
    assert sorted(tuple(out.shape) for out in sizes) == [(4, 4), (10, 4)]


def test_an_update_of_a_classifier_evaluates_only_new_rows(monkeypatch):
    linearized, x = linearize(network(3)), points()
    y = class_targets(x, 3)
    posterior = condition(linearized.kernel(), (x[:10], y[:10]), Categorical(), solver=Cholesky())
    sizes = []
    kind = type(linearized.kernel())
    call = kind.__call__
    monkeypatch.setattr(
        kind, "__call__", lambda self, a, b=None: sizes.append(out := call(self, a, b)) or out
    )
    posterior.update((x[10:], y[10:]))
    assert sorted(tuple(out.shape) for out in sizes) == [(12, 12), (30, 12)]


def test_an_update_leaves_the_old_posterior_as_it_was():
    linearized, x = linearize(network(1)), points()
    y = real_targets(x, 1)
    for solver in SOLVERS.values():
        posterior = condition(linearized.kernel(), (x[:10], y[:10]), Gaussian(0.1), solver=solver)
        before = posterior.marginal(x)
        posterior.update((x[10:], y[10:]))
        assert torch.equal(posterior.marginal(x).mean, before.mean)
        assert torch.equal(posterior.marginal(x).covariance_matrix, before.covariance_matrix)


X = points(3)
WRONG = {
    "targets of another shape": ((X, real_targets(X, 1)), r"y is a tensor of shape \(3, 1\)"),
    "flat targets": ((X, real_targets(X, 1)[:, 0]), r"y is a tensor of shape \(3,\)"),
    "inputs of another shape": (
        (points(3, inputs=3), real_targets(X, 2)),
        r"x is a tensor of shape \(3, 3\).*but was a tensor of shape \(14, 2\)",
    ),
    "inputs of another dtype": ((X.float(), real_targets(X, 2)), "x is .* torch.float32"),
    "targets of another dtype": ((X, real_targets(X, 2).float()), "y is .* torch.float32"),
    "inputs of another structure": (((X,), real_targets(X, 2)), "x is a tuple"),
    "not finite": ((X, real_targets(X, 2) * torch.nan), "y must be finite"),
    "nothing": ((X[:0], real_targets(X, 2)[:0]), "x is empty"),
    "other rows": ((X, real_targets(X, 2)[:2]), "x has 3 rows and y has 2"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("solver", SOLVERS)
def test_new_data_must_look_like_the_old(wrong, solver):
    linearized, x = linearize(network(2)), points()
    posterior = condition(
        linearized.kernel(), (x, real_targets(x, 2)), Gaussian(0.1), solver=SOLVERS[solver]
    )
    data, text = WRONG[wrong]
    with pytest.raises(InputError, match=text):
        posterior.update(data)


def test_dicts_must_keep_their_names():
    class Named(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network(1)

        def forward(self, a):
            return self.body(a)

    y = real_targets(X, 1)
    posterior = condition(linearize(Named().eval()).kernel(), ({"a": X}, y), Gaussian(0.1))
    with pytest.raises(InputError, match=r"x is a dict of {b: .* but was a dict of {a:"):
        posterior.update(({"b": X}, y))


def test_only_gaussian_noise_differs_between_points():
    linearized, x = linearize(network(3)), points()
    y = class_targets(x, 3)
    posterior = condition(linearized.kernel(), (x, y), Categorical())
    with pytest.raises(InputError, match="for Gaussian noise that differs between points"):
        posterior.update((x, y), likelihood=Gaussian(0.1))


def test_noise_of_points_must_be_given_for_new_points():
    linearized, x = linearize(network(1)), points()
    y = real_targets(x, 1)
    posterior = condition(linearized.kernel(), (x, y), Gaussian(noise(14, 1)))
    with pytest.raises(InputError, match="noise of 14 points, but there are 15 here"):
        posterior.update((x[:1], y[:1]))


def test_new_labels_must_fit_the_outputs():
    x = points()
    posterior = condition(RBF(), (x, class_targets(x, 3)), Categorical())
    with pytest.raises(InputError, match=r"labels must be in 0\.\.2 .* y holds 3"):
        posterior.update((x[:1], torch.tensor([3])))
