"""Results are differentiable in the inputs, for every kernel, solver, structure and architecture.

Autograd in x against central finite differences in float64. A posterior joins by one line in ways.py or
methods.py, an architecture by one function in architectures.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from architectures import ARCHITECTURES, OUTPUTS
from net2gp import Gaussian, condition, infinite_width
from net2gp.inputs import map_inputs, rows, tensors
from net2gp.limits import monte_carlo_kernel
from net2gp.linear import linearize
from net2gp.types import FeatureKernel, Inputs
from posteriors.methods import EVERY, RECTIFIED, found
from posteriors.ways import points, seeded

BY_QUADRATURE = {"gaussian, infinite width", "categorical, tangent kernel at infinite width"}
STEP = 1e-5
TOLERANCE = 1e-6

DETACHED = {"weight_used_in_a_detached_branch_too"}
"""Networks that themselves keep autograd from a path from x to the output."""


def described(law: Distribution) -> Tensor:
    """The numbers of a predictive law."""
    if hasattr(law, "probs"):
        return law.probs
    spread = law.covariance_matrix if hasattr(law, "covariance_matrix") else law.variance
    return torch.cat([law.mean.reshape(-1), spread.reshape(-1)])


def functions(posterior: Any) -> Callable[[Tensor], Tensor]:
    """Drawn functions, which are functions of x by themselves where the kernel has features."""
    if isinstance(getattr(posterior, "kernel", None), FeatureKernel):
        return posterior.sample_functions(3, generator=seeded(3))
    return lambda x: posterior.sample(x, 3, generator=seeded(3))


QUANTITIES: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "mean": lambda posterior: lambda x: posterior.marginal(x).mean,
    "variance": lambda posterior: lambda x: posterior.marginal(x).variance,
    "covariance": lambda posterior: lambda x: posterior.marginal(x).covariance_matrix,
    "joint covariance": lambda posterior: lambda x: posterior.joint(x).covariance_matrix,
    "prediction": lambda posterior: lambda x: described(posterior.predict(x)),
    "drawn functions": functions,
}


def floating(x: Inputs) -> list[Tensor]:
    return [value for value in tensors(x) if value.is_floating_point()]


def leaves(x: Inputs) -> Inputs:
    copied = lambda v: v.detach().clone().requires_grad_() if v.is_floating_point() else v
    return map_inputs(x, copied)


def assert_gradient(function: Callable[[Inputs], Tensor], x: Inputs, step: float = STEP) -> None:
    """A random combination of the values, along a random direction of all inputs."""
    plain, inside = function(x), leaves(x)
    assert not plain.requires_grad
    value = function(inside)
    assert value.requires_grad
    torch.testing.assert_close(value.detach(), plain, rtol=1e-9, atol=1e-11)
    weights = torch.randn(value.shape, generator=seeded(1), dtype=value.dtype)
    gradients = torch.autograd.grad((value * weights).sum(), floating(inside))
    generator = seeded(2)
    moves = [torch.randn(v.shape, generator=generator, dtype=v.dtype) for v in floating(x)]
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, moves, strict=True))

    def shifted(size: float) -> Tensor:
        left = iter(moves)
        moved = lambda v: v + size * next(left) if v.is_floating_point() else v
        return function(map_inputs(x, moved))

    expected = float(((shifted(step) - shifted(-step)) * weights).sum() / (2 * step))
    assert abs(slope - expected) < TOLERANCE * max(1.0, abs(expected), float(plain.abs().max()))


def combinations() -> list[Any]:
    """All of them; of limits that take quadrature, the mean alone is quick."""
    quick = lambda name, quantity: name not in BY_QUADRATURE or quantity == "mean"
    return [
        pytest.param(name, quantity, marks=() if quick(name, quantity) else pytest.mark.slow)
        for name in EVERY
        for quantity in QUANTITIES
    ]


@pytest.mark.parametrize(("name", "quantity"), combinations())
def test_gradients_in_x_are_finite_differences(name, quantity):
    """And there are none where none is asked for, with the same values."""
    assert_gradient(QUANTITIES[quantity](found(name)), points(2, seed=9))


@pytest.mark.parametrize("name", EVERY)
def test_nothing_is_followed_where_autograd_is_off(name):
    posterior, x = found(name), points(2, seed=9).requires_grad_()
    with torch.no_grad():
        law = posterior.marginal(x)
    assert not law.mean.requires_grad
    assert not law.covariance_matrix.requires_grad


@pytest.mark.parametrize(
    "name", [n for n, build in ARCHITECTURES.items() if floating(build()[1]) and n not in DETACHED]
)
def test_all_that_is_made_of_a_jacobian_has_gradients_in_x(name):
    network, x = ARCHITECTURES[name]()
    linearized = linearize(network, output=OUTPUTS.get(name))
    kernel, some = linearized.kernel(0.7), rows(x, slice(0, 2))
    w = torch.randn(linearized.num_params, 2, generator=seeded(3), dtype=torch.float64)
    shape = linearized(some).shape
    u = torch.randn(shape, generator=seeded(4), dtype=torch.float64)

    def everything(z: Inputs) -> Tensor:
        found = [
            linearized(z),
            kernel(x, z),
            kernel(z),
            kernel.blocks(z),
            linearized.trace_kernel()(z),
            linearized.jacobian(z),
            linearized.jvp(z, linearized.unflatten(w[:, 0])),
            linearized.flatten(linearized.vjp(z, u)),
            kernel.apply(z, w),
            kernel.adjoint(z, u.reshape(-1, 1)),
        ]
        return torch.cat(
            [value.reshape(-1) / sizes.setdefault(n, norm(value)) for n, value in enumerate(found)]
        )

    sizes: dict[int, float] = {}
    norm = lambda value: float(value.detach().norm()) + 1e-3
    assert_gradient(everything, some, step=1e-6)


SMOOTH = ["gaussian by cholesky", "gaussian, rbf", "gaussian in weight space", "laplace, kron"]


@pytest.mark.parametrize("name", SMOOTH)
def test_second_derivatives_in_x_are_finite_differences_of_first_ones(name):
    """At a training point too, where a distance is zero."""
    posterior = found(name)
    x = torch.cat([points(1, seed=9), EVERY[name].data()[0][:1]])

    def slopes(z: Tensor) -> Tensor:
        inside = z if z.requires_grad else z.clone().requires_grad_()
        law = posterior.marginal(inside)
        value = (law.mean * torch.tensor([1.0, -0.5])).sum() + law.variance.sum()
        (gradient,) = torch.autograd.grad(value, inside, create_graph=z.requires_grad)
        return gradient

    assert_gradient(slopes, x)


def test_second_derivatives_of_norms_are_right():
    """torch takes the statistics of its fused norms for constants from the third derivative on."""
    network, x = ARCHITECTURES["layer_and_group_norm"]()
    kernel = linearize(network).kernel()

    def slopes(z: Tensor) -> Tensor:
        inside = z if z.requires_grad else z.clone().requires_grad_()
        value = kernel(x, inside).square().sum()
        (gradient,) = torch.autograd.grad(value, inside, create_graph=z.requires_grad)
        return gradient

    assert_gradient(slopes, x[:2], step=1e-6)


@pytest.mark.parametrize("name", ["gaussian, rbf", "codes of classes", "codes of classes, rbf"])
@pytest.mark.parametrize("quantity", ["mean", "variance", "prediction"])
def test_gradients_at_the_training_points_are_finite_differences(name, quantity):
    assert_gradient(QUANTITIES[quantity](found(name)), EVERY[name].data()[0])


@pytest.mark.parametrize("tangent", [False, True])
def test_kernels_of_rectifiers_have_gradients_where_points_coincide(tangent):
    """ρ = 1 is where arccos has none; the slope of the tangent kernel jumps there, its mean is zero."""
    limit = infinite_width(RECTIFIED.limit.graph, weight_var=2.0, bias_var=0.1)
    kernel, x = limit.ntk if tangent else limit.nngp, points(3)
    assert_gradient(lambda z: kernel(x, z), torch.cat([x[:1], points(1, seed=9)]))


@pytest.mark.parametrize("tangent", [False, True])
def test_estimated_kernels_have_gradients_in_x(tangent):
    network, x = ARCHITECTURES["layer_and_group_norm"]()
    kernel = monte_carlo_kernel(network, 3, tangent=tangent)
    some = x[:2]
    for function in (lambda z: kernel(x, z), kernel, kernel.diag):
        assert_gradient(function, some)


def test_float32_networks_carry_gradients_through_float64_products():
    posterior = found("gaussian by cholesky").to(dtype=torch.float32)
    x = points(2, seed=9)

    def slope(one: Any, z: Tensor) -> Tensor:
        inside = z.clone().requires_grad_()
        law = one.marginal(inside)
        return torch.autograd.grad(law.mean.sum() + law.variance.sum(), inside)[0]

    expected = slope(found("gaussian by cholesky"), x)
    assert slope(posterior, x.float()).dtype == torch.float32
    torch.testing.assert_close(slope(posterior, x.float()).double(), expected, rtol=1e-3, atol=1e-3)


def test_a_dict_of_inputs_has_a_gradient_for_each_tensor():
    network, x = ARCHITECTURES["dictionary_inputs"]()
    linearized = linearize(network)
    posterior = condition(linearized.kernel(), (x, linearized(x)), Gaussian(0.1), mean=linearized)
    some = rows(x, slice(0, 2))
    assert_gradient(lambda z: posterior.marginal(z).variance, some)
    assert_gradient(lambda z: posterior.sample(z, 2, generator=seeded(1)), some)
    assert all(value.grad_fn is None for value in tensors(some))


def test_inputs_that_a_network_changes_in_place_are_left_alone():
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2.0)
            return self.layer(x).tanh()

    linearized = linearize(Doubling().double().eval())
    x = points(3).requires_grad_()
    before = x.detach().clone()
    value = linearized(x).sum() + linearized.kernel()(x).sum()
    value.backward()
    assert torch.equal(x.detach(), before)
