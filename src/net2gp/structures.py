"""How Laplace's approximation represents the covariance of the parameters, and which Fisher matrix it uses.

n2g.laplace(network, data, likelihood, structure=n2g.structures.Sampled())
"""

from net2gp.linear.curvatures.curvature import EmpiricalFisher, ExactFisher, MonteCarloFisher
from net2gp.posteriors.weights import (
    Diagonal,
    Full,
    FunctionSpace,
    Kron,
    LastLayer,
    LowRank,
    Sampled,
    Subnetwork,
)

__all__ = [
    "Diagonal",
    "EmpiricalFisher",
    "ExactFisher",
    "Full",
    "FunctionSpace",
    "Kron",
    "LastLayer",
    "LowRank",
    "MonteCarloFisher",
    "Sampled",
    "Subnetwork",
]
