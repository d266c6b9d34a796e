"""From the law of f to probabilities of classes, and to the scales of heteroscedastic noise."""

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
