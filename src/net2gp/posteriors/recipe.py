"""How a posterior was found, which decides how it takes in more data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from net2gp.errors import NotAvailable
from net2gp.posteriors.conditioning.problem import kernel_name, predictive
from net2gp.posteriors.conditioning.solvers import Inference, Solver
from net2gp.types import Data, Likelihood

if TYPE_CHECKING:
    from net2gp.posteriors.posterior import Posterior
    from net2gp.posteriors.recipes.dual import Dual


WITHOUT_PROBES = (
    "CG(num_probes=0), ADASAP() and Centers() leave the evidence out. Pass solver=CG(num_probes=16) to "
    "estimate it."
)


def solver_facts(solver: Solver, inference: Inference | None = None) -> dict[str, str]:
    """The lines that the text of a conditioned process shows about its solver."""
    return {"solver": f"{solver}", **({} if inference is None else {"inference": f"{inference}"})}


class Recipe:
    """How a posterior was found, and what it can become: the base class, whose methods refuse.

    Each kind of recipe is a frozen dataclass that holds the settings of its method, and overrides what that
    method can do. Fields named `solver`, `inference`, `structure` or `temperature` are also properties of the
    posterior.
    """

    def extend(self, posterior: Posterior, data: Data, likelihood: Likelihood | None) -> Posterior:
        """The posterior given more data as well; `likelihood` has their noise if it differs from the old."""
        way = "Use posterior.dual().condition().update(data), which moves them in the linear model, or train"
        if posterior.x is None:
            way = "Call laplace again, with a Stream of all data, or condition in weight space, or train"
        raise NotAvailable(
            "update is for a Gaussian process that was conditioned on data, and this posterior is around a "
            f"trained network, whose parameters new data would move. {way} further and call the method again."
        )

    def dual(self, posterior: Posterior) -> Dual:
        """The linear model and the Gaussian process that a network stands for."""
        raise NotAvailable(
            "dual is of a network's tangent kernel, but the kernel is "
            f"{kernel_name(posterior.process.kernel)}. Use dual(network, data, likelihood, prior_var)."
        )

    def tempered(self, posterior: Posterior, factor: float) -> Posterior:
        """The posterior with `factor` times the covariance."""
        raise NotAvailable(
            "tempered is for a Gaussian over a network's parameters around where they are, as laplace, VOGN, "
            "IVON and Swag give it. Condition with another prior variance or noise instead."
        )

    def predictive(self, own: Likelihood, given: Likelihood | None) -> Likelihood:
        """The likelihood to predict with."""
        return predictive(given, own)

    def facts(self, posterior: Posterior) -> dict[str, str]:
        """The lines that the text of a posterior shows about the way it was found, by name."""
        return {}

    def without_evidence(self) -> str:
        """Why there is no evidence, and what to do."""
        return (
            "this posterior was found by a method without an evidence, drawn by Sampled(num_probes=0), "
            "or tempered. Call dual() for the evidence of the linear model at its mean, or use "
            "laplace(network, data, likelihood) without these."
        )
