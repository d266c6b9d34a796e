"""Metrics of torchmetrics are those of net2gp, however points are divided, with states that do not grow."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributions import Bernoulli, Categorical, Normal, StudentT

from net2gp import metrics
from net2gp.errors import InputError

pytest.importorskip("torchmetrics")

from net2gp.interop.torchmetrics import (
    BrierScore,
    CalibrationError,
    Coverage,
    NegativeLogLikelihood,
    RiskCoverage,
)

generator = torch.Generator().manual_seed(0)
LOGITS = 2 * torch.randn(201, 4, generator=generator, dtype=torch.float64)
LABELS = torch.randint(0, 4, (201,), generator=generator)
PROBS = LOGITS.softmax(1)
MEAN = torch.randn(201, 2, generator=generator, dtype=torch.float64)
VAR = torch.rand(201, 2, generator=generator, dtype=torch.float64) + 0.1
TARGETS = MEAN + torch.randn(201, 2, generator=generator, dtype=torch.float64)
LEVELS = (0.5, 0.9, 0.99)
WRONG = (PROBS.argmax(1) != LABELS).double()
UNSURE = 1 - PROBS.amax(1)

CASES = {
    "nll": (NegativeLogLikelihood, lambda s: (Categorical(PROBS[s]), LABELS[s])),
    "nll of a regression": (
        NegativeLogLikelihood,
        lambda s: (Normal(MEAN[s], VAR[s].sqrt()), TARGETS[s]),
    ),
    "brier": (BrierScore, lambda s: (PROBS[s], LABELS[s])),
    "calibration": (CalibrationError, lambda s: (Categorical(PROBS[s]), LABELS[s])),
    "coverage": (Coverage, lambda s: ((MEAN[s], VAR[s]), TARGETS[s])),
    "coverage of a law": (
        lambda: Coverage(LEVELS),
        lambda s: (Normal(MEAN[s], VAR[s].sqrt()), TARGETS[s]),
    ),
    "risk": (RiskCoverage, lambda s: (UNSURE[s], WRONG[s])),
}
ALL = slice(None)


def values(found):
    return found if isinstance(found, tuple) else (found,)


EXACT = {
    "nll": lambda: metrics.nll(Categorical(PROBS), LABELS),
    "nll of a regression": lambda: metrics.nll(Normal(MEAN, VAR.sqrt()), TARGETS),
    "brier": lambda: metrics.brier(PROBS, LABELS),
    "calibration": lambda: metrics.expected_calibration_error(PROBS, LABELS),
    "coverage": lambda: metrics.coverage(MEAN, VAR, TARGETS, 0.9),
    "coverage of a law": lambda: metrics.coverage(
        MEAN, VAR, TARGETS, torch.tensor(LEVELS).double()
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_batch_by_batch_a_metric_is_that_of_all_points(name):
    make, part = CASES[name]
    metric = make()
    for some in (slice(0, 7), slice(7, 150), slice(150, None)):
        metric.update(*part(some))
    torch.testing.assert_close(metric.compute(), EXACT[name](), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_states_of_two_devices_add_up_and_do_not_grow(name):
    make, part = CASES[name]
    whole, first, second = make(), make(), make()
    whole.update(*part(ALL))
    first.update(*part(slice(0, 100)))
    second.update(*part(slice(100, None)))
    sizes = {key: value.shape for key, value in whole.metric_state.items()}
    assert sizes == {key: value.shape for key, value in make().metric_state.items()}
    for key, value in first.metric_state.items():
        getattr(second, key).add_(value)  # what an all-reduce of sums does
    for one, other in zip(values(second.compute()), values(whole.compute()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    whole.reset()
    with (
        pytest.warns(UserWarning, match="before the"),
        pytest.raises(InputError, match="has seen no point yet"),
    ):
        whole.compute()


def test_the_risk_is_exact_at_the_edges_of_the_bins():
    metric = RiskCoverage(num_bins=20)
    metric.update(UNSURE, WRONG)
    (coverage, risk), exact = metric.compute(), metrics.risk_coverage(UNSURE, WRONG)
    index = (coverage * len(WRONG)).round().long() - 1
    torch.testing.assert_close(risk, exact.risk[index], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(coverage, exact.coverage[index])
    fine = RiskCoverage(num_bins=100_000)
    fine.update(UNSURE, WRONG)
    assert len(fine.compute()[1]) == len(UNSURE.unique())


def test_uncertainties_beyond_the_range_are_in_the_outer_bins():
    metric = RiskCoverage(num_bins=2, low=0.0, high=1.0)
    metric.update(torch.tensor([-3.0, 0.2, 7.0]), torch.tensor([0.0, 1.0, 1.0]))
    assert metric.count.tolist() == [2, 1]


def test_two_classes_may_be_one_probability():
    metric = BrierScore()
    metric.update(Bernoulli(torch.tensor([0.2, 0.9])), torch.tensor([0, 1]))
    assert metric.compute() == pytest.approx(2 * (0.04 + 0.01) / 2)


def test_a_metric_can_be_used_with_forward_and_copied():
    metric = CalibrationError()
    batch = metric(Categorical(PROBS[:50]), LABELS[:50])
    torch.testing.assert_close(batch, metrics.expected_calibration_error(PROBS[:50], LABELS[:50]))
    other = copy.deepcopy(metric)
    other.update(PROBS[50:], LABELS[50:])
    torch.testing.assert_close(other.compute(), EXACT["calibration"]())
    torch.testing.assert_close(metric.compute(), batch)


def test_wrong_input_is_refused_in_a_sentence():
    with pytest.raises(InputError, match="labels are predicted by probabilities, but got Normal"):
        BrierScore().update(Normal(0.0, 1.0), LABELS)
    with pytest.raises(InputError, match="nll takes the law of y, but got Tensor"):
        NegativeLogLikelihood().update(torch.ones(2, 2), LABELS[:2])
    for wrong in (StudentT(3.0, torch.zeros(2, 1)), torch.zeros(2, 1)):
        with pytest.raises(InputError, match="Gaussian intervals, but got"):
            Coverage().update(wrong, torch.zeros(2, 1))
    with pytest.raises(InputError, match="num_bins"):
        CalibrationError(num_bins=0)
    with pytest.raises(InputError, match="low must be below high"):
        RiskCoverage(low=1.0, high=0.0)
    with pytest.raises(InputError, match="one number for each of the same points"):
        RiskCoverage().update(UNSURE, WRONG[:-1])
