"""From the law of f, or from draws of weights, to probabilities of classes and to scales of noise."""

from net2gp.likelihoods import (
    Contrast,
    LaplaceBridge,
    LogVariance,
    MonteCarlo,
    Probit,
    Quadrature,
    SoftplusScale,
)
from net2gp.posteriors import WeightSamples

__all__ = [
    "Contrast",
    "LaplaceBridge",
    "LogVariance",
    "MonteCarlo",
    "Probit",
    "Quadrature",
    "SoftplusScale",
    "WeightSamples",
]
