"""How posteriors follow moved inputs: distances are kept, adversaries find what there is, bounds hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp.errors import InputError, NotAvailable
from net2gp.explain import (
    FastGradient,
    Perturbation,
    ProjectedGradient,
    RandomNoise,
    Toward,
    change_bound,
    kernel_distance,
    stability,
)
from net2gp.plots import plot_stability
from posteriors.ways import network, points, real_targets, unseen_points

DOUBLE = torch.float64
WAYS: list[Perturbation] = [
    kind(norm)
    for kind in (RandomNoise, FastGradient, ProjectedGradient)
    for norm in (2.0, math.inf)
]


def adapted(outputs: int = 2, **options: Any) -> n2g.Posterior:
    linearized = n2g.linearize(network(outputs))
    x = points()
    data = (x, real_targets(x, outputs))
    return n2g.condition(linearized.kernel(0.5), data, n2g.Gaussian(0.1), **options)


def of_rbf(outputs: int = 2) -> n2g.Posterior:
    x = points()
    return n2g.condition(n2g.RBF(), (x, real_targets(x, outputs)), n2g.Gaussian(0.1))


def around() -> n2g.Posterior:
    net, x = network(3), points()
    variance = torch.full((sum(p.numel() for p in net.parameters()),), 0.3, dtype=DOUBLE)
    data = (x, net(x).argmax(1))
    return n2g.training.from_variances(net, variance, data, n2g.Categorical(), prior_var=1.0)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_points_are_moved_by_the_distance_and_not_further(way, dtype) -> None:
    posterior, x = of_rbf().to(dtype=dtype), unseen_points().to(dtype)
    found = stability(posterior, x, [0.0, 0.1, 0.7], perturbation=way)
    moved = found.points - x
    lengths = moved.abs().amax(-1) if way.norm == math.inf else moved.norm(dim=-1)
    far = found.distances[:, None].expand_as(lengths)
    assert bool((lengths <= far * (1 + 1e-5) + 1e-6).all())
    if not isinstance(way, ProjectedGradient):
        torch.testing.assert_close(lengths, far, rtol=1e-4, atol=1e-6)
    assert torch.equal(found.points[0], x)
    assert found.points.dtype == dtype


def test_what_is_returned_is_what_the_posterior_says_at_the_points() -> None:
    posterior, x = adapted(), unseen_points()
    found = stability(posterior, x, [0.0, 0.3], perturbation=RandomNoise())
    for at, change, variance, novelty in zip(
        found.points, found.change, found.variance, found.novelty, strict=True
    ):
        torch.testing.assert_close(change, (posterior.mean(at) - posterior.mean(x)).norm(dim=1))
        torch.testing.assert_close(variance, posterior.marginal(at).variance.mean(1))
        torch.testing.assert_close(novelty, posterior.novelty(at))
    assert float(found.change[0].abs().max()) < 1e-12


@pytest.mark.parametrize("norm", [2.0, math.inf])
def test_adversaries_of_a_linear_mean_reach_the_dual_norm_of_its_slope(norm) -> None:
    # The mean of this process is linear, so that the largest change at a distance is known.
    x = points()
    linear = n2g.condition(
        n2g.kernels.Linear(), (x, x @ torch.ones(2, 1).double()), n2g.Gaussian(0.1)
    )
    slope = (linear.mean(torch.eye(2, dtype=DOUBLE)) - linear.mean(torch.zeros(2, 2).double()))[
        :, 0
    ]
    dual = float(slope.abs().sum() if norm == math.inf else slope.norm())
    for way in (FastGradient(norm), ProjectedGradient(norm)):
        found = stability(linear, unseen_points(), [0.5], perturbation=way)
        torch.testing.assert_close(found.change[0], torch.full_like(found.change[0], 0.5 * dual))


def test_more_steps_find_more_and_noise_finds_less() -> None:
    posterior, x = around(), unseen_points()
    y = posterior.mean(x).argmax(1)
    ways = (RandomNoise(), FastGradient(), ProjectedGradient(num_steps=20))
    losses = []
    for way in ways:
        found = stability(posterior, x, [0.8], perturbation=way, y=y)
        mean = posterior.mean(found.points[0])
        losses.append(float(nn.functional.cross_entropy(mean, y)))
    assert losses[0] < losses[1] <= losses[2] + 1e-9


def test_points_go_toward_others_and_not_beyond() -> None:
    posterior, x = of_rbf(), unseen_points()
    other = x.flip(0) + 0.3
    found = stability(posterior, x, [0.1, 1e6], perturbation=Toward(points=other))
    torch.testing.assert_close(found.points[1], other)
    way = (other - x) / (other - x).norm(dim=1, keepdim=True)
    torch.testing.assert_close(found.points[0], x + 0.1 * way)


@pytest.mark.parametrize("make", [adapted, of_rbf])
def test_the_kernel_distance_is_the_deviation_of_differences_before_data(make) -> None:
    posterior, x = make(), unseen_points()
    law = n2g.posteriors.prior(posterior.kernel, torch.cat([x, x + 0.3]), num_outputs=2)
    found = kernel_distance(posterior.kernel, x, x + 0.3)
    C = law.covariance_matrix.reshape(2, len(x), 2, 2, len(x), 2)
    C = C.diagonal(dim1=1, dim2=4).diagonal(dim1=1, dim2=3)  # (2, 2, N, C)
    expected = (C[0, 0] + C[1, 1] - 2 * C[0, 1]).sqrt()
    torch.testing.assert_close(found.expand(len(x), 2), expected)
    assert float(kernel_distance(posterior.kernel, x, x).max()) < 1e-6


def test_many_points_go_in_pieces(monkeypatch) -> None:
    kernel, x = n2g.linearize(network(2)).kernel(), unseen_points()
    whole = kernel_distance(kernel, x, x + 1)
    monkeypatch.setattr("net2gp.methods.explain.stability.PAIRS", 2)
    torch.testing.assert_close(kernel_distance(kernel, x, x + 1), whole)


@pytest.mark.parametrize("solver", [n2g.solvers.Cholesky(), n2g.solvers.WeightCholesky()])
def test_the_norm_is_that_of_the_function_in_weights_and_in_functions(solver) -> None:
    posterior, x = adapted(solver=solver), unseen_points()
    same = adapted(solver=n2g.solvers.Cholesky())
    torch.testing.assert_close(change_bound(posterior, x, x + 1), change_bound(same, x, x + 1))
    data = same.data
    # All outputs of a network share one function of point and output.
    squared = n2g.explain.rkhs_norm(same.kernel, data, noise_var=0.1)
    expected = kernel_distance(same.kernel, x, x + 1) * squared.sqrt()
    torch.testing.assert_close(change_bound(same, x, x + 1), expected)


@pytest.mark.parametrize("make", [adapted, of_rbf])
@pytest.mark.parametrize("distance", [1e-3, 0.1, 1.0, 10.0])
def test_bounds_hold_against_adversaries(make, distance) -> None:
    posterior, x = make(), unseen_points()
    at = stability(posterior, x, [distance]).points[0]
    change = (posterior.centered(at) - posterior.centered(x)).abs()
    bound = change_bound(posterior, x, at)
    assert bool((change <= bound * (1 + 1e-9) + 1e-9).all())
    moved = posterior.marginal(at).stddev - posterior.marginal(x).stddev
    assert bool((moved.abs() <= kernel_distance(posterior.kernel, x, at) + 1e-9).all())


def test_the_bound_of_standard_deviations_holds_around_networks() -> None:
    posterior, x = around(), unseen_points()
    at = stability(posterior, x, [0.5]).points[0]
    moved = posterior.marginal(at).stddev - posterior.marginal(x).stddev
    assert bool((moved.abs() <= kernel_distance(posterior.kernel, x, at) + 1e-9).all())
    with pytest.raises(NotAvailable, match=r"no mean made of its kernel.*kernel_distance"):
        change_bound(posterior, x, at)


@pytest.mark.parametrize("combined", [n2g.bayes.weighted_sum, n2g.bayes.mixture])
def test_the_weights_of_a_combination_are_not_taken_for_those_of_a_mean(combined) -> None:
    posterior, x = combined([of_rbf(), of_rbf()]), unseen_points()
    with pytest.raises(NotAvailable, match=r"no mean made of its kernel"):
        change_bound(posterior, x, x + 1)


def test_ensembles_have_a_bound_if_they_move_along_the_kernel_that_they_begin_with() -> None:
    x, new = points(), unseen_points()
    flow = n2g.gradient_flow(n2g.infinite_width(network(2)), (x, real_targets(x, 2)))
    posterior = flow.ntk_gp().posterior(20.0)
    change = (posterior.centered(new + 1) - posterior.centered(new)).abs()
    bound = change_bound(posterior, new, new + 1)
    assert bool((change <= bound + 1e-9).all())
    assert float(bound.max()) < 100 * float(change.max())
    with pytest.raises(NotAvailable, match=r"no mean made of its kernel"):
        change_bound(flow.posterior(20.0), new, new + 1)


def test_bounds_are_tight_for_one_observation() -> None:
    # E f = k(·, x₁) α, whose largest change from x₁ is along the difference of features itself.
    x = torch.zeros(1, 1, dtype=DOUBLE)
    posterior = n2g.condition(n2g.kernels.Linear(), (x + 1, x + 2), n2g.Gaussian(0.1))
    change = (posterior.mean(x + 3) - posterior.mean(x + 1)).abs()
    torch.testing.assert_close(change_bound(posterior, x + 1, x + 3), change)


def test_images_are_moved_as_wholes() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)).eval()
    x = torch.rand(4, 1, 5, 5)
    variance = torch.full((sum(p.numel() for p in net.parameters()),), 0.01)
    posterior = n2g.training.from_variances(
        net, variance, (x, torch.arange(4) % 3), n2g.Categorical()
    )
    found = stability(posterior, x, [0.1, 0.2], perturbation=FastGradient(math.inf))
    assert found.points.shape == (2, 4, 1, 5, 5)
    assert found.novelty.shape == (2, 4)


def test_bad_input_is_refused() -> None:
    posterior, x = of_rbf(), unseen_points()
    cases: list[tuple[Any, str]] = [
        (lambda: stability(posterior, (x, x), [1.0]), r"one tensor of N points of real numbers"),
        (lambda: stability(posterior, x.long(), [1.0]), r"tokens cannot be moved|tokens "),
        (lambda: stability(posterior, x, [-1.0]), r"distances must be zero or positive"),
        (lambda: stability(posterior, x, []), r"distances must be one or more numbers"),
        (lambda: stability(posterior, x, 0.5), r"distances must be one or more numbers"),
        (lambda: stability(posterior, x, [1.0], perturbation="pgd"), r"such as FastGradient\(\)"),
        (lambda: RandomNoise(norm=1.0), r"norm must be 2\.0 or math\.inf, but is 1\.0"),
        (lambda: ProjectedGradient(num_steps=0), r"num_steps"),
        (
            lambda: stability(posterior, x, [1.0], perturbation=Toward(points=x[:1])),
            r"Toward needs a point for each of x",
        ),
        (lambda: stability(posterior, x, [1.0], y=x[:, :1]), r"y"),
        (lambda: kernel_distance(posterior.kernel, x, x[:2]), r"each point needs a partner"),
        (lambda: kernel_distance(posterior, x, x), r"kernel must be a Kernel"),  # type: ignore[arg-type]
        (lambda: stability(posterior.kernel, x, [1.0]), r"expected a posterior"),  # type: ignore[arg-type]
        (lambda: RandomNoise(seed="one"), r"seed"),  # type: ignore[arg-type]
        (lambda: ProjectedGradient(seed=0.5), r"seed"),
    ]
    for call, message in cases:
        with pytest.raises(InputError, match=message):
            call()


def test_the_figure_has_a_line_and_a_band_for_each_name() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    values: dict[str, Tensor] = {"noise": torch.rand(3, 8), "steps": torch.rand(3, 8)}
    ax = plot_stability(None, [0.0, 1.0, 2.0], values, label="novelty")
    assert [line.get_label() for line in ax.get_lines()] == ["noise", "steps"]
    assert len(ax.collections) == 2
    middle = torch.from_numpy(ax.get_lines()[0].get_ydata())
    torch.testing.assert_close(middle, values["noise"].double().quantile(0.5, 1))
    with pytest.raises(InputError, match=r"distances: 2, values: 3"):
        plot_stability(None, torch.tensor([0.0, 1.0]), values)
