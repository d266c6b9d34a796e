"""Which training inputs are kept to say what is novel."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import net2gp as n2g
from net2gp.posteriors.recipes import seen

DOUBLE = torch.float64


def inputs(count: int, seed: int) -> Tensor:
    """Most of them near each other, a few far away."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator, dtype=DOUBLE)
    return x * torch.where(torch.rand(count, 1, generator=generator) < 0.1, 3.0, 0.5)


@cache
def known() -> tuple[n2g.linear.Linearized, Tensor, seen.SeenPoints]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 2)).double()
    linearized, x = n2g.linearize(network), inputs(1500, 0)
    return linearized, x, seen._points(linearized, x, seen.most)


def shares(linearized: n2g.linear.Linearized, points: Tensor, new: Tensor) -> Tensor:
    """What targets at points leave open, by definition."""
    J = [linearized.jacobian(x).flatten(1) for x in (points, new)]
    K, cross = J[0] @ J[0].T, J[0] @ J[1].T
    own, there = K.diagonal().sqrt(), J[1].norm(dim=1)
    K, cross = K / own / own[:, None], cross / own[:, None] / there
    noisy = K + seen.NOISE * torch.eye(len(K), dtype=DOUBLE)
    return 1 - (cross * torch.linalg.solve(noisy, cross)).sum(0)


def test_shares_are_those_of_the_points_that_are_kept():
    linearized, x, kept = known()
    assert len(kept.x) == seen.NUM_POINTS
    assert len(torch.cat([kept.x, x]).unique(dim=0)) == len(x)
    new = inputs(50, 1)
    expected = shares(linearized, kept.x, new)
    torch.testing.assert_close(kept.shares(linearized)(new), expected, rtol=1e-6, atol=1e-9)


def test_the_kept_points_know_more_than_a_random_choice():
    linearized, x, kept = known()
    new = inputs(400, 2)
    chosen = kept.shares(linearized)(new)
    random = shares(linearized, x[: seen.NUM_POINTS], new)
    everything = shares(linearized, x, new)
    assert everything.max() < chosen.max() < random.max()
    assert chosen.mean() < random.mean()


def test_new_points_are_as_novel_as_the_training_inputs_say():
    linearized, _, kept = known()
    found = (kept.shares(linearized)(inputs(4000, 3)) < kept.ordinary).double().mean()
    # the kept points are those that the others say least about, so that it is rather a little more
    assert seen.ORDINARY - 0.01 < float(found) < seen.ORDINARY + 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_repeated_points_fill_the_places_that_are_left(dtype):
    network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    x = inputs(12, 4)[:, :2].repeat(50, 1).to(dtype)
    linearized = n2g.linearize(network)
    kept = seen._points(linearized, x, seen.most)
    assert len(kept.x) == seen.NUM_POINTS
    expected = shares(n2g.linearize(network.double()), kept.x.double(), x[:12].double())
    found = kept.shares(linearized)(x[:12])
    torch.testing.assert_close(found.double(), expected, rtol=0.05, atol=2e-6)
