"""`LowRank(rank)`: the directions that the data say most about; in all others the prior stays."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from net2gp.errors import check_count
from net2gp.linalg import cholesky
from net2gp.linear.jacobians.capture import plan
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.linear.linearized import Linearized
from net2gp.posteriors.weights.covariance import Covariance, normal
from net2gp.posteriors.weights.kron import factors
from net2gp.posteriors.weights.structure import Curvature, Structure, Traits, common_variance
from net2gp.posteriors.weights.tasks.task import Task
from net2gp.progress import progress
from net2gp.tags import savable
from net2gp.types import Inputs, Params

POWER_ITERATIONS = 12
"""The most rounds of subspace iteration for the largest eigenvalues."""


@savable("structures.LowRank")
@dataclass(frozen=True)
class LowRank(Structure):
    """The `rank` directions that the data say most about; in all others the prior stays.

    The evidence does not count the other directions either, so that it is too large for a wide prior. By
    default a prior that is left open is therefore chosen with Kronecker factors; `tuning=Evidence()` takes
    this evidence at its word.

    Args:
        rank: How many directions are kept.
        seed: The seed of the random start of the search for them.

    Raises:
        InputError: `rank` is not a whole number of at least 1.

    Reference: Halko, Martinsson, Tropp, Finding structure with randomness, SIAM Review 2011.
    """

    rank: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self.rank, "rank", example=100)

    def curvature(self, task: Task) -> LowRankCurvature:
        """The `rank` largest eigenvalues of the GGN, by subspace iteration on products with it.

        Cost: some ten products with rank + 10 vectors, each a forward-mode and a backward pass over the data;
        memory P · (rank + 10).
        """
        like, P = task.linearized.example, task.linearized.num_params
        plan(task.linearized, task.few())
        width = min(self.rank + 10, P, task.sums.num_rows)
        generator = torch.Generator().manual_seed(self.seed)
        Q = torch.randn(P, width, generator=generator, dtype=torch.float64).to(like.device)
        values = Q.new_zeros(width)
        with progress("largest eigenvalues", POWER_ITERATIONS) as advance:
            for _ in range(POWER_ITERATIONS):
                Q = torch.linalg.qr(Q).Q
                product = task.fisher_times(Q.to(like)).double()
                found, rotation = torch.linalg.eigh(Q.mT @ product)
                change = (found - values).abs()[-self.rank :].max() / found.max().clamp(min=1e-300)
                values, Q, basis = found, product, Q @ rotation
                advance(note=f"change {float(change):.1e}")
                if change < 1e-4:
                    break
        return LowRankCurvature(task, basis[:, -self.rank :], values[-self.rank :].clamp(min=0))

    def traits(self) -> Traits:
        """Of some directions; the others keep the prior."""
        return Traits(all_weights=False, keeps_prior=True, passes=POWER_ITERATIONS)


@dataclass(frozen=True, eq=False)
class LowRankCurvature(Curvature):
    """H ≈ U diag(values) Uᵀ with the largest eigenvalues: U (P, k)."""

    U: Tensor
    values: Tensor

    def log_det(self, prior: Params, scale: float | Tensor) -> Tensor:
        """Of the directions that are kept."""
        one = common_variance(prior)
        if one is not None:
            return torch.log1p(scale * one * self.values).sum()
        root = self.U * (scale * self.values).sqrt()
        inner = root.mT @ (self.variances(prior)[:, None] * root)
        return cholesky(torch.eye(len(inner)).to(inner) + inner, what="I + UᵀVU").log_det()

    def covariance(self, prior: Params, scale: float) -> Subtracted:
        """What the directions that are kept leave of the prior."""
        v = self.variances(prior)
        B = v.sqrt()[:, None] * self.U * (scale * self.values).sqrt()
        Q, s, _ = torch.linalg.svd(B, full_matrices=False)
        return Subtracted(v, v.sqrt()[:, None] * Q, s.square() / (1 + s.square()))

    def searched(self, *, per_layer: bool, literal: bool) -> Curvature:
        """Kronecker factors: the directions that are left out would make a wide prior cost nothing."""
        whole = min(self.task.linearized.num_params, self.task.sums.num_rows)
        if literal or self.task.prior_var is not None or len(self.values) >= whole:
            return self
        return factors(self.task)


@savable("covariances.Subtracted")
@dataclass(frozen=True, eq=False)
class Subtracted(Covariance):
    """Σ = V − U diag(shrink) Uᵀ with a diagonal V (P,) and shrink > 0: what data leave of the prior.

    The form of a low-rank curvature: directions without data keep the prior. Kept as a difference, so
    that (P, P) is never formed. U (P, k) is given as V^{1/2} times orthonormal columns.
    """

    prior: Tensor
    U: Tensor
    shrink: Tensor

    def blocks(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J_n Σ J_nᵀ for each point: (N, C, C)."""
        prior, root = self._prior(linearized)
        own, less = prior.blocks_and_products(x, root)
        return (own - less @ less.mT).to(linearized.example.dtype)

    def variances(self, linearized: Linearized, x: Inputs) -> Tensor:
        """The diagonals of the blocks: (N, C)."""
        prior, root = self._prior(linearized)
        own, less = prior.blocks_and_products(x, root)
        difference = own.diagonal(dim1=1, dim2=2) - less.square().sum(-1)
        return difference.clamp(min=0).to(linearized.example.dtype)

    def joint(self, linearized: Linearized, x: Inputs) -> Tensor:
        """J Σ Jᵀ over all points: (N·C, N·C)."""
        prior, root = self._prior(linearized)
        less = prior.apply(x, root)
        return prior(x) - less @ less.mT

    def _prior(self, linearized: Linearized) -> tuple[TangentKernel, Tensor]:
        """The prior's kernel, and V^{-1/2} U shrink^{1/2}: products in float64, from the same gradients.

        Where data are many or exact the two nearly cancel, and float32 would leave nothing but its rounding.
        """
        prior = linearized.kernel(linearized.unflatten(self.prior)).precise()
        return prior, self.U / self.prior.sqrt()[:, None] * self.shrink.sqrt()

    def draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """V^{1/2} (I − Q diag(1 − √(1 − shrink)) Qᵀ) z with Q = V^{-1/2} U."""
        root = self.prior.sqrt()[:, None]
        z = normal(self.prior, num_samples, generator)
        Q = self.U / root
        less = 1 - (1 - self.shrink).clamp(min=0).sqrt()
        return root * (z - Q @ (less[:, None] * (Q.mT @ z)))
