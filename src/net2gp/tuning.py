"""Ways to choose what a model leaves open: prior variances, noise, length scales, architectures."""

from net2gp.methods.laplace_approximation.tuning import Evidence, Matched, Validation
from net2gp.methods.selection import EVIDENCE, Fit, Selection, sweep
from net2gp.posteriors import Spectrum, spectrum, tune

__all__ = [
    "EVIDENCE",
    "Evidence",
    "Fit",
    "Matched",
    "Selection",
    "Spectrum",
    "Validation",
    "spectrum",
    "sweep",
    "tune",
]
