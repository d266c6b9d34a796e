"""Laws of the interpolation tables: as good as the quadrature that they replace, in every layout."""

import copy
import math
from collections import deque
from dataclasses import replace

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.limits.duals import interpolation
from net2gp.limits.duals.activations import activation_of
from net2gp.limits.duals.chebyshev import (
    layout_of,
    series,
    to_coefficients,
    unit_nodes,
    vandermonde,
)
from net2gp.limits.duals.interpolation import build, kept_table_for, table_for
from net2gp.limits.duals.quadrature import mixed_dual


def pairs(count, low, high, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(3, count, generator=generator, dtype=torch.float64)
    var1, var2 = low * (high / low) ** x[0], low * (high / low) ** x[1]
    cov = torch.cos(math.pi * x[2]) * torch.sqrt(var1 * var2)
    return cov.to(dtype), var1.to(dtype), var2.to(dtype)


def gram(count, seed=0, dtype=torch.float64, equal=False):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator, dtype=dtype)
    if equal:
        x = x / x.norm(dim=1, keepdim=True) * math.sqrt(6)
    cov = x @ x.T / 6
    return cov, cov.diagonal().clone()


@pytest.mark.parametrize(
    ("layer", "low", "high"),
    [
        (nn.Tanh(), 0.25, 4.0),
        (nn.Softplus(), 1.0, 1.0),
        (nn.SiLU(), 0.0625, 4.0),
        (nn.Mish(), 1.0, 4.0),
        (nn.ELU(), 1.0, 4.0),
        (nn.Hardtanh(), 2.0, 2.0),
        (nn.Softsign(), 0.7, 0.7),
    ],
    ids=str,
)
def test_tables_are_as_good_as_their_tolerance(layer, low, high):
    act = activation_of(layer)
    table = build(act, math.log(low), math.log(high), 1e-10)
    assert table.error < 1e-10
    cov, var1, var2 = pairs(20, low, high, seed=7)
    found, wanted = table.dual(cov, var1, var2, True), mixed_dual(act, act, cov, var1, var2, True)
    sizes = [act.variance(var, True) for var in (var1, var2)]
    for a, b, one, two in zip(found, wanted, *sizes, strict=True):
        assert ((a - b).abs() / torch.sqrt(one * two)).max() < 3e-10


def test_large_variances_have_a_table():
    # Without one, the evidence of a tanh limit takes minutes where its search passes large variances.
    step = math.log(2)
    for low in (5, 6, 7):
        found = build(activation_of(nn.Tanh()), low * step, (low + 2) * step, 1e-10)
        assert found.error < 1e-10


