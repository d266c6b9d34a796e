"""Laws that every posterior obeys, however it was computed. A new way joins by one line in WAYS."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import Distribution

from net2gp import Gaussian, Posterior, condition, linearize
from net2gp.errors import NotAvailable
from net2gp.posteriors.conditioning import systems
from net2gp.posteriors.recipes.around_network import AroundNetwork
from posteriors.methods import EVERY, METHODS, found
from posteriors.ways import WAYS, built, points, seeded, unseen_points

ANY = pytest.mark.parametrize("name", EVERY)
"""Posteriors of all kinds: what a method finds too."""

EACH = pytest.mark.parametrize("name", WAYS)
"""Gaussian processes that were conditioned on data, which can be conditioned on more."""

WITHOUT_EVIDENCE = {"ivon", "swag", "ivon, classes", "swag, classes", "from variances"} | {
    name
    for name in METHODS
    if name.startswith(("flow", "networks", "mixture", "combined", "deep, sigma points"))
    or "chains" in name
}
CONTINUOUS = [name for name in EVERY if "networks" not in name]
"""Laws without atoms: a set of networks gives the same function twice at times."""
GAUSSIAN = pytest.mark.parametrize("name", [name for name in WAYS if name.startswith("gaussian")])
EXACT = [name for name in WAYS if "conjugate" not in name]


def lowest_eigenvalue(matrix: Tensor) -> float:
    return float(torch.linalg.eigvalsh(0.5 * (matrix + matrix.mT)).min())


def prior_covariance(name: str, x: Tensor) -> Tensor:
    kernel = built(name).kernel
    K = kernel(x)
    return (
        K
        if kernel.outputs(x) is not None
        else torch.kron(K, torch.eye(WAYS[name].outputs, dtype=K.dtype))
    )


def assert_same_law(one, other, tol: float) -> None:
    x = unseen_points()
    for a, b in ((one.joint(x), other.joint(x)), (one.marginal(x), other.marginal(x))):
        torch.testing.assert_close(a.mean, b.mean, rtol=tol, atol=tol)
        torch.testing.assert_close(a.covariance_matrix, b.covariance_matrix, rtol=tol, atol=tol)


@ANY
def test_it_is_a_posterior_with_the_shapes_it_promises(name):
    posterior, x, C = found(name), unseen_points(), EVERY[name].outputs
    assert isinstance(posterior, Posterior)
    marginal, joint = posterior.marginal(x), posterior.joint(x)
    assert (marginal.batch_shape, marginal.event_shape) == ((len(x),), (C,))
    assert (joint.batch_shape, joint.event_shape) == ((), (len(x) * C,))
    assert posterior.sample(x, 3).shape == (3, len(x), C)
    if name not in WITHOUT_EVIDENCE:
        assert posterior.log_marginal_likelihood().shape == ()
        assert bool(posterior.log_marginal_likelihood().isfinite())
    dtypes = {marginal.mean.dtype, joint.covariance_matrix.dtype, posterior.sample(x, 1).dtype}
    assert dtypes == {torch.float64}


@ANY
def test_the_predictive_law_is_of_the_targets(name):
    way, x = EVERY[name], unseen_points()
    predicted = found(name).predict(x)
    assert isinstance(predicted, Distribution)
    y = way.targets(x, way.num_targets)
    log_prob = predicted.log_prob(y).reshape(len(x), -1)
    assert bool(log_prob.isfinite().all())


@ANY
def test_marginals_are_the_diagonal_blocks_of_the_joint_law(name):
    posterior, x, C = found(name), unseen_points(), EVERY[name].outputs
    joint, marginal = posterior.joint(x), posterior.marginal(x)
    blocks = joint.covariance_matrix.reshape(len(x), C, len(x), C).diagonal(dim1=0, dim2=2)
    torch.testing.assert_close(joint.mean.reshape(len(x), C), marginal.mean, rtol=0, atol=1e-10)
    torch.testing.assert_close(
        blocks.permute(2, 0, 1), marginal.covariance_matrix, rtol=0, atol=1e-8
    )


@EACH
def test_covariances_are_positive_and_below_the_prior(name):
    x = unseen_points()
    covariance = built(name).joint(x).covariance_matrix
    assert lowest_eigenvalue(covariance) > -1e-8
    assert lowest_eigenvalue(prior_covariance(name, x) - covariance) > -1e-8


@EACH
def test_permuting_the_data_changes_nothing(name):
    way = WAYS[name]
    x, y = way.data()
    order = torch.randperm(len(x), generator=seeded(0))
    again = way.build(x[order], y[order])
    assert_same_law(built(name), again, way.tol)
    if name in EXACT:
        expected = built(name).log_marginal_likelihood()
        torch.testing.assert_close(
            again.log_marginal_likelihood(), expected, rtol=way.tol, atol=way.tol
        )


@EACH
def test_a_prior_that_is_sure_of_its_mean_learns_nothing(name):
    way, x = WAYS[name], unseen_points()
    sure = way.build(*way.data(), kernel=built(name).kernel.scaled(1e-14))
    mean = linearize(way.network())(x) if way.with_mean else torch.zeros(len(x), way.outputs)
    torch.testing.assert_close(sure.marginal(x).mean, mean.double(), rtol=0, atol=1e-10)


@GAUSSIAN
def test_conditioning_on_nearly_nothing_is_the_prior(name):
    way, x = WAYS[name], unseen_points()
    joint = way.build(*way.data(), likelihood=Gaussian(1e14)).joint(x)
    mean = linearize(way.network())(x) if way.with_mean else torch.zeros(len(x), way.outputs)
    torch.testing.assert_close(joint.mean, mean.double().reshape(-1), rtol=0, atol=1e-9)
    torch.testing.assert_close(joint.covariance_matrix, prior_covariance(name, x))


@GAUSSIAN
def test_the_variance_shrinks_with_data(name):
    way, test = WAYS[name], unseen_points()
    x, y = way.data()
    before = way.build(x[:9], y[:9]).joint(test).covariance_matrix
    after = built(name).joint(test).covariance_matrix
    assert lowest_eigenvalue(before - after) > -1e-8
    assert float((before - after).trace()) > 1e-3


@EACH
def test_updating_is_conditioning_on_everything_at_once(name):
    way = WAYS[name]
    x, y = way.data()
    updated = way.build(x[:-4], y[:-4]).update((x[-4:-1], y[-4:-1])).update((x[-1:], y[-1:]))
    assert_same_law(built(name), updated, way.tol)
    if name in EXACT:
        expected = built(name).log_marginal_likelihood()
        torch.testing.assert_close(
            updated.log_marginal_likelihood(), expected, rtol=way.tol, atol=way.tol
        )


@pytest.mark.parametrize("name", METHODS)
def test_updating_what_a_method_found_is_conditioning_on_everything_or_is_refused(name):
    """What the method has tuned stays as it is."""
    posterior, way = found(name), METHODS[name]
    more = points(3, seed=8)
    data = more, way.targets(more, way.num_targets)
    refusing = ("codes", "flow", "networks", "mixture", "deep", "combined")
    if type(posterior.process) is AroundNetwork or name.startswith(refusing):
        reasons = (
            r"new data would move|Call adapt_classes with all|Call gradient_flow with all data|"
            r"this posterior is a set of networks. Call [a-z_ ]+ again with all data|"
            r"data are of one of them. Update that one, and combine them again"
        )
        with pytest.raises(NotAvailable, match=reasons):
            posterior.update(data)
        return
    updated = posterior.update(data)
    together = tuple(torch.cat(pair) for pair in zip(posterior.data, data, strict=True))
    if name.startswith("dual"):
        anew = way.build(*together)
    else:
        anew = condition(
            posterior.kernel,
            together,
            posterior.likelihood,
            mean=posterior.process.prior_mean,
            solver=posterior.solver,
            inference=posterior.inference,
        )
    assert_same_law(updated, anew, 1e-7)
    expected = anew.log_marginal_likelihood()
    torch.testing.assert_close(updated.log_marginal_likelihood(), expected, rtol=1e-7, atol=1e-7)


@ANY
def test_draws_have_the_law_of_the_posterior(name):
    posterior, x, count = found(name), points(3, seed=9), 2_000
    joint = posterior.joint(x)
    draws = posterior.sample(x, count, generator=seeded(0)).reshape(count, -1)
    covariance = joint.covariance_matrix
    error = (draws.mean(0) - joint.mean).norm()
    assert error < 3 * (covariance.trace() / count).sqrt()
    spread = (covariance.trace().square() + covariance.square().sum()) / count
    assert (draws.T.cov() - covariance).norm() < 3 * spread.sqrt()


@ANY
def test_a_generator_makes_draws_reproducible_and_leaves_the_global_state_alone(name):
    posterior, x = found(name), unseen_points()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    one, other = (posterior.sample(x, 2, generator=seeded(4)) for _ in range(2))
    assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(one, posterior.sample(x, 2, generator=seeded(5)))


@pytest.mark.parametrize("name", CONTINUOUS)
def test_without_a_generator_every_draw_is_new(name):
    posterior, x = found(name), unseen_points()
    one, other = (posterior.sample(x, 2) for _ in range(2))
    assert not torch.isclose(one, other, rtol=1e-6, atol=0).any()


@ANY
def test_covariances_are_positive(name):
    assert lowest_eigenvalue(found(name).joint(unseen_points()).covariance_matrix) > -1e-8


@ANY
def test_a_prediction_factorizes_and_solves_nothing_anew(name, monkeypatch):
    posterior = found(name)
    posterior.marginal(unseen_points())

    def refuse(*args, **kwargs):
        raise AssertionError("a prediction factorizes or iterates")

    for function in ("cholesky", "cholesky_ex", "eigh", "inv", "solve", "svd", "qr"):
        monkeypatch.setattr(torch.linalg, function, refuse)
    monkeypatch.setattr(systems, "block_cg", refuse)
    posterior.marginal(unseen_points())


@ANY
def test_predictions_one_by_one_are_those_of_the_batch(name):
    posterior, x = found(name), unseen_points()
    together = posterior.marginal(x)
    alone = [posterior.marginal(x[n : n + 1]) for n in range(len(x))]
    means = torch.cat([law.mean for law in alone])
    covariances = torch.cat([law.covariance_matrix for law in alone])
    torch.testing.assert_close(means, together.mean, rtol=0, atol=1e-10)
    torch.testing.assert_close(covariances, together.covariance_matrix, rtol=0, atol=1e-9)


@ANY
def test_moving_nowhere_changes_nothing(name):
    moved = found(name).to("cpu", torch.float64)
    assert_same_law(found(name), moved, 1e-12)


@ANY
def test_moving_to_float32_and_back_keeps_the_law_and_leaves_the_original_alone(name):
    """Back in float64 it is the law of parameters that were rounded once, with all factors as they were."""
    posterior, x = found(name), unseen_points()
    before = posterior.marginal(x)
    back = posterior.to(dtype=torch.float32).to(dtype=torch.float64)
    assert back.marginal(x).mean.dtype == back.sample(x, 1).dtype == torch.float64
    assert_same_law(back, posterior, 1e-4)
    after = posterior.marginal(x)
    assert torch.equal(after.mean, before.mean)
    assert torch.equal(after.covariance_matrix, before.covariance_matrix)


@ANY
def test_float32_predictions_stay_close(name):
    """Rounding the network to float32 moves features by 6e-8; noise and curvature here cost 1e3 more."""
    posterior, x = found(name), unseen_points()
    single = posterior.to(dtype=torch.float32).marginal(x.float())
    assert single.mean.dtype == torch.float32
    exact = posterior.marginal(x)
    torch.testing.assert_close(single.mean.double(), exact.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        single.covariance_matrix.double(), exact.covariance_matrix, rtol=1e-4, atol=1e-4
    )
    assert bool((single.covariance_matrix.diagonal(dim1=-2, dim2=-1) >= 0).all())
