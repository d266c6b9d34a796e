"""Scores of predictions: accuracy, likelihood, calibration, detection.

Each takes tensors (or a distribution) and returns a 0-d tensor. Regressions take mean, variance and
y of one shape, (N,) or (N, C), or samples with an axis S in front; classifications take probabilities
(N, C) and labels (N,), where one probability a point, (N,) or (N, 1), means that of label 1. NaN makes
a score NaN where scores are averaged, and is refused where points are counted or sorted.
"""

from net2gp.metrics.classification import (
    Reliability,
    accuracy,
    brier,
    expected_calibration_error,
    reliability,
)
from net2gp.metrics.ranking import RiskCoverage, aurc, auroc, risk_coverage
from net2gp.metrics.regression import (
    coverage,
    coverage_error,
    coverage_samples,
    crps_gaussian,
    crps_samples,
    gaussian_nll,
    nll,
    rmse,
)

__all__ = [
    "Reliability",
    "RiskCoverage",
    "accuracy",
    "aurc",
    "auroc",
    "brier",
    "coverage",
    "coverage_error",
    "coverage_samples",
    "crps_gaussian",
    "crps_samples",
    "expected_calibration_error",
    "gaussian_nll",
    "nll",
    "reliability",
    "risk_coverage",
    "rmse",
]
