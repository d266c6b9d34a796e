"""ψ-statistics against sampling, and the bound of two layers without draws against the fitted one."""

from __future__ import annotations

import pytest
import torch

import net2gp as n2g
from net2gp import RBF, Gaussian
from net2gp.deep import Ascent, collapsed_bound, fit, two_layer_bound
from net2gp.deep.inference.bounds.psi_statistics import collapsed_by_psi, psi_statistics
from net2gp.deep.inference.inducing import factor
from net2gp.errors import InputError
from net2gp.kernels import Linear

KERNEL = RBF(torch.tensor([0.7, 1.3], dtype=torch.float64), 1.4)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_they_are_the_averages_over_drawn_inputs():
    points, mean, variance = normal(3, 2), normal(4, 2, seed=1), normal(4, 2, seed=2).square()
    found = psi_statistics(KERNEL, points, mean, variance)
    draws = mean + variance.sqrt() * normal(40_000, 4, 2, seed=3)
    K = KERNEL(draws.flatten(0, 1), points).reshape(len(draws), 4, 3)
    products = torch.einsum("snm,snl->sml", K, K)
    assert abs(float(found.psi0) - 4 * 1.4) < 1e-12
    for exact, sample in ((found.psi1, K), (found.psi2, products)):
        error = sample.std(0) / len(draws) ** 0.5
        assert bool(((sample.mean(0) - exact).abs() < 5 * error).all())


def test_at_certain_inputs_they_are_kernel_matrices():
    points, mean = normal(3, 2), normal(4, 2, seed=1)
    found = psi_statistics(KERNEL, points, mean, torch.zeros_like(mean))
    K = KERNEL(mean, points)
    torch.testing.assert_close(found.psi1, K)
    torch.testing.assert_close(found.psi2, K.mT @ K)


def toy() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-2, 2, 16, dtype=torch.float64)[:, None]
    return x, x.sin() + 0.1 * normal(16, 1)


def test_the_drawn_bound_of_two_layers_is_the_closed_one_at_its_optimum():
    ascent = Ascent(num_steps=120, learning_rate=0.05, num_inducing=6, starts=("linear",))
    posterior = fit(2, toy(), Gaussian(), ascent=ascent)
    drawn, closed = float(posterior.log_marginal_likelihood()), float(two_layer_bound(posterior))
    # 64 mirrored draws per row leave an error, and the last layer an average over its last steps
    assert abs(drawn - closed) < 0.3


def test_an_inner_layer_without_variance_leaves_the_closed_bound_of_one_layer():

    x, y = toy()
    kernel, points = RBF(0.8), x[::3]
    statistics = psi_statistics(kernel, points, x, torch.zeros_like(x))
    found = collapsed_by_psi(statistics, factor(kernel, points), y, y.new_tensor([0.05]))
    torch.testing.assert_close(found, collapsed_bound(kernel, (x, y), Gaussian(0.05), points))


def test_what_has_no_closed_form_is_refused():
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    with pytest.raises(InputError, match="closed forms for the squared-exponential kernel"):
        psi_statistics(Linear(), one, one, zero)
    quick = Ascent(num_steps=2, num_inducing=4)
    for posterior in (
        n2g.condition(RBF(), toy(), Gaussian(0.1)),
        fit(1, toy(), Gaussian(0.1), ascent=quick),
    ):
        with pytest.raises(InputError, match=r"two layers that deep\.fit found by its bound"):
            two_layer_bound(posterior)
