"""Laws of the numerical expectations: against nested adaptive quadrature, closed forms and each other."""

import math
from itertools import pairwise

import pytest
import torch
from scipy import integrate
from scipy.stats import multivariate_normal
from torch import nn
from torch.nn import functional as F

from net2gp.errors import InputError, NetworkError
from net2gp.limits.duals import closed_forms as closed
from net2gp.limits.duals import power_forms as powers
from net2gp.limits.duals.activations import activation_of
from net2gp.limits.duals.piecewise_linear import PiecewiseLinear, orthant
from net2gp.limits.duals.quadrature import Quadrature, mixed_dual
from net2gp.limits.integrals.expectations import jet, kinks_of
from net2gp.limits.integrals.kinks import find_breaks, find_kinks
from net2gp.limits.modules.pointwise import Pointwise

TANH = Quadrature(torch.tanh, ())
# E[tanh²] at these variances, from adaptive quadrature in one dimension
TANH_VARIANCES = [
    (0.20000000998, 0.14718182305988073),
    (1.0000000099, 0.39429449219763835),
    (2.0000000098, 0.5199757465310173),
    (5.0000000095, 0.6684448852933871),
    (10.000000009, 0.7572662770225669),
    (20.000000008, 0.8251071264724525),
    (50.000000005000004, 0.8880745116858015),
    (100.0, 0.9205368634305169),
]


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def nested(first, second, cov, var1, var2, places=((), ())):
    """E[f(u) g(v)] by two adaptive quadratures, one within the other, cut at `places`."""
    slope, rest = cov / var1, math.sqrt(var2 - cov**2 / var1)

    def density(x, sigma):
        return math.exp(-0.5 * (x / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))

    def cut(f, low, high, points):
        edges = [low, *sorted(p for p in points if low < p < high), high]
        return sum(
            integrate.quad(f, a, b, epsabs=1e-13, epsrel=1e-11)[0] for a, b in pairwise(edges)
        )

    def inner(u):
        m = slope * u
        return cut(
            lambda v: second(v) * density(v - m, rest), m - 8 * rest, m + 8 * rest, places[1]
        )

    sigma = math.sqrt(var1)
    return cut(lambda u: first(u) * density(u, sigma) * inner(u), -8 * sigma, 8 * sigma, places[0])


@pytest.mark.parametrize(("var", "wanted"), TANH_VARIANCES)
def test_tanh_variances_match_the_reference(var, wanted):
    q = tensor(var)
    assert TANH.variance(q, False)[0].item() == pytest.approx(wanted, rel=1e-12)
    assert TANH.dual(q, q, q, False)[0].item() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("cov", "var1", "var2"), [(0.6, 1.2, 0.9), (-2.5, 30.0, 0.5), (0.019, 0.02, 0.021)]
)
def test_tanh_is_the_nested_integral(cov, var1, var2):
    value, slope = TANH.dual(tensor(cov), tensor(var1), tensor(var2), True)
    assert value.item() == pytest.approx(nested(math.tanh, math.tanh, cov, var1, var2), rel=1e-10)

    def rate(x):
        return 1 / math.cosh(x) ** 2

    assert slope.item() == pytest.approx(nested(rate, rate, cov, var1, var2), rel=1e-10)


def test_kinks_away_from_zero_are_the_nested_integral():
    act = activation_of(nn.Hardtanh(-0.5, 1.0))
    cov, var1, var2 = 0.7, 1.1, 2.0
    value, slope = act.dual(tensor(cov), tensor(var1), tensor(var2), True)
    places = ((-0.5, 1.0), (-0.5, 1.0))

    def clip(x):
        return min(max(x, -0.5), 1.0)

    def inside(x):
        return float(-0.5 < x < 1.0)

    assert value.item() == pytest.approx(nested(clip, clip, cov, var1, var2, places), rel=1e-10)
    assert slope.item() == pytest.approx(nested(inside, inside, cov, var1, var2, places), rel=1e-9)


