"""net2gp: hand over the PyTorch network you already have and get the Gaussian process it is."""

from net2gp._version import __version__
from net2gp.linear import Linearized, TangentKernel, TraceKernel, linearize

__all__ = ["Linearized", "TangentKernel", "TraceKernel", "__version__", "linearize"]
