"""Laws of the programs on training: networks trained at once, flows, tangent kernels and norms."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import net2gp as n2g
from net2gp.limits import infinite_width

PAPERS = Path(__file__).parents[2] / "papers"


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


studies = load(PAPERS / "studies.py", "studies")
lee, jacot, bietti = (
    load(PAPERS / name / "run.py", f"papers_{name}")
    for name in ("lee2019", "jacot2018", "bietti2019")
)

TANH = studies.Architecture(2, 2, nn.Tanh(), weight_var=1.5, bias_var=0.1)
RELU = studies.Architecture(2, 2, nn.ReLU(), weight_var=2.0, bias_var=0.1)
GELU = studies.Architecture(2, 1, nn.GELU(), weight_var=1.5, bias_var=0.1)
SKEWED = replace(GELU, skewed=True)


def drawn(architecture, width=16, count=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return studies.Networks.draw(architecture, width, count, generator)


def points(count=6):
    angles = torch.linspace(0, 6, count)
    return studies.circle(angles), angles.sin()


@pytest.mark.parametrize("architecture", [TANH, RELU], ids=["tanh", "relu"])
def test_networks_at_once_compute_what_each_computes_alone(architecture):
    networks, (x, _) = drawn(architecture), points()
    for index, f in enumerate(networks(x)):
        torch.testing.assert_close(networks.module(index)(x)[:, 0], f)
    torch.testing.assert_close(networks.factors(x)[0], networks(x))


@pytest.mark.parametrize("architecture", [TANH, RELU], ids=["tanh", "relu"])
def test_a_step_at_once_is_gradient_descent_with_variances_for_learning_rates(architecture):
    networks, (x, y) = drawn(architecture), points()
    modules = [networks.module(index) for index in range(3)]
    expected = []
    for module in modules:
        params = dict(module.named_parameters())
        loss = (module(x)[:, 0] - y).square().mean() / 2
        gradients = torch.autograd.grad(loss, list(params.values()))
        with torch.no_grad():
            # module() shares memory with the networks
            expected.append(
                {
                    name: value - 0.3 * networks.variances[name] * gradient
                    for (name, value), gradient in zip(params.items(), gradients, strict=True)
                }
            )
    networks.step_(x, y, 0.3)
    for index, params in enumerate(expected):
        for name, value in networks.module(index).named_parameters():
            torch.testing.assert_close(value.detach(), params[name])


def test_descent_in_these_rates_has_the_tangent_kernel_of_the_limit():
    networks, (x, _) = drawn(TANH, width=512, count=8), points()
    limit = infinite_width(TANH.module(1), **TANH.prior).ntk(x.double())
    found = jacot.kernels(networks, x)
    error = found.std(0) / len(found) ** 0.5
    assert ((found.mean(0) - limit).abs() < 4 * error).all()


def test_square_norm_of_features_is_the_trace_of_the_kernel():
    networks, (x, _) = drawn(RELU), points()
    _, features = networks.factors(x)
    trace = jacot.kernels(networks, x).diagonal(dim1=1, dim2=2).sum(1)
    torch.testing.assert_close(jacot.inner(networks, features, features), trace, rtol=1e-5, atol=0)


@given(st.floats(0.001, 0.1), st.floats(0.1, 2.0), st.floats(1.0, 1.5))
@settings(max_examples=30, deadline=None)
def test_growing_steps_end_each_stage_at_its_time(first, largest, growth):
    times = [0.5, 4.0, 10.0]
    stages = studies.growing_steps(first, largest, times, growth)
    for number, time in enumerate(times):
        assert sum(sum(stage) for stage in stages[: number + 1]) == pytest.approx(time)
    assert max(map(max, stages)) <= largest * (1 + 1e-9)


@given(st.floats(-3, 3), st.floats(0.01, 100))
@settings(max_examples=30, deadline=None)
def test_slope_finds_the_exponent_of_a_power(exponent, scale):
    x = [1.0, 2.0, 5.0, 20.0]
    fit = studies.Slope.fit(x, scale * torch.tensor(x, dtype=torch.float64) ** exponent)
    assert fit.value == pytest.approx(exponent, abs=1e-8)
    assert fit.error < 1e-6


def test_standard_error_of_a_slope_is_the_spread_of_fits():
    x = [2.0**k for k in range(8)]
    noise = 0.3 * torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    fits = [studies.Slope.fit(x, row.exp()) for row in noise]
    spread = torch.tensor([fit.value for fit in fits]).std()
    stated = torch.tensor([fit.error for fit in fits]).square().mean().sqrt()
    assert float(stated / spread) == pytest.approx(1.0, abs=0.12)


def test_chance_of_a_slope_is_the_spread_over_other_repetitions():
    x = [2.0**k for k in range(6)]
    spreads = torch.tensor([1.0, 0.7, 0.5, 0.4, 0.3, 0.2])[:, None]
    noise = spreads * torch.randn(400, 6, 8, generator=torch.Generator().manual_seed(0))
    fits = [studies.Slope.fit(x, one.exp()) for one in noise]
    spread = torch.tensor([fit.value for fit in fits]).std()
    stated = torch.tensor([fit.chance for fit in fits]).square().mean().sqrt()
    assert float(stated / spread) == pytest.approx(1.0, abs=0.12)
    assert studies.Slope.fit(x, noise[0, :, 0].exp()).chance == 0.0


def test_chi_square_numbers_become_standard_normal():
    sums = torch.randn(400, 5, generator=torch.Generator().manual_seed(0)).square().sum(1)
    normal = torch.tensor([studies.as_normal(float(value), 5) for value in sums])
    assert abs(float(normal.mean())) < 4 / 400**0.5
    assert float(normal.std()) == pytest.approx(1.0, abs=4 / 800**0.5)


def small_ensemble(seed, **changes):
    defaults = {"device": "cpu", "count": 60, "width": 128, "at_once": 30, "seed": seed}
    return lee.train(argparse.Namespace(**{**defaults, **changes}))


def test_trained_networks_have_the_law_of_the_flow():
    rows = lee.compare(small_ensemble(seed=3))
    assert len(rows) == 8
    assert all(row.agrees for row in rows), rows


def test_comparison_refuses_another_law():
    ensemble = small_ensemble(seed=3)
    wrong = lee.Ensemble(
        ensemble.flow.ntk_gp(), ensemble.times, ensemble.angles, ensemble.functions
    )
    rows = {row.name: row for row in lee.compare(wrong)}
    assert not rows["t = inf  covariance, all points"].agrees
    shifted = lee.Ensemble(ensemble.flow, ensemble.times, ensemble.angles, ensemble.functions + 0.2)
    assert not {row.name: row for row in lee.compare(shifted)}["t = 60   mean, all points"].agrees


@pytest.mark.parametrize(
    "likelihood", [n2g.Gaussian(1.0), n2g.Bernoulli()], ids=["squared", "logistic"]
)
def test_descent_tends_to_flow_with_order_one(likelihood):
    steps = [1 / 16, 1 / 32, 1 / 64]
    fit = studies.Slope.fit(steps, lee.gap_in_function_space(steps, likelihood))
    assert fit.value == pytest.approx(1.0, abs=0.05)


def test_paths_of_two_weights_tend_to_flow_with_order_one():
    steps = [0.4, 0.2, 0.1]
    flow, _, gaps = lee.paths(steps)
    assert studies.Slope.fit(steps, gaps).value == pytest.approx(1.0, abs=0.1)
    losses = lee.landscape(flow)
    assert (losses.diff() <= 1e-9).all()


def test_wider_networks_move_less_and_are_nearer_to_their_limit():
    options = argparse.Namespace(device="cpu", seeds=8, seed=0)
    torch.manual_seed(0)
    narrow, wide = (jacot.train(jacot.STUDIES["tanh"], width, options) for width in (32, 256))
    slopes = {
        name: math.log(float(wide[name].log().mean().exp() / narrow[name].log().mean().exp()), 8)
        for name in studies.expected_of(jacot.__file__)["tanh"]
    }
    for name, expected in studies.expected_of(jacot.__file__)["tanh"].items():
        assert slopes[name] == pytest.approx(expected, abs=0.3), name


def test_skewed_weights_have_no_mean_and_the_variance_of_normal_ones():
    normal, skewed = (drawn(one, width=20_000, count=1) for one in (GELU, SKEWED))
    assert torch.equal(normal.weights[0], skewed.weights[0])
    for networks, third, fourth in ((normal, 0.0, 3.0), (skewed, 2.0, 9.0)):
        w = networks.weights[-1].double().flatten() / networks.rates[-1] ** 0.5
        for power, moment in ((1, 0.0), (2, 1.0), (3, third), (4, fourth)):
            error = float((w**power).std()) / len(w) ** 0.5
            assert abs(float((w**power).mean()) - moment) < 4 * error, power


def tangent(networks, x):
    """The tangent kernels of all networks, in the precision of their weights: (S, N, N)."""
    layers = zip(networks.rates, networks.factors(x)[1], strict=True)
    bias = networks.architecture.bias_var
    return sum((rate * h @ h.mT + bias) * (g @ g.mT) for rate, (h, g) in layers)


def mean_drift(architecture, x, width):
    """-E dΘ/dt of one hidden layer of GELU units for residuals of one, if E ω³ = 2, by quadrature."""
    root, weight = np.polynomial.hermite_e.hermegauss(40)
    nodes = torch.tensor(list(itertools.product(root, repeat=3)))
    weights = torch.tensor(list(itertools.product(weight, repeat=3))).prod(1) / (2 * math.pi) ** 1.5
    v, b = architecture.weight_var, architecture.bias_var
    below = v * x @ x.T / 2 + b
    u = nodes @ torch.cat([x * (v / 2) ** 0.5, x.new_full((len(x), 1), b**0.5)], 1).T
    density = (-u.square() / 2).exp() / (2 * math.pi) ** 0.5
    first, second = torch.special.ndtr(u) + u * density, (2 - u.square()) * density
    third = torch.einsum("q,qx,qy,qz->xyz", weights, second, first, first)
    half = below * torch.einsum("xz,xyz->xy", below, third) / len(x)
    return 2 * v**1.5 / width**0.5 * (half + half.mT)


@pytest.mark.parametrize(("architecture", "skewness"), [(GELU, 0.0), (SKEWED, 1.0)])
def test_kernels_move_on_average_by_the_third_moment_of_the_last_weights(architecture, skewness):
    width, x = 32, studies.circle(torch.tensor([0.0, 1.0, 2.5], dtype=torch.float64))
    networks = drawn(architecture, width, count=16_000)
    double = ([p.double() for p in ps] for ps in (networks.weights, networks.biases))
    networks = studies.Networks(architecture, *double)
    moved = []
    for step in (1e-3, -1e-3):
        one = networks.copy()
        one.step_(x, networks(x) - 1.0, step)
        moved.append(tangent(one, x))
    drift = (moved[1] - moved[0]) / 2e-3
    expected, error = mean_drift(architecture, x, width), drift.std(0) / len(drift) ** 0.5
    assert ((drift.mean(0) - skewness * expected).abs() < 4 * error).all()
    assert (expected.diagonal() > 20 * error.diagonal()).all()  # or it would prove nothing


def test_spectral_norm_is_the_largest_singular_value():
    torch.manual_seed(0)
    for shape in ((3, 200, 200), (3, 200, 2), (3, 1, 200)):
        matrices = torch.randn(shape)
        exact = torch.linalg.matrix_norm(matrices, 2).double()
        torch.testing.assert_close(studies.spectral(matrices), exact, rtol=0.01, atol=0)


def test_norm_is_the_same_in_functions_and_in_weights():
    assert all(row.agrees for row in bietti.norms())


def test_norm_grows_with_points_and_falls_with_noise():
    x, y = bietti.noisy_data()
    kernel = bietti.LIMIT.ntk
    by_points = [float(n2g.explain.rkhs_norm(kernel, (x[:n], y[:n]))) for n in (1, 4, 8, 16)]
    assert by_points == sorted(by_points)
    by_noise = [
        float(n2g.explain.rkhs_norm(kernel, (x, y), noise_var=v)) for v in (0.0, 0.1, 1.0, 10.0)
    ]
    assert by_noise == sorted(by_noise, reverse=True)
    twice = float(n2g.explain.rkhs_norm(kernel, (x, 2 * y)))
    assert twice == pytest.approx(4 * float(n2g.explain.rkhs_norm(kernel, (x, y))))


def test_functions_change_no_more_than_their_norm_allows():
    x, y = bietti.noisy_data()
    kernel = bietti.LIMIT.ntk
    posterior = n2g.condition(kernel, (x, y), n2g.Gaussian(noise_var=1e-8))
    x_grid = studies.circle(bietti.GRID)
    f, K = posterior.joint(x_grid).mean, kernel(x_grid)
    distance = (K.diagonal()[:, None] + K.diagonal() - 2 * K).clamp(min=0).sqrt()
    bound = n2g.explain.rkhs_norm(kernel, (x, y)).sqrt() * distance
    assert ((f[:, None] - f).abs() <= bound + 1e-6).all()


def test_features_of_the_relu_tangent_kernel_are_rougher_than_of_its_nngp():
    _, axis = studies.panels(1)
    assert all(row.agrees for row in bietti.smoothness(axis))


@pytest.mark.parametrize(("found", "agrees"), [(0.4, True), (0.6, True), (0.7, False)])
def test_a_row_agrees_within_its_tolerance(found, agrees):
    assert studies.Row("", 0.5, found, 0.15).agrees is agrees
    assert studies.Row("", 0.5, -9.0, 0.15, at_most=True).agrees
    assert studies.Row("", 0.5, found, 0.15, at_most=True).agrees is agrees


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [lee, jacot, bietti], ids=["lee2019", "jacot2018", "bietti2019"]
)
def test_program_finds_what_is_expected(program, tmp_path):
    assert program.main(["--out", str(tmp_path)]) == 0
    assert list(tmp_path.glob("*.png"))