@pytest.mark.parametrize(
    "act",
    [
        closed.Erf(),
        closed.Gelu(),
        powers.ABReLU(-0.3, 1.0),
        powers.RectifiedPower(2),
        PiecewiseLinear((-0.5, 0.0, 1.0), (0.2, 1.0, -1.0, 0.5), 0.3),
    ],
    ids=str,
)
@pytest.mark.parametrize(("low", "high", "tolerance"), [(-3, 2, 1e-10), (-6, 4, 1e-8)])
def test_every_variance_and_correlation_is_right(act, low, high, tolerance):
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(2, 12, generator=generator, dtype=torch.float64)
    var1, var2 = 10 ** (low + (high - low) * x)
    gaps = tensor(0, 1e-15, 1e-12, 1e-8, 1e-4, 0.1, 0.7, 1, 1.5, 2 - 1e-6, 2 - 1e-12, 2)
    rho = 1 - gaps
    cov = rho * torch.sqrt(var1 * var2)
    value, slope = mixed_dual(act, act, cov, var1, var2, True)
    wanted, steep = act.dual(cov, var1, var2, True)
    sizes = [act.variance(var, True) for var in (var1, var2)]
    scale = torch.sqrt(sizes[0][0] * sizes[1][0])
    assert ((value - wanted).abs() / scale).max() < tolerance
    # θ = acos(ρ) of a jump in φ' carries the square root of the rounding of ρ
    safe = (gaps > 1e-14) & (gaps < 2 - 1e-14)
    scale = torch.sqrt(sizes[0][1] * sizes[1][1])
    assert ((slope - steep).abs() / scale)[safe].max() < max(tolerance, 2e-10)


@pytest.mark.parametrize("name", ["relu", "gelu", "erf", "sin", "sign"])
def test_functions_with_closed_forms_give_them(name):
    functions = {"relu": F.relu, "gelu": F.gelu, "erf": torch.erf, "sin": torch.sin}
    forms = {"relu": powers.ABReLU(), "gelu": closed.Gelu(), "erf": closed.Erf()}
    forms |= {"sin": closed.Sin(), "sign": powers.Step(2.0, -1.0)}
    found = Quadrature(functions.get(name, torch.sign))
    cov, var1, var2 = tensor(0.5, -0.2, 0.9), tensor(1.0, 0.3, 2.0), tensor(0.7, 0.5, 4.0)
    for a, b in zip(
        found.dual(cov, var1, var2, True), forms[name].dual(cov, var1, var2, True), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_orthants_are_the_distribution_function():
    generator = torch.Generator().manual_seed(0)
    x, y = 2.5 * torch.rand(2, 30, generator=generator, dtype=torch.float64)
    rho = 2 * torch.rand(30, generator=generator, dtype=torch.float64) - 1
    sine = torch.sqrt(1 - rho**2)
    found = orthant(x, y, (y - rho * x) / sine, (x - rho * y) / sine)
    for a, b, r, value in zip(x.tolist(), y.tolist(), rho.tolist(), found.tolist(), strict=True):
        wanted = multivariate_normal([0, 0], [[1, r], [r, 1]]).cdf([-a, -b])
        assert value == pytest.approx(wanted, abs=1e-13)


def test_knots_must_rise():
    with pytest.raises(InputError, match=r"knots must rise.*slopes=\(0\.0, 1\.0, 0\.0\)"):
        PiecewiseLinear((1.0, -1.0), (0.0, 1.0, 0.0))
    with pytest.raises(InputError, match="slopes be one more"):
        PiecewiseLinear((1.0,), (0.0,))


def test_kinks_are_found_where_they_are():
    def bent(u):
        return torch.where(u > 1.25, 2 * u, u + 1.25) + torch.relu(-u - 0.5) + torch.tanh(u)

    assert kinks_of(Quadrature(bent), 10.0) == pytest.approx((-0.5, 1.25), abs=1e-9)
    assert find_kinks(lambda u: jet(torch.tanh, u, 1), 100.0) == ()
    assert find_kinks(lambda u: jet(torch.sign, u, 1), 100.0) == (0.0,)


def test_kinks_that_are_found_serve_as_well_as_kinks_that_are_told():
    def bent(u):
        return (u - 0.3).abs() + 0.5 * torch.sign(u + 0.7)

    triple = tensor(0.4, -0.3), tensor(1.0, 2.0), tensor(0.6, 0.3)
    told = activation_of(Pointwise(bent, [-0.7, 0.3])).dual(*triple, True)
    found = activation_of(Pointwise(bent)).dual(*triple, True)
    torch.testing.assert_close(found, told, rtol=1e-9, atol=1e-10)


def test_breaks_resolve_oscillations():
    places = find_breaks(lambda u: [torch.sin(5 * u), 5 * torch.cos(5 * u)], (), 16.0)
    assert max(b - a for a, b in pairwise(places)) < 8
    fast = Quadrature(lambda u: torch.sin(5 * u), ())
    wanted = closed.Sin(frequency=5.0).dual(tensor(1.0), tensor(1.5), tensor(1.2), True)
    found = fast.dual(tensor(1.0), tensor(1.5), tensor(1.2), True)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def test_expectations_with_a_linear_function_obey_stein():
    cov, var1, var2 = tensor(0.5, -0.8), tensor(1.0, 3.0), tensor(0.7, 0.9)
    linear = powers.polynomial([0.0, 1.0])
    for layer in (nn.Tanh(), nn.ELU(), nn.Hardtanh(), nn.Hardshrink(0.3)):
        act = activation_of(layer)
        value, slope = mixed_dual(act, linear, cov, var1, var2, True)
        torch.testing.assert_close(value, cov * act.mean_slope(var1), rtol=1e-10, atol=1e-12)
        seen = getattr(act, "mean_gradient", act.mean_slope)(var1)
        torch.testing.assert_close(slope, seen, rtol=1e-9, atol=1e-12)


def test_a_mixed_pair_of_rectifier_and_step_is_known():
    cov, var1, var2 = tensor(0.5, -0.8, 1.0), tensor(1.0, 3.0, 1.0), tensor(0.7, 0.9, 1.0)
    rho = cov / torch.sqrt(var1 * var2)
    value, slope = mixed_dual(powers.ABReLU(), powers.Step(), cov, var1, var2, True)
    wanted = torch.sqrt(var1) * (1 + rho) / math.sqrt(8 * math.pi)
    torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12)
    assert not slope.any()  # gradients do not see the jump


