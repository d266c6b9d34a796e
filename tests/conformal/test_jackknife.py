"""Laws of the jackknife+: equal to refitting N times, coverage in exact arithmetic, groups."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

import net2gp as n2g
from conformal.cases import (
    classification,
    noisy,
    perceptron,
    regression,
    seeded,
    without,
)
from net2gp import conformal
from net2gp.conformal import (
    AbsoluteResidual,
    Jointly,
    PredictiveQuantile,
    StandardizedResidual,
    TooFewPoints,
    calibrate_intervals,
    jackknife_plus,
)
from net2gp.errors import InputError, NotAvailable
from net2gp.methods.explain import influence

SCORES = (StandardizedResidual(), AbsoluteResidual(), PredictiveQuantile(), Jointly())


def conditioned(solver, noise=0.05):
    return lambda data: n2g.condition(n2g.RBF(), data, noise_of(noise), solver=solver)


def noise_of(noise) -> n2g.Gaussian:
    return n2g.Gaussian(torch.as_tensor(noise, dtype=torch.float64))


def tangent(solver, outputs):
    linearized = n2g.linearize(perceptron(1, outputs))
    likelihood = noise_of([0.05, 0.2, 0.1][:outputs])
    return lambda data: n2g.condition(
        linearized.kernel(), data, likelihood, mean=linearized, solver=solver
    )


def adapted(outputs):
    network = perceptron(1, outputs)
    return lambda data: n2g.adapt(network, data, noise_of(0.1), prior_var=0.5)


SHARP = n2g.solvers.CG(tol=1e-13, variance=n2g.solvers.Exact())
FITS = {
    "Cholesky": (conditioned(n2g.solvers.Cholesky()), 1),
    "Cholesky, 2 outputs": (conditioned(n2g.solvers.Cholesky()), 2),
    "Cholesky, a noise per output": (conditioned(n2g.solvers.Cholesky(), noise=[0.05, 0.3]), 2),
    "CG": (conditioned(SHARP), 1),
    "tangent kernel, Cholesky": (tangent(n2g.solvers.Cholesky(), 2), 2),
    "tangent kernel, weight space": (tangent(n2g.solvers.WeightCholesky(), 2), 2),
    "tangent kernel, CG": (tangent(SHARP, 2), 2),
    "adapt": (adapted(1), 1),
    "adapt, 3 outputs": (adapted(3), 3),
}


def by_refitting(fit, data, new, alpha, score) -> tuple[Tensor, Tensor]:
    """The definition, with N fits."""
    x, y = data
    lows, highs = [], []
    for n in range(len(x)):
        rest = without(len(x), n)
        posterior = fit((x[rest], y[rest]))
        threshold = score.scores(posterior.predict(x[n : n + 1]), y[n : n + 1])
        law = posterior.predict(new)
        low, high = score.interval(law, threshold.expand(len(new), -1))
        lows.append(low)
        highs.append(high)
    allowed = math.floor(Fraction(alpha) * (len(x) + 1))
    low, high = torch.stack(lows).sort(0).values, torch.stack(highs).sort(0).values
    return low[allowed - 1], high[len(x) - allowed]


@pytest.mark.parametrize(
    ("way", "score"),
    [
        *(("Cholesky, 2 outputs", score) for score in SCORES),
        *((way, StandardizedResidual()) for way in FITS if way != "Cholesky, 2 outputs"),
        ("tangent kernel, weight space", Jointly()),
    ],
    ids=str,
)
def test_it_is_what_refitting_without_each_point_gives(way, score) -> None:
    fit, outputs = FITS[way]
    data, new = noisy(11, 1, outputs), noisy(5, 2)[0]
    found = jackknife_plus(fit(data), alpha=0.3, score=score).intervals(new)
    lower, upper = by_refitting(fit, data, new, "0.3", score)
    torch.testing.assert_close(found.lower, lower, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.upper, upper, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("joint", [False, True])
def test_exchangeable_points_are_covered_at_least_as_promised(joint) -> None:
    """Each of N + 1 points is the new one once: an average over all exchangeable draws of these values."""
    fit = conditioned(None, noise=0.02)
    score = Jointly() if joint else StandardizedResidual()
    alphas = ("0.1", "0.2", "0.29", "0.45", "0.6")
    x, y = noisy(15, 1, 2)
    covered = torch.zeros(5, 2)
    for new in range(15):
        rest = without(15, new)
        first = jackknife_plus(fit((x[rest], y[rest])), alpha=0.1, score=score)
        for row, alpha in enumerate(alphas):
            promise = replace(first, alpha=float(alpha))
            inside = promise.intervals(x[new : new + 1]).contains(y[new : new + 1])[0]
            covered[row] += (inside.all() if joint else inside).float()
    for alpha, count in zip(alphas, covered, strict=True):
        promise, allowed = replace(first, alpha=float(alpha)), math.floor(Fraction(alpha) * 15)
        assert promise.coverage == pytest.approx(max(0.0, 1 - (2 * allowed - 1) / 15))
        assert promise.coverage > 1 - 2 * float(alpha)
        assert int(count.min()) >= 15 - (2 * allowed - 1)
        assert int(count.min()) < 15


def test_parts_of_the_new_points_are_answered_alike(monkeypatch) -> None:
    promise, x = jackknife_plus(regression(2), alpha=0.2), noisy(11, 2)[0]
    whole = promise.intervals(x)
    monkeypatch.setattr(conformal.jackknife, "NUMBERS", 3 * 20 * 2)
    found = promise.intervals(x)
    torch.testing.assert_close(found.lower, whole.lower, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.upper, whole.upper, rtol=1e-12, atol=1e-12)


def test_outputs_that_are_coupled_take_no_more_memory(monkeypatch) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 6)).double().eval()
    x, y = torch.randn(10, 1, dtype=torch.float64), torch.randn(10, 6, dtype=torch.float64)
    posterior = n2g.condition(n2g.linearize(network).kernel(), (x, y), n2g.Gaussian(0.1))
    promise, sizes = jackknife_plus(posterior, alpha=0.2), []
    whole = promise.intervals(x)
    original = influence.cross_covariance

    def measured(*given):
        sizes.append(original(*given).numel())
        return original(*given)

    monkeypatch.setattr(influence, "cross_covariance", measured)
    monkeypatch.setattr(conformal.jackknife, "NUMBERS", 1000)
    torch.testing.assert_close(promise.intervals(x).lower, whole.lower)
    assert max(sizes) <= 1000


def test_permuting_the_data_changes_nothing() -> None:
    (x, y), new = noisy(30, 1), noisy(6, 2)[0]
    order, groups = torch.randperm(30, generator=seeded(0)), torch.arange(30) % 2
    fit, mine = conditioned(None), torch.arange(6) % 2
    one = jackknife_plus(fit((x, y)), groups=groups, alpha=0.2).intervals(new, groups=mine)
    other = jackknife_plus(fit((x[order], y[order])), groups=groups[order], alpha=0.2)
    again = other.intervals(new, groups=mine)
    torch.testing.assert_close(one.lower, again.lower, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(one.upper, again.upper, rtol=1e-9, atol=1e-9)


def test_intervals_shrink_as_alpha_grows() -> None:
    posterior, x = regression(count=40), noisy(10, 2)[0]
    found = [jackknife_plus(posterior, alpha=a).intervals(x) for a in (0.05, 0.2, 0.45)]
    for wide, narrow in itertools.pairwise(found):
        assert bool((wide.lower < narrow.lower).all() & (narrow.upper < wide.upper).all())


def test_one_group_is_no_groups_and_a_group_takes_its_own_points() -> None:
    posterior, x = regression(count=40), noisy(6, 2)[0]
    plain = jackknife_plus(posterior, alpha=0.2)
    one = jackknife_plus(posterior, alpha=0.2, groups=torch.full((40,), 3))
    assert one.coverage == plain.coverage
    same = one.intervals(x, groups=torch.full((6,), 3))
    assert torch.equal(same.lower, plain.intervals(x).lower)
    groups = torch.arange(40) % 2
    halves = jackknife_plus(posterior, alpha=0.2, groups=groups)
    found = halves.intervals(x, groups=torch.tensor([0, 0, 0, 1, 1, 1]))
    mean, variance = plain.removal.moments(posterior, x)
    std = (variance + 0.05).sqrt()
    for point, group in enumerate([0, 0, 0, 1, 1, 1]):
        mine = groups == group
        ends = (mean + std * plain.scores)[point, mine, 0].sort().values
        assert float(found.upper[point, 0]) == pytest.approx(float(ends[20 - 4]))
    with pytest.raises(InputError, match=r"group 5 has no calibration points"):
        halves.intervals(x, groups=torch.full((6,), 5))


def test_few_points_are_infinite_and_one_point_is_possible() -> None:
    x = noisy(3, 2)[0]
    with pytest.warns(TooFewPoints, match=r"takes at least 9 calibration points.* only 8"):
        found = jackknife_plus(regression(count=8), alpha=0.1)
    assert found.coverage == 1.0
    assert bool((found.intervals(x).width == torch.inf).all())
    single = jackknife_plus(regression(count=1), alpha=0.5)
    assert bool(single.intervals(x).width.isfinite().all())


def test_updated_posteriors_and_float32_work() -> None:
    (x, y), new = noisy(30, 1), noisy(5, 2)[0]
    fit = conditioned(None)
    grown = fit((x[:20], y[:20])).update((x[20:], y[20:]))
    one = jackknife_plus(grown, alpha=0.2).intervals(new)
    other = jackknife_plus(fit((x, y)), alpha=0.2).intervals(new)
    torch.testing.assert_close(one.upper, other.upper, rtol=1e-9, atol=1e-9)
    single = n2g.condition(n2g.RBF(), (x.float(), y.float()), n2g.Gaussian(0.05))
    small = jackknife_plus(single, alpha=0.2).intervals(new.float())
    assert small.upper.dtype == torch.float32
    torch.testing.assert_close(small.upper.double(), other.upper, rtol=1e-3, atol=1e-3)


def test_spectral_posteriors_give_the_same_intervals() -> None:
    data, new = noisy(30, 1), noisy(5, 2)[0]
    found = n2g.posteriors.spectrum(n2g.RBF(), data)
    spectral = found.condition(noise_var=0.05)
    one, other = (jackknife_plus(p, alpha=0.2) for p in (spectral, conditioned(None)(data)))
    torch.testing.assert_close(
        one.intervals(new).lower, other.intervals(new).lower, rtol=1e-8, atol=1e-8
    )


def test_saved_intervals_are_the_same(tmp_path) -> None:
    posterior, x = adapted(2)(noisy(20, 1, 2)), noisy(5, 2)[0]
    promise = jackknife_plus(posterior, alpha=0.2, score=Jointly())
    promise.save(tmp_path / "promise.safetensors")
    again = conformal.load(tmp_path / "promise.safetensors", perceptron(1, 2))
    assert torch.equal(again.intervals(x).lower, promise.intervals(x).lower)
    assert str(again) == str(promise)


def test_what_has_no_exact_leave_one_out_is_refused() -> None:
    data = noisy(20, 1)
    student = n2g.likelihoods.StudentT(degrees_of_freedom=4.0, scale_var=0.1)
    inexact = (
        n2g.condition(n2g.RBF(), data, student),
        n2g.laplace(torch.nn.Linear(1, 1).double().eval(), data, n2g.Gaussian(1e3), prior_var=1.0),
        classification(),
    )
    for posterior in inexact:
        with pytest.raises(
            NotAvailable, match=r"without each of its points, exactly.*calibrate_intervals"
        ):
            jackknife_plus(posterior)
    without_data = replace(regression(), x=None, y=None)
    with pytest.raises(NotAvailable, match=r"does not hold the data"):
        jackknife_plus(without_data)
    own = n2g.Gaussian(torch.full((20, 1), 0.1, dtype=torch.float64))
    with pytest.raises(
        InputError, match=r"each training point has its own noise.*Condition with one"
    ):
        jackknife_plus(n2g.condition(n2g.RBF(), data, own))
    with pytest.raises(InputError, match=r"expected a posterior, but got"):
        jackknife_plus(data)
    with pytest.raises(InputError, match=r"score must be Standard"):
        jackknife_plus(regression(), score=conformal.ClassProbability())
    with pytest.raises(InputError, match=r"groups must hold one whole number"):
        jackknife_plus(regression(), groups=torch.zeros(3).long())
    with pytest.raises(InputError, match=r"are the data of the posterior"):
        calibrate_intervals(regression(), regression().data)
