"""Laws as values: Gaussians of f of which all or a part is known, and averages of laws of y."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from linear_operator.operators import DiagLinearOperator
from torch import Tensor, distributions
from torch.distributions import Distribution

from net2gp.likelihoods.links import Contrast
from net2gp.show import as_html, as_text, number


class Law(MultivariateNormal):
    """GPyTorch's multivariate normal, with variances as they are.

    GPyTorch raises variances below 1e-6 (float32) or 1e-10 (float64) to that floor, which would be most
    of the variance of targets on a small scale.
    """

    def _facts(self) -> dict[str, str]:
        return {
            "shape": f"{tuple(self.mean.shape)}",
            "mean": number(self.mean),
            "stddev": number(self.variance.sqrt()),
        }

    __repr__, _repr_html_ = as_text, as_html

    @property
    def variance(self) -> Tensor:
        """The diagonal of the covariance, never negative."""
        diagonal = self.lazy_covariance_matrix.diagonal(dim1=-2, dim2=-1)
        return diagonal.clamp(min=0.0).reshape(self.mean.shape)


def gaussian_law(mean: Tensor, covariance: Tensor) -> Law:
    """N(mean, covariance), not factorized before it must be: a covariance may be singular.

    >>> import torch
    >>> gaussian_law(torch.zeros(2), torch.zeros(2, 2)).variance
    tensor([0., 0.])
    """
    return Law(mean, to_linear_operator(covariance))


class Variances(Law):
    """A law of f of which only means and variances (N, C) are known, for links that need nothing else.

    >>> Variances(torch.zeros(1, 2), torch.ones(1, 2)).variance
    tensor([[1., 1.]])
    """

    def __init__(self, mean: Tensor, variances: Tensor) -> None:
        super().__init__(mean, DiagLinearOperator(variances))


class Contrasts(Variances):
    """A law of f of which only means and variances Var[f_c − f_t] (N, C) are known, as `Contrast` needs."""


def contrasts(f: MultivariateNormal) -> Tensor:
    """Var[f_c − f_t] for the class t of the largest mean: (N, C).

    >>> contrasts(gaussian_law(torch.tensor([[3.0, 2.0]]), torch.eye(2)[None]))
    tensor([[0., 2.]])
    """
    if isinstance(f, Contrasts):
        return f.variance
    return Contrast.variances(f.mean, f.covariance_matrix)


class Average(Distribution):
    """(1/S) Σ_s p_s(y) for S laws of the same points: a mixture with equal weights.

    Its mean and variance are those of the mixture, and `log_prob` is log (1/S) Σ_s p_s(y). Each draw comes
    from one of the laws. Cost: that of the S laws.

    >>> laws = [distributions.Normal(torch.tensor([m]), torch.tensor([1.0])) for m in (-1.0, 1.0)]
    >>> Average(laws).variance
    tensor([2.])
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, laws: Sequence[Distribution]) -> None:
        self.laws = tuple(laws)
        super().__init__(laws[0].batch_shape, laws[0].event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        """That of each of the laws."""
        return self.laws[0].support

    @property
    def mean(self) -> Tensor:
        """E y."""
        return torch.stack([law.mean for law in self.laws]).mean(0)

    @property
    def variance(self) -> Tensor:
        """Var y: the mean of the variances plus the variance of the means."""
        means = torch.stack([law.mean for law in self.laws])
        variances = torch.stack([law.variance for law in self.laws])
        return variances.mean(0) + means.var(0, correction=0)

    def log_prob(self, value: Tensor) -> Tensor:
        """log (1/S) Σ_s p_s(value)."""
        parts = torch.stack([law.log_prob(value) for law in self.laws])
        return parts.logsumexp(0) - math.log(len(self.laws))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws of y."""
        draws = torch.stack([law.sample(sample_shape) for law in self.laws])
        # numbers of one event belong together, so that they come from one law
        index = torch.randint(
            len(self.laws), (*sample_shape, *self.batch_shape), device=draws.device
        )
        index = index.reshape(index.shape + (1,) * len(self.event_shape)).expand(draws.shape[1:])
        return draws.gather(0, index[None])[0]


def average(laws: Sequence[Distribution]) -> Distribution:
    """The mixture of laws of y with equal weights; of labels it is the law with the average probabilities.

    >>> laws = [distributions.Categorical(torch.tensor([[p, 1 - p]])) for p in (0.0, 0.5)]
    >>> average(laws).probs
    tensor([[0.2500, 0.7500]])
    """
    kind = type(laws[0])
    if kind in (distributions.Categorical, distributions.Bernoulli):
        probs = torch.stack([law.probs for law in laws])  # type: ignore[attr-defined]
        return kind(probs=probs.double().mean(0).to(probs.dtype))
    return Average(laws)
