"""Compositions of Gaussian processes: their moments, the effect of depth, and fits to data."""

from net2gp.deep.composition import Composed, composed, increment_kurtosis
from net2gp.deep.depth import (
    LogSlope,
    collapse_threshold,
    log_distances,
    log_slope,
    mean_slope,
)
from net2gp.deep.inference.bounds.collapsed import collapsed_bound
from net2gp.deep.inference.bounds.importance import importance_bound
from net2gp.deep.inference.bounds.psi_statistics import two_layer_bound
from net2gp.deep.inference.fit import fit
from net2gp.deep.inference.settings import Ascent
from net2gp.deep.inference.sparse_layer import SparseLayer

__all__ = [
    "Ascent",
    "Composed",
    "LogSlope",
    "SparseLayer",
    "collapse_threshold",
    "collapsed_bound",
    "composed",
    "fit",
    "importance_bound",
    "increment_kurtosis",
    "log_distances",
    "log_slope",
    "mean_slope",
    "two_layer_bound",
]
