"""Scores of predictions: accuracy, likelihood, calibration, detection, closeness to a reference.

Each function takes tensors or a distribution and returns a tensor without axes. For regression, mean,
variance and y have the same shape, (N,) or (N, C), and samples have an additional first axis S. For
classification, probabilities are (N, C) and labels (N,). A single probability per point, (N,) or (N, 1),
is the probability of label 1. Scores that average over points return NaN if an input is NaN. Scores
that count or sort points refuse NaN.
"""

from net2gp.metrics.classification import (
    Reliability,
    accuracy,
    brier,
    expected_calibration_error,
    reliability,
)
from net2gp.metrics.fidelity import (
    agreement,
    total_variation,
    total_variation_samples,
    wasserstein_samples,
)
from net2gp.metrics.ranking import RiskCoverage, aurc, auroc, fpr95, risk_coverage
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
    "agreement",
    "aurc",
    "auroc",
    "brier",
    "coverage",
    "coverage_error",
    "coverage_samples",
    "crps_gaussian",
    "crps_samples",
    "expected_calibration_error",
    "fpr95",
    "gaussian_nll",
    "nll",
    "reliability",
    "risk_coverage",
    "rmse",
    "total_variation",
    "total_variation_samples",
    "wasserstein_samples",
]
