"""Bayesian networks: priors, ensembles, dropout, variational inference and Markov chains.

Every method takes a network, data and a likelihood, and returns a `Posterior`.
"""

from net2gp.bayes.model.model import Model
from net2gp.bayes.model.prior import NormalPrior, WeightPrior
from net2gp.bayes.optimum.ensemble import ensemble
from net2gp.bayes.optimum.map_estimate import map_estimate
from net2gp.bayes.optimum.modules import module_of
from net2gp.bayes.optimum.settings import Training
from net2gp.posteriors.recipes.mixed import mixture

__all__ = [
    "Model",
    "NormalPrior",
    "Training",
    "WeightPrior",
    "ensemble",
    "map_estimate",
    "mixture",
    "module_of",
]
