"""What training minimizes: the negative log joint of each of several networks, from batches of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor
from torch.func import vmap

from net2gp.bayes.model.prior import WeightPrior
from net2gp.bayes.optimum.teams import Team
from net2gp.inputs import chunks, num_rows, rows
from net2gp.likelihoods.targets import shape_targets
from net2gp.likelihoods.traits import GaussianNoise, has_open_noise, of_points, tied_points
from net2gp.linear.forward.evaluation import evaluating
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
        variances: The variances of the parameters by name, if the prior is a `NormalPrior`.
        anchors: The points around which the prior of each network is centered; None is zero.
        resampled: The rows of each network, (S, N), if they are drawn with replacement.
        targets: Targets of each network, with an axis of length S in front; None if all have `y`.
    """

    x: Inputs
    y: Tensor
    likelihood: Likelihood
    prior: WeightPrior | None = None
    variances: Params | None = None
    anchors: Params | None = None
    resampled: Tensor | None = None
    targets: Tensor | None = None

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

    def backward(self, team: Team, batch: Batch, noise: Noise | None) -> Tensor:
        """Add the gradient of −(1/B) Σ_n log p(y_n | f_n) of each network to the gradients of its parameters.

        The likelihood gives its slope in f, so that only networks are differentiated.

        Args:
            team: The networks.
            batch: B rows.
            noise: The variance of open noise, which sees the residuals of the batch.

        Returns:
            The values, (S,).
        """
        f, pull = team.forward(batch.x, batch.own)
        B = f.shape[1]
        if noise is None:
            flat, y = f.flatten(0, 1), batch.y.flatten(0, 1)
            likelihood = self._of_rows(batch.index, f)
            value = -likelihood.log_prob(flat, y).reshape(f.shape[:2]).sum(1)
            slope = -likelihood.residual(flat, y).reshape(f.shape)
        else:
            difference = f - self._shaped(f, batch.y)
            v = noise.after(difference)
            slope = difference / v[:, None, None]
            logs = B * f.shape[2] * (v.log() + math.log(2 * math.pi))
            value = 0.5 * ((difference * slope).flatten(1).sum(1) + logs)
        pull(slope / B)
        return value / B

    def log_likelihood(self, f: Tensor, noise: Tensor | None) -> Tensor:
        """Compute Σ_n log p(y_n | f_n) over all rows for each network, (S,), from outputs (S, N, C)."""
        S, N = f.shape[:2]
        likelihood = self._of_rows(None, f)
        if noise is not None:
            own = noise.repeat_interleave(N)[:, None]
            likelihood = cast(GaussianNoise, likelihood).with_noise(own)
        y = self.y.expand(S, *self.y.shape).flatten(0, 1)
        return likelihood.log_prob(f.flatten(0, 1), y).reshape(S, N).sum(1)

    def residual_variance(self, f: Tensor) -> Tensor:
        """Average (y − f)² over all rows and outputs of each network, (S,), but not below the least noise."""
        difference = f - self._shaped(f, self.y.expand(len(f), *self.y.shape))
        return difference.square().flatten(1).mean(1).clamp(min=self.least_noise)

    def _of_rows(self, index: Tensor | None, f: Tensor) -> Likelihood:
        """The likelihood of the rows of all networks in one line, for outputs (S, B, C)."""
        if tied_points(self.likelihood) is None:
            return self.likelihood
        S, B = f.shape[:2]
        every = torch.arange(B, device=f.device).repeat(S) if index is None else index.flatten()
        return of_points(self.likelihood, every)

    def _shaped(self, f: Tensor, y: Tensor) -> Tensor:
        """Targets (S, B) or (S, B, C) in the shape of outputs (S, B, C)."""
        return shape_targets(f.flatten(0, 1), y.flatten(0, 1)).reshape(f.shape)


class Shrinkage:
    """The prior in training: it adds the slope of −log p(θ − anchor)/N to the gradients.

    Args:
        team: The networks.
        objective: The prior, its anchors, and N.
    """

    def __init__(self, team: Team, objective: Objective) -> None:
        self.team, self.objective = team, objective
        anchors, variances = objective.anchors, objective.variances
        self.rates = list[Tensor]()
        if variances is not None:
            ones = {name: torch.ones_like(value[:1]) for name, value in team.params.items()}
            rates = {n: one / (variances[n] * objective.num_rows) for n, one in ones.items()}
            self.rates = [rate.detach() for rate in team.laid_out(rates)]
        self.anchors = [None] * len(self.rates) if anchors is None else team.laid_out(anchors)

    def backward(self) -> Tensor | float:
        """Add to the gradients.

        Returns:
            The values −log p(θ − anchor)/N of the networks, (S,), for a Gaussian without its constant.
        """
        prior, anchors = self.objective.prior, self.objective.anchors
        if prior is None:
            return 0.0
        if self.rates:
            return self._gaussian()
        params = self.team.params
        if anchors is not None:
            params = {name: value - anchors[name] for name, value in params.items()}
        value = -log_prior(prior, params) / self.objective.num_rows
        if value.requires_grad:  # a flat prior has no slope
            value.sum().backward()
        return value.detach()

    @torch.no_grad()
    def _gaussian(self) -> Tensor:
        values = []
        for leaf, rate, anchor in zip(self.team.leaves, self.rates, self.anchors, strict=True):
            theta = leaf.detach().reshape(len(self.team), -1)
            theta = theta if anchor is None else theta - anchor
            slope = theta * rate
            values.append((theta * slope).sum(1))
            slope = slope.reshape(leaf.shape)
            leaf.grad = slope if leaf.grad is None else leaf.grad.add_(slope)
        return 0.5 * (values[0] if len(values) == 1 else torch.stack(values).sum(0))


class Noise:
    """The variance of open Gaussian noise in training: an average of squared residuals.

    Args:
        least: The least variance.
        keep: The share of the old average that a batch leaves; 0 if batches are all rows.
    """

    def __init__(self, least: float, keep: float) -> None:
        self.least, self.keep, self.frozen = least, keep, False
        self.value: Tensor | None = None

    def after(self, difference: Tensor) -> Tensor:
        """Take in the residuals (S, B, C) of a batch, unless frozen; return the variances (S,)."""
        if self.value is None or not self.frozen:
            found = difference.square().flatten(1).mean(1).clamp(min=self.least)
            old = found if self.value is None else self.value
            self.value = torch.lerp(found, old, self.keep)
        self.frozen = True
        return self.value


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
    noise = objective.residual_variance(f) if objective.learns else None
    return objective.log_likelihood(f, noise), noise
