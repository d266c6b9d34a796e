"""The law of a target whose Gaussian output is integrated out numerically."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution

from net2gp.likelihoods import integrals

NODES = 161
"""The number of nodes of an integral over f. Placed as below, they give densities to about 1e-10."""

REACH = 9.0
"""How many standard deviations of f the nodes reach beyond its mean and beyond the peak of the integrand."""

FARTHEST = 40.0
"""How many standard deviations of f from its mean the peak of the integrand is searched."""

Function = Callable[[Tensor], Tensor]


class Integrated(Distribution):
    """The law p(y) = ∫ p(y | f) N(f | m, v) df of each output by itself, with batch (N, C).

    `mean` and `variance` are E E[y | f] and E Var[y | f] + Var E[y | f]. `log_prob` places its nodes around
    the peak of p(y | f) N(f | m, v) for each y, so that it finds a density that is far narrower than v.
    `sample` draws f and then y. Everything is computed in float64. The cost is about 300 evaluations of
    p(y | f) per number.

    Args:
        likelihood: Has `law(f)`, `log_density(f, y)`, `information(f)` and `moments(mean, variance)`, like
            `LawLikelihood`.
        mean: m, (N, C).
        variance: v, (N, C).

    Reference: Tuerlinckx et al. (2006), Statistical inference in generalized linear mixed models: a review.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, likelihood: Any, mean: Tensor, variance: Tensor) -> None:
        self.likelihood, self.dtype = likelihood, mean.dtype
        self.location, self.spread = mean.double(), variance.double()
        super().__init__(mean.shape, validate_args=False)

    @property
    def support(self) -> Any:
        """The support of the law of y given f."""
        return self.likelihood.law(self.location).support

    @property
    def mean(self) -> Tensor:
        """E y: (N, C)."""
        return self.likelihood.moments(self.location, self.spread)[0].to(self.dtype)

    @property
    def variance(self) -> Tensor:
        """Var y: (N, C)."""
        return self.likelihood.moments(self.location, self.spread)[1].to(self.dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute log p(value), for each output by itself."""
        value = value.double()
        shape = torch.broadcast_shapes(value.shape, self.location.shape)
        mean, variance = self.location.expand(shape), self.spread.expand(shape)
        log_density = lambda f: self.likelihood.log_density(f, value)
        found = log_average(log_density, mean, variance, self.likelihood.information)
        return found.to(self.dtype)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw y, (*sample_shape, N, C)."""
        with torch.no_grad():
            shape = (*sample_shape, *self.location.shape)
            z = torch.randn(shape, dtype=torch.float64, device=self.location.device)
            drawn = self.likelihood.law(self.location + self.spread.sqrt() * z).sample()
        return drawn.to(self.dtype)


def plain_average(function: Function, mean: Tensor, variance: Tensor) -> Tensor:
    """Compute E g(f) for f ~ N(m, v) with the trapezoidal rule, for a g that is smooth on the scale of √v.

    Args:
        function: g.
        mean: m, of any shape.
        variance: v, in the same shape.

    Returns:
        E g(f), in the shape of `mean`.

    >>> zero, one = torch.zeros(1), torch.ones(1)
    >>> plain_average(lambda f: f.exp(), zero, one).log().round(decimals=6)
    tensor([0.5000])
    """
    z = torch.linspace(-12, 12, NODES, dtype=mean.dtype, device=mean.device)
    weights = (-0.5 * z.square()).exp()
    weights = weights / weights.sum()
    z, weights = (value.reshape(-1, *[1] * mean.dim()) for value in (z, weights))
    return (weights * _at(function, mean + _deviation(variance) * z)).sum(0)


def log_average(
    function: Function, mean: Tensor, variance: Tensor, information: Function
) -> Tensor:
    """Compute log E e^{g(f)} for f ~ N(m, v), for each entry by itself.

    With f = m + √v z the integrand e^g φ(z) has its peak at some z*, which a refined grid finds. The width
    of the peak is s = 1/√(1 + v Λ), where Λ is the `information` at the peak. The nodes are z* + s sinh t
    with equal steps of t. They are dense at the peak and still reach beyond the mean of f, where e^g may
    have a long tail.

    Args:
        function: g.
        mean: m, of any shape.
        variance: v, in the same shape.
        information: Maps f to Λ.

    Returns:
        log E e^{g(f)}, in the shape of `mean`.

    >>> log_average(lambda f: f, torch.zeros(1), torch.ones(1), torch.zeros_like).round(decimals=6)
    tensor([0.5000])
    """
    std = _deviation(variance)
    with torch.no_grad():
        peak = _peak(lambda z: function(mean + std * z) - 0.5 * z.square(), mean)
        curvature = 1 + variance * information(mean + std * peak)
        width = curvature.clamp(max=1e12).rsqrt()
        ends = torch.asinh((peak.abs() + REACH) / width)
        t = torch.linspace(-1, 1, NODES, dtype=mean.dtype, device=mean.device)
        t = t.reshape(-1, *[1] * mean.dim()) * ends
        z = peak + width * torch.sinh(t)
        steps = (width * torch.cosh(t) * ends * 2 / (NODES - 1)).log()
        log_weights = steps - 0.5 * z.square() - 0.5 * math.log(2 * math.pi)
    return torch.logsumexp(_at(function, mean + std * z) + log_weights, 0)


def _deviation(variance: Tensor) -> Tensor:
    # The root has an infinite gradient at zero.
    return variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt()


def _peak(function: Function, like: Tensor) -> Tensor:
    """Find the z of the largest value on a grid over ±`FARTHEST` that is refined around the best node."""
    center, step = torch.zeros_like(like), 0.5
    count = int(2 * FARTHEST / step) + 1
    for _ in range(4):
        offsets = step * (torch.arange(count, dtype=like.dtype, device=like.device) - count // 2)
        z = center + offsets.reshape(-1, *[1] * like.dim())
        best = _at(function, z).nan_to_num(nan=-torch.inf).argmax(0, keepdim=True)
        center = z.gather(0, best)[0]
        step, count = step / 16, 33  # 33 finer nodes cover one old step on either side
    return center


def _at(function: Function, nodes: Tensor) -> Tensor:
    """Evaluate `function` at nodes along the first axis, with as many at once as fit into a block."""
    size = max(1, integrals.BLOCK // max(1, nodes[0].numel()))
    return torch.cat([function(part) for part in nodes.split(size)])
