"""Laws of functions that nobody described: kinks are found, work is bounded, or the error says why."""

import math
import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import net2gp as n2g
from net2gp.errors import NetworkError
from net2gp.limits.duals.activations import activation_of
from net2gp.limits.duals.quadrature import Quadrature, mixed_dual
from net2gp.limits.integrals.expectations import jet, kinks_of
from net2gp.limits.integrals.kinks import find_breaks, find_kinks
from net2gp.limits.modules.pointwise import Pointwise

SMOOTH = [
    torch.zeros_like,
    torch.tanh,
    lambda u: 0.3 * torch.sin(u),
    lambda u: 0.2 * u * u,
    lambda u: torch.exp(-u * u),
]
BENT = {
    "relu": torch.relu,
    "abs": torch.abs,
    "step": lambda d: (d > 0).to(d) + 0 * d,
}


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def missed(smooth, parts, reach):
    """Places of the parts (place, size, kind) that a search up to ±reach does not find."""

    def function(u):
        return smooth(u) + sum(size * BENT[kind](u - place) for place, size, kind in parts)

    found = find_kinks(lambda u: jet(function, u, 1), reach)
    return [
        place
        for place, _, _ in parts
        if abs(place) < reach and not any(abs(place - k) < 1e-10 for k in found)
    ]


def drawn(rng):
    place = rng.choice([round(rng.uniform(-3, 3), 1), round(rng.uniform(-3, 3), 2), 0.0, 1.0])
    place = rng.choice([place, rng.uniform(-3, 3)])
    return place, rng.choice([1, -1]) * 10 ** rng.uniform(-2, 1), rng.choice(list(BENT))


def count_missed(count, seed):
    rng = random.Random(seed)
    total = 0
    for number in range(count):
        parts = [drawn(rng) for _ in range(1 + number % 2)]
        if len(parts) == 2 and abs(parts[0][0] - parts[1][0]) < 1e-6:
            continue
        reach = rng.choice([4.0, 8.0, 16.0, 32.0, 64.0])
        total += bool(missed(rng.choice(SMOOTH), parts, reach))
    return total


def test_kinks_and_jumps_are_found_wherever_they_are():
    assert count_missed(60, 0) == 0


@pytest.mark.slow
def test_none_of_two_thousand_kinky_functions_is_missed():
    assert count_missed(2000, 1) == 0


@settings(max_examples=25, deadline=None)
@given(
    st.floats(-5, 5),
    st.sampled_from(["relu", "abs", "step"]),
    st.sampled_from([8.0, 16.0, 4096.0]),
)
def test_one_kink_is_found_at_any_place(place, kind, reach):
    assert not missed(torch.tanh, [(place, 1.0, kind)], reach)


@pytest.mark.parametrize("place", [0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0])
def test_searched_and_declared_kinks_give_one_kernel(place):
    triple = tensor(0.4, -0.3, 1.0), tensor(1.0, 2.0, 1.0), tensor(0.6, 0.3, 1.0)
    told = activation_of(Pointwise(lambda u: torch.relu(u - place), [place])).dual(*triple, True)
    found = activation_of(Pointwise(lambda u: torch.relu(u - place))).dual(*triple, True)
    torch.testing.assert_close(found, told, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("place", [0.3, 1.0, 2.4180642, -2.4446817])
@pytest.mark.parametrize("degree", [2, 3, 5])
def test_jumps_of_higher_derivatives_are_integrated_like_declared_ones(place, degree):
    def function(u):
        return torch.relu(u - place) ** degree + 0.1 * torch.tanh(u)

    triple = tensor(0.4, 1.999), tensor(1.0, 2.0), tensor(0.6, 2.0)
    told = activation_of(Pointwise(function, [place])).dual(*triple, True)
    found = activation_of(Pointwise(function)).dual(*triple, True)
    torch.testing.assert_close(found, told, rtol=1e-10, atol=1e-12)


HARD = {
    "relu(u - 1)": lambda u: torch.relu(u - 1),
    "clamp(min=1) - 1": lambda u: u.clamp(min=1) - 1,
    "relu6(u - 3)": lambda u: F.relu6(u - 3),
    "relu(|u| - 1)": lambda u: torch.relu(u.abs() - 1),
    "tanh(1000 (u - 0.7))": lambda u: torch.tanh(1000 * (u - 0.7)),
    "relu(sin 2u)": lambda u: torch.relu(torch.sin(2 * u)),
}


@pytest.mark.parametrize("name", HARD)
def test_functions_with_features_far_out_or_narrow_take_seconds(name):
    class Own(nn.Module):
        def forward(self, u):
            return HARD[name](u)

    x = 3 * torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    started = time.process_time()
    network = nn.Sequential(nn.Linear(5, 8), Own(), nn.Linear(8, 1))
    nngp, ntk = n2g.infinite_width(network, weight_var=1.5, bias_var=0.3)(x)
    assert time.process_time() - started < 20
    z = torch.randn(2, 200_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = 1.5 * x @ x.T / 5 + 0.3
    root = torch.linalg.cholesky(inputs[:2, :2])
    outputs = torch.prod(HARD[name](root @ z), 0)
    error = float(outputs.std()) / math.sqrt(outputs.numel())
    assert abs(float(nngp[0, 1]) - 0.3 - 1.5 * float(outputs.mean())) < 7.5 * error + 1e-9
    assert torch.linalg.eigvalsh(ntk)[0] > 0


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (torch.sqrt, r"is not a finite number at -0\.\d+"),
        (torch.log, r"is not a finite number at -0\.\d+"),
        (torch.tan, r"more than 2000 pieces, or grows without bound.*Pointwise\(function, kinks="),
        (lambda u: u.abs().sqrt(), r"grows without bound at 0, .*Pointwise"),
        (lambda u: u.abs().log(), r"grows without bound at 0, .*Pointwise"),
        (lambda u: 1 / u, r"grows without bound at 0, .*Pointwise"),
        (lambda u: torch.sin(1000 * u), r"pieces.*Pointwise"),
    ],
)
def test_functions_that_are_not_integrated_are_refused_in_finite_time(function, text):
    started = time.process_time()
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    network = nn.Sequential(nn.Linear(5, 8), Pointwise(function), nn.Linear(8, 1))
    with pytest.raises(NetworkError, match=text):
        n2g.ntk(network, weight_var=100.0)(x)
    assert time.process_time() - started < 20


