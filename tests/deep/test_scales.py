"""Outputs of an inner layer that have variances of their own: a factor is a factor of the kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import net2gp as n2g
from net2gp import Gaussian
from net2gp.deep import Ascent, fit
from net2gp.deep.inference.bounds.importance import draw_layer
from net2gp.deep.inference.inducing import InducingLayer
from net2gp.errors import InputError

SETTINGS = Ascent(num_steps=8, num_inducing=6, num_samples=2, num_draws=6, look_every=4)


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def data() -> tuple[Tensor, Tensor]:
    x = normal(24, 3)
    return x, x[:, :1].sin() + 0.1 * normal(24, 1, seed=1)


def pair() -> tuple[InducingLayer, InducingLayer]:
    """A layer of three outputs with the factor 2, and the same layer with four times the kernel."""
    inner = fit(2, data(), Gaussian(), ascent=SETTINGS).process.layers[0]
    factor = torch.full((3,), 2.0, dtype=torch.float64)
    plain = replace(inner, scale=None, kernel=4.0 * inner.kernel, whitener=inner.whitener / 2)
    return replace(inner, scale=factor), plain


def test_a_factor_is_one_of_the_kernel():
    scaled, plain = pair()
    x = normal(7, 3, seed=2)
    a, b = scaled.project(x), plain.project(x)
    torch.testing.assert_close(a.mean(scaled.center), b.mean(plain.center))
    torch.testing.assert_close(a.variance(scaled.root), b.variance(plain.root))
    covariance = scaled.root @ scaled.root.mT
    torch.testing.assert_close(a.variance_by(covariance), b.variance_by(covariance))
    for given in (False, True):
        torch.testing.assert_close(
            scaled.covariance(x, given=given), plain.covariance(x, given=given)
        )


def test_draws_of_a_layer_have_the_factor_too():
    scaled, plain = pair()
    x, values = normal(7, 3, seed=2), normal(4, 6, 3, seed=3)
    for got, wanted in zip(
        *(layer.project(x).given(values, 7) for layer in (scaled, plain)), strict=True
    ):
        torch.testing.assert_close(
            got.expand_as(wanted.expand(-1, -1, 3)), wanted.expand(-1, -1, 3)
        )
    draws = [draw_layer(layer, x, torch.Generator().manual_seed(0)) for layer in (scaled, plain)]
    torch.testing.assert_close(draws[0][0], draws[1][0], rtol=0, atol=1e-6)
    torch.testing.assert_close(draws[0][1], draws[1][1])


def test_a_composition_has_the_factors_of_its_layers():
    posterior = fit(2, data(), Gaussian(), ascent=SETTINGS)
    scaled, plain = pair()
    x = normal(5, 3, seed=4)
    found = []
    for layer in (scaled, plain):
        inner = replace(posterior.process.inner, layers=(layer,))
        found.append(replace(posterior.process, inner=inner))
    for got, wanted in zip(*(process.components(x) for process in found), strict=True):
        torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(*(process.kernel(x) for process in found))


@pytest.mark.parametrize("changed", [{"relevances": False}, {"tune": False}])
def test_factors_stay_one_if_they_are_not_asked_for(changed):
    posterior = fit(2, data(), Gaussian(), ascent=replace(SETTINGS, **changed))
    assert all(layer.scale is None for layer in posterior.process.layers)


def test_factors_are_saved(tmp_path):
    posterior = fit(2, data(), Gaussian(), ascent=SETTINGS)
    posterior.save(tmp_path / "deep.safetensors")
    loaded = n2g.load(tmp_path / "deep.safetensors")
    x = normal(5, 3, seed=4)
    assert posterior.process.layers[0].scale is not None
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)


def test_columns_of_unlike_units_are_refused():
    x, y = data()
    with pytest.raises(
        InputError, match=r"from 1\.08 to 790, .*Scale the columns: \(x - x\.mean\(0\)\)"
    ):
        fit(2, (x * torch.tensor([1.0, 1e3, 1.0]), y), Gaussian(), ascent=SETTINGS)
