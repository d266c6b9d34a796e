"""Latent variables of data: laws of the search, its result, and what is wrong with data."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

import net2gp as n2g
from net2gp import RBF, Gaussian
from net2gp.deep import LatentSearch, LatentVariables, latent_variables
from net2gp.deep.latent import fit_latent, search
from net2gp.errors import InputError, NotAvailable

QUICK = LatentSearch(num_steps=40, num_inducing=8)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def arc(count: int = 30, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A curve in six dimensions with a little noise, and the place of each row along it."""
    generator = torch.Generator().manual_seed(seed)
    place = 3 * torch.rand(count, 1, generator=generator, dtype=torch.float64) - 1.5
    parts = [place.sin(), place.cos(), (2 * place).sin(), place, place**2, -place.sin() + 1]
    return place, torch.cat(parts, 1) + 0.05 * normal(count, 6, seed=seed + 1)


def step(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]
    return x, (x > 0).double() + 0.05 * normal(40, 1, seed=seed)


@cache
def curve() -> LatentVariables:
    return latent_variables(arc()[1], 3, search=LatentSearch(num_steps=150, num_inducing=10))


def test_one_relevant_variable_is_found_and_ordered_along_the_curve():
    place, _ = arc()
    found, relevances = curve(), curve().relevances[0]
    assert found.mean.shape == found.variance.shape == (30, 3)
    best = int(relevances.argmax())
    others = relevances[[k for k in range(3) if k != best]]
    assert float(others.max()) < 0.1 * float(relevances[best])
    ranks = [v.argsort().argsort().double() for v in (place[:, 0], found.mean[:, best])]
    assert abs(float(torch.corrcoef(torch.stack(ranks))[0, 1])) > 0.98
    assert 0.03**2 < float(found.noise_var) < 0.08**2


def test_irrelevant_variables_stay_at_their_prior():
    found = curve()
    worst = int(found.relevances[0].argmin())
    assert float(found.mean[:, worst].abs().max()) < 0.2
    assert float((found.variance[:, worst] - 1).abs().max()) < 0.2


def test_reconstructions_are_within_their_errors():
    _, y = arc()
    law = curve().reconstruct()
    assert law.variance is not None
    errors = (y - law.mean) / (law.variance + curve().noise_var).sqrt()
    assert 0.4 < float(errors.square().mean()) < 1.2  # below 1, since the rows were fitted


def test_the_bound_never_falls_and_is_the_bound_of_the_result():
    found = curve()
    assert bool((found.bounds.diff() >= 0).all())
    assert found.bound == float(found.bounds[-1]) == found.depth_bounds[0]
    assert float(found.bounds[-1]) > float(found.bounds[0]) + 10


def test_the_latent_law_of_rows_that_were_fitted_is_found_again():
    _, y = arc()
    (law,) = curve().infer(y[:5])
    best = int(curve().relevances[0].argmax())
    torch.testing.assert_close(law.mean[:, best], curve().mean[:5, best], rtol=0, atol=0.1)


def test_new_rows_with_missing_values_are_filled_in():
    _, y = arc(8, seed=5)
    holes = y.clone()
    holes[:, 2:] = math.nan
    (law,) = curve().infer(holes)
    filled = curve().predict(law.mean, law.variance)
    assert float((filled.mean - y)[:, 2:].square().mean().sqrt()) < 0.15
    assert float(y[:, 2:].std()) > 0.7


def test_missing_values_in_the_data_are_filled_in():
    _, y = arc()
    holes = y.masked_fill(normal(30, 6, seed=9) > 1, math.nan)
    found = latent_variables(holes, 1, missing=True, search=QUICK)
    away = (found.reconstruct().mean - y)[holes.isnan()]
    assert float(away.square().mean().sqrt()) < 0.3 * float(y.std(0).mean())


def test_regression_without_levels_is_below_the_evidence_and_near_it():
    x = torch.linspace(0, 6, 25, dtype=torch.float64)[:, None]
    y = x.sin() + 0.2 * normal(25, 1)
    found = latent_variables(y, (), inputs=x, search=LatentSearch(num_steps=60, num_inducing=12))
    one = found.layers[0].layer
    kernel = RBF(one.lengthscale, one.output_var)
    exact = n2g.condition(kernel, (x, y - y.mean()), Gaussian(float(one.noise_var)))
    evidence = float(exact.log_marginal_likelihood())
    assert evidence - 0.01 < found.bound <= evidence + 1e-8
    torch.testing.assert_close(found.predict(x).mean, exact.mean(x) + y.mean(), rtol=0, atol=1e-2)


def test_the_bound_of_a_step_prefers_two_layers():
    x, y = step()
    few = LatentSearch(num_steps=60, num_inducing=10)
    one = latent_variables(y, (), inputs=x, search=few)
    two = latent_variables(y, (1,), inputs=x, search=few)
    assert two.bound > one.bound + 8
    mean = two.predict(x).mean
    assert float(mean.max()) < 1.07
    assert float(mean.min()) > -0.07


