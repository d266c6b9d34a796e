from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from net2gp import metrics
from net2gp.errors import InputError


def classes(seed: int, points: int = 200, num_classes: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(points, num_classes, generator=generator, dtype=torch.float64).softmax(-1)


def draws(seed: int, count: int, points: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, points, generator=generator, dtype=torch.float64)


def test_agreement_counts_equal_labels() -> None:
    one, other = classes(0), classes(1)
    expected = sum(int(p.argmax()) == int(q.argmax()) for p, q in zip(one, other, strict=True))
    assert float(metrics.agreement(one, other)) == expected / len(one)
    assert float(metrics.agreement(one, one)) == 1


def test_total_variation_is_the_largest_difference_over_sets_of_classes() -> None:
    one, other = classes(0), classes(1)
    sets = torch.tensor([[bool(i >> c & 1) for c in range(4)] for i in range(16)])
    gaps = (one - other)[:, None].mul(sets).sum(-1).amax(-1)
    torch.testing.assert_close(metrics.total_variation(one, other), gaps.mean())


def test_one_probability_per_point_stands_for_two_classes() -> None:
    one, other = classes(0)[:, 0], classes(1)[:, 0]
    pair = [torch.stack([1 - p, p], -1) for p in (one, other)]
    for score in (metrics.agreement, metrics.total_variation):
        torch.testing.assert_close(score(one, other[:, None]), score(*pair))
    assert float(metrics.total_variation(one, other)) == pytest.approx(
        float((one - other).abs().mean())
    )


@pytest.mark.parametrize("counts", [(7, 7), (6, 9), (1, 5), (8, 4)])
def test_wasserstein_distance_integrates_the_difference_of_quantiles(
    counts: tuple[int, int],
) -> None:
    one, other = draws(0, counts[0]), 2 * draws(1, counts[1]) + 1
    # Repeated draws leave a law as it is, and laws of equally many draws are matched in order.
    many = [
        part.repeat_interleave(math.lcm(*counts) // len(part), 0).sort(0).values
        for part in (one, other)
    ]
    expected = (many[0] - many[1]).square().mean(0).sqrt().mean()
    torch.testing.assert_close(metrics.wasserstein_samples(one, other), expected)
    torch.testing.assert_close(metrics.wasserstein_samples(other, one), expected)


def test_wasserstein_distance_of_shifted_and_scaled_laws() -> None:
    law = draws(0, 400)
    shifted = metrics.wasserstein_samples(law + 3, law)
    torch.testing.assert_close(shifted, torch.tensor(3.0, dtype=torch.float64))
    scaled = (law.square().mean(0)).sqrt().mean()
    torch.testing.assert_close(metrics.wasserstein_samples(2 * law, law), scaled)


def test_binned_total_variation_approaches_the_distance_of_the_laws() -> None:
    grid = torch.linspace(0, 1, 4002, dtype=torch.float64)[1:-1]
    normal = torch.special.ndtri(grid)[:, None]
    # Between N(0, 1) and N(1, 1) the densities cross at ½.
    expected = 2 * stats.norm.cdf(0.5) - 1
    found = metrics.total_variation_samples(normal + 1, normal, num_bins=200)
    assert float(found) == pytest.approx(expected, abs=5e-3)
    coarse = metrics.total_variation_samples(normal + 1, normal, num_bins=3)
    assert 0.1 < float(coarse) < float(found)


def test_binned_total_variation_of_the_same_law_is_what_the_docstring_says() -> None:
    one, other = draws(0, 500, 200), draws(1, 2000, 200)
    expected = math.sqrt(20 / (2 * math.pi) * (1 / 500 + 1 / 2000))
    found = float(metrics.total_variation_samples(one, other))
    assert found == pytest.approx(expected, rel=0.1)


def test_binned_total_variation_is_zero_for_equal_samples_and_one_for_distant_ones() -> None:
    law = draws(0, 100).round(decimals=1)
    assert float(metrics.total_variation_samples(law, law)) == 0
    point = torch.zeros(100, 5, dtype=torch.float64)
    assert float(metrics.total_variation_samples(point - 1, point)) == 1


@pytest.mark.parametrize("score", [metrics.agreement, metrics.total_variation])
def test_classes_must_fit(score) -> None:
    with pytest.raises(InputError, match="probs and reference must have the same shape"):
        score(classes(0), classes(0, points=3))
    with pytest.raises(InputError, match="must add up to 1"):
        score(classes(0), 0.5 * classes(0))
    with pytest.raises(InputError, match="NaN"):
        score(classes(0) * torch.nan, classes(0))


@pytest.mark.parametrize("score", [metrics.wasserstein_samples, metrics.total_variation_samples])
def test_samples_must_fit(score) -> None:
    with pytest.raises(InputError, match="same shape"):
        score(draws(0, 9), draws(0, 9, points=3))
    with pytest.raises(InputError, match="reference must be"):
        score(draws(0, 9), draws(0, 9)[:0])
    with pytest.raises(InputError, match="samples must be"):
        score(draws(0, 9)[0], draws(0, 9))
    with pytest.raises(InputError, match="NaN"):
        score(draws(0, 9) * torch.nan, draws(0, 9))


def test_bins_must_be_two_or_more() -> None:
    with pytest.raises(InputError, match="num_bins must be at least 2"):
        metrics.total_variation_samples(draws(0, 9), draws(1, 9), num_bins=1)
