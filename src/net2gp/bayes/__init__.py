"""Bayesian networks: priors, ensembles, dropout, variational inference and Markov chains.

Every method takes a network, data and a likelihood, and returns a `Posterior`.
"""

from net2gp.bayes.chains.arviz import from_arviz, to_arviz
from net2gp.bayes.chains.diagnostics import Diagnosis, bulk_ess, diagnose, r_hat, tail_ess
from net2gp.bayes.chains.hmc import hmc
from net2gp.bayes.chains.langevin.mclmc import microcanonical
from net2gp.bayes.chains.langevin.sghmc import sghmc
from net2gp.bayes.chains.langevin.sgld import sgld
from net2gp.bayes.chains.langevin.steps import microcanonical_step
from net2gp.bayes.chains.nuts import nuts
from net2gp.bayes.chains.options import Options as ChainOptions
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
from net2gp.bayes.matching.architectures import Circle, Family, Shape, WithTrend
from net2gp.bayes.matching.network_like import Match, Trial, network_like
from net2gp.bayes.matching.round_trip import module_with
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
from net2gp.bayes.optimum.multi_swag import multi_swag
from net2gp.bayes.optimum.settings import Training
from net2gp.bayes.variational.bound import elbo
from net2gp.bayes.variational.dropout_mixture import DropoutMixture, dropout_elbo
from net2gp.bayes.variational.gaussian_weights import GaussianWeights
from net2gp.bayes.variational.masks import MaskedMembers, draw_masks, drop_units
from net2gp.bayes.variational.mc_dropout import mc_dropout
from net2gp.bayes.variational.mean_field import linearized_mean_field, mean_field
from net2gp.likelihoods.laws import product_of_experts
from net2gp.linalg.langevin import sghmc_step, sgld_step
from net2gp.methods.kernel_fit import with_limits
from net2gp.posteriors.recipes.composition import compose, draw_composition
from net2gp.posteriors.recipes.mixed import mixture
from net2gp.posteriors.recipes.sums import average, weighted_sum

__all__ = [
    "ChainOptions",
    "Circle",
    "CorrelatedPrior",
    "Curve",
    "CurveTraining",
    "Descent",
    "Diagnosis",
    "Diversity",
    "DropoutMixture",
    "Exponential",
    "Family",
    "FlatPrior",
    "Gamma",
    "GaussianWeights",
    "HalfCauchy",
    "Horseshoe",
    "InverseGamma",
    "LaplacePrior",
    "LossSlice",
    "MaskedMembers",
    "Match",
    "Mixing",
    "Model",
    "NormalPrior",
    "PriorByName",
    "ScaleMixture",
    "Shape",
    "StudentTPrior",
    "Training",
    "Trial",
    "WeightPrior",
    "WithTrend",
    "average",
    "barrier",
    "bulk_ess",
    "compose",
    "curve_between",
    "decay_groups",
    "diagnose",
    "diversity",
    "double_descent",
    "draw_composition",
    "draw_masks",
    "drop_units",
    "dropout_elbo",
    "elbo",
    "ensemble",
    "fan_in_variances",
    "from_arviz",
    "hmc",
    "kernel_alignment",
    "linearized_mean_field",
    "loss_slice",
    "map_estimate",
    "match_weights",
    "mc_dropout",
    "mean_field",
    "microcanonical",
    "microcanonical_step",
    "mixture",
    "module_of",
    "module_with",
    "multi_swag",
    "network_like",
    "nuts",
    "permute_units",
    "prior_functions",
    "prior_of_weight_decay",
    "product_of_experts",
    "r_hat",
    "scale_units",
    "sghmc",
    "sghmc_step",
    "sgld",
    "sgld_step",
    "straight_line",
    "tail_ess",
    "to_arviz",
    "weight_decay_of_prior",
    "weighted_sum",
    "with_limits",
]
