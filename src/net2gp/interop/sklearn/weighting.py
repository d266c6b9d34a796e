"""Weights of points: a point of weight w counts as w points, so that w need not be a whole number.

The likelihood of a point is raised to its weight, p(y | f)ʷ. Under Gaussian noise of variance σ² that is
noise of variance σ²/w and a factor that does not depend on f.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from net2gp.errors import InputError
from net2gp.likelihoods import Gaussian
from net2gp.likelihoods.traits import (
    curvature_root,
    has_gaussian_noise,
    has_one_class,
    num_outputs,
    tied_points,
)
from net2gp.tags import savable
from net2gp.types import Likelihood

MOST_COPIES = 20_000
"""Rows up to which points of whole-number weights are repeated to choose hyper-parameters."""


@savable("interop.Weighted")
@dataclass(frozen=True, eq=False)
class Weighted:
    """A likelihood with one weight per point, p(y_n | f_n)^{w_n}.

    Log density, residual and curvature are w_n times those of `likelihood`; predictions are those of
    `likelihood`, since a new point has no weight. Use `weighted`, which knows Gaussian noise.

    Args:
        likelihood: The likelihood of a point of weight 1.
        weights: The positive weights, (N,).

    >>> from net2gp.likelihoods import Categorical
    >>> twice = Weighted(Categorical(), torch.tensor([2.0]))
    >>> twice.residual(torch.zeros(1, 2), torch.tensor([1]))
    tensor([[-1.,  1.]])
    """

    likelihood: Any
    weights: Tensor
    canonical: ClassVar[bool] = True
    classifier: ClassVar[bool] = True

    @property
    def one_class(self) -> bool:
        """Whether one class is the label of a point."""
        return has_one_class(self.likelihood)

    @property
    def link(self) -> Any:
        """How f is integrated out."""
        return self.likelihood.link

    @property
    def tied_points(self) -> int:
        """The number of points."""
        return len(self.weights)

    def of_points(self, part: Tensor | slice) -> Weighted:
        """Select the weights of some of the points."""
        return Weighted(self.likelihood, self.weights[part])

    def num_outputs(self, y: Tensor) -> int:
        """Count the outputs that targets need."""
        return num_outputs(self.likelihood, y)

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise what is wrong with the targets."""
        self.likelihood.check(f, y)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute w_n log p(y_n | f_n): (N,)."""
        return self._by_point(f) * self.likelihood.log_prob(f, y)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute w_n ∇_f log p(y_n | f_n): (N, C)."""
        return self._by_point(f)[:, None] * self.likelihood.residual(f, y)

    def curvature(self, f: Tensor) -> Tensor:
        """Compute w_n Λ_n: (N, C, C)."""
        return self._by_point(f)[:, None, None] * self.likelihood.curvature(f)

    def curvature_root(self, f: Tensor) -> Tensor:
        """Compute √w_n R_n with R_n R_nᵀ = Λ_n: (N, C, K)."""
        return self._by_point(f).sqrt()[:, None, None] * curvature_root(self.likelihood, f)

    def predict(self, f: Any) -> Any:
        """Compute the law of the target of points of weight 1."""
        return self.likelihood.predict(f)

    def _by_point(self, f: Tensor) -> Tensor:
        if len(f) != len(self.weights):
            raise InputError(
                f"there are weights of {len(self.weights)} points, but {len(f)} points here. Pass the "
                "likelihood without weights for new points."
            )
        return self.weights.to(f)


def weighted(likelihood: Likelihood, weights: Tensor | None) -> Likelihood:
    """Return the likelihood of points that count as often as their weights say.

    Args:
        likelihood: The likelihood of points of weight 1.
        weights: Positive weights (N,), or None for ones.

    Returns:
        Gaussian noise of variance noise_var/w_n, `Weighted` for other likelihoods, and the likelihood
        itself without weights.
    """
    if weights is None:
        return likelihood
    if not has_gaussian_noise(likelihood):
        return Weighted(likelihood, weights)
    assert likelihood.noise_var is not None
    noise = torch.as_tensor(likelihood.noise_var, dtype=torch.float64).to(weights.device)
    return Gaussian(noise / weights[:, None])


def left_over(likelihood: Likelihood, weights: Tensor | None, num_outputs: int) -> float:
    """Return what p(y | f)ʷ has beyond Gaussian noise of variance σ²/w, which evidences lack.

    N(y | f, σ²)ʷ = N(y | f, σ²/w) · (2πσ²)^{−w/2} (2πσ²/w)^{1/2}; the logarithms of the last two factors are
    summed over points and outputs. With them the evidence equals that of repeated points.

    Args:
        likelihood: The likelihood of points of weight 1.
        weights: Positive weights (N,), or None for ones.
        num_outputs: The number of outputs C.

    Returns:
        The sum; 0 without weights and for likelihoods that `Weighted` raises to their weights itself.
    """
    if weights is None or not has_gaussian_noise(likelihood) or tied_points(likelihood) is not None:
        return 0.0
    noise = torch.as_tensor(likelihood.noise_var, dtype=torch.float64).expand(num_outputs)
    logs = (2 * math.pi * noise).log().sum()
    own = 0.5 * num_outputs * weights.log().sum()
    return float(0.5 * (len(weights) - weights.sum()) * logs - own)


def copies(weights: Tensor) -> Tensor:
    """Return how often each point is to be repeated: whole-number weights themselves, else what is near.

    The sums Σ_{m ≤ n} w_m are rounded, so that also many small weights have some copies. If the weights add
    up to more than `MOST_COPIES` and to more than the number of points, they are made smaller together.

    Args:
        weights: Positive weights, (N,).

    Returns:
        Whole numbers (N,), at least one of them positive.

    >>> copies(torch.tensor([2.0, 1.0, 3.0])), copies(torch.full((4,), 0.5))
    (tensor([2, 1, 3]), tensor([0, 1, 0, 1]))
    """
    most = max(MOST_COPIES, len(weights))
    sums = (weights.double() * min(1.0, most / float(weights.sum()))).cumsum(0)
    whole = torch.floor(sums + 0.5 - 1e-9).long()
    found = torch.diff(whole, prepend=whole.new_zeros(1))
    if not bool(found.any()):
        found[int(weights.argmax())] = 1
    return found


def repeated(data: tuple[Tensor, Tensor], weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and targets with each point as often as `copies` says.

    Args:
        data: Inputs (N, …) and targets (N, …).
        weights: Positive weights, (N,).

    Returns:
        Inputs and targets of all copies.
    """
    counts = copies(weights)
    x, y = (value.repeat_interleave(counts.to(value.device), 0) for value in data)
    return x, y
