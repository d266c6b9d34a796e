"""A network, its checked data and a likelihood: what a structure takes the curvature of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from net2gp.inputs import rows, tensors
from net2gp.likelihoods.traits import of_points
from net2gp.linalg.chance import fixed_choice
from net2gp.linear.curvatures.curvature import ExactFisher, Fisher, Source
from net2gp.linear.curvatures.ggn import GaussNewton
from net2gp.linear.linearized import Linearized, PriorVar, expand_prior
from net2gp.posteriors.weights.tasks.sums import Sums
from net2gp.types import Inputs, Likelihood, Params


@dataclass(frozen=True, eq=False)
class Task:
    """A network with checked data: what a structure takes the curvature of.

    The data may be a stream, of which `x`, `y` and `f` are never together: sum over `pieces()`, which are
    tasks themselves and have them, or over `source().gradients()`.

    Args:
        linearized: The network at its parameters θ*.
        x: The inputs of the data.
        y: The targets.
        likelihood: How targets follow the outputs; its noise variance is 1 where it is open.
        f: The outputs of the network at `x`, (N, C), in float64.
        open_noise: Whether the noise variance is to be found.
        prior_var: The prior variances that were given, or None if they are to be found.
        temperature: What the curvature is divided by.
        free: The indices of the parameters that vary, or None if all do.
        among: Of a piece of a stream the number of its first point among all, and the likelihood of all.
    """

    linearized: Linearized
    x: Inputs
    y: Tensor
    likelihood: Likelihood
    f: Tensor
    open_noise: bool = False
    prior_var: PriorVar | None = None
    temperature: float = 1.0
    free: Tensor | None = None
    among: tuple[int, Likelihood] | None = None

    @property
    def params(self) -> Params:
        """θ*."""
        return self.linearized.params

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self.linearized.example.device

    @cached_property
    def sums(self) -> Sums:
        """The numbers of points and outputs, and what else sums over the data say."""
        return Sums.of(self.likelihood, self.f, self.y)

    @property
    def kept(self) -> tuple[Inputs, Tensor] | None:
        """The data, if the posterior keeps them."""
        return self.x, self.y

    def pieces(self, what: str = "data") -> Iterator[Task]:
        """The points in pieces that fit into memory, once: all together, or one pass over a stream.

        Args:
            what: What is done with them, which a progress bar shows.

        Yields:
            Tasks with the points of each piece.
        """
        yield self

    def few(self) -> Inputs:
        """Some inputs from which the network can be planned: all, or a few of a stream."""
        return self.x

    def whole(self, what: str, instead: str) -> Task:
        """The task with all points together.

        Args:
            what: What needs them, for the error.
            instead: What to use instead, for the error.

        Returns:
            The task itself; a stream raises.
        """
        return self

    def some(self, count: int, seed: int = 0) -> Task:
        """The task at a fixed random choice of points.

        Args:
            count: How many, at most.
            seed: The seed of the choice.

        Returns:
            A task with these points together.
        """
        return self.at(fixed_choice(self.sums.count, count, seed).to(self.device))

    def fisher_times(self, v: Tensor) -> Tensor:
        """H v, in one pass over the data.

        Args:
            v: Columns over all parameters, (P, k).

        Returns:
            (P, k), in the dtype of `v`.
        """
        total = torch.zeros_like(v)
        for piece in self.pieces("product with the curvature"):
            total += GaussNewton(piece.linearized, piece.x, piece.likelihood).matmul(v)
        return total

    def root(self, fisher: Fisher, f: Tensor, part: slice) -> Tensor:
        """R_n of some of the points.

        Args:
            fisher: Which Fisher matrix.
            f: The outputs at these points, (n, C).
            part: The numbers of the points.

        Returns:
            (n, C, K).
        """
        first, likelihood = self.among or (0, self.likelihood)
        return fisher.root(likelihood, f, self.y[part], first + part.start)

    def contents(self) -> Iterator[bytes]:
        """The bytes of the data and outputs, to tell one task from another."""
        for value in [*tensors(self.x), self.y, self.f]:
            yield value.detach().cpu().contiguous().numpy().tobytes()

    def source(self, fisher: Fisher | None = None) -> Source:
        """What gradients and diagonals are taken of.

        Args:
            fisher: Which Fisher matrix; None means `ExactFisher()`.

        Returns:
            The network with its data, which gives gradients chunk by chunk.
        """
        first, likelihood = self.among or (0, self.likelihood)
        chosen = fisher or ExactFisher()
        return Source(self.linearized, self.x, self.y, likelihood, chosen, first)

    def at(self, index: Tensor) -> Task:
        """The task at some of its points.

        Args:
            index: The numbers of the points, (n,).

        Returns:
            A task of n points, with the noise that belongs to them.
        """
        likelihood = of_points(self.likelihood, index)
        x, y, f = rows(self.x, index), self.y[index], self.f[index]
        return replace(self, x=x, y=y, f=f, likelihood=likelihood)

    def prior(self, prior_var: PriorVar) -> Params:
        """The variance of each parameter; one that was found is not rounded to the network's dtype.

        Args:
            prior_var: A number, or variances by the names of parameters.

        Returns:
            A scalar tensor for each parameter, or one of its shape.
        """
        if self.prior_var is not None:
            return expand_prior(prior_var, self.params)
        precise = lambda value: torch.tensor(value, dtype=torch.float64, device=self.device)
        if isinstance(prior_var, Mapping):
            return {name: precise(prior_var[name]) for name in self.params}
        return dict.fromkeys(self.params, precise(prior_var))

    def noise(self, scale: float) -> Tensor | None:
        """The open noise variance that a factor of the curvature stands for.

        Args:
            scale: The factor, 1/(temperature · noise variance).

        Returns:
            The noise variance, or None where it is not open.
        """
        if not self.open_noise:
            return None
        return torch.tensor(1.0 / (self.temperature * scale), dtype=torch.float64)

    def log_likelihood(self, noise_var: Tensor | None) -> Tensor:
        """log p(y | f(x; θ*)), summed over the points.

        Args:
            noise_var: The noise variance where it is open, else None.

        Returns:
            A scalar, differentiable in the noise.
        """
        return self.sums.log_likelihood(noise_var)

    def distance(self, prior: Params) -> Tensor:
        """Σ θ*²/v over the parameters that vary.

        Args:
            prior: The variance v of each parameter.

        Returns:
            A scalar, differentiable in the prior.
        """
        squares = [
            (value.double().square() / prior[name].double()).reshape(-1)
            for name, value in self.params.items()
        ]
        each = torch.cat(squares)
        return each.sum() if self.free is None else each[self.free].sum()
