"""Compositions of Gaussian processes: draws, moments, depth, fits to data, kernels of features."""

from net2gp.deep.bottleneck import Activated, layers_of
from net2gp.deep.chains import sghmc
from net2gp.deep.composition import Composed, composed, increment_kurtosis
from net2gp.deep.depth import LogSlope, collapse_threshold, log_distances, log_slope, mean_slope
from net2gp.deep.draws import Draws, draw
from net2gp.deep.ergodicity import distance_quantiles, effective_depth
from net2gp.deep.inference.bounds.collapsed import collapsed_bound
from net2gp.deep.inference.bounds.importance import importance_bound
from net2gp.deep.inference.bounds.two_layers import two_layer_bound
from net2gp.deep.inference.fit import fit
from net2gp.deep.inference.settings import Ascent
from net2gp.deep.inference.sparse_layer import SparseLayer
from net2gp.deep.jacobians import JacobianDraws, draw_jacobians
from net2gp.deep.kernel_learning import KernelTraining, NetworkKernel, learn_kernel
from net2gp.deep.latent.fit_latent import latent_variables
from net2gp.deep.latent.psi import GaussianRows, PsiStatistics, psi_statistics
from net2gp.deep.latent.result import LatentVariables
from net2gp.deep.latent.search import LatentSearch
from net2gp.deep.layers import Layer
from net2gp.deep.saturation import SaturatedKernel, Saturation, saturation

__all__ = [
    "Activated",
    "Ascent",
    "Composed",
    "Draws",
    "GaussianRows",
    "JacobianDraws",
    "KernelTraining",
    "LatentSearch",
    "LatentVariables",
    "Layer",
    "LogSlope",
    "NetworkKernel",
    "PsiStatistics",
    "SaturatedKernel",
    "Saturation",
    "SparseLayer",
    "collapse_threshold",
    "collapsed_bound",
    "composed",
    "distance_quantiles",
    "draw",
    "draw_jacobians",
    "effective_depth",
    "fit",
    "importance_bound",
    "increment_kurtosis",
    "latent_variables",
    "layers_of",
    "learn_kernel",
    "log_distances",
    "log_slope",
    "mean_slope",
    "psi_statistics",
    "saturation",
    "sghmc",
    "two_layer_bound",
]
