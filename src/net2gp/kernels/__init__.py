"""Covariance functions: what every kernel is given, kernels made of kernels, and those without a network.

`base` has the class that a kernel of your own derives from, and sums, products and multiples; `features` the
same for kernels that are inner products of features; `independent` makes independent outputs a joint kernel;
`rbf` is the squared exponential, `matern` has rougher functions, `distances` is what these two share;
`periodic` has functions on a circle, and `linear` has linear functions.
"""

from net2gp.kernels.base import BaseKernel, Product, Scaled, Sum
from net2gp.kernels.features import BaseFeatureKernel
from net2gp.kernels.independent import IndependentOutputs
from net2gp.kernels.linear import Linear
from net2gp.kernels.matern import Matern
from net2gp.kernels.periodic import Periodic
from net2gp.kernels.rbf import RBF
from net2gp.tags import savable

__all__ = [
    "RBF",
    "BaseFeatureKernel",
    "BaseKernel",
    "IndependentOutputs",
    "Linear",
    "Matern",
    "Periodic",
    "Product",
    "Scaled",
    "Sum",
    "savable",
]
