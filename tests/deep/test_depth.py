"""Slopes and distances over depth, against sampling and against the numbers of the reference data."""

from __future__ import annotations

import json
import math

import pytest
import torch

import net2gp as n2g
from net2gp import RBF
from net2gp.deep import collapse_threshold, log_distances, log_slope, mean_slope
from net2gp.errors import InputError
from shared_data import shared_reference

WIDTHS = pytest.mark.parametrize("width", [1, 2, 7])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@WIDTHS
def test_slopes_are_those_of_sampled_gradients(width):
    layer = RBF(lengthscale=0.7, output_var=1.9)
    draws = torch.randn(400_000, width, generator=generator(), dtype=torch.float64)
    slopes = draws.norm(dim=1) * 1.9**0.5 / 0.7
    count, law = len(slopes), log_slope(layer, width=width)
    logs = slopes.log()
    assert abs(logs.mean() - law.mean) < 4 * logs.std() / count**0.5
    assert abs(logs.var() - law.variance) < 4 * (logs - logs.mean()).square().std() / count**0.5
    assert abs(slopes.mean() - mean_slope(layer, width=width)) < 4 * slopes.std() / count**0.5


def test_the_slope_of_the_process_is_what_its_kernel_says():
    layer, step = RBF(lengthscale=0.7, output_var=1.9), 1e-4
    pair = torch.tensor([[0.0], [step]], dtype=torch.float64)
    K = layer(pair)
    variance = (K[0, 0] + K[1, 1] - 2 * K[0, 1]) / step**2
    assert variance.item() == pytest.approx(1.9 / 0.49, rel=1e-6)


@WIDTHS
def test_the_exponent_vanishes_at_the_threshold(width):
    layer = RBF(lengthscale=2.0, output_var=4 * collapse_threshold(width=width))
    assert abs(log_slope(layer, width=width).mean) < 1e-14


def test_the_numbers_of_the_reference():
    stored = json.loads((shared_reference() / "analytic_refs.json").read_text())
    one = stored["dgp_logabs_normal"]
    law = log_slope(RBF())
    assert law.mean.item() == pytest.approx(one["mean_exact"], rel=1e-12)
    assert law.variance.item() == pytest.approx(one["var_exact"], rel=1e-12)
    assert mean_slope(RBF(output_var=one["E_abs_unit_when_s2"])).item() == pytest.approx(1.0)
    assert collapse_threshold() == pytest.approx(one["collapse_threshold_s2_1d"], rel=1e-12)
    for row in stored["dunlop_pair_chain_l1"]:
        found = log_slope(RBF(output_var=row["s2_over_l2"])).mean.item()
        assert found == pytest.approx(row["lyapunov"], rel=1e-12)


def test_distances_over_depth_are_those_of_the_reference():
    """Medians and root mean squares of a chain that starts at 1/2, over 200 layers."""
    table = json.loads((shared_reference() / "analytic_refs.json").read_text())
    for row in table["dunlop_pair_chain_l1"]:
        layer = RBF(output_var=row["s2_over_l2"])
        chain = log_distances(layer, 0.5, 200, num_samples=20_000, generator=generator())
        for depth, median, _ in row["layer_median_rms"]:
            logs = chain[:, depth]
            # the reference drew fewer chains; its sampling error is the larger of the two
            error = 1.2533 * logs.std() * (1 / 20_000 + 1 / 2_000) ** 0.5
            assert abs(logs.median() - math.log(median)) < 4 * error, (row["s2_over_l2"], depth)
        squares = (2 * chain[:, 1]).exp()
        expected = row["layer_median_rms"][0][2] ** 2
        assert squares.mean().item() == pytest.approx(expected, rel=0.1)


@WIDTHS
def test_distances_are_those_of_sampled_layers(width):
    """Three layers sampled at two points as Gaussian vectors, one by one."""
    layer, count = RBF(lengthscale=0.9, output_var=1.4), 50_000
    draw = generator(1)
    points = torch.zeros(count, 2, 1, dtype=torch.float64)
    points[:, 1] = 0.6
    for _ in range(3):
        squared = (points[:, 0] - points[:, 1]).square().sum(1)
        off = torch.exp(-squared / (2 * 0.9**2))
        first = torch.randn(count, width, generator=draw, dtype=torch.float64)
        second = torch.randn(count, width, generator=draw, dtype=torch.float64)
        other = off[:, None] * first + (1 - off.square()).clamp(min=0).sqrt()[:, None] * second
        points = 1.4**0.5 * torch.stack([first, other], dim=1)
    direct = (points[:, 0] - points[:, 1]).norm(dim=1).log()
    chain = log_distances(layer, 0.6, 3, width=width, num_samples=count, generator=generator())[
        :, -1
    ]
    error = (direct.var() / count + chain.var() / count).sqrt()
    assert abs(direct.mean() - chain.mean()) < 4 * error
    spread = (direct - direct.mean()).square(), (chain - chain.mean()).square()
    error = (spread[0].var() / count + spread[1].var() / count).sqrt()
    assert abs(spread[0].mean() - spread[1].mean()) < 4 * error


def test_a_collapse_is_followed_at_the_rate_of_the_exponent_to_any_depth():
    layer = RBF()
    chain = log_distances(layer, 0.1, 3000, num_samples=500, generator=generator())
    law = log_slope(layer)
    assert torch.isfinite(chain).all()
    fallen = (chain[:, -1] - chain[:, 500]) / 2500
    assert abs(fallen.mean() - law.mean) < 4 * (law.variance / 2500 / 500).sqrt()


def test_points_stay_apart_above_the_threshold():
    layer = RBF(output_var=2 * collapse_threshold())
    chain = log_distances(layer, 1e-6, 300, num_samples=2000, generator=generator())
    assert chain[:, -1].median() > math.log(0.1)


def test_layers_that_have_no_single_slope_are_refused():
    with pytest.raises(InputError, match=r"n2g\.RBF\(lengthscale, output_var\)"):
        log_slope(n2g.linearize(torch.nn.Linear(1, 1).eval()).kernel())
    with pytest.raises(InputError, match="one length scale here"):
        log_slope(RBF(torch.ones(2)))
    with pytest.raises(InputError, match="distance must be positive"):
        log_distances(RBF(), 0.0, 3)
    with pytest.raises(InputError, match="num_layers"):
        log_distances(RBF(), 0.1, 0)
