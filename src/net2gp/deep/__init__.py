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
from net2gp.deep.inference.bounds.two_layers import two_layer_bound
from net2gp.deep.inference.fit import fit
from net2gp.deep.inference.settings import Ascent
from net2gp.deep.inference.sparse_layer import SparseLayer
from net2gp.deep.latent.fit_latent import latent_variables
from net2gp.deep.latent.psi import GaussianRows, PsiStatistics, psi_statistics
from net2gp.deep.latent.result import LatentVariables
from net2gp.deep.latent.search import LatentSearch

__all__ = [
    "Ascent",
    "Composed",
    "GaussianRows",
    "LatentSearch",
    "LatentVariables",
    "LogSlope",
    "PsiStatistics",
    "SparseLayer",
    "collapse_threshold",
    "collapsed_bound",
    "composed",
    "fit",
    "importance_bound",
    "increment_kurtosis",
    "latent_variables",
    "log_distances",
    "log_slope",
    "mean_slope",
    "psi_statistics",
    "two_layer_bound",
]
