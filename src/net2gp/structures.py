"""How Laplace's approximation represents the covariance of the parameters, and which Fisher matrix it uses.

n2g.laplace(network, data, likelihood, structure=n2g.structures.Sampled())

A structure of your own derives from `Structure` and `Curvature`: CONTRIBUTING.md has a whole example.
"""

from net2gp.linear.curvatures.curvature import EmpiricalFisher, ExactFisher, MonteCarloFisher
from net2gp.posteriors.weights import (
    Covariance,
    Curvature,
    Diagonal,
    DiagonalCovariance,
    Full,
    FullCovariance,
    FunctionSpace,
    Kron,
    LastLayer,
    LowRank,
    Sampled,
    Structure,
    Subnetwork,
    Task,
    Traits,
)
from net2gp.tags import savable

__all__ = [
    "Covariance",
    "Curvature",
    "Diagonal",
    "DiagonalCovariance",
    "EmpiricalFisher",
    "ExactFisher",
    "Full",
    "FullCovariance",
    "FunctionSpace",
    "Kron",
    "LastLayer",
    "LowRank",
    "MonteCarloFisher",
    "Sampled",
    "Structure",
    "Subnetwork",
    "Task",
    "Traits",
    "savable",
]
