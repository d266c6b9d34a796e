"""The bound of two layers without draws against the fitted one."""

from __future__ import annotations

import pytest
import torch

import net2gp as n2g
from net2gp import RBF, Gaussian
from net2gp.deep import Ascent, fit, two_layer_bound
from net2gp.errors import InputError
from net2gp.kernels import Linear


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def toy() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-2, 2, 16, dtype=torch.float64)[:, None]
    return x, x.sin() + 0.1 * normal(16, 1)


def test_the_drawn_bound_of_two_layers_is_the_closed_one_at_its_optimum():
    ascent = Ascent(num_steps=120, learning_rate=0.05, num_inducing=6, starts=("linear",))
    posterior = fit(2, toy(), Gaussian(), ascent=ascent)
    drawn, closed = float(posterior.log_marginal_likelihood()), float(two_layer_bound(posterior))
    # 64 mirrored draws per row leave an error, and the last layer an average over its last steps
    assert abs(drawn - closed) < 0.3


def test_what_has_no_closed_form_is_refused():
    quick = Ascent(num_steps=2, num_inducing=4)
    mixed = fit([RBF(), RBF() + Linear()], toy(), Gaussian(0.1), ascent=quick)
    with pytest.raises(InputError, match="closed forms for the squared-exponential kernel"):
        two_layer_bound(mixed)
    for posterior in (
        n2g.condition(RBF(), toy(), Gaussian(0.1)),
        fit(1, toy(), Gaussian(0.1), ascent=quick),
    ):
        with pytest.raises(InputError, match=r"two layers that deep\.fit found by its bound"):
            two_layer_bound(posterior)
