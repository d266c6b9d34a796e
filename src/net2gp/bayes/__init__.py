"""Bayesian networks: priors, ensembles, dropout, variational inference and Markov chains.

Every method takes a network, data and a likelihood, and returns a `Posterior`.
"""

from net2gp.bayes.landscape.alignment import kernel_alignment
from net2gp.bayes.landscape.curves import (
    Curve,
    CurveTraining,
    barrier,
    curve_between,
    straight_line,
)
from net2gp.bayes.landscape.diversity import Diversity, diversity
from net2gp.bayes.landscape.double_descent import Descent, double_descent
from net2gp.bayes.landscape.slices import LossSlice, loss_slice
from net2gp.bayes.landscape.symmetries import match_weights, permute_units, scale_units
from net2gp.bayes.model.model import Model
from net2gp.bayes.model.prior import NormalPrior, WeightPrior
from net2gp.posteriors.recipes.mixed import mixture

__all__ = [
    "Curve",
    "CurveTraining",
    "Descent",
    "Diversity",
    "LossSlice",
    "Model",
    "NormalPrior",
    "WeightPrior",
    "barrier",
    "curve_between",
    "diversity",
    "double_descent",
    "kernel_alignment",
    "loss_slice",
    "match_weights",
    "mixture",
    "permute_units",
    "scale_units",
    "straight_line",
]
