"""net2gp: hand over the PyTorch network you already have and get the Gaussian process it is."""

from net2gp._version import __version__
from net2gp.kernels import RBF
from net2gp.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    LogVariance,
    MonteCarlo,
    Probit,
    Quadrature,
    SoftplusScale,
)
from net2gp.linear import Fisher, Linearized, linearize
from net2gp.methods import adapt, adapt_tasks
from net2gp.posteriors import (
    CG,
    Cholesky,
    Exact,
    Lanczos,
    Laplace,
    Nystrom,
    PivotedCholesky,
    Spectrum,
    Variational,
    WeightSpace,
    condition,
    load,
    save,
    spectrum,
    tune,
)

__all__ = [
    "CG",
    "RBF",
    "Bernoulli",
    "Categorical",
    "Cholesky",
    "Exact",
    "Fisher",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Lanczos",
    "Laplace",
    "Linearized",
    "LogVariance",
    "MonteCarlo",
    "Nystrom",
    "PivotedCholesky",
    "Probit",
    "Quadrature",
    "SoftplusScale",
    "Spectrum",
    "Variational",
    "WeightSpace",
    "__version__",
    "adapt",
    "adapt_tasks",
    "condition",
    "linearize",
    "load",
    "save",
    "spectrum",
    "tune",
]
