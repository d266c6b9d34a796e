"""A Bayesian network as one value: log densities as plain functions of a dict of parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from net2gp.bayes.model.prior import NormalPrior, WeightPrior, as_prior
from net2gp.errors import InputError, check_count, check_positive
from net2gp.inputs import describe, gather, num_rows, rows
from net2gp.likelihoods.traits import has_open_noise
from net2gp.linear.linearized import Linearized, Output, Patterns, linearize
from net2gp.linear.precision import check_full
from net2gp.types import Data, Inputs, Likelihood, Params

Batch = tuple[Inputs, Tensor]
"""Inputs and targets of some points."""


@dataclass(frozen=True, eq=False)
class Model:
    """A network, a prior of its parameters and a likelihood: p(θ) Π_n p(y_n | f(x_n; θ)).

    Use `Model.of` to make one. `log_joint(params, batch)` is a plain function of a dict of parameters, so
    any sampler or optimizer for such functions can take it. `torch.func.grad` and `vmap` apply to it. The
    network runs in eval mode.

    Args:
        architecture: The network with the present values of its parameters.
        likelihood: How targets follow the outputs.
        prior: The prior of the parameters, or None for a flat one.
        num_data: The number of training points N. A batch of B points counts N/B times in `log_joint`; None
            if batches are all data.
        temperature: Divides the log joint; less than 1 gives a cold posterior.

    >>> import torch
    >>> from net2gp.likelihoods import Gaussian
    >>> model = Model.of(nn.Linear(1, 1, bias=False), Gaussian(noise_var=1.0))
    >>> x = torch.ones(1, 1)
    >>> model.log_joint({"weight": torch.zeros(1, 1)}, (x, x))
    tensor(-2.3379)
    """

    architecture: Linearized
    likelihood: Likelihood
    prior: WeightPrior | None = field(default_factory=NormalPrior)
    num_data: int | None = None
    temperature: float = 1.0

    @classmethod
    def of(
        cls,
        network: nn.Module | Linearized,
        likelihood: Likelihood,
        prior: WeightPrior | float | None = 1.0,
        *,
        num_data: int | None = None,
        temperature: float = 1.0,
        only: Patterns | None = None,
        output: Output | None = None,
    ) -> Model:
        """Check the parts and put them together.

        Args:
            network: The network; its parameters are where optimizers and chains start.
            likelihood: How targets follow the outputs; Gaussian noise must be given.
            prior: The prior of the parameters. A number is the variance of independent Gaussians, and None
                is a flat prior.
            num_data: The number of training points, if batches are only some of them.
            temperature: Divides the log joint.
            only: Chooses parameters by name pattern, as in `linearize`; the others stay fixed.
            output: Picks the tensor of outputs from what the network returns.

        Returns:
            The model.

        Raises:
            InputError: If the prior does not cover the parameters, the temperature is not positive, or the
                noise is open or the likelihood is none.
            NetworkError: If the network has dropout or batch statistics in training mode.
        """
        check_positive(temperature, "temperature", single=True)
        if num_data is not None:
            check_count(num_data, "num_data", example=1000)
        check_likelihood(likelihood)
        if has_open_noise(likelihood):
            raise InputError(
                "the variance of the noise is open, but a log density needs it. Pass "
                "Gaussian(noise_var=0.1), or take the likelihood that map_estimate(...) found."
            )
        if not isinstance(network, Linearized):
            network = architecture_of(network, only, output)
        chosen = None if prior is None else as_prior(prior)
        if chosen is not None:
            chosen.check(network.params)
        return cls(network, likelihood, chosen, num_data, float(temperature))

    @property
    def params(self) -> Params:
        """The present values of the parameters, by name."""
        return self.architecture.params

    def outputs(self, params: Params, x: Inputs) -> Tensor:
        """Compute f(x; θ).

        Args:
            params: Parameters by name.
            x: N points.

        Returns:
            The outputs, (N, C).
        """
        return self.architecture.evaluate(params, x)

    def log_prior(self, params: Params) -> Tensor:
        """Compute log p(θ), which is zero for a flat prior.

        Args:
            params: Parameters by name.

        Returns:
            A scalar.
        """
        if self.prior is None:
            return next(iter(params.values())).new_zeros(())
        return self.prior.log_prob(params)

    def log_likelihood(self, params: Params, batch: Batch) -> Tensor:
        """Compute Σ_n log p(y_n | f(x_n; θ)) over the points of a batch.

        Args:
            params: Parameters by name.
            batch: Inputs and targets.

        Returns:
            A scalar.
        """
        x, y = batch
        return self.likelihood.log_prob(self.outputs(params, x), y).sum()

    def log_joint(self, params: Params, batch: Batch) -> Tensor:
        """Compute (log p(θ) + (N/B) Σ_n log p(y_n | f(x_n; θ))) / temperature.

        Args:
            params: Parameters by name.
            batch: Inputs and targets of B points.

        Returns:
            A scalar, without bias for the log joint of all N points if the batch is random.
        """
        share = 1.0 if self.num_data is None else self.num_data / num_rows(batch[0])
        total = self.log_prior(params) + share * self.log_likelihood(params, batch)
        return total / self.temperature


def checked_data(model: Model, data: Data) -> Batch:
    """Collect data, and raise unless the network takes the inputs and the likelihood takes the targets.

    Args:
        model: The network and its likelihood.
        data: The data, as `gather` takes them.

    Returns:
        All inputs and targets.

    Raises:
        InputError: If the targets do not fit.
        NetworkError: If the network cannot take the inputs.
    """
    network = model.architecture
    x, y = gather(data, network.example)
    network.check(x)
    with torch.no_grad():
        f = network(rows(x, slice(0, 1)))
    model.likelihood.check(f.expand(num_rows(x), -1), y)
    return x, y


def check_likelihood(likelihood: object) -> None:
    """Raise unless this is a likelihood, and not its class.

    Args:
        likelihood: What a method was given.

    Raises:
        InputError: If it is anything else.

    >>> check_likelihood(None)
    Traceback (most recent call last):
    net2gp.errors.InputError: likelihood must be e.g. Categorical() or Gaussian(0.1), but is None.
    """
    if isinstance(likelihood, type):
        raise InputError(
            "likelihood must be e.g. Categorical() or Gaussian(0.1), but is the class "
            f"{likelihood.__name__}. Pass {likelihood.__name__}()."
        )
    if not isinstance(likelihood, Likelihood):
        raise InputError(
            f"likelihood must be e.g. Categorical() or Gaussian(0.1), but is {describe(likelihood)}."
        )


def architecture_of(
    network: nn.Module, only: Patterns | None = None, output: Output | None = None
) -> Linearized:
    """Return a network with the parameters that are random: those of `only`, or all of them.

    Unlike in `linearize`, `requires_grad` plays no role: these methods train copies.

    Args:
        network: The network.
        only: Patterns of names; None means all.
        output: Picks the tensor of outputs.

    Returns:
        The network with its values.

    Raises:
        NetworkError: If it has parameters of half precision, whose steps would be rounded away.

    >>> frozen = nn.Linear(2, 1).requires_grad_(False)
    >>> architecture_of(frozen.eval()).num_params
    3
    """
    found = linearize(network, only="*" if only is None else only, output=output)
    check_full(found.network)
    return found
