"""Laws of signal propagation: fixed points, phases, depth scales, the critical line."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq
from torch import nn

from net2gp.errors import InputError
from net2gp.limits.duals.activations import activation_of
from net2gp.limits.phase import (
    correlation_fixed_point,
    critical_line,
    depth_scales,
    fixed_point,
    phase_diagram,
)
from net2gp.limits.propagation.layer_maps import slope, variance_map, variance_slope

VARIANCES = st.floats(0.1, 6.0)
weights = pytest.mark.parametrize("weight_var", [0.5, 1.3, 2.0, 5.0])
activations = pytest.mark.parametrize(
    "activation", [nn.Tanh(), nn.ReLU(), nn.LeakyReLU(0.2), nn.GELU(), nn.Sigmoid()], ids=str
)


def iterate(activation, q, weight_var, bias_var, steps):
    for _ in range(steps):
        q = variance_map(activation, q, weight_var, bias_var)
    return q


def gaussian_mean(function, q):
    density = lambda z: function(math.sqrt(q) * z) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return quad(density, -12, 12, epsabs=1e-13, epsrel=1e-13, limit=400, points=[0])[0]


def test_the_fixed_point_is_left_alone_by_the_variance_map():
    grid = torch.linspace(0.2, 6, 25, dtype=torch.float64)
    for bias_var in (0.0, 0.01, 0.5, 2.0):
        q = fixed_point(nn.Tanh(), grid, bias_var)
        torch.testing.assert_close(
            variance_map(nn.Tanh(), q, grid, bias_var), q, rtol=1e-10, atol=1e-11
        )


@weights
@activations
def test_the_fixed_point_is_where_the_iteration_ends(activation, weight_var):
    settled = iterate(activation, torch.tensor(1.0).double(), weight_var, 0.3, 150)
    q = fixed_point(activation, weight_var, 0.3)
    if q.isinf():
        assert settled > 30
    else:
        torch.testing.assert_close(settled, q, rtol=1e-7, atol=1e-9)


@settings(deadline=None, max_examples=20)
@given(weight_var=st.floats(0.05, 1.99), bias_var=st.floats(1e-3, 5.0))
def test_relu_settles_at_the_bias_over_one_minus_half_the_weight(weight_var, bias_var):
    expected = bias_var / (1 - weight_var / 2)
    assert float(fixed_point(nn.ReLU(), weight_var, bias_var)) == pytest.approx(expected, rel=1e-9)
    assert float(slope(nn.ReLU(), expected, weight_var)) == pytest.approx(weight_var / 2)


def test_relu_diverges_dies_out_or_keeps_its_variance():
    q = fixed_point(nn.ReLU(), torch.tensor([1.9, 2.0, 2.1]), 0.0, start=3.0)
    assert q.tolist() == [0.0, 3.0, math.inf]
    assert fixed_point(nn.ReLU(), 2.0, 0.1).isinf()


def test_a_signal_without_bias_dies_out_below_weight_variance_one_in_tanh():
    q = fixed_point(nn.Tanh(), torch.tensor([0.3, 0.99, 1.01, 1.5]), 0.0)
    assert (q[:2] == 0).all()
    assert (q[2:] > 1e-3).all()
    # tanh² = u² − 2u⁴/3 + …, so V(q) = σ_w² (q − 2q² + …) and q* ≈ (σ_w² − 1) / 2 near one
    assert float(fixed_point(nn.Tanh(), 1.0002, 0.0)) == pytest.approx(1e-4, rel=2e-3)


@pytest.mark.parametrize("bias_var", [0.01, 0.5, 2.0])
def test_the_critical_line_of_tanh_is_that_of_direct_quadrature(bias_var):
    square = lambda q: gaussian_mean(lambda u: np.tanh(u) ** 2, q)
    slopes = lambda q: gaussian_mean(lambda u: np.cosh(u) ** -4, q)
    q = brentq(lambda q: q - square(q) / slopes(q) - bias_var, 0.01, 20, xtol=1e-13)
    found = critical_line(nn.Tanh(), bias_var)
    assert float(found) == pytest.approx(1 / slopes(q), rel=1e-9)
    assert float(fixed_point(nn.Tanh(), found, bias_var)) == pytest.approx(q, rel=1e-8)


def test_on_the_critical_line_the_slope_is_one_and_beside_it_order_and_chaos_lie():
    biases = torch.tensor([0.02, 0.3, 1.5], dtype=torch.float64)
    line = critical_line(nn.Tanh(), biases)
    for factor, sign in ((0.99, -1), (1.0, 0), (1.01, 1)):
        q = fixed_point(nn.Tanh(), line * factor, biases)
        excess = slope(nn.Tanh(), q, line * factor) - 1
        assert (torch.where(excess.abs() < 1e-9, 0, excess.sign()) == sign).all()


def test_critical_points_without_bias_are_the_inverse_mean_squared_slopes():
    assert float(critical_line(nn.ReLU(), 0.0)) == pytest.approx(2.0)
    assert float(critical_line(nn.LeakyReLU(0.5), 0.0)) == pytest.approx(2 / 1.25)
    assert float(critical_line(nn.Identity(), 0.0)) == pytest.approx(1.0)
    assert float(critical_line(nn.Tanh(), 0.0)) == pytest.approx(1.0, abs=1e-8)


def test_gelu_has_its_known_point_where_both_slopes_are_one():
    # Roberts, Yaida & Hanin (2022), section 5.3.4
    q, weight_var, bias_var = (3 + 17**0.5) / 2, 1.98305826, 0.17292239
    assert float(variance_map(nn.GELU(), q, weight_var, bias_var)) == pytest.approx(q, abs=1e-7)
    assert float(slope(nn.GELU(), q, weight_var)) == pytest.approx(1, abs=1e-8)
    assert float(variance_slope(nn.GELU(), q, weight_var)) == pytest.approx(1, abs=1e-8)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Identity()], ids=str)
def test_homogeneous_activations_have_no_critical_line_with_a_bias(activation):
    with pytest.raises(InputError, match=r"no critical weight variance at bias_var=0\.1"):
        critical_line(activation, 0.1)


@pytest.mark.parametrize("q", [0.05, 1.0, 30.0])
def test_the_variance_slope_is_that_of_schoenholz_by_direct_quadrature(q):
    tanh, first = np.tanh, lambda u: 1 - np.tanh(u) ** 2
    second = lambda u: -2 * np.tanh(u) * (1 - np.tanh(u) ** 2)
    expected = gaussian_mean(lambda u: first(u) ** 2 + tanh(u) * second(u), q)
    assert float(variance_slope(nn.Tanh(), q, 1.7)) == pytest.approx(1.7 * expected, rel=1e-7)
    chi = 1.7 * gaussian_mean(lambda u: first(u) ** 2, q)
    assert float(slope(nn.Tanh(), q, 1.7)) == pytest.approx(chi, rel=1e-8)


@settings(deadline=None, max_examples=15)
@given(weight_var=VARIANCES, bias_var=st.floats(0.0, 2.0))
def test_correlations_end_at_one_exactly_where_the_network_is_not_chaotic(weight_var, bias_var):
    q = fixed_point(nn.Tanh(), weight_var, bias_var)
    chaotic = bool(slope(nn.Tanh(), q, weight_var) > 1 + 1e-9)
    c = correlation_fixed_point(nn.Tanh(), weight_var, bias_var)
    assert bool(c < 1) == chaotic
    assert 0 <= c <= 1


@pytest.mark.parametrize(("weight_var", "bias_var"), [(2.0, 0.05), (4.0, 0.3), (1.8, 0.05)])
def test_layers_bring_every_correlation_nearer_to_its_fixed_point(weight_var, bias_var):
    phi = activation_of(nn.Tanh())
    q = fixed_point(nn.Tanh(), weight_var, bias_var)
    star = correlation_fixed_point(nn.Tanh(), weight_var, bias_var)
    below, above = (
        torch.linspace(0, 1, 9).double() * star,
        1 - torch.linspace(0.1, 1, 9) * (1 - star),
    )
    for c in (below, above):
        step = (weight_var * phi.dual(c * q, q, q, False)[0] + bias_var) / q - c
        assert (step * (star - c) > -1e-11).all()
        assert (step.abs() <= (star - c).abs() + 1e-11).all()
    assert abs(step[-1]) < 1e-10
    assert step[0] < -1e-8


def test_an_odd_activation_without_bias_decorrelates_inputs_in_chaos():
    assert float(correlation_fixed_point(nn.Tanh(), 3.0, 0.0)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("weight_var", "bias_var"), [(1.3, 0.05), (3.0, 0.1)])
def test_deviations_decay_over_the_depth_scales(weight_var, bias_var):
    phi, scales = activation_of(nn.Tanh()), depth_scales(nn.Tanh(), weight_var, bias_var)
    q_star = fixed_point(nn.Tanh(), weight_var, bias_var)
    q = iterate(nn.Tanh(), q_star * (1 + 1e-4), weight_var, bias_var, 1)
    rate = -torch.log((q - q_star) / (q_star * 1e-4))
    assert float(scales.variance * rate) == pytest.approx(1, rel=1e-3)
    star = correlation_fixed_point(nn.Tanh(), weight_var, bias_var)
    c = (
        weight_var * phi.dual((star - 1e-4) * q_star, q_star, q_star, False)[0] + bias_var
    ) / q_star
    assert float(scales.correlation * -torch.log((star - c) / 1e-4)) == pytest.approx(1, rel=2e-3)


def test_the_correlation_depth_scale_diverges_towards_the_critical_line():
    line = critical_line(nn.Tanh(), 0.05)
    for side in (-1, 1):
        near = torch.stack([line * (1 + side * gap) for gap in (1e-1, 1e-2, 1e-3, 1e-4)])
        scales = depth_scales(nn.Tanh(), near, 0.05)
        assert (scales.correlation.diff() > 0).all()
        assert scales.correlation[-1] > 500
        assert (scales.variance < 20).all()


def test_relu_correlations_approach_one_more_slowly_than_any_exponential_without_bias():
    for weight_var in (1.0, 2.0, 3.0):
        assert depth_scales(nn.ReLU(), weight_var, 0.0).correlation.isinf()


def test_a_phase_diagram_is_its_parts_point_by_point():
    w, b = torch.tensor([0.7, 1.76, 4.0]).double(), torch.tensor([0.0, 0.05]).double()
    grid = phase_diagram(nn.Tanh(), w, b)
    for i, bias_var in enumerate(b):
        for j, weight_var in enumerate(w):
            q = fixed_point(nn.Tanh(), weight_var, bias_var)
            scales = depth_scales(nn.Tanh(), weight_var, bias_var)
            torch.testing.assert_close(grid.variance[i, j], q)
            torch.testing.assert_close(grid.slope[i, j], slope(nn.Tanh(), q, weight_var))
            torch.testing.assert_close(
                grid.correlation[i, j], correlation_fixed_point(nn.Tanh(), weight_var, bias_var)
            )
            torch.testing.assert_close(grid.depth_scales.variance[i, j], scales.variance)
            torch.testing.assert_close(grid.depth_scales.correlation[i, j], scales.correlation)
    assert grid.labels == [["ordered", "chaotic", "chaotic"], ["ordered", "ordered", "chaotic"]]


def test_a_module_and_its_activation_give_the_same():
    phi = activation_of(nn.Tanh())
    assert fixed_point(phi, 2.0, 0.1) == fixed_point(nn.Tanh(), 2.0, 0.1)
    assert critical_line(phi, 0.1) == critical_line(nn.Tanh(), 0.1)


def test_bad_hyperparameters_are_named():
    with pytest.raises(InputError, match="weight_var must be positive and finite, but -1"):
        fixed_point(nn.Tanh(), -1.0, 0.1)
    with pytest.raises(InputError, match="bias_var must be zero or positive and finite, but -2"):
        critical_line(nn.Tanh(), -2.0)
    with pytest.raises(InputError, match="weight_vars must be a vector, but has shape"):
        phase_diagram(nn.Tanh(), torch.ones(2, 2), torch.ones(2))
    with pytest.raises(InputError, match="q must be zero or positive, but has -1"):
        slope(nn.Tanh(), -1.0, 1.0)


def paper():
    path = Path(__file__).parents[2] / "papers" / "schoenholz2017" / "run.py"
    spec = importlib.util.spec_from_file_location("schoenholz2017", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_numbers_of_deep_information_propagation_are_reproduced():
    run = paper()
    rows = run.table()
    assert len(rows) == 2 * sum(len(run.expectations()[part]) for part in ("critical", "settled"))
    assert max(row.error for row in rows) <= run.expectations()["tolerance"]["relative"]


@pytest.mark.slow
def test_the_figure_of_deep_information_propagation_is_drawn(tmp_path, capsys):
    assert paper().main(["--out", str(tmp_path), "--size", "20"]) == 0
    assert (tmp_path / "phase_diagram.png").stat().st_size > 20_000
    assert "critical weight_var" in capsys.readouterr().out
