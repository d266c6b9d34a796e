"""SWAG: a Gaussian over the weights from the path of an optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from net2gp.errors import InputError
from net2gp.linear.linearized import Output, Patterns, PriorVar, choose, linearize
from net2gp.posteriors.posterior import Posterior
from net2gp.posteriors.recipes.around_network import around_network
from net2gp.posteriors.weights.diagonal import DiagonalCovariance, LowRankPlusDiagonal
from net2gp.streams import held_or_streamed
from net2gp.types import Data, Likelihood, Params


@dataclass(frozen=True, eq=False)
class Path:
    """A summary of n collected weight vectors.

    Args:
        shapes: The shapes of the parameters by name, in the order of the flat vectors.
        count: n.
        mean: Their mean: (P,), float64.
        squares: The sums of squared deviations from it: (P,), float64.
        recent: The last weight vectors.
    """

    shapes: dict[str, torch.Size]
    count: int
    mean: Tensor
    squares: Tensor
    recent: tuple[Tensor, ...]

    def then(self, weights: Tensor, rank: int) -> Path:
        """The path with one more weight vector, by Welford's update.

        Weights move little compared with their size, so a difference of sums of squares would cancel.
        """
        count = self.count + 1
        step = weights.double() - self.mean
        mean = self.mean + step / count
        squares = self.squares + step * (weights.double() - mean)
        recent = (*self.recent, weights)[-rank:] if rank else ()
        return replace(self, count=count, mean=mean, squares=squares, recent=recent)


@dataclass(frozen=True, eq=False)
class Swag:
    """The mean and the spread of a network's weights over some moments of its training.

    Late in a training with a constant, rather large learning rate, the weights wander through a region of low
    loss. From n collected weights θ_i with mean θ̄ and variances v, its Gaussian is N(θ̄, Σ) with

        Σ = ½ diag(v) + ½ D Dᵀ,

    where the columns of D are the last `rank` deviations θ_i − θ̄, scaled so that D Dᵀ is an unbiased
    covariance for independent weights. Deviations are from the mean of all weights, at the end; the paper
    takes each from the mean up to that moment. Averages are in float64. A `Swag` is a value: `collect`
    returns the next one. Cost: (rank + 2)·P numbers.

    Args:
        rank: The number of recent weights that D is made of. With 0, Σ = diag(v).
        only: The parameters to collect, by name patterns as in `linearize`. None collects all.
        path: The weights that were collected so far; None at the start.

    Raises:
        InputError: If the rank is not a whole number from 0 on.

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
        """Return the value that includes the present weights of `network`; call it after each epoch.

        Args:
            network: The network in training.

        Returns:
            A new value; this one does not change.

        Raises:
            InputError: If the parameters have other names or shapes than the collected ones.
        """
        named = {name: value.detach() for name, value in network.named_parameters()}
        shapes = {name: named[name].shape for name in choose(list(named), self.only)}
        weights = torch.cat([named[name].reshape(-1) for name in shapes])
        path = self.path
        if path is None:
            zeros = torch.zeros_like(weights, dtype=torch.float64)
            path = Path(shapes, 0, zeros, zeros, ())
        elif shapes != path.shapes:
            raise InputError(
                f"this network's parameters differ from the {len(path.shapes)} that were collected so far, "
                f"from '{next(iter(path.shapes))}' on. Collect one network with one Swag."
            )
        return replace(self, path=path.then(weights, self.rank))

    @property
    def count(self) -> int:
        """The number of collected weights."""
        return 0 if self.path is None else self.path.count

    @property
    def mean(self) -> Params:
        """The mean θ̄ by name, in float64, for `network.load_state_dict(swag.mean, strict=False)`."""
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
        """Return Σ in the order of the collected parameters, in float64; this needs two collected weights.

        Returns:
            The covariance of the parameters.
        """
        path = self._enough(2)
        variance = path.squares / (path.count - 1)
        if not path.recent:
            return DiagonalCovariance(variance)
        D = torch.stack([weights.double() - path.mean for weights in path.recent], 1)
        # A deviation from the mean of all n weights has (n − 1)/n of the variance of a weight.
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
        """Return the posterior N(θ̄, Σ) of the network, linearized at θ̄.

        With batch norm, load the mean and estimate the statistics again first:
        `network.load_state_dict(swag.mean, strict=False)`, then
        `torch.optim.swa_utils.update_bn(loader, network)`.

        Args:
            network: Gives the architecture and the buffers.
            data: The training data, (x, y) or a DataLoader.
            likelihood: How targets depend on the outputs.
            output: Picks the outputs out of what the network returns, as in `linearize`.
            prior_var: The prior variance for `dual()` and `novelty`; the covariance does not depend on it.

        Returns:
            A posterior without an evidence.

        Raises:
            InputError: If fewer than two weights were collected.
        """
        covariance = self.covariance()
        example = next(network.parameters())
        mean = {name: value.to(example) for name, value in self.mean.items()}
        linearized = linearize(network, mean, only=list(mean), output=output)
        kept = held_or_streamed(data, linearized.example)
        return around_network(linearized, covariance, prior_var, likelihood, kept)
