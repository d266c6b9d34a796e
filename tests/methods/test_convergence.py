"""Gradient descent foretold by the tangent kernel, against gradient descent."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import net2gp as n2g
from net2gp.errors import InputError
from net2gp.plots import plot_convergence
from net2gp.training import convergence

DOUBLE = torch.float64


def data(num_points: int = 12, num_outputs: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_points, 3, dtype=DOUBLE, generator=generator)
    return x, torch.randn(num_points, num_outputs, dtype=DOUBLE, generator=generator)


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 2).to(DOUBLE).eval()


def wide(width: int = 4096, dtype: torch.dtype = DOUBLE) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)).to(dtype).eval()


def trained(network: nn.Module, pair: tuple, steps: list[int], **options: float) -> list[float]:
    network, (x, y), losses = deepcopy(network), pair, []
    optimizer = torch.optim.SGD(network.parameters(), **options)
    for step in range(max(steps) + 1):
        loss = 0.5 * mse_loss(network(x), y)
        if step in steps:
            losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize("momentum", [None, 0.0, 0.5, 0.9])
@pytest.mark.parametrize("share", [0.2, 1.0, 1.9])
def test_the_loss_of_a_linear_model_is_exact_at_every_step(momentum, share) -> None:
    network, pair, steps = linear(), data(), [0, 1, 2, 7, 60]
    rate = share / 2 * convergence(network, pair, momentum=momentum).max_learning_rate
    found = convergence(network, pair, learning_rate=rate, momentum=momentum)
    measured = trained(network, pair, steps, lr=rate, momentum=momentum or 0.0)
    assert found.stable
    torch.testing.assert_close(
        found.loss(steps), torch.tensor(measured, dtype=DOUBLE), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_descent_diverges_above_the_largest_rate_and_not_below(momentum) -> None:
    network, pair = linear(), data()
    largest = convergence(network, pair, momentum=momentum).max_learning_rate
    for factor, stable in [(0.98, True), (1.02, False)]:
        found = convergence(network, pair, learning_rate=factor * largest, momentum=momentum)
        losses = trained(network, pair, [0, 2000], lr=factor * largest, momentum=momentum or 0.0)
        assert found.stable is stable
        assert (losses[1] < losses[0]) is stable
        assert bool(found.loss(math.inf).isfinite()) is stable
        assert ("diverges" in repr(found)) is not stable


def test_eigenvalues_are_those_of_the_jacobians_gram_matrix() -> None:
    network, pair = wide(8), data(5)
    J = n2g.linearize(network).jacobian(pair[0]).flatten(0, 1)
    found = convergence(network, pair)
    values = torch.linalg.eigvalsh(J @ J.T)
    torch.testing.assert_close(found.eigenvalues, values)
    assert found.rank == 10
    assert found.condition_number == pytest.approx(float(values[-1] / values[0]))
    assert found.max_learning_rate == pytest.approx(2 * 10 / float(values[-1]))


def test_the_norm_of_the_gradient_is_that_of_autograd() -> None:
    network, pair = wide(8), data(5)
    (0.5 * mse_loss(network(pair[0]), pair[1])).backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in network.parameters()])
    assert convergence(network, pair).gradient_norm == pytest.approx(float(gradient.norm()))


@pytest.mark.parametrize("momentum", [None, 0.5, 0.95])
@pytest.mark.parametrize("share", [0.1, 0.9, 1.99])
def test_time_constants_are_those_of_the_matrix_that_a_step_multiplies_with(
    momentum, share
) -> None:
    found = convergence(linear(), data(4), momentum=momentum)
    rate = share / 2 * found.max_learning_rate
    found = convergence(linear(), data(4), momentum=momentum, learning_rate=rate)
    for value, time in zip(found.eigenvalues, found.time_constants, strict=True):
        middle = float(1 + (momentum or 0.0) - rate * value / 8)
        step = torch.tensor([[middle, -(momentum or 0.0)], [1.0, 0.0]], dtype=DOUBLE)
        slowest = float(torch.linalg.eigvals(step).abs().max())
        assert float(time) == pytest.approx(-1 / math.log(slowest), rel=1e-6)


def test_a_fitted_model_is_stationary_and_its_loss_stays() -> None:
    network, (x, y) = linear(), data()
    design = torch.cat([x, torch.ones(12, 1, dtype=DOUBLE)], 1)
    solution = torch.linalg.lstsq(design, y).solution
    with torch.no_grad():
        network.weight.copy_(solution[:3].T)
        network.bias.copy_(solution[3])
    found = convergence(network, (x, y))
    assert found.rank == 8
    assert math.isinf(found.condition_number)
    assert found.stationarity < 1e-25
    assert found.gradient_norm < 1e-12
    torch.testing.assert_close(found.loss([0, 50, math.inf]), found.loss(0).expand(3))


def test_what_is_never_learned_is_the_final_loss() -> None:
    network, (x, y) = linear(), data()
    design = torch.cat([x, torch.ones(12, 1, dtype=DOUBLE)], 1)
    left = y - design @ torch.linalg.lstsq(design, y).solution
    found = convergence(network, (x, y))
    assert float(found.loss(math.inf)) == pytest.approx(float(left.square().mean() / 2))
    assert 0 < found.stationarity < 1
    assert int(found.time_constants.isinf().sum()) == 24 - 8


def test_the_loss_of_a_wide_network_is_within_five_percent() -> None:
    network, pair, steps = wide(), data(), [1, 3, 10, 30, 100]
    found = convergence(network, pair)
    measured = trained(network, pair, steps, lr=found.learning_rate)
    measured = torch.tensor(measured, dtype=DOUBLE)
    assert measured[-1] < 0.7 * found.loss(0)
    torch.testing.assert_close(found.loss(steps), measured, rtol=0.05, atol=0)


def test_only_the_parameters_that_are_trained_count() -> None:
    network, pair = wide(64), data()
    head = convergence(n2g.linearize(network, only="2.*"), pair)
    assert head.max_learning_rate > convergence(network, pair).max_learning_rate


def test_the_expectation_over_an_ensemble_is_that_of_its_law() -> None:
    network, (x, y) = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), data()
    limit = n2g.infinite_width(network, weight_var=2.0, bias_var=0.1)
    found = convergence(limit, (x, y), learning_rate=1e-4)
    law = n2g.gradient_flow(limit, (x, y), learning_rate=1e-4).at([0.0, 1e4, 1e6])
    expected = ((law.mean - y).square() + law.variance).mean((-2, -1)) / 2
    torch.testing.assert_close(found.loss([0, 10**4, 10**6]), expected, rtol=1e-3, atol=0)


def test_float32_networks_and_a_single_point_are_taken() -> None:
    x, y = data(1, 2)
    found = convergence(wide(8, torch.float32), (x.float(), y.float()))
    assert found.eigenvalues.dtype == DOUBLE
    assert found.rank == 2
    assert "rank=2 of 2" in repr(found)
    assert "<table>" in found._repr_html_()


def test_bad_input_is_refused() -> None:
    network, (x, y) = linear(), data()
    with pytest.raises(InputError, match=r"learning_rate must be positive"):
        convergence(network, (x, y), learning_rate=-1.0)
    with pytest.raises(InputError, match=r"momentum must be at least 0 and below 1"):
        convergence(network, (x, y), momentum=1.0)
    with pytest.raises(
        InputError, match=r"steps must be whole numbers or math\.inf.*gradient_flow"
    ):
        convergence(network, (x, y)).loss(0.5)
    with pytest.raises(InputError, match=r"steps must be zero or positive"):
        convergence(network, (x, y)).loss(-1)
    with pytest.raises(InputError, match=r"steps must be a number.*steps=10"):
        convergence(network, (x, y)).loss("ten")
    with pytest.raises(InputError):
        convergence(network, (x, torch.arange(12) % 2))


def test_the_figure_shows_predicted_and_measured_losses() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    found = convergence(linear(), data())
    ax = plot_convergence(None, found, measured=([0, 1, 10], found.loss([0, 1, 10]).tolist()))
    assert [line.get_label() for line in ax.get_lines()] == [
        "measured",
        "predicted",
        "time constants",
    ]
    assert list(ax.get_lines()[0].get_xdata()) == [1, 10]
    losses = found.loss([0, 1, 10]).requires_grad_()
    ax = plot_convergence(None, found, measured=(torch.tensor([0, 1, 10]), losses))
    assert list(ax.get_lines()[0].get_xdata()) == [1, 10]
    with pytest.raises(InputError, match=r"measured needs a loss at the first step or later"):
        plot_convergence(None, found, measured=([0], [1.0]))
