"""Posteriors: condition, tune, save; in function space and in weight space."""

from net2gp.posteriors.condition import condition
from net2gp.posteriors.conditioning.samples import FunctionSamples, WeightSamples
from net2gp.posteriors.conditioning.solvers import (
    CG,
    Cholesky,
    Exact,
    Lanczos,
    Laplace,
    Nystrom,
    PivotedCholesky,
    Variational,
    WeightCholesky,
)
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.prior import prior
from net2gp.posteriors.recipes.class_codes import OneHotCodes, Standardized
from net2gp.posteriors.rkhs import rkhs_norm
from net2gp.posteriors.saving.save import load, save
from net2gp.posteriors.spectrum import Spectrum, spectrum
from net2gp.posteriors.tune import tune
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
    "CG",
    "Cholesky",
    "Diagonal",
    "Exact",
    "Full",
    "FunctionSamples",
    "FunctionSpace",
    "Kron",
    "Lanczos",
    "Laplace",
    "LastLayer",
    "LowRank",
    "Nystrom",
    "OneHotCodes",
    "PivotedCholesky",
    "Posterior",
    "Sampled",
    "Spectrum",
    "Standardized",
    "Subnetwork",
    "Variational",
    "WeightCholesky",
    "WeightSamples",
    "condition",
    "load",
    "prior",
    "rkhs_norm",
    "save",
    "spectrum",
    "tune",
]
