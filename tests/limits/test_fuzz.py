"""Random networks of everyday code: right within sampling error, or refused by name."""

from __future__ import annotations

import pytest
import torch

from fuzz.limit_networks import BAD, Network, outcome
from fuzz.limit_referee import Kernels, deviation

QUICK = range(1000, 1036)


@pytest.mark.parametrize("seed", QUICK)
def test_random_networks_agree_with_finite_ones_or_are_refused(seed):
    found = outcome(seed)
    assert found.verdict not in BAD, f"{found.title}: {found.text}"


def test_the_quick_ones_are_mostly_accepted_and_have_every_kind_of_input():
    assert {Network(seed, 8).kind for seed in QUICK} == {"vector", "sequence", "map", "tokens"}
    assert len({type(block) for seed in QUICK for block in Network(seed, 8).blocks}) >= 15


def test_the_referee_tells_a_kernel_from_another_that_is_larger_by_a_tenth():
    kernels = torch.stack([torch.eye(3), 2 * torch.eye(3)]).double()
    found = Kernels(kernels, 0.015 * torch.ones_like(kernels))
    z, part = deviation(found, kernels / 1.1)
    assert z > 5
    assert part == pytest.approx(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_many_random_networks_agree_with_finite_ones_or_are_refused(seed):
    found = outcome(seed)
    assert found.verdict not in BAD, f"{found.title}: {found.text}"
