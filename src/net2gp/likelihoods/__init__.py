"""Likelihoods p(y | f): what is observed, given the outputs of the network.

Each likelihood computes its log density, the gradient and the curvature in f, and how to integrate f out.
"""

from net2gp.likelihoods.bernoulli import Bernoulli
from net2gp.likelihoods.by_law import (
    LawLikelihood,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
)
from net2gp.likelihoods.categorical import Categorical
from net2gp.likelihoods.expectations import ExpectedDerivatives, expected_derivatives
from net2gp.likelihoods.gaussian import Gaussian
from net2gp.likelihoods.heteroscedastic import HeteroscedasticGaussian, LogVariance, SoftplusScale
from net2gp.likelihoods.links import Contrast, LaplaceBridge, MonteCarlo, Probit, Quadrature
from net2gp.likelihoods.places import each_place
from net2gp.likelihoods.targets import shape_targets
from net2gp.likelihoods.traits import of_points
from net2gp.tags import savable

__all__ = [
    "Bernoulli",
    "Categorical",
    "Contrast",
    "ExpectedDerivatives",
    "Gaussian",
    "HeteroscedasticGaussian",
    "LaplaceBridge",
    "LawLikelihood",
    "LogVariance",
    "MonteCarlo",
    "NegativeBinomial",
    "Ordinal",
    "Poisson",
    "Probit",
    "Quadrature",
    "SoftplusScale",
    "StudentT",
    "each_place",
    "expected_derivatives",
    "of_points",
    "savable",
    "shape_targets",
]