def test_breaks_do_not_step_over_a_transition():
    for place in (0.0, 3.0, -7.5):
        places = find_breaks(lambda u, p=place: jet(lambda v: torch.tanh(v - p), u, 1), (), 1e7)
        assert sum(abs(b - place) < 5 for b in places) >= 3


def test_kinks_of_all_kinds_have_their_places():
    def bent(u):
        return torch.relu(u - 0.3) ** 3 + torch.relu(-u - 1.5) ** 2 + (u - 2.25).abs()

    assert kinks_of(Quadrature(bent), 10.0) == pytest.approx((-1.5, 0.3, 2.25), abs=1e-5)


@pytest.mark.parametrize("layer", [nn.Hardswish(), nn.Softsign(), nn.Hardshrink()], ids=str)
def test_series_and_quadrature_are_one_function_of_the_correlation(layer):
    # both sides of where the series of Hermite polynomials ends, and next to full correlation
    act = activation_of(layer)
    rho = tensor(0.9, 0.95, 0.958, 0.966, 0.98, 0.999, 1 - 1e-8)
    q1, q2 = torch.full_like(rho, 1.3), torch.full_like(rho, 0.8)
    for sign in (1, -1):
        cov = sign * rho * torch.sqrt(q1 * q2)
        value, _ = act.dual(cov, q1, q2, False)
        # Price: the value is the integral of the slope over the covariance, jumps counted
        cov.requires_grad_()
        (rate,) = torch.autograd.grad(act.dual(cov, q1, q2, False)[0].sum(), cov)
        middle = (cov[1:5] + cov[:4]).detach() / 2
        middle.requires_grad_()
        (between,) = torch.autograd.grad(act.dual(middle, q1[:4], q2[:4], False)[0].sum(), middle)
        steps = torch.diff(cov.detach())[:4]
        simpson = steps / 6 * (rate[:4] + 4 * between + rate[1:5])
        torch.testing.assert_close(torch.diff(value)[:4], simpson, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("layer", [nn.Tanh(), nn.ELU(), nn.Hardswish()], ids=str)
def test_a_single_prediction_costs_milliseconds(layer):
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    network = nn.Sequential(nn.Linear(3, 8), layer, nn.Linear(8, 1))
    posterior = n2g.condition(n2g.nngp(network), (x, x[:, :1]), n2g.Gaussian(0.1))
    posterior.predict(x[:1] + 0.1)
    started = time.process_time()
    posterior.predict(x[:1] + 0.2)
    assert time.process_time() - started < 0.2


@pytest.mark.parametrize(
    "layer",
    [
        nn.Hardswish(),
        nn.Softsign(),
        nn.Threshold(0.1, 0.5),
        nn.ELU(),
        Pointwise(HARD["relu(u - 1)"]),
    ],
    ids=str,
)
def test_matrices_of_functions_with_kinks_take_seconds(layer):
    x = torch.randn(80, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    network = nn.Sequential(nn.Linear(5, 8), layer, nn.Linear(8, 8), layer, nn.Linear(8, 1))
    started = time.process_time()
    nngp, _ = n2g.infinite_width(network, weight_var=1.5, bias_var=0.1)(x)
    assert time.process_time() - started < 4
    some = x[:3]
    torch.testing.assert_close(
        nngp[:3, :3], n2g.nngp(network, weight_var=1.5, bias_var=0.1)(some), rtol=1e-10, atol=1e-12
    )


def test_the_mixed_dual_of_two_kinked_functions_is_their_polarization():
    one, two = activation_of(nn.Hardswish()), activation_of(nn.ELU())
    both = Quadrature(lambda u: one(u) + two(u), (-3.0, 0.0, 3.0))
    triple = tensor(0.4, -0.3, 0.99), tensor(1.0, 2.0, 1.0), tensor(0.6, 0.3, 1.0)
    swapped = triple[0], triple[2], triple[1]
    total = both.dual(*triple, False)[0] - one.dual(*triple, False)[0] - two.dual(*triple, False)[0]
    found = mixed_dual(one, two, *triple, False)[0] + mixed_dual(one, two, *swapped, False)[0]
    torch.testing.assert_close(found, total, rtol=1e-10, atol=1e-12)
