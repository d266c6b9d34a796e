"""Compositions of Gaussian processes: their moments, depth, fits to data, kernels of features."""

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
from net2gp.deep.kernel_learning import KernelTraining, NetworkKernel, learn_kernel
from net2gp.deep.saturation import SaturatedKernel, Saturation, saturation

__all__ = [
    "Ascent",
    "Composed",
    "KernelTraining",
    "LogSlope",
    "NetworkKernel",
    "SaturatedKernel",
    "Saturation",
    "SparseLayer",
    "collapse_threshold",
    "collapsed_bound",
    "composed",
    "fit",
    "importance_bound",
    "increment_kurtosis",
    "learn_kernel",
    "log_distances",
    "log_slope",
    "mean_slope",
    "saturation",
    "two_layer_bound",
]