def test_a_level_that_explains_nothing_leaves_the_bound_as_it_was():
    """With variance 0 and noise 1 the level below has the prior N(0, I), which it has without the level."""
    _, y = arc(12)
    center, targets = fit_latent._targets(y, False)
    one = latent_variables(y, 2, search=LatentSearch(num_steps=5, num_inducing=6))
    generator = torch.Generator().manual_seed(0)
    level, variance = one.mean, one.variance
    last = one.layers[0].layer
    below = {
        "level1.mean": level,
        "level1.log_var": variance.log(),
        "layer1.points": last.points,
        "layer1.log_scale": last.lengthscale.log(),
        "layer1.log_var": last.output_var.log(),
        "layer1.log_noise": last.noise_var.log(),
    }
    top = fit_latent.level_variables(0, 0 * level, 1.0)
    above = fit_latent.layer_variables(
        0, level, torch.ones(2), fit_latent.Targets(level, variance), 6, generator
    )
    above |= {"layer0.log_var": torch.full((2,), -40.0), "layer0.log_noise": torch.zeros(2)}
    tower = fit_latent.Tower(None, targets, 2, below | top | above)
    assert abs(float(tower.bound()) - one.bound) < 1e-6
    torch.testing.assert_close(center, y.mean(0))


def test_levels_are_added_from_the_data_upward():
    _, y = arc(16)
    found = latent_variables(y, (1, 2), search=QUICK)
    assert [level.mean.shape[1] for level in found.levels] == [1, 2]
    assert [len(r) for r in found.relevances] == [1, 2]
    assert len(found.depth_bounds) == 2
    assert found.bound == found.depth_bounds[-1] >= found.depth_bounds[0]
    laws = found.infer(y[:3], num_steps=10)
    assert [law.mean.shape for law in laws] == [(3, 1), (3, 2)]
    assert found.predict(laws[0].mean, laws[0].variance).mean.shape == (3, 6)


def test_the_same_seed_gives_the_same_result():
    _, y = arc(12)
    few = LatentSearch(num_steps=5, num_inducing=4)
    one, other = (latent_variables(y, 2, search=few) for _ in range(2))
    assert one.bound == other.bound
    assert torch.equal(one.mean, other.mean)


def test_steps_that_are_too_long_are_refused_and_nothing_is_lost():
    """A function that is not a number away from its start."""

    def bound(variables):
        x = variables["x"]
        return -(x**2).sum() if float(x.detach().abs().max()) < 1.5 else x.sum() * math.nan

    seen: list[float] = []
    start = {"x": torch.ones(2, dtype=torch.float64)}
    found = search.climb(bound, start, 20, 1e-9, seen.append)
    assert float(found["x"].abs().max()) <= 1
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y.masked_fill(y > 1.5, math.nan), r"y has \d+ NaN\. Pass missing=True"),
        (lambda y: torch.cat([y, 0 * y[:, :1] + 2], 1), r"columns \[6\] of y are constant"),
        (lambda y: y[:, 0], r"shape \(N, D\) with at least two rows"),
        (lambda y: y * math.inf, "y must be finite|NaN"),
    ],
)
def test_data_that_cannot_be_used_are_named(change, message):
    with pytest.raises(InputError, match=message):
        latent_variables(change(arc(10)[1]), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"search": LatentSearch(num_inducing=11)}, r"inducing points \(11\) than rows \(10\)"),
        ({"search": 3}, r"search must be deep\.LatentSearch"),
        ({"widths": ()}, "widths is empty"),
        ({"widths": "2"}, "widths must be a number or a tuple"),
        ({"widths": 0}, "widths must be a positive whole number"),
        ({"inputs": torch.zeros(4, 1)}, r"inputs must have the shape \(10, P\)"),
        ({"inputs": torch.zeros(10, 1)}, r"columns \[0\] of inputs are constant"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        latent_variables(arc(10)[1], **({"widths": 1} | arguments))


def test_rows_without_any_value_are_named():
    y = arc(10)[1]
    y[3] = math.nan
    with pytest.raises(InputError, match="row 3 of y is all NaN"):
        latent_variables(y, 1, missing=True)
    with pytest.raises(InputError, match="a row of y is all NaN"):
        curve().infer(y)


def test_questions_that_do_not_fit_are_named():
    x, y = step()
    found = latent_variables(y, (), inputs=x, search=LatentSearch(num_steps=2, num_inducing=5))
    with pytest.raises(NotAvailable, match=r"With inputs, use predict\(inputs\)"):
        found.infer(y)
    with pytest.raises(NotAvailable, match="there are no latent variables"):
        _ = found.mean
    with pytest.raises(InputError, match=r"top must have the shape \(R, 1\)"):
        found.predict(torch.zeros(3, 2))
    with pytest.raises(InputError, match=r"variance must have the shape \(3, 1\) of top"):
        found.predict(torch.zeros(3, 1), torch.zeros(2, 1))
    with pytest.raises(InputError, match=r"y must have the shape \(R, 6\)"):
        curve().infer(torch.zeros(3, 2))
