"""Whatever gives a posterior can carry a promise, and Gaussian ones can leave their points out."""

from __future__ import annotations

import pytest
import torch
from torch import distributions

from net2gp.conformal import calibrate_intervals, calibrate_sets, jackknife_plus
from net2gp.errors import InputError, NotAvailable
from net2gp.likelihoods.traits import has_gaussian_noise
from net2gp.methods.explain.influence import removal
from net2gp.posteriors.condition import ByConditioning
from posteriors.methods import EVERY, found
from posteriors.ways import WAYS, points, unseen_points


def can_leave_out(posterior) -> bool:
    return isinstance(posterior.recipe, ByConditioning) and has_gaussian_noise(posterior.likelihood)


EXACT = [name for name, way in WAYS.items() if has_gaussian_noise(way.likelihood)]
HELD_OUT, ALPHA, COVERED = 19, 0.25, 15


@pytest.mark.parametrize("name", EVERY)
def test_the_threshold_covers_as_many_held_out_points_as_its_rank_says(name) -> None:
    posterior, way = found(name), EVERY[name]
    x = points(HELD_OUT, seed=7)
    data = (x, way.targets(x, way.num_targets))
    law = posterior.predict(x)
    if isinstance(law, distributions.Bernoulli) and law.probs.shape[-1] > 1:
        with pytest.raises(InputError, match=r"binary labels per point\. Calibrate a posterior"):
            calibrate_sets(posterior, data, alpha=ALPHA)
        return
    if isinstance(law, distributions.Categorical | distributions.Bernoulli):
        promise = calibrate_sets(posterior, data, alpha=ALPHA)
        covered = promise.sets(x).contains(data[1])[:, None].sum(0)
    else:
        promise = calibrate_intervals(posterior, data, alpha=ALPHA)
        covered = promise.intervals(x).contains(data[1]).sum(0)
    assert promise.coverage == COVERED / (HELD_OUT + 1)
    assert bool((covered >= COVERED).all())
    if data[1].is_floating_point():
        assert covered.tolist() == [COVERED] * way.num_targets


@pytest.mark.parametrize("name", EXACT)
def test_leaving_a_point_out_is_refitting_without_it(name) -> None:
    posterior, way, new = found(name), WAYS[name], unseen_points()
    law, taken = removal(posterior)
    mean, variance = taken.moments(posterior, new)
    x, y = way.data()
    for left_out in (0, len(x) - 1):
        rest = torch.arange(len(x)) != left_out
        refit = way.build(x[rest], y[rest])
        here = refit.marginal(new)
        tolerance = {"rtol": 10 * way.tol, "atol": 10 * way.tol}
        torch.testing.assert_close(mean[:, left_out], here.mean, **tolerance)
        torch.testing.assert_close(variance[:, left_out], here.variance, **tolerance)
        own = refit.marginal(x[left_out : left_out + 1])
        torch.testing.assert_close(law.mean[left_out], own.mean[0], **tolerance)


@pytest.mark.parametrize("name", EVERY)
def test_the_jackknife_takes_what_it_can_leave_out_exactly_and_refuses_the_rest(name) -> None:
    posterior, new = found(name), unseen_points()
    if can_leave_out(posterior):
        assert bool(jackknife_plus(posterior, alpha=0.3).intervals(new).width.isfinite().all())
    else:
        with pytest.raises(NotAvailable, match=r"exactly|does not hold the data"):
            jackknife_plus(posterior, alpha=0.3)
