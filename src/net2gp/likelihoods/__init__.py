"""Likelihoods p(y | f): what is observed, given the outputs of the network.

Each one knows its log density, the gradient and curvature of it in f, and how to integrate f out.
"""

from net2gp.likelihoods.bernoulli import Bernoulli
from net2gp.likelihoods.categorical import Categorical
from net2gp.likelihoods.expectations import ExpectedDerivatives, expected_derivatives
from net2gp.likelihoods.gaussian import Gaussian
from net2gp.likelihoods.heteroscedastic import HeteroscedasticGaussian, LogVariance, SoftplusScale
from net2gp.likelihoods.links import Contrast, LaplaceBridge, MonteCarlo, Probit, Quadrature
from net2gp.likelihoods.targets import shape_targets
from net2gp.likelihoods.traits import of_points

__all__ = [
    "Bernoulli",
    "Categorical",
    "Contrast",
    "ExpectedDerivatives",
    "Gaussian",
    "HeteroscedasticGaussian",
    "LaplaceBridge",
    "LogVariance",
    "MonteCarlo",
    "Probit",
    "Quadrature",
    "SoftplusScale",
    "expected_derivatives",
    "of_points",
    "shape_targets",
]
