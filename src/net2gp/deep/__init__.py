"""Compositions of Gaussian processes: draws, moments, Jacobians, and the effect of depth."""

from net2gp.deep.bottleneck import Activated, layers_of
from net2gp.deep.composition import Composed, composed, increment_kurtosis
from net2gp.deep.depth import (
    LogSlope,
    collapse_threshold,
    log_distances,
    log_slope,
    mean_slope,
)
from net2gp.deep.draws import Draws, draw
from net2gp.deep.ergodicity import distance_quantiles, effective_depth
from net2gp.deep.jacobians import JacobianDraws, draw_jacobians
from net2gp.deep.layers import Layer

__all__ = [
    "Activated",
    "Composed",
    "Draws",
    "JacobianDraws",
    "Layer",
    "LogSlope",
    "collapse_threshold",
    "composed",
    "distance_quantiles",
    "draw",
    "draw_jacobians",
    "effective_depth",
    "increment_kurtosis",
    "layers_of",
    "log_distances",
    "log_slope",
    "mean_slope",
]
