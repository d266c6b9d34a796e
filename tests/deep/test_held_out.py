"""Fits of sigma points end where rows that they have not seen are most likely."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from net2gp import Gaussian
from net2gp.deep import Ascent, fit
from net2gp.deep.inference import ascent as loop
from net2gp.deep.inference.problem import make_problem
from net2gp.deep.inference.sigma_points import SigmaStack
from net2gp.deep.inference.starts import batch_of
from net2gp.deep.inference.steps import restarts
from net2gp.deep.inference.steps.held_out import hold_out

SETTINGS = Ascent(
    objective="predictive", num_steps=30, num_inducing=20, num_samples=4, look_every=5
)


def noisy(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return x, x[:, :1] + torch.randn(count, 1, generator=generator, dtype=torch.float64)


def climb_of(ascent: Ascent, count: int = 120) -> loop.Climb:
    return restarts._climbs(make_problem(2, noisy(count), Gaussian(), ascent), ascent)[0]


@pytest.mark.parametrize("batch_size", [None, 30])
def test_steps_do_not_see_the_rows_that_are_kept_back(batch_size):
    climb = climb_of(replace(SETTINGS, batch_size=batch_size))
    kept = set(climb.held_out.rows.tolist())
    assert len(kept) == 12
    seen = {row for step in range(40) for row in climb.rows(step).tolist()}
    assert seen == set(range(120)) - kept


def test_the_end_is_the_look_at_which_these_rows_were_most_likely(monkeypatch):
    climb, values = climb_of(replace(SETTINGS, learning_rate=0.3)), []
    batch, look = batch_of(climb.problem, climb.held_out.rows), climb.held_out.look

    def density() -> float:
        with torch.no_grad():
            return float(climb.stack.estimate(batch, 1, torch.Generator()).log_probs.sum())

    def watched(problem, stack):
        look(problem, stack)
        values.append(density())

    monkeypatch.setattr(climb.held_out, "look", watched)
    climb.climb(30, lambda note: None, lambda: None)
    climb.settle()
    assert len(values) == 4  # where the bound ends after 15 steps, and three looks after it
    assert max(values) > values[-1]
    assert density() == max(values)


@pytest.mark.parametrize(
    ("count", "changed"),
    [(90, {}), (2000, {}), (120, {"hold_out": False}), (120, {"objective": "bound"})],
)
def test_all_rows_are_used_if_they_are_very_few_or_many_or_if_asked_to(count, changed):
    ascent = replace(SETTINGS, **changed)
    problem = make_problem(2, noisy(count), Gaussian(), ascent)
    assert hold_out(problem, ascent, 0) is None


def test_rows_kept_back_save_fits_from_being_too_certain():
    (x, y), (x_new, y_new) = noisy(200), noisy(500, seed=1)
    long = replace(SETTINGS, num_steps=150, num_inducing=60, learning_rate=0.05)
    found = []
    for ascent in (long, replace(long, hold_out=False)):
        law = fit(2, (x, y), Gaussian(), ascent=ascent).predict(x_new)
        found.append(float(-law.log_prob(y_new).mean()))
    truth = 0.5 * (1 + math.log(2 * math.pi))
    assert found[0] < truth + 0.3
    assert found[0] < found[1] - 0.3


def test_a_checkpoint_has_the_best_state(tmp_path):
    pair, path = noisy(120), tmp_path / "state.safetensors"
    kept = replace(SETTINGS, learning_rate=0.3, checkpoint=path, checkpoint_seconds=0.0)
    whole = fit(2, pair, Gaussian(), ascent=kept).predict(pair[0]).mean
    again = fit(2, pair, Gaussian(), ascent=kept).predict(pair[0]).mean
    assert torch.equal(whole, again)


def test_few_rows_have_a_fit_by_the_bound_first():
    climb = climb_of(SETTINGS)
    climb.climb(15, lambda note: None, lambda: None)
    assert not isinstance(climb.stack, SigmaStack)
    bound, noise = climb.stack.whole_law(1), climb.stack.leaves["log_noise"].tolist()
    climb._end_of_bound()
    assert isinstance(climb.stack, SigmaStack)
    law = climb.stack.whole_law(1)
    assert climb.stack.leaves["log_noise"].tolist() != noise  # its optimum for all rows
    torch.testing.assert_close(law.center, bound.center, rtol=0, atol=0.3)
    assert climb._share(15) == 0
    assert climb._share(30) == 1


@pytest.mark.parametrize("num_inducing", [5, 20])
def test_more_rows_have_sigma_points_from_the_start(num_inducing):
    ascent = replace(SETTINGS, num_inducing=num_inducing, batch_size=100)
    climb = climb_of(ascent, 600)
    assert isinstance(climb.stack, SigmaStack)
    assert climb.turn is None


@pytest.mark.parametrize("killed", [7, 15, 22])
def test_a_fit_that_was_killed_goes_on_before_and_after_the_bound(monkeypatch, tmp_path, killed):
    plain, alive = loop.Climb._plain, [True]

    def step(climb, rows, generator, rate):
        if climb.step == killed and alive[0]:
            raise KeyboardInterrupt
        return plain(climb, rows, generator, rate)

    monkeypatch.setattr(loop.Climb, "_plain", step)
    settings = replace(SETTINGS, starts=("linear",), checkpoint_seconds=0.0)
    kept = replace(settings, checkpoint=tmp_path / "fit.safetensors")
    with pytest.raises(KeyboardInterrupt):
        fit(2, noisy(120), Gaussian(), ascent=kept)
    alive[0] = False
    resumed = fit(2, noisy(120), Gaussian(), ascent=kept)
    whole = fit(2, noisy(120), Gaussian(), ascent=settings)
    assert torch.equal(resumed.recipe.bounds, whole.recipe.bounds)
    assert torch.equal(resumed.process.last.center, whole.process.last.center)


def test_patience_does_not_end_the_bound_before_sigma_points():
    climb = climb_of(replace(SETTINGS, num_steps=40, look_every=1, patience=1))
    climb.climb(40, lambda note: None, lambda: None)
    assert climb.turn == 20
    assert climb.turned


def test_sigma_points_are_never_less_likely_than_those_of_the_bound():
    """Without noise the first steps after the bound would destroy the fit; too few rows are kept back."""
    x = torch.linspace(-2, 2, 60, dtype=torch.float64)[:, None]
    ascent = replace(SETTINGS, num_steps=60, num_inducing=6)
    found = fit(1, (x, x.sin()), Gaussian(), ascent=ascent)
    assert float((found.predict(x).mean - x.sin()).square().mean().sqrt()) < 0.01


def test_as_many_inducing_points_as_rows_without_noise_give_numbers():
    x = torch.linspace(-2, 2, 60, dtype=torch.float64)[:, None]
    ascent = replace(SETTINGS, num_steps=20, num_inducing=60)
    assert bool(fit(1, (x, 3 * x), Gaussian(), ascent=ascent).predict(x).mean.isfinite().all())


def test_numbers_have_the_same_limits_after_a_run_was_killed():
    climbs = [climb_of(replace(SETTINGS, starts=("linear",))) for _ in range(2)]
    climbs[0].climb(20, lambda note: None, lambda: None)
    climbs[1].restore("0", climbs[0].tensors("0"), climbs[0].numbers())
    for name, value in climbs[0].stack.anchors.items():
        assert torch.equal(climbs[1].stack.anchors[name], value)


def test_a_single_step_has_sigma_points():
    posterior = fit(2, noisy(120), Gaussian(), ascent=replace(SETTINGS, num_steps=1))
    assert len(posterior.process.inner) == 4
