"""INFINITE WIDTH: the Gaussian process that a network is at initialization, and its tangent kernel."""

from net2gp.limits.activations import Activation, UnsupportedLayer, activation_of
from net2gp.limits.kernels import InfiniteWidth, LimitKernel, infinite_width, nngp, ntk
from net2gp.limits.rules import rule

__all__ = [
    "Activation",
    "InfiniteWidth",
    "LimitKernel",
    "UnsupportedLayer",
    "activation_of",
    "infinite_width",
    "nngp",
    "ntk",
    "rule",
]
