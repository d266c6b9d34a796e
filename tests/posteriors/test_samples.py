"""Functions drawn from a posterior."""

from __future__ import annotations

import pytest
import torch

from net2gp import RBF, Gaussian, condition, linearize
from net2gp.errors import InputError
from net2gp.solvers import CG, Cholesky, Lanczos, WeightCholesky
from posteriors.ways import WAYS, built, network, points, real_targets, seeded

WITHOUT_FEATURES = ("rbf", "trace", "infinite width")
PATHWISE = [name for name in WAYS if not any(word in name for word in WITHOUT_FEATURES)]


@pytest.mark.parametrize("name", PATHWISE)
def test_a_drawn_function_is_one_function_wherever_it_is_evaluated(name):
    functions = built(name).sample_functions(4, generator=seeded(0))
    x, z = points(5, seed=6), points(3, seed=7)
    together = functions(torch.cat([x, z]))
    torch.testing.assert_close(functions(x), together[:, :5], rtol=0, atol=1e-12)
    torch.testing.assert_close(functions(z), together[:, 5:], rtol=0, atol=1e-12)
    torch.testing.assert_close(functions(x.flip(0)), functions(x).flip(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", PATHWISE)
def test_sampling_at_points_is_drawing_functions_and_evaluating_them(name):
    posterior, x = built(name), points(5, seed=6)
    functions = posterior.sample_functions(4, generator=seeded(0))
    assert torch.equal(posterior.sample(x, 4, generator=seeded(0)), functions(x))


def test_drawn_functions_are_affine_in_their_weights():
    """f = m + Φw: so the mean of two weights gives the mean of the functions."""
    functions = built("gaussian by cholesky").sample_functions(2, generator=seeded(0))
    x = points(5, seed=6)
    middle = type(functions)(
        functions.kernel, functions.mean, functions.num_outputs, functions.weights.mean(1)[:, None]
    )
    torch.testing.assert_close(middle(x)[0], functions(x).mean(0), rtol=0, atol=1e-12)


def test_functions_pass_near_data_with_little_noise():
    linearized, x = linearize(network(1, hidden=30)), points(6)
    y = real_targets(x, 1)
    for solver in (Cholesky(), WeightCholesky(), CG(tol=1e-10, variance=Lanczos(6))):
        posterior = condition(linearized.kernel(), (x, y), Gaussian(1e-8), solver=solver)
        draws = posterior.sample(x, 10, generator=seeded(0))
        assert float((draws - y).abs().max()) < 1e-3


def test_draws_without_noise_pass_through_the_data():
    x = points(6)
    y = real_targets(x, 2)
    draws = condition(RBF(0.5), (x, y), Gaussian(0.0)).sample(x, 10, generator=seeded(0))
    assert float((draws - y).abs().max()) < 1e-6


@pytest.mark.parametrize("shape", [(), (2,), (14, 1), (14, 2)], ids=str)
def test_draws_know_the_noise_of_each_point_and_output(shape):
    linearized, x = linearize(network(2)), points()
    noise = 0.05 + torch.rand(shape, generator=seeded(3), dtype=torch.float64)
    posterior = condition(
        linearized.kernel(), (x, real_targets(x, 2)), Gaussian(noise), solver=Cholesky()
    )
    test, count = points(3, seed=9), 4000
    joint = posterior.joint(test)
    draws = posterior.sample(test, count, generator=seeded(0)).reshape(count, -1)
    covariance = joint.covariance_matrix
    spread = (covariance.trace().square() + covariance.square().sum()) / count
    assert (draws.mean(0) - joint.mean).norm() < 3 * (covariance.trace() / count).sqrt()
    assert (draws.T.cov() - covariance).norm() < 3 * spread.sqrt()


def test_drawing_functions_needs_features():
    posterior = condition(RBF(), (points(), real_targets(points(), 1)), Gaussian(0.1))
    with pytest.raises(
        InputError, match=r"kernel is RBF\. Use posterior\.sample\(x, num_samples\)"
    ):
        posterior.sample_functions(3)
