"""INFINITE WIDTH: the Gaussian process that a network is at initialization, and its tangent kernel."""

from net2gp.limits.duals.activation_table import activation_table
from net2gp.limits.duals.activations import Activation, UnsupportedLayer, activation_of
from net2gp.limits.finite_width import (
    FiniteWidth,
    excess_kurtosis,
    finite_width,
    kernel_variance,
    sample_kernels,
    sample_ntks,
    sample_outputs,
    square_correlation,
)
from net2gp.limits.initialization import as_built
from net2gp.limits.kernels import infinite_width, nngp, ntk
from net2gp.limits.limit_kernels import InfiniteWidth, LimitKernel
from net2gp.limits.phase import (
    DepthScales,
    PhaseDiagram,
    correlation_fixed_point,
    critical_line,
    depth_scales,
    fixed_point,
    phase_diagram,
)
from net2gp.limits.propagation.hidden_layers import HiddenLayer
from net2gp.limits.propagation.layer_maps import slope
from net2gp.limits.rules.layer_rules import rule
from net2gp.limits.sampling.monte_carlo import Estimate, MonteCarloKernel, monte_carlo_kernel
from net2gp.limits.sampling.twin import twin
from net2gp.limits.tangent_depth import TangentDepth, tangent_depth

__all__ = [
    "Activation",
    "DepthScales",
    "Estimate",
    "FiniteWidth",
    "HiddenLayer",
    "InfiniteWidth",
    "LimitKernel",
    "MonteCarloKernel",
    "PhaseDiagram",
    "TangentDepth",
    "UnsupportedLayer",
    "activation_of",
    "activation_table",
    "as_built",
    "correlation_fixed_point",
    "critical_line",
    "depth_scales",
    "excess_kurtosis",
    "finite_width",
    "fixed_point",
    "infinite_width",
    "kernel_variance",
    "monte_carlo_kernel",
    "nngp",
    "ntk",
    "phase_diagram",
    "rule",
    "sample_kernels",
    "sample_ntks",
    "sample_outputs",
    "slope",
    "square_correlation",
    "tangent_depth",
    "twin",
]
