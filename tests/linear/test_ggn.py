"""The Fisher information as an operator: exact products, and their finite-difference stand-in."""

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp.errors import InputError


def network(outputs=1, dtype=torch.float64):
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, outputs)
    )
    return layers.to(dtype).eval()


CASES = {
    "gaussian": (1, n2g.Gaussian(0.3)),
    "several outputs": (3, n2g.Gaussian(torch.tensor([0.1, 0.2, 0.5], dtype=torch.float64))),
    "bernoulli": (2, n2g.Bernoulli()),
    "categorical": (4, n2g.Categorical()),
    "heteroscedastic": (2, n2g.HeteroscedasticGaussian()),
}


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_the_explicit_matrix(name):
    outputs, likelihood = CASES[name]
    linearized = n2g.linearize(network(outputs))
    x = torch.randn(9, 2, dtype=torch.float64)
    J = linearized.jacobian(x)
    F = torch.einsum("ncp,ncd,ndq->pq", J, likelihood.curvature(linearized(x)), J)
    v = torch.randn(linearized.num_params, 3, dtype=torch.float64)
    product = n2g.linear.GaussNewton(linearized, x, likelihood).matmul(v)
    assert torch.allclose(product, F @ v, rtol=0, atol=1e-10 * (F @ v).abs().max())


@pytest.mark.parametrize("name", CASES)
def test_the_fisher_is_the_hessian_of_the_divergence(name):
    outputs, likelihood = CASES[name]
    linearized = n2g.linearize(network(outputs))
    fisher = n2g.linear.GaussNewton(linearized, torch.randn(9, 2, dtype=torch.float64), likelihood)
    v = torch.randn(linearized.num_params, dtype=torch.float64)
    exact = fisher.matmul(v[:, None])[:, 0]
    errors = [
        float((fisher.finite_difference(v, step) - exact).norm() / exact.norm())
        for step in (1e-1, 1e-2, 1e-3)
    ]
    assert errors[2] < 2e-3
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.5)
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.2)


def test_finite_differences_have_their_best_step_near_a_thousandth_in_float32():
    linearized = n2g.linearize(network(dtype=torch.float32))
    fisher = n2g.linear.GaussNewton(linearized, torch.randn(20, 2), n2g.Gaussian(1.0))
    v = torch.randn(linearized.num_params)
    exact = fisher.matmul(v[:, None])[:, 0]
    errors = {
        step: float((fisher.finite_difference(v, step) - exact).norm() / exact.norm())
        for step in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    }
    best = min(errors, key=errors.get)
    assert best in (1e-3, 1e-4)
    assert errors[best] < 2e-3
    assert errors[1e-6] > 3 * errors[best]
    assert errors[1e-1] > 3 * errors[best]


def test_the_fisher_and_the_tangent_kernel_share_their_spectrum():
    linearized = n2g.linearize(network())
    x = torch.randn(7, 2, dtype=torch.float64)
    F = n2g.linear.GaussNewton(linearized, x, n2g.Gaussian(1.0)).matmul(
        torch.eye(linearized.num_params, dtype=torch.float64)
    )
    ours = torch.linalg.eigvalsh(linearized.kernel()(x))
    assert torch.allclose(torch.linalg.eigvalsh(F)[-7:], ours, rtol=1e-9)


def test_a_zero_direction_gives_zero_and_wrong_shapes_are_refused():
    linearized = n2g.linearize(network())
    fisher = n2g.linear.GaussNewton(
        linearized, torch.randn(3, 2, dtype=torch.float64), n2g.Gaussian(1.0)
    )
    zero = torch.zeros(linearized.num_params, dtype=torch.float64)
    assert torch.equal(fisher.finite_difference(zero), zero)
    with pytest.raises(InputError, match="one per parameter, but has shape"):
        fisher.matmul(torch.zeros(3, 1))
