from __future__ import annotations

import itertools
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


def test_crps_of_samples_is_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(7, 5, 2, generator=generator, dtype=torch.float64)
    y = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    near = (samples - y).abs().mean(0)
    apart = (samples[:, None] - samples).abs().sum((0, 1))
    for unbiased, pairs in ((True, 7 * 6), (False, 7 * 7)):
        expected = (near - apart / (2 * pairs)).mean()
        value = metrics.crps_samples(samples, y, unbiased=unbiased)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)


def test_crps_of_samples_is_that_of_their_law_on_average() -> None:
    mean, var, y = regression(shape=(4,))
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(3, 100_000, 4, generator=generator, dtype=torch.float64)
    samples = mean + var.sqrt() * noise
    spread = (samples - y).abs().mean(0) - (samples - samples.roll(1, 0)).abs().mean(0) / 2
    error = float(spread.mean(-1).std() / 100_000**0.5)
    each = metrics.crps_samples(samples, y.expand(100_000, 4))
    assert abs(float(each - metrics.crps_gaussian(mean, var, y))) < 4 * error
    biased = metrics.crps_samples(samples, y.expand(100_000, 4), unbiased=False)
    assert float(biased - metrics.crps_gaussian(mean, var, y)) > 20 * error


def test_crps_of_one_sample_is_the_absolute_error() -> None:
    mean, _, y = regression(shape=(6,))
    expected = (mean - y).abs().mean()
    torch.testing.assert_close(metrics.crps_samples(mean[None], y, unbiased=False), expected)


def test_coverage_of_samples_counts_between_numpys_quantiles() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(11, 400, 2, generator=generator, dtype=torch.float64)
    y = torch.randn(400, 2, generator=generator, dtype=torch.float64)
    levels = torch.tensor([0.0, 0.25, 0.8, 0.97, 1.0], dtype=torch.float64)
    expected = []
    for level in levels.tolist():
        lower, upper = np.quantile(samples.numpy(), [(1 - level) / 2, (1 + level) / 2], axis=0)
        expected.append(((y.numpy() >= lower) & (y.numpy() <= upper)).mean())
    assert metrics.coverage_samples(samples, y, levels).tolist() == pytest.approx(expected)
    assert float(metrics.coverage_samples(samples, y, 0.8)) == pytest.approx(expected[2])


def test_five_samples_span_the_next_in_four_cases_of_six() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(6, 200_000, generator=generator)
    share = float(metrics.coverage_samples(draws[1:], draws[0], 1.0))
    assert share == pytest.approx(4 / 6, abs=4 * (2 / 9 / 200_000) ** 0.5)


def test_coverage_error_is_zero_for_the_right_law_and_half_for_one_that_never_covers() -> None:
    mean, var, y = regression(shape=(200_000,))
    assert metrics.coverage_error(mean, var, y) < 2e-3
    never = metrics.coverage_error(mean, 1e-12 * var, y)
    assert float(never) == pytest.approx(0.5, abs=1e-4)
    levels = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    gaps = [abs(float(metrics.coverage(mean, 4 * var, y, level)) - level) for level in levels]
    value = metrics.coverage_error(mean, 4 * var, y, num_levels=3)
    assert float(value) == pytest.approx(float(np.mean(gaps)), rel=1e-12)


def test_risk_coverage_is_the_mean_loss_of_the_surest() -> None:
    generator = torch.Generator().manual_seed(0)
    uncertainty = torch.rand(50, generator=generator, dtype=torch.float64)
    loss = torch.rand(50, generator=generator, dtype=torch.float64)
    order = sorted(range(50), key=lambda n: float(uncertainty[n]))
    expected = [np.mean([float(loss[n]) for n in order[: k + 1]]) for k in range(50)]
    curve = metrics.risk_coverage(uncertainty, loss)
    assert curve.risk.tolist() == pytest.approx(expected, rel=1e-12)
    assert curve.coverage.tolist() == pytest.approx([(k + 1) / 50 for k in range(50)])
    area = metrics.aurc(uncertainty, loss)
    assert float(area) == pytest.approx(np.mean(expected), rel=1e-12)


def test_ties_count_as_the_average_over_their_orders() -> None:
    uncertainty = torch.tensor([1, 0, 1, 1, 0, 2])
    loss = torch.tensor([0.3, 0.1, 0.9, 0.0, 0.5, 0.2], dtype=torch.float64)
    orders = [
        [*low, *middle, 5]
        for low in itertools.permutations([1, 4])
        for middle in itertools.permutations([0, 2, 3])
    ]
    number = torch.arange(1, 7)
    expected = torch.stack([loss[order].cumsum(0) / number for order in orders]).mean(0)
    torch.testing.assert_close(metrics.risk_coverage(uncertainty, loss).risk, expected)


def test_sorted_losses_have_the_least_area_and_constant_uncertainty_the_mean_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    loss = torch.rand(6, generator=generator, dtype=torch.float64)
    areas = [
        float(metrics.aurc(torch.tensor(order), loss)) for order in itertools.permutations(range(6))
    ]
    assert float(metrics.aurc(loss, loss)) == pytest.approx(min(areas), rel=1e-12)
    torch.testing.assert_close(metrics.aurc(torch.zeros(6), loss), loss.mean())


def test_truth_values_are_losses_and_columns_are_vectors() -> None:
    uncertainty = torch.tensor([0.3, 0.1, 0.2])
    wrong = torch.tensor([True, False, True])
    torch.testing.assert_close(metrics.aurc(uncertainty, wrong), torch.tensor(7 / 18))
    column = metrics.aurc(uncertainty[:, None], wrong[:, None].double())
    torch.testing.assert_close(column, torch.tensor(7 / 18, dtype=torch.float64))


