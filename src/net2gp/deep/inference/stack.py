"""The variables of a fit, and the bound as a function of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from net2gp.deep.inference.expectations import expectations
from net2gp.deep.inference.hyperparameters import with_numbers
from net2gp.deep.inference.inducing import (
    InducingLayer,
    Projection,
    divergence,
    factor,
    project,
)
from net2gp.deep.inference.sparse_layer import AffineMean
from net2gp.likelihoods.traits import has_gaussian_noise, of_points
from net2gp.types import Kernel, Likelihood, Params


@dataclass(frozen=True, eq=False)
class Plan:
    """What stays fixed about a layer during a fit.

    Args:
        kernel: The kernel, in float64, whose numbers are replaced.
        mean: The mean function.
        points: The inducing points at the start, (M, …).
        scale: The unit in which they move, per column.
        width: The number of outputs C.
    """

    kernel: Kernel
    mean: AffineMean
    points: Tensor = field(repr=False)
    scale: Tensor = field(repr=False)
    width: int


class Batch(NamedTuple):
    """Rows of the data.

    Args:
        x: Inputs, (B, …).
        y: Targets.
        rows: The numbers of the rows.
        weight: N / B, by which sums over these rows are multiplied.
    """

    x: Tensor
    y: Tensor
    rows: Tensor
    weight: float


class Working(NamedTuple):
    """A layer at the present values of the variables."""

    kernel: Kernel
    points: Tensor
    L: Tensor
    mean: AffineMean

    def project(self, inputs: Tensor) -> Projection:
        """What the layer needs to know of its inputs."""
        return project(self.kernel, self.points, self.L, self.mean, inputs)


class Estimate(NamedTuple):
    """An estimate of the bound from one batch.

    Args:
        bound: The estimate, a number with gradients.
        log_probs: E log p(y | f) for each draw and row, (S, B).
        divergence: The sum of all divergences from the prior.
    """

    bound: Tensor
    log_probs: Tensor
    divergence: Tensor


class Stack:
    """The layers during a fit.

    The inner layers have free variables, `leaves`. The last layer has natural parameters: the precision P and
    P m of the whitened values of each output.

    Args:
        plans: What stays fixed.
        leaves: The variables by name: "0.shift", "0.center", "0.root", "0.log_diagonal" and
            "0.kernel.<place>" of layer 0, and "log_noise".
        likelihood: How targets follow the last layer.
    """

    def __init__(self, plans: tuple[Plan, ...], leaves: Params, likelihood: Likelihood) -> None:
        self.plans, self.leaves, self.given = plans, leaves, likelihood
        last = plans[-1]
        count, like = len(last.points), last.points
        self.precision = torch.eye(count).to(like).expand(last.width, -1, -1).clone()
        self.shift = like.new_zeros(last.width, count)

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, with the present value of open noise."""
        if "log_noise" not in self.leaves:
            return self.given
        assert has_gaussian_noise(self.given)
        return self.given.with_noise(self.leaves["log_noise"].exp())

    def working(self, index: int) -> Working:
        """A layer at the present values of its variables."""
        plan, start = self.plans[index], f"{index}.kernel."
        numbers = {
            name.removeprefix(start): value.exp()
            for name, value in self.leaves.items()
            if name.startswith(start)
        }
        kernel = with_numbers(plan.kernel, numbers)
        points = plan.points
        if f"{index}.shift" in self.leaves:
            points = points + plan.scale * self.leaves[f"{index}.shift"]
        return Working(kernel, points, factor(kernel, points), plan.mean)

    def law(self, index: int) -> tuple[Tensor, Tensor]:
        """Mean (M, C) and triangular root (C, M, M) of the whitened values of a layer."""
        if index < len(self.plans) - 1:
            below = self.leaves[f"{index}.root"].tril(-1)
            diagonal = self.leaves[f"{index}.log_diagonal"].exp()
            return self.leaves[f"{index}.center"], below + torch.diag_embed(diagonal)
        R = torch.linalg.cholesky(self.precision)
        center = torch.cholesky_solve(self.shift[..., None], R)[..., 0].mT
        identity = torch.eye(R.shape[-1]).to(R).expand_as(R)
        return center, torch.linalg.solve_triangular(R, identity, upper=False).mT

    def propagate(
        self, x: Tensor, num_samples: int, generator: torch.Generator
    ) -> tuple[Projection, Tensor, int]:
        """Draw through the inner layers, each row by itself.

        Args:
            x: B rows.
            num_samples: The number of draws S. Half of them mirror the other half.
            generator: The source of random numbers.

        Returns:
            What the last layer needs to know of the S·B draws, the divergence of the inner layers, and S,
            which is 1 if there is nothing to draw.
        """
        projection = self.working(0).project(x)
        total, count = x.new_zeros(()), 1
        for index in range(len(self.plans) - 1):
            center, root = self.law(index)
            total = total + divergence(center, root)
            mean, variance = projection.mean(center), projection.variance(root)
            if index == 0:
                count = num_samples
                mean, variance = (v.expand(count, *v.shape) for v in (mean, variance))
            else:
                mean, variance = (v.reshape(count, len(x), -1) for v in (mean, variance))
            z = mirrored(mean.shape, generator).to(mean)
            draws = mean + variance.sqrt() * z
            projection = self.working(index + 1).project(draws.flatten(0, 1))
        return projection, total, count

    def estimate(
        self, batch: Batch, num_samples: int, generator: torch.Generator, rate: float = 0.0
    ) -> Estimate:
        """Estimate the bound, after a step of the last layer along its natural gradient.

        Args:
            batch: Rows of the data.
            num_samples: The number of draws through the layers.
            generator: The source of random numbers.
            rate: The length of the step, from 0 to 1.

        Returns:
            The estimate, whose gradients are in `leaves`.
        """
        projection, inner, count = self.propagate(batch.x, num_samples, generator)
        y = batch.y.repeat(count, *[1] * (batch.y.dim() - 1))
        likelihood = of_points(self.likelihood, batch.rows.repeat(count))
        if rate:
            self.step(projection, y, likelihood, batch.weight / count, rate)
        center, root = self.law(len(self.plans) - 1)
        mean, variance = projection.mean(center), projection.variance(root)
        log_probs = expectations(likelihood, mean, variance, y).log_prob
        total = inner + divergence(center, root)
        bound = batch.weight / count * log_probs.sum() - total
        return Estimate(bound, log_probs.reshape(count, -1), total)

    @torch.no_grad()
    def step(
        self, projection: Projection, y: Tensor, likelihood: Likelihood, weight: float, rate: float
    ) -> None:
        """Move the last layer along its natural gradient.

        With the weights A of the draws, the expected residual g and the diagonal λ of the expected curvature,
        the natural parameters go a part `rate` of the way to I + w A diag(λ) Aᵀ and w A (g + λ Aᵀm). Under
        Gaussian noise this is the optimum, whatever m is.
        """
        center, root = self.law(len(self.plans) - 1)
        A = projection.weights
        mean, variance = projection.mean(center), projection.variance(root)
        found = expectations(likelihood, mean, variance, y)
        curvature = found.curvature.diagonal(dim1=-2, dim2=-1)
        pull = found.residual + curvature * (A.mT @ center)
        target = weight * (A * curvature.mT[:, None]) @ A.mT
        target = target + torch.eye(len(A)).to(A)
        self.precision = (1 - rate) * self.precision + rate * target
        self.shift = (1 - rate) * self.shift + rate * weight * (A @ pull).mT

    @torch.no_grad()
    def fitted(self) -> tuple[InducingLayer, ...]:
        """The layers at the present values, as values."""
        found = []
        for index in range(len(self.plans)):
            now, (center, root) = self.working(index), self.law(index)
            identity = torch.eye(len(now.L)).to(now.L)
            whitener = torch.linalg.solve_triangular(now.L, identity, upper=False)
            parts = (now.points, whitener, center, root)
            found.append(
                InducingLayer(now.kernel, now.mean, *(part.detach().clone() for part in parts))
            )
        return tuple(found)


def mirrored(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Draw standard normal numbers, of which the second half along the first axis mirrors the first."""
    half = (shape[0] + 1) // 2
    z = torch.randn(half, *shape[1:], generator=generator, dtype=torch.float64)
    return torch.cat([z, -z])[: shape[0]]
