from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from scipy import integrate, stats
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Independent, Normal

from net2gp import metrics
from net2gp.errors import InputError

sklearn_metrics = pytest.importorskip("sklearn.metrics")


def regression(seed: int = 0, shape: tuple[int, ...] = (60, 2)) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(shape, generator=generator, dtype=torch.float64)
    var = 0.1 + torch.rand(shape, generator=generator, dtype=torch.float64)
    y = mean + var.sqrt() * torch.randn(shape, generator=generator, dtype=torch.float64)
    return mean, var, y


def classification(seed: int = 0, classes: int = 4, points: int = 500) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(points, classes, generator=generator, dtype=torch.float64)
    y = Categorical(logits=logits).probs.multinomial(1, generator=generator)[:, 0]
    return (1.5 * logits).softmax(-1), y


def test_rmse_is_sklearns() -> None:
    mean, _, y = regression()
    expected = sklearn_metrics.mean_squared_error(y, mean) ** 0.5
    assert float(metrics.rmse(mean, y)) == pytest.approx(expected, rel=1e-12)


def test_gaussian_nll_is_the_average_of_scipys_log_density() -> None:
    mean, var, y = regression()
    expected = -stats.norm(mean, var.sqrt()).logpdf(y).mean()
    assert float(metrics.gaussian_nll((mean, var), y)) == pytest.approx(expected, rel=1e-12)
    prediction = Independent(Normal(mean, var.sqrt()), 1)
    assert float(metrics.gaussian_nll(prediction, y)) == pytest.approx(expected, rel=1e-12)


def test_nll_sums_the_outputs_of_a_point() -> None:
    mean, var, y = regression()
    together = MultivariateNormal(mean, torch.diag_embed(var))
    expected = 2 * metrics.gaussian_nll((mean, var), y)
    torch.testing.assert_close(metrics.nll(together, y), expected)
    torch.testing.assert_close(metrics.nll(Independent(Normal(mean, var.sqrt()), 1), y), expected)


def test_nll_of_classes_is_sklearns_log_loss() -> None:
    probs, y = classification()
    expected = sklearn_metrics.log_loss(y, probs)
    assert float(metrics.nll(Categorical(probs=probs), y)) == pytest.approx(expected, rel=1e-9)
    one = probs[:, :1]
    label = (y == 0).long()
    expected = sklearn_metrics.log_loss(label, one)
    assert float(metrics.nll(Bernoulli(probs=one), label)) == pytest.approx(expected, rel=1e-9)


def test_accuracy_is_sklearns() -> None:
    probs, y = classification()
    assert float(metrics.accuracy(probs, y)) == sklearn_metrics.accuracy_score(y, probs.argmax(-1))


def test_one_probability_a_point_is_that_of_label_one() -> None:
    probs, y = classification(classes=2)
    for metric in (metrics.accuracy, metrics.brier, metrics.expected_calibration_error):
        torch.testing.assert_close(metric(probs[:, 1], y), metric(probs, y))
        torch.testing.assert_close(metric(probs[:, 1:], y[:, None]), metric(probs, y))


