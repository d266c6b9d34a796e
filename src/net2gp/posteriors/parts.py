"""Properties of a posterior, some of them only of some kinds, and the errors that say so."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from net2gp.errors import NotAvailable
from net2gp.linear.linearized import Linearized, PriorVar
from net2gp.posteriors.conditioning.problem import kernel_name
from net2gp.posteriors.conditioning.process import Process
from net2gp.posteriors.conditioning.solvers import Inference, Solver
from net2gp.posteriors.recipe import Recipe
from net2gp.posteriors.weights.covariance import Covariance
from net2gp.types import Inputs, Kernel


class Parts:
    """What a posterior reads from its process, its recipe and its data."""

    process: Process
    x: Inputs | None
    y: Tensor | None
    recipe: Recipe

    @property
    def num_outputs(self) -> int:
        """The number of outputs C."""
        return self.process.num_outputs

    @property
    def kernel(self) -> Kernel:
        """The covariance function of the prior; for a network, its tangent kernel at `prior_var`."""
        return self.process.kernel

    @property
    def data(self) -> tuple[Inputs, Tensor]:
        """The data (x, y).

        Raises:
            NotAvailable: If the posterior does not keep them.
        """
        if self.x is None or self.y is None:
            raise NotAvailable(
                "this posterior does not hold the data that it was found with, as after a Stream. Pass data "
                "that fit into memory, (x, y), to the method that finds it: condition, adapt, laplace. Some "
                "of the points will often do: explain.dual(network, (x, y), likelihood, prior_var), or "
                "laplace(network, (x, y), likelihood, prior_var=posterior.prior_var)."
            )
        return self.x, self.y

    @property
    def linearized(self) -> Linearized:
        """The network, linearized at its parameters. Only for posteriors of a network."""
        return cast(Linearized, self._of_network("linearized"))

    @property
    def prior_var(self) -> Any:
        """The prior variances of a network's parameters: one number, or a dict by parameter name."""
        return cast(PriorVar, self._of_network("prior_var"))

    @property
    def covariance(self) -> Covariance:
        """The covariance Σ of the parameters, for a Gaussian around a network's own parameters.

        Raises:
            NotAvailable: If the posterior is of another kind, as after `condition`.
        """
        if not hasattr(self.process, "covariance"):
            raise NotAvailable(
                "this posterior is not a Gaussian around a network's parameters, so they have no covariance. "
                "Use joint(x) for the covariance of its outputs, or laplace(network, data, likelihood)."
            )
        return cast(Covariance, self.process.covariance)

    @property
    def structure(self) -> Any:
        """Which parts of the covariance `laplace` keeps, such as `Kron()`."""
        return self._setting("structure", "laplace(network, data, likelihood, structure=...)")

    @property
    def solver(self) -> Solver:
        """How the linear systems were solved."""
        found = self._setting("solver", "condition(kernel, data, likelihood, solver=...)")
        return cast(Solver, found)

    @property
    def inference(self) -> Inference | None:
        """How the law of f was approximated by a Gaussian, or None if it is exact."""
        found = self._setting("inference", "condition(kernel, data, likelihood, inference=...)")
        return cast("Inference | None", found)

    @property
    def temperature(self) -> float:
        """The number that the curvature of the data was divided by; 1 unless the posterior is tempered."""
        return float(getattr(self.recipe, "temperature", 1.0))

    def _of_network(self, name: str) -> object:
        kernel = self.process.kernel
        owner = self.process if hasattr(self.process, name) else kernel
        if not hasattr(owner, name):
            raise NotAvailable(
                f"{name} is of a network's tangent kernel, but the kernel is {kernel_name(kernel)}. Use "
                "adapt(network, data, likelihood) or laplace for a posterior of a network."
            )
        return getattr(owner, name)

    def _setting(self, name: str, source: str) -> object:
        if not hasattr(self.recipe, name):
            raise NotAvailable(f"this posterior was found without a {name}, as {source} takes it.")
        return getattr(self.recipe, name)

    def _drawing(self, name: str) -> Any:
        """The method of the process that draws parameters of a network, or networks."""
        if not hasattr(self.process, name):
            raise NotAvailable(
                "parameters are drawn from a Gaussian around a network's parameters, but this posterior is "
                "of functions. Use sample_functions(num_samples), or laplace(network, data, likelihood)."
            )
        return getattr(self.process, name)
