"""Bayesian networks: priors, ensembles, dropout, variational inference and Markov chains.

Every method takes a network, data and a likelihood, and returns a `Posterior`.
"""

from net2gp.bayes.chains.hmc import hmc
from net2gp.bayes.chains.langevin.mclmc import microcanonical
from net2gp.bayes.chains.langevin.sghmc import sghmc
from net2gp.bayes.chains.langevin.sgld import sgld
from net2gp.bayes.chains.nuts import nuts
from net2gp.bayes.chains.runs import Options as ChainOptions
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
from net2gp.bayes.model.by_name import PriorByName
from net2gp.bayes.model.correlated import CorrelatedPrior
from net2gp.bayes.model.fan_in import fan_in_variances
from net2gp.bayes.model.functions import prior_functions
from net2gp.bayes.model.independent import LaplacePrior, StudentTPrior
from net2gp.bayes.model.mixing import Exponential, Gamma, HalfCauchy, InverseGamma, Mixing
from net2gp.bayes.model.model import Model
from net2gp.bayes.model.prior import FlatPrior, NormalPrior, WeightPrior
from net2gp.bayes.model.scale_mixture import Horseshoe, ScaleMixture
from net2gp.bayes.model.weight_decay import (
    decay_groups,
    prior_of_weight_decay,
    weight_decay_of_prior,
)
from net2gp.bayes.optimum.ensemble import ensemble
from net2gp.bayes.optimum.map_estimate import map_estimate
from net2gp.bayes.optimum.modules import module_of
from net2gp.bayes.optimum.settings import Training
from net2gp.posteriors.recipes.mixed import mixture

__all__ = [
    "ChainOptions",
    "CorrelatedPrior",
    "Curve",
    "CurveTraining",
    "Descent",
    "Diversity",
    "Exponential",
    "FlatPrior",
    "Gamma",
    "HalfCauchy",
    "Horseshoe",
    "InverseGamma",
    "LaplacePrior",
    "LossSlice",
    "Mixing",
    "Model",
    "NormalPrior",
    "PriorByName",
    "ScaleMixture",
    "StudentTPrior",
    "Training",
    "WeightPrior",
    "barrier",
    "curve_between",
    "decay_groups",
    "diversity",
    "double_descent",
    "ensemble",
    "fan_in_variances",
    "hmc",
    "kernel_alignment",
    "loss_slice",
    "map_estimate",
    "match_weights",
    "microcanonical",
    "mixture",
    "module_of",
    "nuts",
    "permute_units",
    "prior_functions",
    "prior_of_weight_decay",
    "scale_units",
    "sghmc",
    "sgld",
    "straight_line",
    "weight_decay_of_prior",
]
