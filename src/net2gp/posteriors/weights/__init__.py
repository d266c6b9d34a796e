"""Gaussians over a network's parameters; a file per structure has its value, curvature and covariance.

A `Task` goes into `Structure.curvature`; a `Curvature` comes out, which gives the covariance at a prior.
"""

from net2gp.posteriors.weights.covariance import Covariance
from net2gp.posteriors.weights.diagonal import Diagonal, DiagonalCovariance
from net2gp.posteriors.weights.full import Full, FullCovariance
from net2gp.posteriors.weights.function_space import FunctionSpace
from net2gp.posteriors.weights.kron import Kron
from net2gp.posteriors.weights.last_layer import LastLayer
from net2gp.posteriors.weights.low_rank import LowRank
from net2gp.posteriors.weights.sampled import Sampled
from net2gp.posteriors.weights.structure import Curvature, Structure, Traits
from net2gp.posteriors.weights.subnetwork import Subnetwork
from net2gp.posteriors.weights.tasks.task import Task

__all__ = [
    "Covariance",
    "Curvature",
    "Diagonal",
    "DiagonalCovariance",
    "Full",
    "FullCovariance",
    "FunctionSpace",
    "Kron",
    "LastLayer",
    "LowRank",
    "Sampled",
    "Structure",
    "Subnetwork",
    "Task",
    "Traits",
]
