"""Laws of expectations at every variance: against independent rules, from 1e-8 to 1e12."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import net2gp as n2g
from limits.gaussian_references import line, pair
from net2gp.errors import InputError
from net2gp.limits.duals.activations import activation_of
from net2gp.limits.duals.quadrature import Quadrature, mixed_dual
from net2gp.limits.modules import pointwise as points


def sigmoid(x):
    small = np.exp(-np.abs(x))
    return np.where(x > 0, 1 / (1 + small), small / (1 + small))


def bump(x):
    small = np.exp(-np.abs(x))
    return small / (1 + small) ** 2


# a function and its derivative, features next to zero
FUNCTIONS = {
    "Tanh": (nn.Tanh(), np.tanh, lambda x: 4 * bump(2 * x)),
    "Sigmoid": (nn.Sigmoid(), sigmoid, bump),
    "SiLU": (nn.SiLU(), lambda x: x * sigmoid(x), lambda x: sigmoid(x) + x * bump(x)),
    "Softplus": (nn.Softplus(), lambda x: np.logaddexp(x, 0), sigmoid),
    "ELU": (
        nn.ELU(),
        lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
        lambda x: np.where(x > 0, 1.0, np.exp(np.minimum(x, 0))),
    ),
    "Softsign": (nn.Softsign(), lambda x: x / (1 + abs(x)), lambda x: (1 + abs(x)) ** -2.0),
    "LogSigmoid": (nn.LogSigmoid(), lambda x: -np.logaddexp(-x, 0), lambda x: sigmoid(-x)),
    "Tanhshrink": (nn.Tanhshrink(), lambda x: x - np.tanh(x), lambda x: np.tanh(x) ** 2),
}
each = pytest.mark.parametrize("name", FUNCTIONS)
VARIANCES = [1e-8, 1e-4, 1.0, 1e2, 2.5e5, 1e6, 1e9, 1e12]


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@each
def test_squares_hold_their_digits_at_every_variance(name):
    layer, f, slope = FUNCTIONS[name]
    found = activation_of(layer).variance(tensor(*VARIANCES), True)
    for function, values in zip((f, slope), found, strict=True):
        for var, value in zip(VARIANCES, values.tolist(), strict=True):
            # next to zero x − tanh(x) itself cancels
            tolerance = 1e-7 if name == "Tanhshrink" and var < 1e-3 else 1e-11
            assert value == pytest.approx(line(lambda x: function(x) ** 2, var), rel=tolerance)


@each
@pytest.mark.parametrize(
    "var",
    [2.5e5, *(pytest.param(var, marks=pytest.mark.slow) for var in (1e-8, 1.0, 1e4, 1e9, 1e12))],
)
def test_pairs_hold_their_digits_at_every_variance_and_angle(name, var):
    layer, f, slope = FUNCTIONS[name]
    if name == "Tanhshrink" and var < 1e-3:
        pytest.skip("x − tanh(x) itself cancels next to zero")
    angles = tensor(0.0, 1e-3, 0.1, math.pi / 2, math.pi - 1e-3, math.pi)
    q = torch.full_like(angles, var)
    cov = q * torch.cos(angles)
    # the angle that the rounded covariance has
    angles = 2 * torch.atan2(torch.sqrt(q - cov), torch.sqrt(q + cov))
    found = activation_of(layer).dual(cov, q, q, True)
    for function, values in zip((f, slope), found, strict=True):
        size = line(lambda x: function(x) ** 2, var)
        wanted = [pair(function, function, angle, var, var) for angle in angles.tolist()]
        assert np.abs(values.numpy() - wanted).max() < 1e-11 * size


def test_pairs_of_unlike_variances_hold_their_digits():
    act, q1, q2 = activation_of(nn.Tanh()), 1e-2, 1e9
    for angle in (0.3, 2.0):
        cov = math.sqrt(q1 * q2) * math.cos(angle)
        value = act.dual(tensor(cov), tensor(q1), tensor(q2), False)[0].item()
        assert value == pytest.approx(pair(np.tanh, np.tanh, angle, q1, q2), abs=1e-11)


def test_the_tangent_kernel_of_raw_features_is_that_of_the_formula():
    x = 1000 * torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    network = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    kernel = n2g.ntk(network)
    for var, value in zip((x * x).mean(1).tolist(), kernel(x).diagonal().tolist(), strict=True):
        squares = line(lambda u: np.tanh(u) ** 2, var)
        assert value == pytest.approx(
            squares + var * line(lambda u: (4 * bump(2 * u)) ** 2, var), rel=1e-11
        )
    torch.testing.assert_close(kernel(x), kernel(x, x.clone()), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "layer", [nn.Tanh(), nn.ELU(), nn.Hardtanh(), nn.ReLU6(), nn.GELU(), points.Erf()], ids=str
)
@pytest.mark.parametrize("scale", [1e-3, 1e5])
def test_a_copy_of_the_points_has_the_same_kernel(layer, scale):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    network = nn.Sequential(nn.Linear(3, 8), layer, nn.Linear(8, 8), layer, nn.Linear(8, 1))
    kernel = n2g.ntk(network, weight_var=1.5, bias_var=0.1)
    same, copy = kernel(scale * x), kernel(scale * x, (scale * x).clone())
    # θ of a kink in φ' carries the square root of the rounding of the correlation
    assert (same - copy).abs().max() < 1e-7 * same.abs().max()


@pytest.mark.parametrize(
    "layer",
    [nn.Hardtanh(), nn.ReLU6(), nn.Hardsigmoid(), nn.Softshrink(), points.Erf(), nn.GELU()],
    ids=str,
)
def test_closed_forms_are_the_integrals_at_every_variance(layer):
    act = activation_of(layer)
    integral = Quadrature(act, act.kinks)
    rho = tensor(1 - 1e-4, 0.5, 0.0, -1 + 1e-4, 1.0, -1.0)
    for var in VARIANCES:
        q = torch.full_like(rho, var)
        found = act.dual(rho * q, q, q, True)
        wanted = mixed_dual(integral, integral, rho * q, q, q, True)
        sizes = integral.variance(tensor(var), True)
        for a, b, size in zip(found, wanted, sizes, strict=True):
            assert (a - b).abs().max() <= 1e-10 * size.item()


def test_narrow_bumps_are_seen():
    for place, width in ((0.0, 0.01), (0.37, 0.01), (-2.1, 0.02), (1.0, 0.005)):
        act = Quadrature(lambda u, p=place, w=width: torch.exp(-(((u - p) / w) ** 2)))
        # the square is a bump of width w/√2, times the density: a Gaussian integral
        var = width**2 / 4
        wanted = width * math.sqrt(math.pi / 2) * math.exp(-0.5 * place**2 / (1 + var))
        wanted /= math.sqrt(2 * math.pi * (1 + var))
        assert act.variance(tensor(1.0), False)[0].item() == pytest.approx(wanted, rel=1e-10)


def test_erf_in_single_precision_is_the_double_at_large_variances():
    x = 1000 * torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    kernel = n2g.ntk(nn.Sequential(nn.Linear(5, 8), points.Erf(), nn.Linear(8, 1)))
    wanted = kernel(x.double())
    assert (kernel(x).double() - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert (kernel(x, x.clone()).double() - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("layer", [nn.Tanh(), nn.ReLU()], ids=str)
def test_inputs_that_overflow_are_refused_by_name(layer):
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    kernel = n2g.nngp(nn.Sequential(nn.Linear(3, 8), layer, nn.Linear(8, 1)))
    with pytest.raises(InputError, match=r"too large. Divide x by its standard deviation"):
        kernel(1e30 * x)
    posterior = n2g.condition(kernel, (x, y), n2g.Gaussian(0.1))
    if isinstance(layer, nn.Tanh):
        with pytest.raises(InputError, match=r"Divide x by its standard deviation"):
            posterior.predict(1e30 * x)


def test_equal_points_of_enormous_variance_are_integrated_and_near_ones_refused():
    act = activation_of(nn.Tanh())
    q = tensor(1e18)
    assert act.dual(q, q, q, False)[0].item() == pytest.approx(1.0, abs=1e-8)
    assert act.dual(0.3 * q, q, q, False)[0].item() == pytest.approx(
        2 / math.pi * math.asin(0.3), abs=1e-8
    )
    with pytest.raises(InputError, match=r"variance 1.0e\+18, at which rounding hides"):
        act.dual(q * (1 - 1e-9), q, q, True)
