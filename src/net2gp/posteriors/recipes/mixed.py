"""Mixtures: several posteriors of f, each with a weight, as one posterior."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add

import torch
from torch import Tensor
from torch.distributions import Distribution

from net2gp.errors import InputError, check_positive
from net2gp.inputs import describe, num_rows, rows, same_inputs
from net2gp.likelihoods.laws import average
from net2gp.likelihoods.links import Contrast
from net2gp.likelihoods.responses import law_moments
from net2gp.likelihoods.traits import has_gaussian_noise
from net2gp.linear.forward.evaluation import evaluating
from net2gp.posteriors.conditioning.process import evaluated, linearizations_of
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipe import Recipe
from net2gp.posteriors.split import Split
from net2gp.posteriors.writing import check_value, limits_of
from net2gp.tags import savable
from net2gp.types import Data, Inputs, Kernel, Likelihood, Params


@savable("process.Mixed")
@dataclass(frozen=True, eq=False)
class Mixed:
    """The law Σ_m w_m p_m(f) of posteriors p_m.

    Its mean is Σ w_m μ_m and its covariance Σ w_m (Σ_m + (μ_m − μ)(μ_m − μ)ᵀ): the average within the members
    plus the covariance between them.

    Args:
        members: The posteriors.
        weights: Their weights, which add up to 1: (M,), float64.
    """

    members: tuple[Posterior, ...]
    weights: Tensor = field(repr=False)

    @property
    def num_outputs(self) -> int:
        """The number of outputs C."""
        return self.members[0].num_outputs

    @property
    def kernel(self) -> Kernel:
        """The average of the members' prior covariances."""
        parts = [m.kernel.scaled(float(w)) for m, w in zip(self.members, self.weights, strict=True)]
        return reduce(add, parts)

    def facts(self) -> dict[str, str]:
        """The number of members, and what the first is."""
        return {**self.members[0].process.facts(), "members": f"{len(self.members)}"}

    def check(self, x: Inputs) -> None:
        """Raise unless `x` can be points of every member."""
        for member in self.members:
            member.process.check(x)

    @evaluated
    def mean(self, x: Inputs) -> Tensor:
        """The average of the means: (N, C)."""
        return self._average([member.process.mean(x) for member in self.members])

    @evaluated
    def moments(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean (N, C) and the covariance of each point (N, C, C)."""
        means, blocks = zip(*(m.process.moments(x) for m in self.members), strict=True)
        mean = self._average(means)
        spread = [(m - mean)[:, :, None] * (m - mean)[:, None, :] for m in means]
        return mean, self._average([b.to(mean.dtype) for b in blocks]) + self._average(spread)

    @evaluated
    def diagonal(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and the variances: (N, C) each."""
        means, variances = zip(*(m.process.diagonal(x) for m in self.members), strict=True)
        mean = self._average(means)
        between = self._average([(m - mean).square() for m in means])
        return mean, self._average(variances) + between

    def contrast(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean and Var[f_c − f_t] for the class t of the largest mean: (N, C) each."""
        mean, blocks = self.moments(x)
        return mean, Contrast.variances(mean, blocks)

    @evaluated
    def joint(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The mean (N·C,) and the covariance (N·C, N·C)."""
        means, covariances = zip(*(m.process.joint(x) for m in self.members), strict=True)
        mean = self._average(means)
        return mean, self._average(covariances) + self._average(
            [torch.outer(m - mean, m - mean) for m in means]
        )

    @evaluated
    def prior_variances(self, x: Inputs) -> Tensor:
        """The average of the members' prior variances: (N, C)."""
        return self._average([member.process.prior_variances(x) for member in self.members])

    @evaluated
    def predict(self, x: Inputs, likelihood: Likelihood, own: bool) -> Distribution:
        """Σ_m w_m p_m(y); a member predicts with its own noise and link, unless another one was asked for."""
        return average(self._laws(x, None if own else likelihood), self.weights)

    @evaluated
    def split(self, x: Inputs, likelihood: Likelihood, own: bool) -> Split:
        """Noise and variance within the members, averaged, and the variance of E y between them."""
        chosen = None if own else likelihood
        parts = [member.split(x, likelihood=chosen) for member in self.members]
        means = [law_moments(law)[0] for law in self._laws(x, chosen)]
        mean = self._average(means)
        between = self._average([(m - mean).square() for m in means])
        within = self._average([part.epistemic for part in parts])
        return Split(within + between, self._average([part.aleatoric for part in parts]), between)

    def functions(
        self, num_samples: int, generator: torch.Generator | None
    ) -> Callable[[Inputs], Tensor]:
        """Functions of members that are chosen by their weights."""
        parts, order = [], self._choose(num_samples, generator)
        for index, member in enumerate(self.members):
            count = int((order == index).sum())
            parts.append(member.process.functions(count, generator) if count else None)
        return MixedFunctions(tuple(parts), order)

    @evaluated
    def draw(self, x: Inputs, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """Draws of f(x) from members that are chosen by their weights: (S, N, C)."""
        order = self._choose(num_samples, generator)
        found = None
        for index, member in enumerate(self.members):
            chosen = (order == index).nonzero()[:, 0]
            if not len(chosen):
                continue
            values = member.sample(x, len(chosen), generator=generator)
            if found is None:
                found = values.new_zeros(num_samples, num_rows(x), self.num_outputs)
            found = found.index_copy(0, chosen.to(values.device), values)
        assert found is not None
        return found

    @evaluated
    def draw_networks(
        self, x: Inputs, num_samples: int, generator: torch.Generator | None
    ) -> Tensor:
        """The outputs at `x` of networks with drawn parameters, from members chosen by weight: (S, N, C)."""
        order = self._choose(num_samples, generator)
        counts = [int((order == index).sum()) for index in range(len(self.members))]
        parts = [
            member.sample(x, count, generator=generator, linear=False)
            for member, count in zip(self.members, counts, strict=True)
            if count
        ]
        values = torch.cat(parts)
        return values[order.sort(stable=True).indices.argsort().to(values.device)]

    def draw_weights(self, num_samples: int, generator: torch.Generator | None) -> Params:
        """Parameters of members that are chosen by their weights, in the order of the members."""
        order = self._choose(num_samples, generator)
        counts = [int((order == index).sum()) for index in range(len(self.members))]
        parts = [
            member.sample_weights(count, generator=generator)
            for member, count in zip(self.members, counts, strict=True)
            if count
        ]
        shuffled = order.sort(stable=True).indices.argsort()
        return {
            n: torch.cat([p[n] for p in parts])[shuffled.to(v.device)] for n, v in parts[0].items()
        }

    def network_value(self, x: Inputs) -> Tensor | None:
        """The outputs by which `load` knows the architecture, those of the first member."""
        graphs = {one.limit.graph.code for m in self.members for one in limits_of(m.process.kernel)}
        if len(graphs) > 1 or (graphs and any(_shapes(member) for member in self.members)):
            raise InputError(
                "the mixture is of a network and of limits of another one, but load takes one network, so "
                "that it cannot be saved. Save its members, posterior.process.members, and mix them after "
                "load."
            )
        return check_value(replace(self.members[0], x=x))

    def _choose(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        device = "cpu" if generator is None else generator.device
        weights = self.weights.to(device)
        return weights.multinomial(num_samples, replacement=True, generator=generator).cpu()

    def _average(self, parts: Sequence[Tensor]) -> Tensor:
        stacked = torch.stack(list(parts))
        return torch.tensordot(self.weights.to(stacked), stacked, 1)

    def _laws(self, x: Inputs, likelihood: Likelihood | None) -> list[Distribution]:
        return [member.predict(x, likelihood=likelihood) for member in self.members]


@dataclass(frozen=True, eq=False)
class MixedFunctions:
    """S functions that were drawn from the members of a mixture.

    Args:
        parts: The functions of each member, or None where none were drawn.
        order: The number of the member of each function: (S,).
    """

    parts: tuple[Callable[[Inputs], Tensor] | None, ...] = field(repr=False)
    order: Tensor = field(repr=False)

    def __call__(self, x: Inputs) -> Tensor:
        """Return the values of the functions.

        Args:
            x: N points.

        Returns:
            The values: (S, N, C).
        """
        values = torch.cat([part(x) for part in self.parts if part is not None])
        return values[self.order.sort(stable=True).indices.argsort().to(values.device)]


@savable("recipe.ByMixing")
@dataclass(frozen=True)
class ByMixing(Recipe):
    """The recipe of `mixture`: every member takes in data and temperatures by itself."""

    def extend(self, posterior: Posterior, data: Data, likelihood: Likelihood | None) -> Posterior:
        """The mixture of the members given more data, with the weights as they are."""
        return _each(posterior, lambda member: member.update(data, likelihood=likelihood))

    def tempered(self, posterior: Posterior, factor: float) -> Posterior:
        """The mixture of the tempered members; the distances between their means stay."""
        return _each(posterior, lambda member: member.tempered(factor))

    def without_evidence(self) -> str:
        """Why there is no evidence."""
        return "a mixture of posteriors has no evidence of its own. Ask its members."


def _each(posterior: Posterior, change: Callable[[Posterior], Posterior]) -> Posterior:
    process = posterior.process
    assert isinstance(process, Mixed)
    members = tuple(change(member) for member in process.members)
    return mixture(members, process.weights.tolist())


def mixture(posteriors: Sequence[Posterior], weights: Sequence[float] | None = None) -> Posterior:
    """Mix posteriors of networks of one architecture, or of any processes with the same outputs.

    The law of f is Σ_m w_m p_m(f). Deep ensembles of posteriors are of this kind: mixtures of Laplace
    approximations, and multi-SWAG. Each member predicts with its own noise and link, and `split` gives the
    variance within and between members. Cost: that of all members.

    Args:
        posteriors: The members.
        weights: A positive number for each; None takes equal weights. They are divided by their sum.

    Returns:
        A posterior with the surface of all others.

    Raises:
        InputError: If there are no members, or members of unlike architectures, outputs or likelihoods.

    >>> from net2gp.kernels import RBF
    >>> from net2gp.likelihoods import Gaussian
    >>> from net2gp.posteriors.condition import condition
    >>> x = torch.zeros(1, 1, dtype=torch.float64)
    >>> members = [condition(RBF(), (x, x + y), Gaussian(noise_var=1.0)) for y in (-1.0, 1.0)]
    >>> mixture(members).marginal(x).variance
    tensor([[0.7500]], dtype=torch.float64)

    References: Eschenhagen et al., Mixtures of Laplace approximations, 2021; Wilson and Izmailov, Bayesian
    deep learning and a probabilistic perspective of generalization, NeurIPS 2020.
    """
    members = tuple(posteriors) if isinstance(posteriors, Sequence) else ()
    if not members or not all(isinstance(member, Posterior) for member in members):
        kinds = describe(posteriors) if not members else ", ".join(map(describe, members[:3]))
        raise InputError(
            f"a mixture is of one or more posteriors, but got {kinds}. Pass for example "
            "mixture([laplace(network, data, likelihood), laplace(other, data, likelihood)])."
        )
    _check_alike(members)
    weights = getattr(weights, "tolist", lambda: weights)()  # tensors and arrays
    if weights is not None and not isinstance(weights, list | tuple):
        raise InputError(f"weights must be one number per posterior, but is {describe(weights)}.")
    given = [1.0] * len(members) if weights is None else list(weights)
    if len(given) != len(members):
        raise InputError(
            f"there are {len(members)} posteriors and {len(given)} weights. Pass one weight for each."
        )
    for weight in given:
        check_positive(weight, "weights", single=True)
    shares = torch.tensor(given, dtype=torch.float64)
    first = members[0]
    shared = all(_same_data(first, member) for member in members)
    data = (first.x, first.y) if shared else (None, None)
    process = Mixed(members, shares / shares.sum())
    return Posterior(process, _likelihood(process), *data, None, ByMixing())


def _likelihood(process: Mixed) -> Likelihood:
    """The first member's likelihood, with the average variance if members have Gaussian noise of their own.

    Members predict with their own; the average is for draws of networks and for users that ask.
    """
    first = process.members[0].likelihood
    noises = [m.likelihood.noise_var for m in process.members if has_gaussian_noise(m.likelihood)]
    values = [torch.as_tensor(noise, dtype=torch.float64) for noise in noises if noise is not None]
    alike = len(values) == len(process.members) and len({v.shape for v in values}) == 1
    if not alike or not has_gaussian_noise(first) or all(v.equal(values[0]) for v in values):
        return first
    mean = torch.tensordot(process.weights.to(values[0].device), torch.stack(values), 1)
    return first.with_noise(float(mean) if not mean.dim() else mean)


def _same_data(one: Posterior, other: Posterior) -> bool:
    if one.x is None or other.x is None or one.y is None or other.y is None:
        return one.x is None and other.x is None
    alike = one.y is other.y or (one.y.shape == other.y.shape and torch.equal(one.y, other.y))
    return alike and (one.x is other.x or same_inputs(one.x, other.x))


def _check_alike(members: tuple[Posterior, ...]) -> None:
    """Raise unless all members have the same outputs, kind of likelihood and parameters."""
    first = members[0]
    shapes = _shapes(first)
    for index, member in enumerate(members[1:], start=1):
        if member.num_outputs != first.num_outputs:
            raise InputError(
                f"posterior {index} has {member.num_outputs} outputs and posterior 0 has "
                f"{first.num_outputs}. Mix posteriors of the same outputs."
            )
        if type(member.likelihood) is not type(first.likelihood):
            raise InputError(
                f"posterior {index} has the likelihood {type(member.likelihood).__name__} and posterior 0 "
                f"{type(first.likelihood).__name__}. Mix posteriors of the same kind of targets."
            )
        own = _shapes(member)
        if own and shapes and own != shapes:  # a limit has no parameters
            wrong = sorted(n for n in own.keys() | shapes.keys() if own.get(n) != shapes.get(n))[0]
            raise InputError(
                f"the networks are of unlike architectures: '{wrong}' has shape {own.get(wrong)} in "
                f"posterior {index} and {shapes.get(wrong)} in posterior 0. A mixture is of one "
                "architecture, since load takes one network. Average predictions of unlike networks yourself."
            )
        _check_same_function(first, member, index)


@torch.no_grad()
def _check_same_function(first: Posterior, member: Posterior, index: int) -> None:
    """Raise if a member's network computes something else, for example by another activation."""
    x = first.x if member.x is None else member.x
    if x is None:
        return
    few = rows(x, slice(0, 3))
    for one, other in zip(linearizations_of(first), linearizations_of(member), strict=False):
        values = {**other.frozen, **other.params}
        with evaluating(one.network), evaluating(other.network):
            mine, theirs = one.run(values, few), other.run(values, few)
        if not torch.allclose(mine, theirs, rtol=1e-3, equal_nan=True):
            raise InputError(
                f"the networks are of unlike architectures: the network of posterior {index} computes "
                "something else than posterior 0's does with the same parameters. A mixture is of one "
                "architecture, since load takes one network. Average predictions of unlike networks yourself."
            )


def _shapes(posterior: Posterior) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for network in linearizations_of(posterior):
        found |= {n: tuple(v.shape) for n, v in {**network.frozen, **network.params}.items()}
    return found