def test_duals_of_many_pairs_go_through_the_table():
    act = activation_of(nn.Tanh())
    cov, var = gram(190)
    table = table_for(act, cov, var[:, None], var)
    assert table is not None
    value, slope = act.dual(cov, var[:, None], var, True)
    wanted = mixed_dual(act, act, cov[:3, :9], var[:3, None], var[:9], True)
    torch.testing.assert_close(value[:3, :9], wanted[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(slope[:3, :9], wanted[1], rtol=0, atol=1e-10)
    assert table_for(act, cov, var[:, None], var) is table
    assert table_for(act, cov[:2], var[:2, None], var) is None


def test_equal_variances_need_one_polynomial():
    act = activation_of(nn.Tanh())
    for dtype in (torch.float32, torch.float64):
        cov, var = gram(190, equal=True, dtype=dtype)
        table = table_for(act, cov, var[:, None], var)
        assert table.low == table.high
        assert table.coefficients[0].shape[1:] == (1, 1)
        value, slope = act.dual(cov, var[:, None], var, True)
        tolerance = 1e-10 if dtype == torch.float64 else 2e-6
        some = slice(0, 4)
        inputs = [x.double() for x in (cov[some, some], var[some, None], var[some])]
        wanted = mixed_dual(act, act, *inputs, True)
        torch.testing.assert_close(value[some, some].double(), wanted[0], rtol=0, atol=tolerance)
        torch.testing.assert_close(slope[some, some].double(), wanted[1], rtol=0, atol=tolerance)


def test_single_precision_tables_are_shorter():
    act = activation_of(nn.Tanh())
    coarse, fine = (build(act, 0.0, math.log(4), tolerance) for tolerance in (1e-6, 1e-10))
    assert len(coarse.degrees[0]) < len(fine.degrees[0])
    assert 1e-10 < coarse.error < 1e-6


def test_odd_functions_have_odd_series_in_the_correlation():
    table = build(activation_of(nn.Tanh()), 0.0, 0.0, 1e-10)
    assert all(degree % 2 == 1 for degree in table.degrees[0])
    assert all(degree % 2 == 0 for degree in table.degrees[1])
    assert not table.angular


def test_positions_and_elementwise_layouts_agree_with_flat_ones():
    act = activation_of(nn.SiLU())
    generator = torch.Generator().manual_seed(3)
    var1 = 1 + 2 * torch.rand(4, 1, 5, 1, generator=generator, dtype=torch.float64)
    var2 = 1 + 2 * torch.rand(1, 3, 1, 6, generator=generator, dtype=torch.float64)
    cov = 0.9 * torch.sin(torch.arange(360.0).reshape(4, 3, 5, 6)).double()
    table = build(act, 0.0, math.log(4), 1e-10)
    value, slope = table.dual(cov, var1, var2, True)
    flat = [x.expand(4, 3, 5, 6).reshape(-1) for x in (cov, var1, var2)]
    again = table.dual(*flat, True)
    torch.testing.assert_close(value.reshape(-1), again[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(slope.reshape(-1), again[1], rtol=1e-12, atol=1e-13)
    assert value.shape == (4, 3, 5, 6)
    # one batch axis shared by both variances
    both = table.dual(cov[:, 0], var1[:, 0], var1[:, 0].mT[..., :1].expand(4, 1, 6), True)
    assert both[0].shape == (4, 5, 6)


def test_layouts_lead_back():
    cov = torch.arange(24.0).reshape(2, 3, 4)
    layout = layout_of(cov, torch.ones(2, 1, 4), torch.ones(3, 1))
    assert layout.cov.shape == (1, 8, 3)
    assert torch.equal(layout.restore(layout.cov), cov)
    scalar = layout_of(torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0))
    assert scalar.restore(scalar.correlation()).shape == ()


def test_tables_are_differentiable():
    act = activation_of(nn.Tanh())
    table = build(act, 0.0, math.log(4), 1e-10)
    inputs = [x.requires_grad_() for x in pairs(5, 1.1, 3.5)]
    for which in (0, 1):
        found = torch.autograd.grad(table.dual(*inputs, True)[which].sum(), inputs)
        wanted = torch.autograd.grad(mixed_dual(act, act, *inputs, True)[which].sum(), inputs)
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-8)


def test_derivatives_in_equal_variances_are_kept():
    act = activation_of(nn.Tanh())
    cov, var = gram(33, equal=True)
    var = torch.ones_like(var).requires_grad_()
    (found,) = torch.autograd.grad(act.dual(cov, var[:, None], var, False)[0].sum(), var)
    few = var[:2].detach().requires_grad_()
    value = mixed_dual(act, act, cov[:2], few[:, None], var.detach(), False)[0].sum()
    (rows,) = torch.autograd.grad(value, few)
    # each variance counts as a row and as a column
    torch.testing.assert_close(found[:2], 2 * rows, rtol=1e-7, atol=1e-8)


def test_jumps_and_ranges_of_kinks_fall_back_to_quadrature():
    cov, var = gram(100)
    assert table_for(activation_of(nn.Hardshrink()), cov, var[:, None], var) is None
    assert table_for(activation_of(nn.Hardswish()), cov, var[:, None], var) is None
    assert table_for(activation_of(nn.Tanh()), cov, var[:, None], 1e12 * var) is None
    assert table_for(activation_of(nn.Tanh()), cov, 0 * var[:, None], var) is None


@pytest.mark.parametrize("degrees", [(0, 1, 2, 5), (1, 3, 7), (0, 2, 6), (4,), (0,)])
def test_series_are_sums_of_chebyshev_polynomials(degrees):
    generator = torch.Generator().manual_seed(0)
    t = 2 * torch.rand(2, 3, 4, generator=generator, dtype=torch.float64) - 1
    first = torch.rand(2, 3, 5, generator=generator, dtype=torch.float64)
    second = torch.rand(2, 4, 5, generator=generator, dtype=torch.float64)
    c = torch.rand(len(degrees), 5, 5, generator=generator, dtype=torch.float64)
    basis = vandermonde(t, 8)[..., list(degrees)]
    wanted = torch.einsum("brck,brm,kmn,bcn->brc", basis, first, c, second)
    torch.testing.assert_close(series(t, degrees, c, first, second), wanted)
    one = torch.ones(5, dtype=torch.float64)
    wanted = torch.einsum("brck,kmn->brc", basis, c)
    torch.testing.assert_close(series(t, degrees, c, one, one), wanted)


def test_coefficients_give_back_polynomials():
    nodes = unit_nodes(6)
    values = vandermonde(nodes, 6)[:, 4]
    wanted = torch.zeros(6, dtype=torch.float64)
    wanted[4] = 1.0
    torch.testing.assert_close(to_coefficients(6) @ values, wanted, atol=1e-14, rtol=0)


@pytest.fixture
def no_tables(monkeypatch):
    """No table that another test has left behind."""
    monkeypatch.setattr(interpolation, "_KEPT", deque(maxlen=32))


SMOOTH = [nn.Tanh(), nn.Sigmoid(), nn.Softplus(), nn.SiLU(), nn.Mish()]


@pytest.mark.parametrize("layer", SMOOTH, ids=str)
def test_few_pairs_are_the_same_with_and_without_a_table(layer, no_tables):
    act = activation_of(layer)
    cov, var = gram(30, seed=1)
    new, own = gram(5, seed=2)
    few = (new[0, 1:], own[:1], own[1:])
    assert kept_table_for(act, *few) is None
    without = act.dual(*few, True)
    act.dual(cov, var[:, None], var, True)
    assert kept_table_for(act, *few) is not None
    again = act.dual(*few, True)
    sizes = [act.variance(v, True) for v in few[1:]]
    for a, b, one, two in zip(again, without, *sizes, strict=True):
        assert ((a - b).abs() / torch.sqrt(one * two)).max() < 1e-12


def test_a_kept_table_serves_single_precision_without_losing_digits(no_tables):
    act = activation_of(nn.Tanh())
    cov, var = gram(30, seed=1)
    act.dual(cov, var[:, None], var, True)
    exact = act.dual(cov[0, 1:9], var[:1], var[1:9], True)
    single = act.dual(cov[0, 1:9].float(), var[:1].float(), var[1:9].float(), True)
    for a, b in zip(single, exact, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-7)


def test_variances_beyond_a_kept_table_and_gradients_do_without(no_tables):
    act = activation_of(nn.Tanh())
    cov, var = gram(30, seed=1)
    act.dual(cov, var[:, None], var, True)
    far = 100 * var[:2]
    assert kept_table_for(act, 0.3 * far, far, far) is None
    followed = cov[0, :4].clone().requires_grad_()
    assert kept_table_for(act, followed, var[:1], var[:4]) is None
    zero = torch.zeros(1, dtype=torch.float64)
    assert kept_table_for(act, zero, zero, var[:1]) is None
    assert kept_table_for(activation_of(nn.Hardtanh()), cov, var[:, None], var) is None


def test_kept_tables_are_bounded(no_tables):
    cov, var = gram(23, seed=1)
    table = build(activation_of(nn.Tanh()), 0.0, 0.0, 1e-10)
    for count in range(40):
        interpolation._KEPT.append((count, table))
    act = activation_of(nn.SiLU())
    act.dual(cov, var[:, None], var, False)
    assert len(interpolation._KEPT) == 32
    assert interpolation._KEPT[-1][0] == act


def test_a_posterior_says_the_same_with_and_without_tables(no_tables):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    layers = nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
    kernel = n2g.ntk(nn.Sequential(*layers).double(), weight_var=1.5, bias_var=0.1)
    alone = torch.cat([kernel(x[:1], x[n : n + 1]) for n in range(30)], 1)
    posterior = n2g.condition(kernel, (x, x[:, :1].sin()), n2g.Gaussian(0.1))
    assert interpolation._KEPT
    after = torch.cat([kernel(x[:1], x[n : n + 1]) for n in range(30)], 1)
    torch.testing.assert_close(after, alone, rtol=1e-12, atol=1e-12)
    one = torch.stack([posterior.predict(x[n : n + 1]).mean[0] for n in range(5)])
    torch.testing.assert_close(one, posterior.predict(x[:5]).mean, rtol=1e-10, atol=1e-11)


def test_what_a_posterior_holds_of_its_points_changes_nothing():
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randn(4, 5, 2, generator=generator, dtype=torch.float64)
    for x in (sequences, sequences.flatten(1)[:, :2]):
        layers = nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)
        kernel = n2g.ntk(nn.Sequential(*layers).double(), bias_var=0.1).scaled(0.7)
        kept = kernel.keep(x)
        for again in (kept, copy.deepcopy(kept)):
            cross, blocks = again(x[1:3])
            torch.testing.assert_close(cross, kernel(x, x[1:3].clone()), rtol=1e-14, atol=0)
            torch.testing.assert_close(blocks, kernel.blocks(x[1:3]), rtol=1e-14, atol=0)
    assert kernel.keep(x.clone().requires_grad_()) is None


def test_what_a_limit_remembers_is_bounded():
    limit = n2g.infinite_width(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)))
    for length in range(1, 40):
        limit.nngp.outputs(torch.zeros(1, length, 1))
    assert len(limit.plans) == 16
    x = torch.nn.functional.normalize(torch.randn(260, 3))
    network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    plans = {}
    for step in range(20):
        tuned = replace(n2g.infinite_width(network, weight_var=1.0 + step), plans=plans)
        tuned.nngp(x)
    (plan,) = plans.values()
    assert 0 < len(plan.polynomials) <= 16


@pytest.mark.parametrize("module", [nn.Tanh(), nn.Softplus()], ids=["tanh", "softplus"])
def test_a_table_is_left_out_where_it_would_take_longer_than_its_pairs(module, monkeypatch):
    """Large variances need fine grids: thirty points must not wait for a table of thousands."""
    taken = []
    fourier_values = interpolation._fourier_values
    monkeypatch.setattr(
        interpolation,
        "_fourier_values",
        lambda act, grid: taken.append(grid.num_values) or fourier_values(act, grid),
    )
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(3, 4), module, nn.Linear(4, 1))
    limit = n2g.infinite_width(network, weight_var=1.5, bias_var=0.1)
    x = 100 * torch.randn(30, 3, dtype=torch.float64)
    nngp, ntk = limit(x)
    few = limit(x[:4])
    assert sum(taken) <= 900 * interpolation._VALUES_PER_PAIR
    torch.testing.assert_close(nngp[:4, :4], few[0], rtol=1e-11, atol=0)
    torch.testing.assert_close(ntk[:4, :4], few[1], rtol=1e-11, atol=0)
