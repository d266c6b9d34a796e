"""Likelihoods that follow from the law of y given f: predictions integrate over f, whatever the law is.

`LawLikelihood` is their base class, and the base class for your own.
"""

from net2gp.likelihoods.by_law.base import LawLikelihood
from net2gp.likelihoods.by_law.negative_binomial import NegativeBinomial
from net2gp.likelihoods.by_law.ordinal import Ordinal
from net2gp.likelihoods.by_law.poisson import Poisson
from net2gp.likelihoods.by_law.student_t import StudentT

__all__ = ["LawLikelihood", "NegativeBinomial", "Ordinal", "Poisson", "StudentT"]
