"""Bayesian networks: priors, ensembles, dropout, variational inference and Markov chains.

Every method takes a network, data and a likelihood, and returns a `Posterior`.
"""

from net2gp.bayes.chains.hmc import hmc
from net2gp.bayes.chains.nuts import nuts
from net2gp.bayes.chains.runs import Options as ChainOptions
from net2gp.bayes.model.model import Model
from net2gp.bayes.model.prior import NormalPrior, WeightPrior
from net2gp.posteriors.recipes.mixed import mixture

__all__ = [
    "ChainOptions",
    "Model",
    "NormalPrior",
    "WeightPrior",
    "hmc",
    "mixture",
    "nuts",
]
