"""Laws of the activations' Gaussian expectations."""

import math
import operator

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from contributing import example
from net2gp.errors import InputError
from net2gp.limits.duals import power_forms as powers
from net2gp.limits.duals.activation_table import activation_table
from net2gp.limits.duals.activations import (
    UnsupportedLayer,
    activation_of,
)
from net2gp.limits.duals.quadrature import Quadrature, mixed_dual
from net2gp.limits.duals.torch_functions import from_function
from net2gp.limits.integrals.expectations import has_jumps
from net2gp.limits.modules import pointwise as points

CLOSED = [
    nn.Identity(),
    nn.ReLU(),
    nn.LeakyReLU(0.2),
    nn.PReLU(init=0.4),
    nn.GELU(),
    points.Sin(1.5, 0.7, 0.3),
    points.Cos(0.5, 1.2, -0.4),
    points.Erf(1.2, 0.8, 0.3),
    points.SigmoidLike(),
    points.Rbf(0.6),
    points.Exp(0.7, 0.4),
    points.GaussianBump(1.3, 0.5),
    points.Gabor(),
    points.Sign(),
    points.Step(),
    points.Abs(),
    points.ABReLU(-0.5, 2.0),
    points.Monomial(0),
    points.Monomial(5),
    points.Polynomial([0.3, -1.0, 0.5, 0.2]),
    points.Hermite(4),
    points.RectifiedMonomial(0),
    points.RectifiedMonomial(1),
    points.RectifiedMonomial(2),
    points.RectifiedMonomial(5),
    nn.Hardtanh(-0.5, 1.0),
    nn.ReLU6(),
    nn.Hardsigmoid(),
    nn.Softshrink(0.1),
    example("activation").Snake(),
]
NUMERIC = [
    nn.Tanh(),
    nn.Sigmoid(),
    nn.SiLU(),
    nn.Softplus(beta=2.0),
    nn.ELU(0.7),
    nn.SELU(),
    nn.CELU(1.3),
    nn.Hardswish(),
    nn.Mish(),
    nn.LogSigmoid(),
    nn.Softsign(),
    nn.Tanhshrink(),
    nn.Hardshrink(0.4),
    nn.Threshold(0.1, 0.5),
    nn.GELU(approximate="tanh"),
    points.Pointwise(lambda u: u * torch.atan(u)),
]
JUMPS = (points.Sign, points.Step, nn.Hardshrink, nn.Threshold)
by_name = pytest.mark.parametrize("layer", CLOSED, ids=str)
all_layers = pytest.mark.parametrize("layer", CLOSED + NUMERIC, ids=str)


def has_jump(layer):
    return isinstance(layer, JUMPS) or getattr(layer, "degree", 1) == 0


