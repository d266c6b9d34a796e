"""Ways to choose what a model leaves open: prior variances, noise, length scales, architectures."""

from net2gp.methods.kernel_fit import fit_kernel
from net2gp.methods.laplace_approximation.tuning import Evidence, Matched, Validation
from net2gp.methods.most_probable import LogNormal, most_probable
from net2gp.methods.selection import EVIDENCE, Fit, Selection, sweep
from net2gp.posteriors import Spectrum, spectrum, tune

__all__ = [
    "EVIDENCE",
    "Evidence",
    "Fit",
    "LogNormal",
    "Matched",
    "Selection",
    "Spectrum",
    "Validation",
    "fit_kernel",
    "most_probable",
    "spectrum",
    "sweep",
    "tune",
]
