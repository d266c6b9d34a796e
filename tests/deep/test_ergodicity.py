"""The law of distances over depth on a grid, against sampled chains."""

from __future__ import annotations

import math

import pytest
import torch

from net2gp import RBF
from net2gp.deep import collapse_threshold, distance_quantiles, effective_depth, log_distances
from net2gp.errors import InputError

LEVELS = (0.05, 0.5, 0.95)


@pytest.mark.parametrize(("layer", "width"), [(RBF(0.9, 2.0), 1), (RBF(1.1, 8.0), 1), (RBF(), 4)])
def test_quantiles_are_those_of_sampled_chains(layer, width):
    found = distance_quantiles(layer, 0.5, 30, levels=LEVELS, width=width)
    chain = log_distances(
        layer,
        0.5,
        30,
        width=width,
        num_samples=20_000,
        generator=torch.Generator().manual_seed(0),
    )
    for depth in (1, 5, 30):
        logs = chain[:, depth]
        for level, value in zip(LEVELS, found[depth - 1], strict=True):
            share = (logs <= value).double().mean()
            assert abs(share - level) < 4 * (level * (1 - level) / len(logs)) ** 0.5 + 1e-3


@pytest.mark.parametrize("output_var", [1.0, 2.0])
def test_below_the_threshold_two_points_are_one_from_the_effective_depth_on(output_var):
    layer = RBF(output_var=output_var)
    depth = effective_depth(layer, 0.5, resolution=1e-2, tolerance=0.1)
    generator = torch.Generator().manual_seed(0)
    chain = log_distances(layer, 0.5, depth, num_samples=20_000, generator=generator)
    apart = (chain > math.log(1e-2)).double().mean(0)
    assert apart[depth] < 0.1 + 0.01
    assert apart[depth - 1] > 0.1 - 0.01


def test_above_the_threshold_the_chain_forgets_the_inputs():
    layer = RBF(output_var=8.0)
    depths = [effective_depth(layer, distance) for distance in (0.01, 1.0, 100.0)]
    assert all(1 <= depth <= 20 for depth in depths)
    near, far = (distance_quantiles(layer, d, 200)[-1] for d in (0.01, 100.0))
    torch.testing.assert_close(near, far, rtol=0, atol=1e-3)


def test_depth_is_worth_most_near_the_threshold():
    threshold = collapse_threshold(width=3)
    depths = [effective_depth(RBF(output_var=r * threshold), width=3) for r in (0.5, 0.8, 2.0)]
    assert depths[1] > 2 * depths[0]
    assert depths[1] > 2 * depths[2]


def test_arguments_out_of_range_are_refused():
    with pytest.raises(InputError, match=r"away from collapse_threshold.*by a tenth or more"):
        effective_depth(RBF(output_var=collapse_threshold()))
    with pytest.raises(InputError, match=r"tolerance must be from 0\.001 to 1"):
        effective_depth(RBF(), tolerance=0.0)
    with pytest.raises(InputError, match="resolution must be positive"):
        effective_depth(RBF(), resolution=0.0)
    with pytest.raises(InputError, match="levels must be probabilities between 0 and 1"):
        distance_quantiles(RBF(), 0.5, 3, levels=[1.0])
    with pytest.raises(InputError, match="one length scale here"):
        distance_quantiles(RBF(torch.ones(2)), 0.5, 3)