def test_mixed_pairs_swap_with_their_variances():
    cov, var1, var2 = tensor(0.5, -0.8), tensor(1.0, 3.0), tensor(0.7, 0.9)
    one, two = activation_of(nn.ELU()), activation_of(nn.Softplus())
    a = mixed_dual(one, two, cov, var1, var2, True)
    b = mixed_dual(two, one, cov, var2, var1, True)
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_jumps_are_exact_at_full_correlation_and_count_nothing_in_the_slope():
    act = activation_of(nn.Hardshrink(0.5))
    q = tensor(1.0)
    value, slope = act.dual(q, q, q, True)
    torch.testing.assert_close(value, act.variance(q, False)[0], rtol=1e-10, atol=0)
    outside = torch.special.erfc(tensor(0.5 / math.sqrt(2)))
    torch.testing.assert_close(slope, outside, rtol=1e-10, atol=0)
    torch.testing.assert_close(act.variance(q, True)[1], outside, rtol=1e-10, atol=0)
    torch.testing.assert_close(act.mean_gradient(q), outside, rtol=1e-10, atol=0)


def test_the_slope_of_a_jump_refuses_to_be_differentiated():
    cov = tensor(0.5).requires_grad_()
    value, slope = activation_of(nn.Hardshrink(0.5)).dual(cov, tensor(1.0), tensor(1.0), True)
    torch.autograd.grad(value, cov, retain_graph=True)
    with pytest.raises(NetworkError, match=r"jumps \(Hardshrink\) cannot be differentiated.*NNGP"):
        slope.backward()


def test_a_variance_of_zero_is_a_constant():
    act = activation_of(nn.Softplus())
    zero, one = tensor(0.0), tensor(1.0)
    value, slope = act.dual(zero, zero, one, True)
    torch.testing.assert_close(value, math.log(2) * act.mean(one), rtol=1e-11, atol=0)
    torch.testing.assert_close(slope, 0.5 * act.mean_slope(one), rtol=1e-11, atol=0)


def test_single_precision_is_the_rounded_double():
    cov, var1, var2 = torch.tensor([0.5]), torch.tensor([1.0]), torch.tensor([0.7])
    found = TANH.dual(cov, var1, var2, True)
    wanted = TANH.dual(cov.double(), var1.double(), var2.double(), True)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=2e-7, atol=0)