@pytest.mark.parametrize("count", [1, 7, 20, 99, 100])
def test_fpr95_is_the_first_point_of_sklearns_curve_where_95_percent_pass(count) -> None:
    generator = torch.Generator().manual_seed(count)
    inside = torch.randint(0, 30, (count,), generator=generator).double()  # with ties
    outside = torch.randint(10, 50, (57,), generator=generator).double()
    known = np.r_[np.ones(count), np.zeros(57)]
    false, true, _ = sklearn_metrics.roc_curve(
        known, -np.r_[inside.numpy(), outside.numpy()], drop_intermediate=False
    )
    expected = false[np.argmax(true >= 0.95 - 1e-12)]
    assert float(metrics.fpr95(inside, outside)) == pytest.approx(expected, abs=1e-12)
    with pytest.raises(InputError, match="fpr95 needs scores of both kinds"):
        metrics.fpr95(inside, outside[:0])


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
    samples = torch.stack([mean, mean + var, mean - 2 * var]).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda s: metrics.crps_samples(s, y), samples)


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
    with pytest.raises(InputError, match=r"got 0 inside and 5 outside.*scores\[y == 0\]"):
        metrics.auroc(mean[:0], mean)


def test_mistakes_with_probabilities_say_what_to_pass() -> None:
    probs, labels = classification(points=5)
    with pytest.raises(InputError, match=r"between 0 and 1.*pass logits\.softmax\(-1\)"):
        metrics.brier(probs.log(), labels)
    with pytest.raises(InputError, match="between 0 and 1, but one is nan"):
        metrics.expected_calibration_error(probs * torch.nan, labels)
    with pytest.raises(InputError, match=r"add up to 1, but are off by .*probs / probs\.sum"):
        metrics.brier(0.5 * probs, labels)
    with pytest.raises(InputError, match=r"probs must be a tensor.*torch\.as_tensor\(probs\)"):
        metrics.accuracy(probs.numpy(), labels)


def test_mistakes_with_samples_and_uncertainties_say_what_to_pass() -> None:
    mean, var, y = regression(shape=(5,))
    with pytest.raises(InputError, match=r"\(S, N\) or \(S, N, C\).*have shape \(5,\)"):
        metrics.crps_samples(mean, y)
    with pytest.raises(InputError, match=r"at least 2 samples, but got 1.*unbiased=False"):
        metrics.crps_samples(mean[None], y)
    with pytest.raises(InputError, match=r"each sample and y must have the same shape.*\(4,\)"):
        metrics.coverage_samples(mean.expand(3, 5), y[:4], 0.5)
    with pytest.raises(InputError, match="between 0 and 1, but is 95"):
        metrics.coverage_samples(mean.expand(3, 5), y, 95)
    with pytest.raises(InputError, match="num_levels must be at least 1, but is 0"):
        metrics.coverage_error(mean, var, y, 0)
    with pytest.raises(InputError, match=r"one number for each.*\(5,\) and \(5, 2\).*loss\.mean"):
        metrics.aurc(mean, torch.zeros(5, 2))
    with pytest.raises(InputError, match=r"one number for each of the same points.*\(5,\) and \(4"):
        metrics.risk_coverage(mean, y[:4])
    with pytest.raises(InputError, match=r"one number for each of the same points.*\(0,\) and \(0"):
        metrics.risk_coverage(mean[:0], y[:0])
    with pytest.raises(InputError, match="y must hold numbers, but 5 of 5 are NaN"):
        metrics.coverage(mean, var, y * torch.nan, 0.5)
    with pytest.raises(InputError, match="scores_out must hold numbers, but 5 of 5 are NaN"):
        metrics.auroc(mean, mean * torch.nan)
    with pytest.raises(InputError, match="y must be a tensor, but is an object of type float"):
        metrics.rmse(mean, 1.0)


def test_nan_stays_nan_in_what_is_averaged() -> None:
    mean, var, y = regression(shape=(5,))
    lost = mean.clone()
    lost[0] = torch.nan
    assert metrics.rmse(lost, y).isnan()
    assert metrics.gaussian_nll((lost, var), y).isnan()
    assert metrics.crps_gaussian(lost, var, y).isnan()


def test_float32_stays_float32() -> None:
    mean, var, y = (value.float() for value in regression())
    probs, labels = classification()
    values = [
        metrics.rmse(mean, y),
        metrics.gaussian_nll((mean, var), y),
        metrics.coverage(mean, var, y, 0.9),
        metrics.crps_gaussian(mean, var, y),
        metrics.auroc(mean, y),
        metrics.aurc(mean[:, 0], y[:, 0]),
        metrics.coverage_error(mean, var, y),
        metrics.crps_samples(torch.stack([mean, y]), y),
        metrics.coverage_samples(torch.stack([mean, y]), y, 0.9),
        metrics.accuracy(probs.float(), labels),
        metrics.brier(probs.float(), labels),
        metrics.expected_calibration_error(probs.float(), labels),
    ]
    assert all(value.dtype == torch.float32 and math.isfinite(value) for value in values)


def test_accuracy_is_of_the_largest_score_whatever_its_scale():
    scores, y = torch.tensor([[-3.0, 2.0], [0.5, 0.1], [7.0, 9.0]]), torch.tensor([1, 1, 1])
    expected = metrics.accuracy(scores.softmax(-1), y)
    assert metrics.accuracy(scores, y) == metrics.accuracy(10 * scores - 4, y) == expected
    with pytest.raises(InputError, match="probs must be between 0 and 1"):
        metrics.accuracy(scores[:, 0], y)
