"""Kernels whose hyper-parameters a search can move cheaply: stretched inputs, variances of a limit."""

from net2gp.kernels.stretched import Stretched
from net2gp.limits.other_variances import with_variances

__all__ = ["Stretched", "with_variances"]
