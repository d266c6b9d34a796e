"""Chains over the values of all layers of a deep Gaussian process, against closed forms and quadrature."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import net2gp as n2g
from net2gp import RBF, Gaussian
from net2gp.deep import Ascent, fit, sghmc
from net2gp.deep.chains import Target
from net2gp.deep.inference.process import Deep
from net2gp.errors import InputError, NotAvailable

FIXED = Ascent(num_steps=40, tune=False, move_points=False, num_inducing=4, starts=("linear",))


def toy(count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-1, 1, count, dtype=torch.float64)[:, None]
    return x, (2 * x).sin() + 0.3 * torch.randn(count, 1, generator=generator, dtype=torch.float64)


def test_one_layer_is_drawn_from_the_law_in_closed_form():
    fitted = fit([RBF(0.7)], toy(), Gaussian(0.1), ascent=FIXED)
    drawn = sghmc(fitted, num_draws=100, num_chains=40, warmup=50, thin=15, step_size=0.3)
    x = torch.linspace(-1.5, 1.5, 7, dtype=torch.float64)[:, None]
    exact, found = fitted.marginal(x), drawn.marginal(x)
    error = (exact.variance / 4000).sqrt()
    assert ((found.mean - exact.mean).abs() < 4 * error).all()
    assert ((found.variance / exact.variance - 1).abs() < 5 * math.sqrt(2 / 4000)).all()


def test_two_layers_of_one_value_each_have_the_moments_of_quadrature():
    small = Ascent(num_steps=40, tune=False, move_points=False, num_inducing=1, starts=("linear",))
    x, y = toy()
    # The first layer shifts its inputs by one number, so that one value leaves nothing of it open.
    fitted = fit([RBF(100.0), RBF(1.0)], (x, y), Gaussian(0.5), ascent=small)
    assert isinstance(fitted.process, Deep)
    drawn = sghmc(fitted, num_draws=100, num_chains=20, warmup=100, thin=20)
    target = Target(fitted.process.layers, fitted.likelihood, x, y)
    at = torch.linspace(-5, 5, 101, dtype=torch.float64)
    pairs = torch.cartesian_prod(at, at)[:, :, None, None]
    rows, generator = torch.arange(len(x)), torch.Generator().manual_seed(0)
    weights = target.log_joint([pairs[:, 0], pairs[:, 1]], rows, generator).softmax(0)
    chains = torch.cat([drawn.process.inner.values[0], drawn.process.values], 1)[:, :, 0]
    for power in (1, 2):
        moments = (weights[:, None] * pairs[..., 0, 0] ** power).sum(0)
        spread = (chains**power).std(0) / math.sqrt(len(chains) / 4)
        assert ((chains**power).mean(0) - moments).abs().lt(4 * spread).all()


def test_batches_and_labels_are_taken_and_files_keep_all_draws(tmp_path):
    x, y = toy()
    labels = (y[:, 0] > 0).long()
    quick = Ascent(num_steps=8, num_inducing=4, num_draws=5)
    fitted = fit(2, (x, labels), n2g.Categorical(), ascent=quick)
    drawn = sghmc(fitted, num_draws=2, num_chains=3, warmup=4, thin=2, batch_size=5, seed=3)
    assert drawn.recipe.log_joints.shape == (2,)
    assert drawn.process.hidden(x).shape == (6, 12, 1)
    again = sghmc(fitted, num_draws=2, num_chains=3, warmup=4, thin=2, batch_size=5, seed=3)
    assert torch.equal(drawn.predict(x).probs, again.predict(x).probs)
    n2g.save(drawn, tmp_path / "drawn.safetensors")
    loaded = n2g.load(tmp_path / "drawn.safetensors")
    assert torch.equal(loaded.predict(x).probs, drawn.predict(x).probs)
    with pytest.raises(NotAvailable, match=r"deep\.fit"):
        drawn.log_marginal_likelihood()


def test_what_is_not_a_fit_or_out_of_range_is_named():
    x, y = toy()
    quick = Ascent(num_steps=4, num_inducing=4)
    fitted = fit(2, (x, y), Gaussian(0.1), ascent=quick)
    for wrong in (None, n2g.condition(RBF(), (x, y), Gaussian(0.1))):
        with pytest.raises(InputError, match=r"deep\.fit"):
            sghmc(wrong)
    with pytest.raises(InputError, match="another method"):
        sghmc(sghmc(fitted, num_draws=1, num_chains=2, warmup=0, thin=1))
    sharp = fit(
        2, (x, y), Gaussian(0.1), ascent=Ascent(objective="predictive", num_steps=2, num_inducing=2)
    )
    with pytest.raises(InputError, match="another method"):
        sghmc(sharp)
    for name in ("num_draws", "num_chains", "thin", "batch_size", "step_size", "warmup"):
        with pytest.raises(InputError, match=name):
            sghmc(fitted, **{name: -1})
    with pytest.raises(InputError, match="smaller step_size"):
        sghmc(fitted, step_size=1e6, num_draws=50)
