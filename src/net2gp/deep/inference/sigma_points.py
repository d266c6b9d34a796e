"""Deep sigma point processes: inner layers at learned multiples of their standard deviations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from net2gp.deep.inference.expectations import standard_points
from net2gp.deep.inference.inducing import InducingLayer, inverse
from net2gp.deep.inference.stack import Batch, Estimate, Stack
from net2gp.likelihoods.links import MonteCarlo
from net2gp.likelihoods.traits import has_gaussian_noise, of_points
from net2gp.tags import savable
from net2gp.types import Likelihood

NODES = 32
"""Quasi-random points per sigma point, by which outputs are integrated out unless noise is Gaussian."""

LEAST_VARIANCE = 1e-14
"""The least variance of an output while the objective is climbed."""


@savable("deep.SigmaPoints")
@dataclass(frozen=True, eq=False)
class SigmaPoints:
    """S functions h(x) = m(x) + ξ s(x) of the inner layers, with their means m and standard deviations s.

    Args:
        layers: The inner layers.
        sites: The multiples ξ of each layer, (S, C).
        weights: The weight of each function, which add up to 1: (S,); None for equal weights.
    """

    layers: tuple[InducingLayer, ...]
    sites: tuple[Tensor, ...] = field(repr=False)
    weights: Tensor | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.sites[0]) if self.sites else 1

    def __call__(self, x: Tensor) -> Tensor:
        """Return the values of the functions: (S, N, C)."""
        current = x[None]
        for layer, sites in zip(self.layers, self.sites, strict=True):
            found = layer.project(current.flatten(0, 1))
            parts = (found.mean(layer.center), found.variance(layer.root).sqrt())
            mean, std = (part.reshape(-1, len(x), layer.width) for part in parts)
            current = mean + std * sites[:, None]
        return current


class SigmaStack(Stack):
    """The layers of a deep sigma point process during a fit.

    All layers have free variables, also the last one. "<index>.sites" are the multiples ξ of an inner layer,
    and "log_weights" the logarithms of the weights w, up to a constant. The objective is

        Σ_n log Σ_s w_s p(y_n | h_s(x_n)) − β Σ_l KL(q(v_l) ‖ N(0, I)),

    which is no bound on the evidence: it is the log density of the prediction itself. Under Gaussian noise,
    each of several outputs has a mixture of its own, as in predictions.
    """

    divergence_weight = 1.0

    @classmethod
    def like(cls, stack: Stack, num_points: int, weight: float, *, keeps_last: bool) -> SigmaStack:
        """Start from the layers of a bound.

        Args:
            stack: The layers.
            num_points: The number of sigma points S.
            weight: The factor β of the divergences.
            keeps_last: Whether the last layer is kept as it is, and not put at its prior. Before the first
                step its optimum, for points that do not lie apart yet, would hold them together.

        Returns:
            The layers, whose variables require gradients.
        """
        last, plan = len(stack.plans) - 1, stack.plans[-1]
        like = plan.points
        center = like.new_zeros(len(like), plan.width)
        root = torch.eye(len(like)).to(like).expand(plan.width, -1, -1)
        if keeps_last:
            center = stack.law(last)[0]
            root = _lower_root(stack.precision)
        leaves = {
            **stack.leaves,
            f"{last}.center": center,
            f"{last}.root": root.tril(-1),
            f"{last}.log_diagonal": root.diagonal(dim1=-2, dim2=-1).log(),
        }
        for index, inner in enumerate(stack.plans[:-1]):
            sites = MonteCarlo(num_points, seed=index).base_sample(inner.width, like=like)
            leaves[f"{index}.sites"] = sites
        if last:
            leaves["log_weights"] = like.new_zeros(num_points)
        free = {name: value.detach().clone().requires_grad_() for name, value in leaves.items()}
        made = cls(stack.plans, free, stack.given)
        made.divergence_weight = weight
        return made

    def law(self, index: int) -> tuple[Tensor, Tensor]:
        """Mean (M, C) and lower triangular root (C, M, M) of the whitened values of a layer."""
        below = self.leaves[f"{index}.root"].tril(-1)
        diagonal = self.leaves[f"{index}.log_diagonal"].exp()
        return self.leaves[f"{index}.center"], below + torch.diag_embed(diagonal)

    def estimate(
        self, batch: Batch, num_samples: int, generator: torch.Generator, rate: float | Tensor = 0.0
    ) -> Estimate:
        """Compute the objective on a batch. There is nothing to draw, and no step of the last layer."""
        current, total = batch.x[None], batch.x.new_zeros(())
        for index in range(len(self.plans)):
            law = self.whole_law(index)
            total = total + law.divergence
            parts = self.working(index).moments(current.flatten(0, 1), law)
            mean, variance = (p.double().reshape(-1, len(batch.x), p.shape[-1]) for p in parts)
            variance = variance.clamp(
                min=LEAST_VARIANCE
            )  # products in float32 may make it negative
            if index < len(self.plans) - 1:
                current = mean + variance.sqrt() * self.leaves[f"{index}.sites"][:, None]
        likelihood = of_points(self.likelihood, batch.rows)
        log_probs = log_densities(likelihood, mean, variance, batch.y, self.log_weights)
        objective = batch.weight * log_probs.sum() - self.divergence_weight * total
        return Estimate(objective, log_probs[None], total)

    @property
    def log_weights(self) -> Tensor | None:
        """The logarithms of the weights of the sigma points, or None without inner layers."""
        logs = self.leaves.get("log_weights")
        return None if logs is None else logs.log_softmax(0)

    def sigma_points(self, layers: tuple[InducingLayer, ...]) -> SigmaPoints:
        """The functions of the inner layers after a fit."""
        sites = [self.leaves[f"{i}.sites"].detach().clone() for i in range(len(self.plans) - 1)]
        logs = self.log_weights
        weights = None if logs is None else logs.detach().exp()
        return SigmaPoints(layers[:-1], tuple(sites), weights)


@torch.no_grad()
def _lower_root(precision: Tensor) -> Tensor:
    """The lower triangular S with S Sᵀ = P⁻¹, without forming P⁻¹: by the factor of P in reverse order."""
    factor = torch.linalg.cholesky(precision.flip(-2, -1))
    return inverse(factor).flip(-2, -1).mT.contiguous()


def log_densities(
    likelihood: Likelihood,
    mean: Tensor,
    variance: Tensor,
    y: Tensor,
    log_weights: Tensor | None = None,
) -> Tensor:
    """Compute log Σ_s w_s p(y_n | h_s) for outputs of given means and variances under each s.

    Args:
        likelihood: The likelihood of the B rows.
        mean: Means of the outputs, (S, B, C).
        variance: Their variances, (S, B, C).
        y: Targets.
        log_weights: The logarithms of the weights, (S,); None for equal weights.

    Returns:
        The log densities, (B,).

    >>> from net2gp.likelihoods import Gaussian
    >>> half = torch.full((2, 1, 1), 0.5)
    >>> log_densities(Gaussian(0.5), torch.zeros(2, 1, 1), half, torch.zeros(1, 1))
    tensor([-0.9189])
    """
    if log_weights is None:
        log_weights = mean.new_full((len(mean),), -math.log(len(mean)))
    if has_gaussian_noise(likelihood):
        total = variance + likelihood.noise_variance(mean[0])
        targets = y.reshape(mean.shape[1:]).to(mean)
        logs = -0.5 * ((targets - mean).square() / total + total.log() + math.log(2 * math.pi))
        return (logs + log_weights[:, None, None]).logsumexp(0).sum(-1)
    nodes = standard_points(NODES, mean.shape[2], mean.dtype, mean.device)
    f = (mean[:, None] + variance[:, None].sqrt() * nodes[:, None]).flatten(0, 1)
    logs = torch.stack([likelihood.log_prob(one, y) for one in f])
    each = log_weights.repeat_interleave(NODES) - math.log(NODES)
    return (logs + each[:, None]).logsumexp(0)
