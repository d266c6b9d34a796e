"""Results are differentiable in the inputs, for every kernel, solver, structure and architecture.

Autograd in x against central finite differences in float64. A posterior joins by one line in ways.py or
methods.py, an architecture by one function in architectures.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Distribution

from architectures import ARCHITECTURES, OUTPUTS
from net2gp.inputs import map_inputs, rows, tensors
from net2gp.linear import linearize
from net2gp.types import FeatureKernel, Inputs
from posteriors.methods import EVERY, found
from posteriors.ways import points, seeded

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


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("name", EVERY)
def test_gradients_in_x_are_finite_differences(name, quantity):
    """And there are none where none is asked for, with the same values."""
    assert_gradient(QUANTITIES[quantity](found(name)), points(2, seed=9))


@pytest.mark.parametrize("name", EVERY)
def test_nothing_is_followed_where_autograd_is_off(name):
    x = points(2, seed=9).requires_grad_()
    with torch.no_grad():
        law = found(name).marginal(x)
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
