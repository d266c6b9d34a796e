"""Ways to solve the linear systems of a Gaussian process, and to approximate non-Gaussian likelihoods.

n2g.condition(kernel, data, likelihood, solver=n2g.solvers.CG())
"""

from net2gp.posteriors.conditioning.solvers import (
    ADASAP,
    CG,
    Centers,
    Cholesky,
    Exact,
    Lanczos,
    Laplace,
    Nystrom,
    Pathwise,
    PivotedCholesky,
    RandomPivots,
    Variational,
    WeightCholesky,
)

__all__ = [
    "ADASAP",
    "CG",
    "Centers",
    "Cholesky",
    "Exact",
    "Lanczos",
    "Laplace",
    "Nystrom",
    "Pathwise",
    "PivotedCholesky",
    "RandomPivots",
    "Variational",
    "WeightCholesky",
]
