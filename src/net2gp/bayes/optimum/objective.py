"""What training minimizes: the negative log joint of each of several networks, from batches of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import torch
from torch import Tensor
from torch.func import vmap

from net2gp.bayes.model.prior import NormalPrior, WeightPrior
from net2gp.bayes.optimum.teams import Team
from net2gp.inputs import chunks, num_rows, rows
from net2gp.likelihoods.targets import shape_targets
from net2gp.likelihoods.traits import GaussianNoise, has_open_noise, of_points, tied_points
from net2gp.linear.forward.evaluation import evaluating
from net2gp.linear.parameters import expand_prior
from net2gp.types import Inputs, Likelihood, Params

SMALLEST_NOISE = 1e-6
"""The least learned variance of the noise, as a share of the variance of the targets."""

ROWS_AT_ONCE = 256
"""How many rows are evaluated together at least; passes without gradients take little memory."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows that S networks see in one step.

    Args:
        x: Inputs of B rows, with an axis of networks in front if `own`.
        y: Targets, (S, B) or (S, B, D).
        index: The numbers of the rows, (S, B); None for all rows in order.
    """

    x: Inputs
    y: Tensor
    index: Tensor | None

    @property
    def own(self) -> bool:
        """Whether each network has its own rows."""
        return self.index is not None


@dataclass(frozen=True, eq=False)
class Objective:
    """The negative log joint of S networks, divided by the number of rows.

    An open variance v of Gaussian noise is learned along: it is the average of squared residuals, which is
    its optimum for the present parameters, so that steps on θ with v held fixed descend in both.

    Args:
        x: The inputs of the N training rows.
        y: Their targets.
        likelihood: How targets follow outputs.
        prior: The prior of the parameters; None is flat.
        anchors: The points around which the prior of each network is centered; None is zero.
        resampled: The rows of each network, (S, N), if they are drawn with replacement.
        targets: Targets of each network, with an axis of length S in front; None if all have `y`.
    """

    x: Inputs
    y: Tensor
    likelihood: Likelihood
    prior: WeightPrior | None
    anchors: Params | None = None
    resampled: Tensor | None = None
    targets: Tensor | None = None
    _variances: Params = field(default_factory=dict, repr=False)

    @property
    def num_rows(self) -> int:
        """The number of training rows N."""
        return num_rows(self.x)

    @cached_property
    def learns(self) -> bool:
        """Whether the variance of the noise is open."""
        return has_open_noise(self.likelihood)

    @cached_property
    def least_noise(self) -> float:
        """The least variance of the noise."""
        spread = float(self.y.double().var(correction=0))
        return SMALLEST_NOISE * spread if spread > 0 else 1e-12

    def batches(self, size: int | None, generators: Sequence[torch.Generator]) -> Iterator[Batch]:
        """Yield batches without end, each network's from its own generator.

        Args:
            size: The number of rows of a batch; None for all.
            generators: One for each of the S networks.

        Yields:
            The batches; all rows in order if a batch holds all of them and none is resampled.
        """
        S, N = len(generators), self.num_rows
        size = N if size is None else min(size, N)
        targets = self.y.expand(S, *self.y.shape) if self.targets is None else self.targets
        device = self.y.device
        while size == N and self.resampled is None:
            yield Batch(self.x, targets, None)
        member = torch.arange(S, device=device)[:, None]
        while True:
            order = torch.stack([torch.randperm(N, generator=one) for one in generators]).to(device)
            if self.resampled is not None:
                order = self.resampled.to(device).gather(1, order)
            for start in range(0, N - size + 1, size):
                index = order[:, start : start + size]
                yield Batch(rows(self.x, index), targets[member, index], index)

    def loss(self, team: Team, f: Tensor, batch: Batch, noise: Tensor | None) -> Tensor:
        """Compute the objective of each network from a batch.

        Args:
            team: The networks.
            f: Their outputs, (S, B, C).
            batch: The rows.
            noise: The variance of open noise, (S,).

        Returns:
            −(log p(θ) + (N/B) Σ_n log p(y_n | f_n))/N, (S,), up to a constant.
        """
        likelihood = self.log_likelihood(f, batch.y, batch.index, noise)
        return self.penalty(team.params) / self.num_rows - likelihood / f.shape[1]

    def log_likelihood(
        self, f: Tensor, y: Tensor, index: Tensor | None, noise: Tensor | None
    ) -> Tensor:
        """Compute Σ_n log p(y_n | f_n) for each network, (S,); arguments as in `loss`."""
        S, B = f.shape[:2]
        likelihood = self.likelihood
        if noise is not None and self.learns:
            likelihood = cast(GaussianNoise, likelihood).with_noise(
                noise.detach().repeat_interleave(B)[:, None]
            )
        elif tied_points(likelihood) is not None:
            every = torch.arange(B, device=f.device).repeat(S) if index is None else index.flatten()
            likelihood = of_points(likelihood, every)
        log_prob = likelihood.log_prob(f.flatten(0, 1), y.flatten(0, 1))
        return log_prob.reshape(S, B).sum(1)

    def penalty(self, params: Params) -> Tensor:
        """Compute −log p(θ − anchor) of each network, (S,), for a Gaussian without its constant."""
        if self.prior is None:
            return next(iter(params.values())).new_zeros(())
        if self.anchors is not None:
            params = {name: value - self.anchors[name] for name, value in params.items()}
        if not isinstance(self.prior, NormalPrior):
            return -log_prior(self.prior, params)
        if not self._variances:
            one = {name: value[0].detach() for name, value in params.items()}
            self._variances.update(expand_prior(self.prior.variance, one))
        parts = [(p.square() / self._variances[n]).flatten(1).sum(1) for n, p in params.items()]
        return 0.5 * torch.stack(parts).sum(0)

    def residual_variance(self, f: Tensor, y: Tensor) -> Tensor:
        """Average (y − f)² over rows and outputs of each network, (S,), but not below `least_noise`."""
        flat = f.detach().flatten(0, 1)
        squares = (shape_targets(flat, y.flatten(0, 1)) - flat).square()
        return squares.reshape(len(f), -1).mean(1).clamp(min=self.least_noise)


def log_prior(prior: WeightPrior, params: Params) -> Tensor:
    """Compute log p(θ) of S networks, (S,), from parameters with an axis of length S in front."""
    count = len(next(iter(params.values())))
    if count > 1:
        return vmap(prior.log_prob)(params)
    return prior.log_prob({name: value[0] for name, value in params.items()})[None]


@torch.no_grad()
def evaluate(team: Team, x: Inputs, size: int | None) -> Tensor:
    """Compute the outputs of all networks in eval mode, (S, N, C), some rows at a time."""
    with evaluating(team.network):
        size = max(size or num_rows(x), ROWS_AT_ONCE)
        parts = [team.outputs(part, own=False) for part in chunks(x, size)]
    return torch.cat(parts, 1)


def score(objective: Objective, f: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute Σ_n log p(y_n | f_n) of all rows, (S,), and the best variance of open noise, (S,).

    Args:
        objective: The rows and their likelihood.
        f: The outputs at these rows, (S, N, C).

    Returns:
        The log likelihood of each network, at the variance that is returned with it.
    """
    y = objective.y.expand(len(f), *objective.y.shape)
    noise = objective.residual_variance(f, y) if objective.learns else None
    return objective.log_likelihood(f, y, None, noise), noise
