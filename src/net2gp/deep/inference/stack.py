"""The variables of a fit, and the bound as a function of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from net2gp.deep.inference.expectations import expectations
from net2gp.deep.inference.hyperparameters import with_numbers
from net2gp.deep.inference.inducing import (
    InducingLayer,
    Law,
    Projection,
    divergence,
    factor,
    factored,
    inverse,
    project,
)
from net2gp.deep.inference.sparse_layer import AffineMean
from net2gp.deep.inference.steps.own_kernels import OwnLayer, own_grams
from net2gp.kernels import RBF
from net2gp.likelihoods.traits import has_gaussian_noise, of_points
from net2gp.types import Kernel, Likelihood, Params

OWN_JITTER = 1e-8
"""What is added to the diagonal of K(Z, Z) if outputs have kernels of their own, relative to its mean: their
variances are computed without the roots of that matrix, which costs digits."""

RANGE = 8.0
"""How far the logarithms of the numbers of kernels may move from where they start: a factor of 3000."""

Numbers = Callable[[torch.Size, torch.Generator], Tensor]
"""Draws standard normal numbers of a shape."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What stays fixed about a layer during a fit.

    Args:
        kernel: The kernel, in float64, whose numbers are replaced.
        mean: The mean function.
        points: The inducing points at the start, (M, …).
        scale: The standard deviation of each entry of the inputs, the unit in which points move.
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
    scale: Tensor | None

    def project(self, inputs: Tensor) -> Projection:
        """What the layer needs to know of its inputs."""
        return project(self.kernel, self.points, self.L, self.mean, inputs, self.scale)

    def moments(self, inputs: Tensor, law: Law) -> tuple[Tensor, Tensor]:
        """Means and variances of the outputs at R inputs: (R, C) each."""
        found = self.project(inputs)
        return found.mean(law.center), found.variance_by(law.covariance())


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
        leaves: The variables by name: "0.shift", "0.center", "0.root", "0.log_diagonal", "0.log_scale",
            "0.log_factors", "0.weight" and "0.kernel.<place>" of layer 0, and "log_noise".
        likelihood: How targets follow the last layer.
        moves_after: Whether the last layer moves after the bound of a step was estimated, and not before. The
            bound is then one of rows that the last layer has not seen, without bias.

    `numbers` draws standard normal numbers of a shape.
    """

    def __init__(
        self,
        plans: tuple[Plan, ...],
        leaves: Params,
        likelihood: Likelihood,
        *,
        moves_after: bool = False,
    ) -> None:
        self.plans, self.leaves, self.given = plans, leaves, likelihood
        self.anchors = {n: v.detach().clone() for n, v in leaves.items() if has_limits(n)}
        last = plans[-1]
        count, like = len(last.points), last.points
        self.precision = torch.eye(count).to(like).expand(last.width, -1, -1).clone()
        self.shift = like.new_zeros(last.width, count)
        self.numbers: Numbers = mirrored
        self.moves_after = moves_after

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, with the present value of open noise."""
        if "log_noise" not in self.leaves:
            return self.given
        assert has_gaussian_noise(self.given)
        return self.given.with_noise(self.leaves["log_noise"].exp())

    def working(self, index: int) -> Working | OwnLayer:
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
            points = points + self.leaves[f"{index}.shift"] * plan.scale
        scale, factors = (
            self.leaves[f"{index}.{name}"].exp() if f"{index}.{name}" in self.leaves else None
            for name in ("log_scale", "log_factors")
        )
        mean = plan.mean
        if f"{index}.weight" in self.leaves:
            assert mean.weight is not None
            mean = AffineMean(mean.weight + self.leaves[f"{index}.weight"], mean.offset)
        if factors is None:
            return Working(kernel, points, factor(kernel, points), mean, scale)
        points = points.expand(plan.width, *points.shape[-2:])
        assert isinstance(kernel, RBF)
        with torch.no_grad():
            L = factored(own_grams(kernel, points, factors), OWN_JITTER)
        return OwnLayer(kernel, points, L, mean, scale, factors)

    def law(self, index: int) -> tuple[Tensor, Tensor]:
        """Mean (M, C) and triangular root (C, M, M) of the whitened values of a layer."""
        if index < len(self.plans) - 1:
            below = self.leaves[f"{index}.root"].tril(-1)
            diagonal = self.leaves[f"{index}.log_diagonal"].exp()
            return self.leaves[f"{index}.center"], below + torch.diag_embed(diagonal)
        R, info = torch.linalg.cholesky_ex(self.precision)
        # a failure must show in the bound: looking at it here would wait for a GPU
        R = torch.where((info == 0)[:, None, None], R, math.nan)
        inverse = torch.linalg.solve_triangular(R, _identity(R), upper=False)
        return (inverse.mT @ (inverse @ self.shift[..., None]))[..., 0].mT, inverse.mT

    def whole_law(self, index: int) -> Law:
        """The law of the whitened values of a layer, with its divergence from the prior."""
        center, root = self.law(index)
        return Law(center, root, divergence(center, root))

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
        total, count, current = x.new_zeros(()), 1, x
        for index in range(len(self.plans) - 1):
            law = self.whole_law(index)
            total = total + law.divergence
            mean, variance = self.working(index).moments(current, law)
            if index == 0:
                count = num_samples
                mean, variance = (v.expand(count, *v.shape) for v in (mean, variance))
            else:
                mean, variance = (v.reshape(count, len(x), -1) for v in (mean, variance))
            z = self.numbers(mean.shape, generator).to(mean)
            current = (mean + variance.sqrt() * z).flatten(0, 1).double()
        last = self.working(len(self.plans) - 1)
        assert isinstance(last, Working)  # its outputs share a kernel
        return last.project(current), total, count

    def estimate(
        self, batch: Batch, num_samples: int, generator: torch.Generator, rate: float | Tensor = 0.0
    ) -> Estimate:
        """Estimate the bound, and take a step of the last layer along its natural gradient, before or after.

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
        moves = isinstance(rate, Tensor) or bool(rate)
        if moves and not self.moves_after:
            self.step(projection, y, likelihood, batch.weight / count, rate)
        law = self.whole_law(len(self.plans) - 1)
        if moves and self.moves_after:
            self.step(projection, y, likelihood, batch.weight / count, rate)
        mean, variance = projection.mean(law.center), projection.variance_by(law.covariance())
        log_probs = expectations(likelihood, mean.double(), variance.double(), y).log_prob
        total = inner + law.divergence
        bound = batch.weight / count * log_probs.sum() - total
        return Estimate(bound, log_probs.reshape(count, -1), total)

    @torch.no_grad()
    def step(
        self,
        projection: Projection,
        y: Tensor,
        likelihood: Likelihood,
        weight: float,
        rate: float | Tensor,
    ) -> None:
        """Move the last layer along its natural gradient.

        With the weights A of the draws, the expected residual g and the diagonal λ of the expected curvature,
        the natural parameters go a part `rate` of the way to I + w A diag(λ) Aᵀ and w A (g + λ Aᵀm). Under
        Gaussian noise this is the optimum, whatever m is.
        """
        center, root = self.law(len(self.plans) - 1)
        A = projection.weights.detach().double()
        around = A.mT @ center
        mean = around + projection.offset
        if has_gaussian_noise(likelihood):  # residual and curvature do not depend on the variance
            curvature = _reciprocal(likelihood.noise_variance(mean))
            residual = likelihood.residual(mean, y)
        else:
            variance = projection.residual + (root.mT @ A).square().sum(1).mT
            found = expectations(likelihood, mean, variance, y)
            curvature, residual = found.curvature.diagonal(dim1=-2, dim2=-1), found.residual
        self.precision.lerp_(weight * _grams(A, curvature) + _identity(A), rate)
        self.shift.lerp_(weight * (A @ (residual + curvature * around)).mT, rate)

    @torch.no_grad()
    def confine(self) -> None:
        """Keep the numbers of kernels within their range.

        Where a layer is nearly linear, its variance and length scales can grow together for ever, at almost
        the same bound, until the inducing points cannot be told apart in floating-point numbers.
        """
        for name, start in self.anchors.items():
            self.leaves[name].clamp_(start - RANGE, start + RANGE)

    @torch.no_grad()
    def fitted(self) -> tuple[InducingLayer, ...]:
        """The layers at the present values, as values."""
        found = []
        for index in range(len(self.plans)):
            now, (center, root) = self.working(index), self.law(index)
            tensors = (now.points, inverse(now.L), center, root)
            points, whitener, center, root = (value.detach().clone() for value in tensors)
            parts = (points, whitener, center, root, now.scale)
            factors = now.factors if isinstance(now, OwnLayer) else None
            found.append(InducingLayer(now.kernel, now.mean, *parts, factors))
        return tuple(found)


def has_limits(name: str) -> bool:
    """Whether a variable is a number of a kernel, or a factor of an output or of its inputs."""
    return ".kernel." in name or name.endswith((".log_scale", ".log_factors"))


def _reciprocal(noise: Tensor) -> Tensor:
    """1 / noise, which stays one row if all rows are the same."""
    return noise[:1].reciprocal() if noise.stride(0) == 0 else noise.reciprocal()


def _grams(A: Tensor, curvature: Tensor) -> Tensor:
    """Compute A diag(λ_c) Aᵀ for each output, from the curvatures of all rows or from those of one row.

    Args:
        A: (M, R).
        curvature: (R, C), or (1, C) if it is the same for all rows.

    Returns:
        The matrices, (C, M, M).
    """
    if len(curvature) == 1:
        return curvature.mT[..., None] * (A @ A.mT)
    return (A * curvature.mT[:, None]) @ A.mT


def _identity(like: Tensor) -> Tensor:
    """The identity, like the last two axes of a square matrix or the rows of another one."""
    size = like.shape[-2]
    eye = torch.eye(size, dtype=like.dtype, device=like.device)
    return eye.expand(*like.shape[:-2], size, size)


def mirrored(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Draw standard normal numbers, of which the second half along the first axis mirrors the first."""
    half = (shape[0] + 1) // 2
    z = torch.randn(half, *shape[1:], generator=generator, dtype=torch.float64)
    return torch.cat([z, -z])[: shape[0]]
