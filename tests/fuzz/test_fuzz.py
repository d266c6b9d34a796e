"""Random networks: what net2gp answers is right, or it refuses by name."""

from __future__ import annotations

import pytest
import torch

from fuzz.generator import draws, registered, title
from fuzz.referee import OK, REFUSED, subject
from fuzz.run import judge, summary

QUICK = 240
BATCH = 20


def assert_no_faults(seeds: range, share: float) -> None:
    results = [judge(seed, share) for seed in seeds]
    faults = [result.report() for result in results if result.faults()]
    assert not faults, "\n\n".join(faults)
    answered = [f for result in results for f in result.findings]
    refused = sum(f.verdict == REFUSED for f in answered)
    # refusals that are false would hide here
    assert refused <= 0.1 * len(answered), summary(results)


@pytest.mark.parametrize("start", range(0, QUICK, BATCH))
def test_random_networks_are_right_or_refused(start: int) -> None:
    assert_no_faults(range(start, start + BATCH), share=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(10_000, 12_000, 100))
def test_many_random_networks_are_right_or_refused(start: int) -> None:
    assert_no_faults(range(start, start + 100), share=1.0)


def test_a_seed_gives_the_same_network_again() -> None:
    for seed in range(5):
        (one, right), (two, again) = subject(seed), subject(seed)
        assert repr(one.network) == repr(two.network)
        torch.testing.assert_close(right.J, again.J, rtol=0, atol=0)


def test_every_block_and_wrap_is_drawn() -> None:
    drawn: set[str] = set()
    names = {title(build) for build in registered()}
    for seed in range(2000):
        drawn.update(next(draws(seed)).ingredients)
        if names <= drawn:
            break
    assert names <= drawn


def test_the_referee_finds_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from net2gp.linear.tangent import TangentKernel

    right = TangentKernel.diag
    monkeypatch.setattr(TangentKernel, "diag", lambda self, x: right(self, x) * (1 + 1e-7))
    found = {f.what: f.verdict for f in judge(1).findings}
    assert found["kernel.diag"] == "wrong"
    assert found["kernel(x)"] == OK