def test_brier_is_the_squared_distance_to_the_label() -> None:
    probs, y = classification()
    brute = [
        sum((p - (k == label)) ** 2 for k, p in enumerate(row))
        for row, label in zip(probs.tolist(), y.tolist(), strict=True)
    ]
    assert float(metrics.brier(probs, y)) == pytest.approx(np.mean(brute), rel=1e-12)
    probs, y = classification(classes=2)
    expected = 2 * sklearn_metrics.brier_score_loss(y, probs[:, 1])
    assert float(metrics.brier(probs, y)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("num_bins", [1, 7, 15])
def test_calibration_error_is_its_definition(num_bins) -> None:
    probs, y = classification()
    confidence, correct = probs.max(-1).values, probs.argmax(-1) == y
    total = 0.0
    for b in range(num_bins):
        inside = (confidence > b / num_bins) & (confidence <= (b + 1) / num_bins)
        if inside.any():
            gap = correct[inside].double().mean() - confidence[inside].mean()
            total += float(inside.double().mean() * gap.abs())
    value = metrics.expected_calibration_error(probs, y, num_bins)
    assert float(value) == pytest.approx(total, rel=1e-10)
    assert total > 0.01


def test_reliability_bins_add_up_to_the_whole() -> None:
    probs, y = classification()
    bins = metrics.reliability(probs, y, num_bins=10)
    filled = bins.count > 0
    assert int(bins.count.sum()) == len(y)
    assert bins.edges.shape == (11,)
    assert torch.equal(bins.accuracy.isnan(), ~filled)
    weight = bins.count[filled] / len(y)
    torch.testing.assert_close((weight * bins.accuracy[filled]).sum(), metrics.accuracy(probs, y))
    assert (bins.confidence[filled] > bins.edges[:-1][filled]).all()
    assert (bins.confidence[filled] <= bins.edges[1:][filled]).all()


def test_labels_drawn_from_the_probabilities_are_calibrated() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(200_000, 3, generator=generator, dtype=torch.float64).softmax(-1)
    y = probs.multinomial(1, generator=generator)[:, 0]
    assert metrics.expected_calibration_error(probs, y) < 0.01


def test_coverage_counts_the_points_inside() -> None:
    mean, var, y = regression()
    lower, upper = stats.norm(mean, var.sqrt()).interval(0.8)
    expected = ((y.numpy() >= lower) & (y.numpy() <= upper)).mean()
    assert float(metrics.coverage(mean, var, y, 0.8)) == pytest.approx(expected, rel=1e-12)


def test_the_right_model_covers_what_it_says() -> None:
    mean, var, y = regression(shape=(200_000,))
    levels = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
    torch.testing.assert_close(metrics.coverage(mean, var, y, levels), levels, rtol=0, atol=5e-3)


def test_crps_is_the_integral_of_the_squared_distance_of_distributions() -> None:
    mean, var, y = regression(shape=(5,))
    brute = []
    for m, v, t in zip(mean.tolist(), var.tolist(), y.tolist(), strict=True):
        law = stats.norm(m, v**0.5)
        below = integrate.quad(lambda s: law.cdf(s) ** 2, m - 12, t, epsabs=1e-12)[0]
        above = integrate.quad(lambda s: law.sf(s) ** 2, t, m + 12, epsabs=1e-12)[0]
        brute.append(below + above)
    assert float(metrics.crps_gaussian(mean, var, y)) == pytest.approx(np.mean(brute), rel=1e-8)


def test_crps_of_a_certain_prediction_is_the_absolute_error() -> None:
    for dtype in (torch.float32, torch.float64):
        mean, y = torch.zeros(3, dtype=dtype), torch.tensor([0.0, -3.0, 6.0], dtype=dtype)
        assert float(metrics.crps_gaussian(mean, torch.zeros_like(mean), y)) == 3.0


def test_auroc_is_sklearns_with_ties() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = torch.randint(0, 8, (40,), generator=generator).double()
    outside = torch.randint(3, 11, (70,), generator=generator).double()
    labels = [0] * 40 + [1] * 70
    expected = sklearn_metrics.roc_auc_score(labels, torch.cat([inside, outside]))
    assert float(metrics.auroc(inside, outside)) == pytest.approx(expected, rel=1e-12)
    swapped = metrics.auroc(outside, inside)
    assert float(swapped) == pytest.approx(1 - expected, rel=1e-12)


def test_a_column_and_a_vector_are_never_broadcast() -> None:
    mean, var, y = regression(shape=(30, 1))
    for value in (
        metrics.rmse(mean, y[:, 0]) - metrics.rmse(mean, y),
        metrics.coverage(mean, var, y[:, 0], 0.5) - metrics.coverage(mean, var, y, 0.5),
        metrics.crps_gaussian(mean, var, y[:, 0]) - metrics.crps_gaussian(mean, var, y),
        metrics.gaussian_nll((mean, var), y[:, 0]) - metrics.gaussian_nll((mean, var), y),
        metrics.nll(Normal(mean, var.sqrt()), y[:, 0]) - metrics.nll(Normal(mean, var.sqrt()), y),
    ):
        assert float(value) == 0.0


def test_scores_can_be_differentiated() -> None:
    mean, var, y = regression(shape=(8,))
    mean.requires_grad_()
    var.requires_grad_()
    assert torch.autograd.gradcheck(lambda m, v: metrics.crps_gaussian(m, v, y), (mean, var))
    assert torch.autograd.gradcheck(lambda m, v: metrics.gaussian_nll((m, v), y), (mean, var))


def test_mistakes_say_what_was_expected() -> None:
    mean, var, y = regression(shape=(5,))
    probs, labels = classification(points=5)
    with pytest.raises(InputError, match=r"mean and y must have the same shape.*\(5,\) and \(4,\)"):
        metrics.rmse(mean, y[:4])
    with pytest.raises(InputError, match="mean and variance must have the same shape"):
        metrics.coverage(mean, var[:1], y, 0.5)
    with pytest.raises(InputError, match="must be positive, but the smallest is 0"):
        metrics.gaussian_nll((mean, 0 * var), y)
    with pytest.raises(InputError, match="zero or positive, but the smallest is -"):
        metrics.crps_gaussian(mean, -var, y)
    with pytest.raises(InputError, match="between 0 and 1, but is 95"):
        metrics.coverage(mean, var, y, 95)
    with pytest.raises(InputError, match=r"probs must be \(N, C\) and y \(N,\)"):
        metrics.accuracy(probs, labels[:4])
    with pytest.raises(InputError, match=r"labels in 0..3, at least one, but holds \[7\]"):
        metrics.brier(probs, torch.full((5,), 7))
    with pytest.raises(InputError, match="num_bins must be at least 1, but is 0"):
        metrics.reliability(probs, labels, 0)
    with pytest.raises(InputError, match=r"y must have shape \(5,\) for this Categorical"):
        metrics.nll(Categorical(probs=probs), labels[:4])
    with pytest.raises(InputError, match="got 0 inside and 5 outside"):
        metrics.auroc(mean[:0], mean)


def test_float32_stays_float32() -> None:
    mean, var, y = (value.float() for value in regression())
    probs, labels = classification()
    values = [
        metrics.rmse(mean, y),
        metrics.gaussian_nll((mean, var), y),
        metrics.coverage(mean, var, y, 0.9),
        metrics.crps_gaussian(mean, var, y),
        metrics.auroc(mean, y),
        metrics.accuracy(probs.float(), labels),
        metrics.brier(probs.float(), labels),
        metrics.expected_calibration_error(probs.float(), labels),
    ]
    assert all(value.dtype == torch.float32 and math.isfinite(value) for value in values)
