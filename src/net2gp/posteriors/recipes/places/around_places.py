"""A Gaussian over the parameters of a network that has outputs at every place of a point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from net2gp.errors import NotAvailable
from net2gp.inputs import follows, num_rows, ordinary_tensors, rows
from net2gp.likelihoods.links import Contrast
from net2gp.likelihoods.places import EachPlace, each_place
from net2gp.linear.curvatures.head import weights_of
from net2gp.linear.forward.places import (
    channels_of,
    has_few_outputs,
    output_shape,
    outputs_by_place,
)
from net2gp.linear.jacobians.passes import capacity, column_products, memory_budget
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.linear.linearized import Linearized, PriorVar, expand_prior
from net2gp.memory import check_memory
from net2gp.posteriors.conditioning.process import evaluated
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.around_network import AroundNetwork, ByLaplace
from net2gp.posteriors.recipes.dual import Dual
from net2gp.posteriors.recipes.seen import Seen
from net2gp.posteriors.weights.covariance import Covariance
from net2gp.posteriors.weights.last_layer import LastLayerDiagonal
from net2gp.posteriors.weights.structure import prior_vector
from net2gp.types import Inputs, Likelihood, Params

NUM_DRAWS = 64
"""Draws that estimate variances at places, with a relative standard error of √(2/64) = 18 %."""

NUMBERS = 2**24
"""Numbers of the changes of outputs that are held at once."""

MOST_POINTS = 500
"""Points that go through the network together."""

Law = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class AroundPlaces:
    """The process f(x)_p = f(x; θ*)_p + J_p(x)(θ − θ*) with θ ~ N(θ*, Σ), for each place p of a point.

    If Σ is of a last layer, variances are exact, from its features at the places. They are exact too if a
    point has few outputs in all (`FEW_OUTPUTS`), from its Jacobian. Otherwise a Jacobian of all places is
    never formed: variances are the mean squares of J(x) times fixed draws of θ − θ*, a forward-mode pass
    each, and covariances between places are those of the same draws.

    Args:
        inner: The process whose outputs are the places' one after the other, p·C + c.
        num_draws: How many draws estimate variances.
    """

    inner: AroundNetwork
    num_draws: int = NUM_DRAWS

    @property
    def num_outputs(self) -> int:
        """The number C of channels at a place."""
        found = channels_of(self.linearized)
        assert found is not None
        return found

    @property
    def linearized(self) -> Linearized:
        """The network at θ*."""
        return self.inner.linearized

    @property
    def covariance(self) -> Covariance:
        """Σ."""
        return self.inner.covariance

    @property
    def prior_var(self) -> PriorVar:
        """The prior variances of the parameters."""
        return self.inner.prior_var

    @property
    def kernel(self) -> TangentKernel:
        """J diag(prior_var) Jᵀ of all places, which is for products."""
        return self.inner.kernel

    @property
    def seen(self) -> Seen | None:
        """What was seen in training, as `novelty` compares with it."""
        return self.inner.seen

    def with_seen(self, seen: Seen) -> AroundPlaces:
        """The process that knows what was seen."""
        return replace(self, inner=replace(self.inner, seen=seen))

    def facts(self) -> dict[str, str]:
        """The network, its prior variances and its number of parameters."""
        return self.inner.facts()

    def check(self, x: Inputs) -> None:
        """Do nothing: the network itself raises an error for inputs that it cannot take."""

    @evaluated
    def mean(self, x: Inputs) -> Tensor:
        """The outputs of the network, with channels behind the places: (N, …, C)."""
        return outputs_by_place(self.linearized, x)

    @evaluated
    def moments(self, x: Inputs) -> Law:
        """The mean (N, …, C) and the covariance of the channels at each place (N, …, C, C)."""
        return self._law(x, self._blocks, (self.num_outputs, self.num_outputs))

    @evaluated
    def diagonal(self, x: Inputs) -> Law:
        """The mean and the variances, (N, …, C) each."""
        return self._law(x, self._variances, (self.num_outputs,))

    @evaluated
    def contrast(self, x: Inputs) -> Law:
        """The mean and Var[f_c − f_t] for the class t of the largest mean at a place: (N, …, C) each."""
        return self._law(x, self._contrasts, (self.num_outputs,))

    @evaluated
    def joint(self, x: Inputs) -> Law:
        """The mean and the covariance of all places of all points, (N·P·C, N·P·C), for few places."""
        mean = self.mean(x).flatten()
        check_memory(
            16 * len(mean) ** 2,
            mean.device,
            f"the covariance of {len(mean)} outputs at places",
            "posterior.sample(x, 100), whose draws show which places err together",
        )
        if self._is_exact(x):
            return mean, self.covariance.joint(self.linearized, x).to(mean.dtype)
        deviations = torch.cat([part.flatten(0, 1) for part in self._deviations(x, self._columns)])
        return mean, (deviations @ deviations.mT).to(mean.dtype)

    @evaluated
    def prior_variances(self, x: Inputs) -> Tensor:
        """The variances before any data, (N, …, C); estimated by draws as those of the posterior are."""
        like = self.mean(x)
        prior = expand_prior(self.prior_var, self.linearized.params)
        if self.covariance.by_place:
            wide = {n: prior[n].double().expand(v.shape) for n, v in self.linearized.params.items()}
            own = LastLayerDiagonal(weights_of(wide), len(wide) == 2)
            found = own.variances(self.linearized, x)
        elif has_few_outputs(self.linearized, x):
            found = self.inner.prior_variances(x)
        else:
            root = prior_vector(prior, self.linearized.params).sqrt()
            free = self.covariance.mask()
            root = root if free is None else root * free.to(root)
            generator = torch.Generator().manual_seed(1)
            z = torch.randn(len(root), self.num_draws, generator=generator, dtype=root.dtype)
            columns = root[:, None] * z.to(root.device) / self.num_draws**0.5
            squares = [part.square().sum(-1) for part in self._deviations(x, columns)]
            found = torch.cat(squares).to(like.dtype)
        return found.reshape(like.shape)

    @evaluated
    def novelty(self, x: Inputs) -> Tensor:
        """The share of the prior variance at each place that the training places leave open: (N, …)."""
        shape = self.mean(x).shape[:-1]
        return self.inner.novelty(x).reshape(shape)

    @evaluated
    def excess(self, x: Inputs) -> Tensor:
        """By how much a place is more novel than all but few training places: (N, …)."""
        shape = self.mean(x).shape[:-1]
        if self.seen is None:
            return self.linearized.example.new_zeros(shape)
        return (self.inner.novelty(x).reshape(shape) / self.seen.ordinary - 1).clamp(min=0)

    def functions(self, num_samples: int, generator: torch.Generator | None) -> PlaceFunctions:
        """The functions f(x; θ*) + J(x)(θ_s − θ*) for drawn parameters θ_s."""
        draws = self.covariance.draw(num_samples, generator).to(self.linearized.example)
        return PlaceFunctions(self, draws)

    def draw_networks(
        self, x: Inputs, num_samples: int, generator: torch.Generator | None
    ) -> Tensor:
        """The outputs at `x` of the network itself at drawn parameters: (S, N, …, C)."""
        shape = self.mean(x).shape
        return self.inner.draw_networks(x, num_samples, generator).reshape(-1, *shape)

    def draw_weights(self, num_samples: int, generator: torch.Generator | None) -> Params:
        """Draws of the chosen parameters, each with an axis of samples in front."""
        return self.inner.draw_weights(num_samples, generator)

    def scaled(self, factor: float) -> AroundPlaces:
        """The process with the covariances of the posterior and of the prior multiplied by `factor`."""
        return replace(self, inner=self.inner.scaled(factor))

    @cached_property
    @ordinary_tensors()
    def _columns(self) -> Tensor:
        return self.covariance.columns(self.num_draws)

    def _law(
        self, x: Inputs, spread: Callable[[Inputs, Tensor], Tensor], event: tuple[int, ...]
    ) -> Law:
        """The mean, and a spread of shape `event` at each place."""
        means, spreads, done = [], [], 0
        together = self._together(x)
        while done < num_rows(x):
            part = rows(x, slice(done, done + together))
            mean = outputs_by_place(self.linearized, part)
            means.append(mean)
            found = spread(part, mean.detach().reshape(-1, self.num_outputs))
            spreads.append(found.to(mean.dtype).reshape(*mean.shape[:-1], *event))
            done += len(mean)
        return torch.cat(means), torch.cat(spreads)

    def _together(self, x: Inputs) -> int:
        """How many points go through the network together: one, if it has many places."""
        each = output_shape(self.linearized, x).numel()
        width = self.num_outputs if self.covariance.by_place else self.num_draws
        return max(1, min(MOST_POINTS, NUMBERS // (each * width)))

    def _is_exact(self, x: Inputs) -> bool:
        """Whether Σ has the exact covariance of the outputs at a price that can be paid."""
        return self.covariance.by_place or has_few_outputs(self.linearized, x)

    def _blocks(self, x: Inputs, mean: Tensor) -> Tensor:
        if self._is_exact(x):
            found, channels = self.covariance.blocks(self.linearized, x), mean.shape[1]
            if self.covariance.by_place:
                return found
            wide = found.reshape(len(found), -1, channels, len(mean) // len(found), channels)
            return wide.diagonal(dim1=1, dim2=3).movedim(-1, 1).flatten(0, 1)
        total = mean.new_zeros(*mean.shape, mean.shape[1])
        for part in self._by_columns(x):
            deviations = part.reshape(*mean.shape, -1)
            total = total + deviations @ deviations.mT
        return total

    def _variances(self, x: Inputs, mean: Tensor) -> Tensor:
        if self._is_exact(x):
            return self.covariance.variances(self.linearized, x).reshape(mean.shape)
        parts = [part.square().sum(-1) for part in self._by_columns(x)]
        return torch.stack(parts).sum(0)

    def _contrasts(self, x: Inputs, mean: Tensor) -> Tensor:
        top = mean.argmax(-1)
        if self.covariance.by_place and hasattr(self.covariance, "differences"):
            return self.covariance.differences(self.linearized, x, top)
        if self._is_exact(x):
            blocks = self._blocks(x, mean)
            return Contrast.variances(mean.to(blocks.dtype), blocks)
        total = torch.zeros_like(mean)
        for part in self._by_columns(x):
            deviations = part.reshape(*mean.shape, -1)
            best = deviations.gather(1, top[:, None, None].expand(-1, 1, deviations.shape[-1]))
            total += (deviations - best).square().sum(-1)
        return total

    def _by_columns(self, x: Inputs) -> Iterator[Tensor]:
        """J(x) times the draws, some draws at a time: (N·P·C, s)."""
        for part in self._deviations(x, self._columns):
            yield part.flatten(0, 1)

    def _deviations(self, x: Inputs, columns: Tensor) -> Iterator[Tensor]:
        """J(x) W of all points, (N, P·C, S), or of one point in parts of the columns."""
        linearized = self.linearized
        W = columns.to(linearized.example)
        size = capacity(linearized, x, memory_budget(W.device))
        with torch.set_grad_enabled(follows(x)):
            for part in W.split(self._at_once(x, W), 1) if num_rows(x) == 1 else (W,):
                found = column_products(linearized, x, part.contiguous(), size)
                yield found.reshape(num_rows(x), -1, part.shape[1])

    def _at_once(self, x: Inputs, W: Tensor) -> int:
        return max(1, min(W.shape[1], NUMBERS // max(1, self.mean(x).numel())))


@dataclass(frozen=True, eq=False)
class PlaceFunctions:
    """S functions with values at places, which can be evaluated at any points.

    Args:
        process: The process that they were drawn from.
        weights: Draws of θ − θ*, (P, S).
    """

    process: AroundPlaces
    weights: Tensor = field(repr=False)

    @evaluated
    def __call__(self, x: Inputs) -> Tensor:
        """Return the values of the functions, at the cost of one forward-mode pass per function.

        Args:
            x: N points.

        Returns:
            The values: (S, N, …, C).
        """
        mean = self.process.mean(x)
        linearized = self.process.linearized
        size = capacity(linearized, x, memory_budget(mean.device))
        with torch.set_grad_enabled(follows(x)):
            found = column_products(linearized, x, self.weights, size)
            return mean + found.reshape(len(mean), -1, self.weights.shape[1]).permute(
                2, 0, 1
            ).reshape(-1, *mean.shape)


@dataclass(frozen=True)
class ByLaplaceAtPlaces(ByLaplace):
    """The recipe of `laplace` for a network with outputs at places."""

    def dual(self, posterior: Posterior) -> Dual:
        """Raise: the matrices of a dual would have a row for each place."""
        raise NotAvailable(
            "the dual view has a matrix with a row for each output of each training point, which places make "
            "too many. Take one place: laplace(linearize(network, output=lambda out: out[:, :, 0, 0]), "
            "(x, y[:, 0, 0]), likelihood).dual()."
        )

    def predictive(self, own: Likelihood, given: Likelihood | None) -> Likelihood:
        """The likelihood to predict with, at each place."""
        assert isinstance(own, EachPlace)
        chosen = super().predictive(own, given)
        if isinstance(chosen, EachPlace):
            return chosen if chosen.channels is not None else own.inside(chosen.likelihood)
        return own.inside(each_place(chosen).likelihood)
