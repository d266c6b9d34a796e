"""Bayesian networks: priors, ensembles, dropout, variational inference and Markov chains.

Every method takes a network, data and a likelihood, and returns a `Posterior`.
"""

from net2gp.bayes.model.model import Model
from net2gp.bayes.model.prior import NormalPrior, WeightPrior
from net2gp.posteriors.recipes.mixed import mixture

__all__ = ["Model", "NormalPrior", "WeightPrior", "mixture"]
