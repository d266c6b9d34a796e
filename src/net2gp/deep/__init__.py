"""Compositions of Gaussian processes: their second and fourth moments, and the effect of depth."""

from net2gp.deep.composition import Composed, composed, increment_kurtosis
from net2gp.deep.depth import (
    LogSlope,
    collapse_threshold,
    log_distances,
    log_slope,
    mean_slope,
)

__all__ = [
    "Composed",
    "LogSlope",
    "collapse_threshold",
    "composed",
    "increment_kurtosis",
    "log_distances",
    "log_slope",
    "mean_slope",
]
