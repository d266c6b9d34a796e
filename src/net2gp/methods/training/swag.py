"""SWAG: a Gaussian over the weights from the path of an optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from net2gp.errors import InputError
from net2gp.inputs import gather
from net2gp.linear.linearized import Output, Patterns, PriorVar, choose, linearize
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.around_network import around_network
from net2gp.posteriors.weights.covariances import DiagonalCovariance, LowRankPlusDiagonal
from net2gp.types import Data, Likelihood, Params


@dataclass(frozen=True, eq=False)
class Path:
    """n weights: names and shapes, mean and summed squared deviations (P,) in float64, and the last ones."""

    shapes: dict[str, torch.Size]
    count: int
    mean: Tensor
    squares: Tensor
    recent: tuple[Tensor, ...]

    def then(self, weights: Tensor, rank: int) -> Path:
        """With one more, by Welford's update: sums of squares would cancel, since weights move little."""
        count = self.count + 1
        step = weights.double() - self.mean
        mean = self.mean + step / count
        squares = self.squares + step * (weights.double() - mean)
        recent = (*self.recent, weights)[-rank:] if rank else ()
        return replace(self, count=count, mean=mean, squares=squares, recent=recent)


@dataclass(frozen=True, eq=False)
class Swag:
    """The mean and the spread of a network's weights over some moments of its training.

    Late in a training with a constant, rather large learning rate, the weights wander about a region of low
    loss. Its Gaussian, from n collected weights θ_i with mean θ̄ and variances v, is N(θ̄, Σ) with

        Σ = ½ diag(v) + ½ D Dᵀ,

    where D has the last `rank` deviations θ_i − θ̄ as columns, scaled so that D Dᵀ is an unbiased covariance
    for independent weights; `rank=0` is the diagonal alone, Σ = diag(v). Deviations are taken from the mean
    of all weights, at the end; the paper takes each from the mean so far. Averages are kept in float64.

    A value: `collect` returns the next one. `only` chooses parameters by name patterns, as in `linearize`.
    Cost: (rank + 2)·P numbers.

    Reference: Maddox et al., A simple baseline for Bayesian uncertainty in deep learning, NeurIPS 2019.

    >>> network, swag = nn.Linear(1, 1), Swag(rank=2)
    >>> for value in (1.0, 2.0, 6.0):
    ...     _ = nn.init.constant_(network.weight, value)
    ...     swag = swag.collect(network)
    >>> swag.mean["weight"], swag.count
    (tensor([[3.]], dtype=torch.float64), 3)
    """

    rank: int = 20
    only: Patterns | None = None
    path: Path | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 0:
            raise InputError(
                f"rank must be a whole number, zero for a diagonal, but is {self.rank!r}. Pass rank=20."
            )

    def collect(self, network: nn.Module) -> Swag:
        """With the weights of `network` as they are now; typically after each epoch."""
        named = {name: value.detach() for name, value in network.named_parameters()}
        shapes = {name: named[name].shape for name in choose(list(named), self.only)}
        weights = torch.cat([named[name].reshape(-1) for name in shapes])
        path = self.path
        if path is None:
            zeros = torch.zeros_like(weights, dtype=torch.float64)
            path = Path(shapes, 0, zeros, zeros, ())
        elif shapes != path.shapes:
            raise InputError(
                f"this network's parameters are others than those collected so far ({len(path.shapes)} of "
                f"them, from '{next(iter(path.shapes))}' on). Collect one network with one Swag."
            )
        return replace(self, path=path.then(weights, self.rank))

    @property
    def count(self) -> int:
        """How many weights were collected."""
        return 0 if self.path is None else self.path.count

    @property
    def mean(self) -> Params:
        """θ̄ by name, in float64: for network.load_state_dict(swag.mean, strict=False)."""
        path = self._enough(1)
        pieces = path.mean.split([shape.numel() for shape in path.shapes.values()])
        return {n: v.reshape(s) for (n, s), v in zip(path.shapes.items(), pieces, strict=True)}

    def _enough(self, needed: int) -> Path:
        if self.path is None or self.path.count < needed:
            raise InputError(
                f"{needed} collected weights are needed at least, but there are {self.count}. "
                "Call swag = swag.collect(network) after each epoch."
            )
        return self.path

    def covariance(self) -> DiagonalCovariance | LowRankPlusDiagonal:
        """Σ in the order of the collected parameters, in float64. Needs two collected weights."""
        path = self._enough(2)
        variance = path.squares / (path.count - 1)
        if not path.recent:
            return DiagonalCovariance(variance)
        D = torch.stack([weights.double() - path.mean for weights in path.recent], 1)
        # a mean over all n weights leaves (n − 1)/n of the variance to each deviation from it
        freedom = len(path.recent) * (path.count - 1) / path.count
        return LowRankPlusDiagonal(variance / 2, D / (2 * freedom) ** 0.5)

    def posterior(
        self,
        network: nn.Module,
        data: Data,
        likelihood: Likelihood,
        *,
        output: Output | None = None,
        prior_var: PriorVar = 1.0,
    ) -> Posterior:
        """N(θ̄, Σ) seen through `network`, linearized at θ̄; it has no evidence.

        `network` gives the architecture and the buffers, and is in eval mode. With batch norm, load the mean
        and estimate the statistics again first: `network.load_state_dict(swag.mean, strict=False)`, then
        `torch.optim.swa_utils.update_bn(loader, network)`. `prior_var` is for the posterior's `dual()` alone.
        """
        covariance = self.covariance()
        example = next(network.parameters())
        mean = {name: value.to(example) for name, value in self.mean.items()}
        linearized = linearize(network, mean, only=list(mean), output=output)
        return around_network(linearized, covariance, prior_var, likelihood, gather(data))