def triples(count=12, low=-3.0, high=1.0, seed=0):
    """Random covariances and variances 10^low … 10^high in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(3, count, generator=generator, dtype=torch.float64)
    var1, var2 = 10 ** (low + (high - low) * x[0]), 10 ** (low + (high - low) * x[1])
    return (1.98 * x[2] - 0.99) * torch.sqrt(var1 * var2), var1, var2


def assert_close(found, wanted, scale, tolerance):
    assert ((found - wanted).abs() / scale).max() < tolerance


@by_name
def test_closed_forms_are_the_integrals(layer):
    act = activation_of(layer)
    cov, var1, var2 = triples()
    value, slope = act.dual(cov, var1, var2, True)
    wanted, steep = mixed_dual(act, act, cov, var1, var2, True)
    size = [act.variance(var, True) for var in (var1, var2)]
    assert_close(value, wanted, torch.sqrt(size[0][0] * size[1][0]), 1e-10)
    assert_close(slope, steep, steep.abs() + 1e-3, 1e-10)


@by_name
def test_means_and_variances_are_the_integrals(layer):
    act = activation_of(layer)
    integral = Quadrature(act, act.kinks)
    var = torch.logspace(-3, 1, 9, dtype=torch.float64)
    torch.testing.assert_close(act.mean(var), integral.mean(var), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(
        act.mean_slope(var), integral.mean_slope(var), rtol=1e-11, atol=1e-12
    )
    value, slope = act.variance(var, True)
    wanted, steep = integral.variance(var, True)
    torch.testing.assert_close(value, wanted, rtol=1e-11, atol=0)
    torch.testing.assert_close(slope, steep, rtol=1e-11, atol=1e-14)


@all_layers
def test_the_variance_is_the_dual_at_full_correlation(layer):
    act = activation_of(layer)
    var = torch.tensor([1e-3, 0.5, 1.0, 20.0], dtype=torch.float64)
    value, slope = act.variance(var, True)
    again, steep = act.dual(var, var, var, True)
    torch.testing.assert_close(value, again, rtol=1e-10, atol=1e-16)
    if not has_jump(layer):
        # the angle carries the square root of the rounding error of the correlation
        torch.testing.assert_close(slope, steep, rtol=3e-8, atol=1e-12)


@all_layers
def test_the_activation_is_the_function_of_the_layer(layer):
    u = torch.linspace(-4, 4, 33, dtype=torch.float64)
    torch.testing.assert_close(activation_of(layer)(u), layer.double()(u), rtol=1e-9, atol=1e-9)


@all_layers
def test_the_dual_does_not_depend_on_the_order_of_the_pair(layer):
    cov, var1, var2 = triples(6)
    act = activation_of(layer)
    one, two = act.dual(cov, var1, var2, True), act.dual(cov, var2, var1, True)
    torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


@all_layers
def test_the_slope_is_the_derivative_in_the_covariance(layer):
    cov, var1, var2 = triples(6)
    cov.requires_grad_()
    act = activation_of(layer)
    value, slope = act.dual(cov, var1, var2, True)
    (found,) = torch.autograd.grad(value.sum() + 0 * cov.sum(), cov)
    if has_jumps(act, 30.0):  # which the derivative sees, and gradients of networks do not
        assert float((found - slope.detach()).abs().max()) > 1e-3
    else:
        torch.testing.assert_close(found, slope.detach(), rtol=1e-8, atol=1e-10)


def directional(function, inputs, step=1e-5):
    """Derivatives of the sums of `function`'s results along one direction: autograd, central differences."""
    generator = torch.Generator().manual_seed(5)
    ways = [torch.rand(x.shape, generator=generator, dtype=x.dtype) * x for x in inputs]
    leaves = [x.clone().requires_grad_() for x in inputs]
    results = function(*leaves)
    exact = []
    for result in results:
        if not result.requires_grad:
            exact.append(torch.zeros(()))
            continue
        grads = torch.autograd.grad(result.sum(), leaves, retain_graph=True, materialize_grads=True)
        exact.append(sum((g * way).sum() for g, way in zip(grads, ways, strict=True)))
    with torch.no_grad():
        ahead = function(*(x + step * way for x, way in zip(inputs, ways, strict=True)))
        behind = function(*(x - step * way for x, way in zip(inputs, ways, strict=True)))
    numeric = [(a - b).sum() / (2 * step) for a, b in zip(ahead, behind, strict=True)]
    return torch.stack([x.double() for x in exact]), torch.stack(numeric)


@all_layers
def test_derivatives_of_the_dual_are_those_of_finite_differences(layer):
    act = activation_of(layer)
    count = 1 if has_jump(layer) and isinstance(act, Quadrature) else 2
    exact, numeric = directional(
        lambda *x: act.dual(*x, True)[:count], triples(2, -1.0, 0.7, seed=3)
    )
    torch.testing.assert_close(exact, numeric, rtol=1e-6, atol=1e-8)


@all_layers
def test_derivatives_of_means_and_variances_are_those_of_finite_differences(layer):
    act = activation_of(layer)
    smooth = not has_jump(layer)

    def means(x):
        return [
            y for y in (act.mean(x), act.mean_slope(x), *act.variance(x, smooth)) if y is not None
        ]

    exact, numeric = directional(means, [torch.tensor([0.3, 2.0], dtype=torch.float64)])
    torch.testing.assert_close(exact, numeric, rtol=1e-7, atol=1e-9)


