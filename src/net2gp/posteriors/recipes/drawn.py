"""Networks that were drawn from a posterior or trained one by one, as the law of f that they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.distributions import Distribution

from net2gp.errors import InputError, NotAvailable
from net2gp.inputs import describe, follows, num_rows, rows
from net2gp.likelihoods.links import Contrast
from net2gp.likelihoods.mixtures import mixture
from net2gp.likelihoods.responses import target_moments
from net2gp.linear.forward.evaluation import evaluating
from net2gp.linear.linearized import Linearized
from net2gp.posteriors.conditioning.process import evaluated
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipe import Recipe
from net2gp.posteriors.recipes.members import MemberCovariance, Members
from net2gp.posteriors.split import Split
from net2gp.show import number
from net2gp.tags import savable
from net2gp.types import Data, Inputs, Likelihood, Params

PRIOR_DRAWS = 256
"""Networks that stand for the prior where its variance is asked for: 9 % standard error of a variance."""


class Drawable(Protocol):
    """A prior of parameters that can be drawn from."""

    def sample(
        self, params: Params, num_samples: int, generator: torch.Generator | None = None
    ) -> Params:
        """Parameters with an axis of draws in front, of the shapes, dtype and device of `params`."""


@savable("process.Drawn")
@dataclass(frozen=True, eq=False)
class Drawn:
    """The law of f that gives each of S networks the probability 1/S.

    Means and covariances are averages over the networks. The law is not Gaussian, so predictions average
    p(y | f_s), draws are the networks themselves, and a draw never lies between two of them.

    Args:
        members: The networks.
        num_outputs: The number of outputs C.
        prior: The prior of the parameters, for `novelty`; None if there is none.
    """

    members: Members
    num_outputs: int
    prior: Drawable | None = field(default=None, repr=False)

    @cached_property
    def kernel(self) -> MemberCovariance:
        """The covariance of f under the prior, over networks drawn from it with a fixed seed."""
        if self.prior is None:
            raise NotAvailable(
                "these networks were found without a prior, so f has no covariance before the data. Pass "
                "prior= to the method that found them."
            )
        network = self.members.architecture
        generator = torch.Generator(network.example.device).manual_seed(0)
        values = self.prior.sample(network.params, PRIOR_DRAWS, generator)
        return MemberCovariance(Members(network, values))

    @property
    def architecture(self) -> Linearized:
        """The network, with the values of what all draws share."""
        return self.members.architecture

    def facts(self) -> dict[str, str]:
        """The network, the number of draws and its number of parameters."""
        network = self.members.architecture
        return {
            "_network": f"{type(network.network).__name__}",
            "draws": f"{len(self.members)}",
            "P": f"{network.num_params}",
        }

    def check(self, x: Inputs) -> None:
        """Do nothing: the network itself raises an error for inputs that it cannot take."""

    @evaluated
    def values(self, x: Inputs) -> Tensor:
        """The outputs of all networks: (S, N, C)."""
        return self.members(x)

    def mean(self, x: Inputs) -> Tensor:
        """The average over the networks: (N, C)."""
        return self.values(x).mean(0)

    def moments(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean (N, C) and the covariance of each point (N, C, C)."""
        mean, centered = self._centered(x)
        return mean, torch.einsum("snc,snd->ncd", centered, centered) / len(centered)

    def diagonal(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and the variances: (N, C) each."""
        mean, centered = self._centered(x)
        return mean, centered.square().mean(0)

    def contrast(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and Var[f_c − f_t] for the class t of the largest mean: (N, C) each."""
        mean, blocks = self.moments(x)
        return mean, Contrast.variances(mean, blocks)

    def joint(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean (N·C,) and the covariance (N·C, N·C)."""
        mean, centered = self._centered(x)
        flat = centered.flatten(1)
        return mean.reshape(-1), flat.mT @ flat / len(flat)

    def _centered(self, x: Inputs) -> tuple[Tensor, Tensor]:
        values = self.values(x)
        mean = values.mean(0)
        return mean, values - mean

    @evaluated
    def prior_variances(self, x: Inputs) -> Tensor:
        """The variances under the prior: (N, C)."""
        return self.kernel.diag(x).reshape(-1, self.num_outputs)

    def predict(self, x: Inputs, likelihood: Likelihood, own: bool) -> Distribution:
        """(1/S) Σ_s p(y | f_s)."""
        return mixture(likelihood, self.values(x))

    def split(self, x: Inputs, likelihood: Likelihood, own: bool) -> Split:
        """The variance of E[y | f] over the networks, and their average of Var[y | f]: exact."""
        values = self.values(x)
        flat = values.flatten(0, 1)
        mean, variance = target_moments(likelihood, flat)
        if not follows(x):
            mean, variance = mean.detach(), variance.detach()
        mean = mean.reshape(len(values), num_rows(x), -1)
        return Split(mean.var(0, correction=0), variance.reshape(mean.shape).mean(0))

    def functions(
        self, num_samples: int, generator: torch.Generator | None
    ) -> Callable[[Inputs], Tensor]:
        """That many of the networks, chosen at random with replacement."""
        return Chosen(self.members[self._choose(num_samples, generator)])

    def draw(self, x: Inputs, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """The outputs of networks that are chosen at random with replacement: (S, N, C)."""
        return self.values(x)[self._choose(num_samples, generator)]

    draw_networks = draw

    def draw_weights(self, num_samples: int, generator: torch.Generator | None) -> Params:
        """Parameters of networks that are chosen at random, each with an axis of samples in front."""
        index = self._choose(num_samples, generator)
        params = self.members.architecture.params
        return {n: v[index] for n, v in self.members.values.items() if n in params}

    def _choose(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        device = self.members.architecture.example.device
        own = generator.device if generator is not None else device
        count = len(self.members)
        return torch.randint(count, (num_samples,), generator=generator, device=own).to(device)

    @evaluated
    def network_value(self, x: Inputs) -> Tensor:
        """The output of the first network at the first point, which a file keeps as a check."""
        return next(self.members.each())(rows(x, slice(0, 1)))


@dataclass(frozen=True, eq=False)
class Chosen:
    """S functions, each of them a network.

    Args:
        members: The networks.
    """

    members: Members = field(repr=False)

    def __call__(self, x: Inputs) -> Tensor:
        """Return the values of the functions.

        Args:
            x: N points.

        Returns:
            The values: (S, N, C).
        """
        with evaluating(self.members.network):
            return self.members(x)


@savable("recipe.ByDrawing")
@dataclass(frozen=True, eq=False)
class ByDrawing(Recipe):
    """The recipe of methods that give networks: ensembles, dropout, variational draws and Markov chains.

    Args:
        method: The name of the function that found the networks.
        temperature: The number that the log joint was divided by; 1 for the Bayesian posterior.
        num_chains: The number of Markov chains; the draws of a chain stand one after the other. 1 if the
            draws are independent.
        statistics: What the method reports of its run, by name, such as "divergences", one entry per chain.
    """

    method: str = ""
    temperature: float = 1.0
    num_chains: int = 1
    statistics: dict[str, Tensor] = field(default_factory=dict)

    def extend(self, posterior: Posterior, data: Data, likelihood: Likelihood | None) -> Posterior:
        """Refuse: the networks would have to be found again."""
        raise NotAvailable(
            "update is for a Gaussian process that was conditioned on data, and this posterior is a set of "
            f"networks. Call {self.method or 'the method'} again with all data."
        )

    def tempered(self, posterior: Posterior, factor: float) -> Posterior:
        """Refuse: networks cannot be moved apart after the fact."""
        raise NotAvailable(
            "tempered is for a Gaussian over a network's parameters, and this posterior is a set of "
            f"networks. Call {self.method or 'the method'} with temperature={factor:g}, if it takes one."
        )

    def facts(self, posterior: Posterior) -> dict[str, str]:
        """The method, the chains if there are several, and the temperature unless it is 1."""
        chains = {} if self.num_chains == 1 else {"chains": f"{self.num_chains}"}
        heat = {} if self.temperature == 1.0 else {"temperature": number(self.temperature)}
        return {"method": self.method, **chains, **heat}

    def without_evidence(self) -> str:
        """Why there is no evidence."""
        return (
            "a set of networks does not give the evidence. Use laplace(network, data, likelihood) around one "
            "of them."
        )


def drawn_posterior(
    members: Members,
    likelihood: Likelihood,
    data: tuple[Inputs, Tensor] | None,
    *,
    prior: Drawable | None = None,
    recipe: Recipe | None = None,
) -> Posterior:
    """The posterior that gives each of S networks the probability 1/S.

    Args:
        members: The networks.
        likelihood: How targets follow the outputs.
        data: The inputs and targets, as `gather` gives them; None if they are not kept.
        prior: The prior of the parameters, if there is one.
        recipe: How the networks were found.

    Returns:
        A posterior with the surface of all others.
    """
    assert data is not None
    x, y = data
    with evaluating(members.network):
        num_outputs = members.architecture(rows(x, slice(0, 1))).shape[1]
    return Posterior(
        Drawn(members, num_outputs, prior), likelihood, x, y, None, recipe or ByDrawing()
    )


def check_posterior(posterior: object) -> None:
    """Raise unless this is a posterior.

    Args:
        posterior: What a function of posteriors was given.

    Raises:
        InputError: If it is anything else, such as a network.

    >>> check_posterior(torch.nn.Linear(1, 1))
    Traceback (most recent call last):
    ...
    net2gp.errors.InputError: posterior must be what a method such as ensemble(network, data, likelihood) ...
    """
    if not isinstance(posterior, Posterior):
        raise InputError(
            "posterior must be what a method such as ensemble(network, data, likelihood) returns, but is "
            f"{describe(posterior)}."
        )
