"""How the law of f, or draws of weights, become class probabilities, and raw outputs scales of noise."""

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