@all_layers
def test_first_derivatives_are_finite_where_the_correlation_is_one_or_a_variance_zero(layer):
    act = activation_of(layer)
    var1 = torch.tensor([2.0, 2.0, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    var2 = torch.tensor([2.0, 2.0, 3.0, 0.0], dtype=torch.float64, requires_grad=True)
    cov = torch.tensor([2.0, -2.0, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    value, slope = act.dual(cov, var1, var2, True)
    assert value.isfinite().all()
    smooth = not has_jump(layer)
    total = value.sum() + (slope.sum() if smooth else 0)
    for grad in torch.autograd.grad(total + 0 * (cov + var1 + var2).sum(), (cov, var1, var2)):
        assert grad.isfinite().all()


@all_layers
def test_dtype_and_shape_are_kept(layer):
    act = activation_of(layer)
    cov, var1, var2 = torch.full((3, 2), 0.2), torch.ones(3, 1), torch.full((1, 2), 0.5)
    for result in (*act.dual(cov, var1, var2, True), *act.variance(cov, True)):
        assert (result.dtype, result.shape) == (torch.float32, (3, 2))
    wanted = act.dual(cov.double(), var1.double(), var2.double(), True)
    for found, exact in zip(act.dual(cov, var1, var2, True), wanted, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-6)
    assert act.dual(cov, var1, var2, False)[1] is None
    assert act.mean(var1).shape == act.mean_slope(var1).shape == (3, 1)


def test_relu_diagonals_are_exact_in_float32():
    var = torch.rand(1000) * 100
    value, slope = activation_of(nn.ReLU()).variance(var, True)
    assert torch.equal(value, var / 2)
    assert torch.equal(slope, torch.full_like(var, 0.5))


@pytest.mark.parametrize("degree", [1, 2, 3, 6])
def test_rectified_powers_keep_their_digits_near_full_correlation(degree):
    mpmath = pytest.importorskip("mpmath")
    mpmath.mp.dps = 60
    act = powers.RectifiedPower(degree)
    top = act.variance(torch.ones(1, dtype=torch.float64), False)[0].item()
    for rho in (1 - 1e-3, 1 - 1e-9, 1 - 1e-15, 1.0, -1 + 1e-9, -1.0, 0.3):
        theta = mpmath.acos(mpmath.mpf(rho))
        p, q = powers.arc_cosine_polynomials(degree)
        wanted = (mpmath.pi - theta) * mpmath.polyval(p[::-1], rho)
        wanted += mpmath.sin(theta) * mpmath.polyval(q[::-1], rho)
        cov = torch.tensor([rho], dtype=torch.float64)
        found = act.dual(cov, torch.ones_like(cov), torch.ones_like(cov), False)[0]
        assert abs(found.item() - float(wanted / (2 * mpmath.pi))) < 1e-12 * top


def test_relu_gradients_keep_their_digits_next_to_full_correlation():
    cov = torch.tensor([1 - 6e-8], requires_grad=True)
    one = torch.ones(1)
    (found,) = torch.autograd.grad(activation_of(nn.ReLU()).dual(cov, one, one, False)[0], cov)
    assert abs(found.item() - 0.5) < 1e-3


@pytest.mark.parametrize("layer", [points.Sign(), points.Step()], ids=str)
def test_gradients_do_not_see_jumps(layer):
    act = activation_of(layer)
    var = torch.tensor([2.0, 2.0, 2.0], dtype=torch.float64)
    u = torch.tensor([-1.0, 0.3], dtype=torch.float64, requires_grad=True)
    (seen,) = torch.autograd.grad(layer(u).sum(), u, materialize_grads=True)
    slope = act.dual(torch.tensor([2.0, -2.0, 1.9], dtype=torch.float64), var, var, True)[1]
    assert not seen.any()
    assert not slope.any()
    assert not act.variance(var, True)[1].any()
    assert not act.mean_gradient(var).any()
    assert act.mean_slope(var).all()


def test_the_trigonometric_pair_is_the_squared_exponential():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    cov = x @ x.T
    var = cov.diagonal()
    found = activation_of(points.Rbf(0.5)).dual(cov, var[:, None], var, False)[0]
    wanted = torch.exp(-0.5 * torch.cdist(x, x) ** 2)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("degree", range(8))
def test_hermite_polynomials_are_powers_of_the_correlation_at_variance_one(degree):
    rho = torch.linspace(-1, 1, 9, dtype=torch.float64)
    one = torch.ones_like(rho)
    value, slope = activation_of(points.Hermite(degree)).dual(rho, one, one, True)
    torch.testing.assert_close(value, rho**degree, rtol=1e-13, atol=1e-14)
    wanted = degree * rho ** max(degree - 1, 0)
    torch.testing.assert_close(slope, wanted, rtol=1e-13, atol=1e-13)


def test_normalized_exponentials_are_what_they_say():
    act = activation_of(points.ExpNormalized(0.7, -0.4))
    cov, var1, var2 = triples()
    rho = cov / torch.sqrt(var1 * var2)
    value, slope = act.dual(cov, var1, var2, True)
    torch.testing.assert_close(value, torch.sqrt(var1 * var2) * torch.exp(0.7 * (rho - 0.4)))
    torch.testing.assert_close(slope, 0.7 * torch.exp(0.7 * (rho - 0.4)))
    one = torch.ones_like(rho)
    wanted, steep = mixed_dual(act, act, rho, one, one, True)
    torch.testing.assert_close(act.dual(rho, one, one, True), (wanted, steep))


def test_a_wide_normalized_exponential_has_the_kernel_of_the_limit():
    generator = torch.Generator().manual_seed(0)
    layer = points.ExpNormalized(0.5, -1.0)
    root = torch.tensor([[2.0, 0.0], [0.5, 1.0]], dtype=torch.float64)
    u = root @ torch.randn(2, 200_000, generator=generator, dtype=torch.float64)
    cov = root @ root.T
    out = layer(u)
    wanted = activation_of(layer).dual(cov[0, 1], cov[0, 0], cov[1, 1], False)[0]
    assert (out[0] * out[1]).mean().item() == pytest.approx(wanted.item(), rel=0.02)


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.GELU(), points.Erf(), points.Gabor()], ids=str)
def test_closed_forms_are_traced_without_branches_on_data(layer):
    act = activation_of(layer)
    inputs = triples(4)
    graph = make_fx(lambda *x: act.dual(*x, True))(*inputs)
    other = triples(4, seed=9)
    torch.testing.assert_close(graph(*other), act.dual(*other, True))


def test_inputs_are_never_written_to():
    inputs = triples(5)
    copies = [x.clone() for x in inputs]
    for layer in CLOSED:
        activation_of(layer).dual(*inputs, True)
    assert all(torch.equal(x, y) for x, y in zip(inputs, copies, strict=True))


def test_an_unknown_layer_says_what_is_known():
    with pytest.raises(UnsupportedLayer, match=r"layer Softmax\. Known: .*ReLU.*Pointwise\(func"):
        activation_of(nn.Softmax(-1))


def test_layers_without_one_distribution_a_channel_are_refused():
    with pytest.raises(UnsupportedLayer, match=r"PReLU has 3 slopes.*num_parameters=1"):
        activation_of(nn.PReLU(3))
    with pytest.raises(UnsupportedLayer, match=r"RReLU draws its slopes.*network\.eval\(\)"):
        activation_of(nn.RReLU())
    assert activation_of(nn.RReLU(0.1, 0.3).eval()) == powers.ABReLU(0.2, 1.0)


def test_parameters_out_of_range_are_refused():
    with pytest.raises(InputError, match="rate must be positive"):
        activation_of(points.GaussianBump(1.0, -1.0))
    with pytest.raises(InputError, match="degree must be zero or positive"):
        points.Hermite(-1)
    with pytest.raises(InputError, match=r"degree must be at least 1.*Step\(\)"):
        powers.RectifiedPower(0)
    with pytest.raises(InputError, match="at least one entry"):
        powers.polynomial([])


def test_users_add_their_own_activations():
    class Triple(nn.Module):
        def forward(self, x):
            return 3 * x

    @activation_of.register
    def _(layer: Triple):
        return powers.polynomial([0.0, 3.0])

    one = torch.ones(1)
    assert activation_of(Triple()).dual(one, one, one, False)[0].item() == 9
    assert any(isinstance(row.layer, Triple) for row in activation_table().rows)


CALLS = [
    (torch.relu, (), {}),
    (F.relu, (), {"inplace": False}),
    (F.leaky_relu, (0.2,), {}),
    (F.rrelu, (), {"lower": 0.1, "upper": 0.3}),
    (F.relu6, (), {}),
    (F.elu, (), {"alpha": 0.5}),
    (F.celu, (0.7,), {}),
    (F.selu, (), {}),
    (F.gelu, (), {"approximate": "tanh"}),
    (F.gelu, (), {}),
    (F.silu, (), {}),
    (F.mish, (), {}),
    (F.softplus, (2.0,), {}),
    (torch.sigmoid, (), {}),
    (F.logsigmoid, (), {}),
    (F.softsign, (), {}),
    (F.tanhshrink, (), {}),
    (F.hardtanh, (-0.5, 0.7), {}),
    (F.hardsigmoid, (), {}),
    (F.hardswish, (), {}),
    (F.hardshrink, (), {"lambd": 0.3}),
    (F.softshrink, (0.3,), {}),
    (F.threshold, (0.1, 0.5), {}),
    (torch.sin, (), {}),
    (torch.cos, (), {}),
    (torch.erf, (), {}),
    (torch.special.erf, (), {}),
    (torch.erfc, (), {}),
    (torch.exp, (), {}),
    (torch.abs, (), {}),
    (abs, (), {}),
    (torch.sign, (), {}),
    (torch.square, (), {}),
    (torch.pow, (3,), {}),
    (operator.pow, (2,), {}),
    (torch.clamp, (), {"min": 0}),
    (torch.clamp, (-1.0, 0.5), {}),
    (torch.clamp, (), {"max": 0.5}),
    (torch.clamp_min, (0.2,), {}),
    (torch.atan, (), {}),
    (torch.sinc, (), {}),
]


@pytest.mark.parametrize(
    ("function", "args", "kwargs"), CALLS, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_a_call_is_the_module_that_it_names(function, args, kwargs):
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    module = from_function(function, (x, *args), kwargs)
    torch.testing.assert_close(module(x), function(x, *args, **kwargs))
    activation_of(module)


@pytest.mark.parametrize("name", ["relu", "relu_", "tanh", "sigmoid_", "__abs__", "square", "clip"])
def test_tensor_methods_are_named_by_strings(name):
    x = torch.linspace(-2, 2, 9)
    args = (-1.0, 1.0) if name == "clip" else ()
    wanted = getattr(x.clone(), name)(*args)
    torch.testing.assert_close(from_function(name, (x, *args), {})(x), wanted)


def test_calls_that_are_not_pointwise_have_no_module():
    x = torch.ones(2)

    def relu(x):
        return x + 1

    assert from_function(torch.matmul, (x, x), {}) is None
    assert from_function(F.prelu, (x, x), {}) is None
    assert from_function(operator.pow, (2, x), {}) is None
    assert from_function(torch.pow, (x, 0.5), {}) is None
    assert from_function(torch.clamp, (x, x), {}) is None
    assert from_function(relu, (x,), {}) is None
    assert from_function("softmax", (x, -1), {}) is None


ROWS = activation_table().rows


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.layer))
def test_each_row_of_the_table_holds_by_monte_carlo(row):
    generator = torch.Generator().manual_seed(1)
    root = torch.tensor([[0.9, 0.0], [0.5, 0.6]], dtype=torch.float64)
    z = torch.randn(2, 100_000, generator=generator, dtype=torch.float64)
    u = root @ torch.cat([z, -z], 1)
    cov = root @ root.T
    product = torch.prod(row.layer.double()(u), 0)
    wanted = activation_of(row.layer).dual(cov[0, 1], cov[0, 0], cov[1, 1], False)[0]
    error = product.std() / math.sqrt(product.numel() / 2)
    assert abs(product.mean() - wanted) < 5 * error + 1e-12


def test_the_table_names_every_registered_layer_once():
    printed = str(activation_table())
    assert len({str(row.layer) for row in ROWS}) == len(ROWS) > 35
    assert all(str(row.layer) in printed for row in ROWS)
    kinds = {type(row.layer) for row in ROWS}
    assert {kind for kind in activation_of.registry if kind is not object} >= kinds
    assert {nn.ReLU, nn.Tanh, points.Rbf, nn.Threshold} <= kinds
