"""From the law of y given f to a likelihood: predictions by integrals over f, whatever the law is.

`LawLikelihood` is the base of those in here, and of your own.
"""

from net2gp.likelihoods.by_law.base import LawLikelihood
from net2gp.likelihoods.by_law.negative_binomial import NegativeBinomial
from net2gp.likelihoods.by_law.ordinal import Ordinal
from net2gp.likelihoods.by_law.poisson import Poisson
from net2gp.likelihoods.by_law.student_t import StudentT

__all__ = ["LawLikelihood", "NegativeBinomial", "Ordinal", "Poisson", "StudentT"]
