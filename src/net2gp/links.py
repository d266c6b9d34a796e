"""How the law of f becomes class probabilities, and how raw outputs become scales of noise."""

from net2gp.likelihoods import (
    Contrast,
    LaplaceBridge,
    LogVariance,
    MonteCarlo,
    Probit,
    Quadrature,
    SoftplusScale,
)

__all__ = [
    "Contrast",
    "LaplaceBridge",
    "LogVariance",
    "MonteCarlo",
    "Probit",
    "Quadrature",
    "SoftplusScale",
]
