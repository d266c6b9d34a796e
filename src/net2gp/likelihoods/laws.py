"""Distributions as values: Gaussians of f that are known in part or in full, and averages of laws of y."""

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

from net2gp.errors import InputError, check_positive
from net2gp.likelihoods.links import Contrast
from net2gp.show import as_html, as_text, number


class Law(MultivariateNormal):
    """GPyTorch's multivariate normal without its floor on variances.

    GPyTorch raises variances to at least 1e-6 (float32) or 1e-10 (float64). For targets on a small scale
    this floor would be most of the variance.
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
    """Build N(mean, covariance) without factorizing it before that is needed, since it may be singular.

    Args:
        mean: Means, (..., C).
        covariance: Covariances, (..., C, C).

    Returns:
        The Gaussian law.

    >>> import torch
    >>> gaussian_law(torch.zeros(2), torch.zeros(2, 2)).variance
    tensor([0., 0.])
    """
    return Law(mean, to_linear_operator(covariance))


class Variances(Law):
    """A law of f with known means and variances (N, C), for links that need nothing else.

    Args:
        mean: Means, (N, C).
        variances: Variances, (N, C).

    >>> Variances(torch.zeros(1, 2), torch.ones(1, 2)).variance
    tensor([[1., 1.]])
    """

    def __init__(self, mean: Tensor, variances: Tensor) -> None:
        super().__init__(mean, DiagLinearOperator(variances))


class Contrasts(Variances):
    """A law of f with known means and variances Var[f_c − f_t] (N, C), as `Contrast` needs them."""


def contrasts(f: MultivariateNormal) -> Tensor:
    """Compute Var[f_c − f_t], where t is the class with the largest mean.

    Args:
        f: The law of the logits, with batch N and event C.

    Returns:
        The variances, (N, C).

    >>> contrasts(gaussian_law(torch.tensor([[3.0, 2.0]]), torch.eye(2)[None]))
    tensor([[0., 2.]])
    """
    if isinstance(f, Contrasts):
        return f.variance
    return Contrast.variances(f.mean, f.covariance_matrix)


class Average(Distribution):
    """The mixture Σ_s w_s p_s(y) of S laws of the same points.

    `mean` and `variance` are exact, and `log_prob` is log Σ_s w_s p_s(y). Each draw comes from one of the
    laws. The cost is the sum of the costs of the S laws.

    Args:
        laws: The S laws.
        weights: Their weights, which add up to 1: (S,); None for equal weights.

    >>> laws = [distributions.Normal(torch.tensor([m]), torch.tensor([1.0])) for m in (-1.0, 1.0)]
    >>> Average(laws).variance
    tensor([2.])
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, laws: Sequence[Distribution], weights: Tensor | None = None) -> None:
        self.laws, count = tuple(laws), len(laws)
        self.weights = torch.full((count,), 1 / count, dtype=torch.float64)
        if weights is not None:
            self.weights = weights
        super().__init__(laws[0].batch_shape, laws[0].event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        """The support of each of the laws."""
        return self.laws[0].support

    @property
    def mean(self) -> Tensor:
        """E y."""
        return weighted([law.mean for law in self.laws], self.weights)

    @property
    def variance(self) -> Tensor:
        """Var y: the mean of the variances plus the variance of the means."""
        mean = self.mean
        parts = [law.variance + (law.mean - mean).square() for law in self.laws]
        return weighted(parts, self.weights)

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute log Σ_s w_s p_s(value)."""
        parts = torch.stack([law.log_prob(value) for law in self.laws])
        logs = self.weights.log().to(parts)
        return (parts + logs.reshape(-1, *[1] * (parts.dim() - 1))).logsumexp(0)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw y."""
        draws = torch.stack([law.sample(sample_shape) for law in self.laws])
        # The numbers of one event belong together, so all of them come from the same law.
        shape = (*sample_shape, *self.batch_shape)
        index = self.weights.multinomial(max(1, math.prod(shape)), replacement=True)
        index = index[: math.prod(shape)].reshape(shape).to(draws.device)
        index = index.reshape(index.shape + (1,) * len(self.event_shape)).expand(draws.shape[1:])
        return draws.gather(0, index[None])[0]


def weighted(parts: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Compute Σ_s w_s part_s, in the dtype of the parts.

    Args:
        parts: S tensors of one shape.
        weights: Their weights, (S,).

    Returns:
        The sum.
    """
    stacked = torch.stack(list(parts))
    return torch.tensordot(weights.to(stacked), stacked, 1)


def average(laws: Sequence[Distribution], weights: Tensor | None = None) -> Distribution:
    """Average laws of y.

    Args:
        laws: Laws of the same points.
        weights: Their weights, which add up to 1: (S,); None for equal weights.

    Returns:
        For laws of labels, the law with the average probabilities; otherwise a mixture (`Average`).

    >>> laws = [distributions.Categorical(torch.tensor([[p, 1 - p]])) for p in (0.0, 0.5)]
    >>> average(laws).probs
    tensor([[0.2500, 0.7500]])
    """
    kind = type(laws[0])
    if kind in (distributions.Categorical, distributions.Bernoulli):
        # A law of labels keeps its class, so that `.probs` and `.entropy()` are there.
        probs = [law.probs for law in laws]  # type: ignore[attr-defined]
        if weights is None:
            weights = torch.full((len(laws),), 1 / len(laws), dtype=torch.float64)
        return kind(probs=weighted([p.double() for p in probs], weights).to(probs[0].dtype))
    return Average(laws, weights)


def product_of_experts(
    laws: Sequence[Distribution], weights: Sequence[float] | None = None
) -> Distribution:
    """Multiply laws of the same points and normalize: p(y) ∝ Π_m p_m(y)^{w_m}, for each point by itself.

    Gaussians have the precision Σ w_m P_m and the mean weighted by precision, so that a certain expert
    outweighs an uncertain one, and experts that agree make each other more certain. That is right if they saw
    different data and their prior is flat beside these. For opinions from the same data pass weights that add
    up to 1. A product is a law at each point and no process: products at more points have other marginals.

    Args:
        laws: What `predict(x)` or `marginal(x)` of several posteriors returned: Gaussians, or laws of labels.
        weights: A positive number for each; None is 1 for each.

    Returns:
        A law of the same kind.

    Raises:
        InputError: If there are no laws, or laws of another kind or of unlike shapes, or if two Gaussians are
            certain of different values.

    >>> laws = [gaussian_law(torch.tensor([[m]]), torch.tensor([[[v]]])) for m, v in ((0.0, 1.0), (4.0, 3.0))]
    >>> product_of_experts(laws).mean, product_of_experts(laws).variance
    (tensor([[1.]]), tensor([[0.7500]]))

    Reference: Hinton, Training products of experts by minimizing contrastive divergence, 2002.
    """
    found = list(laws) if isinstance(laws, Sequence) else []
    powers = [1.0] * len(found) if weights is None else list(weights)
    kinds = {kind for law in found for kind in _EXPERTS if isinstance(law, kind)}
    shapes = {
        (law.batch_shape, law.event_shape, getattr(law, "param_shape", None))
        for law in found
        if isinstance(law, Distribution)
    }
    if len(kinds) != 1 or len(shapes) != 1 or len(powers) != len(found):
        raise InputError(
            "a product is of Gaussians, of laws of classes or of Bernoulli laws, with the same shapes and a "
            f"weight for each, but got {[type(law).__name__ for law in found]} and {len(powers)} weights. "
            "Pass for example product_of_experts([first.predict(x), second.predict(x)])."
        )
    for power in powers:
        check_positive(power, "weights", single=True)
    if MultivariateNormal in kinds:
        return _gaussian_product(found, powers)
    logits = [law.logits * power for law, power in zip(found, powers, strict=True)]  # type: ignore[attr-defined]
    kind: Any = kinds.pop()
    return kind(logits=torch.stack(logits).sum(0))


_EXPERTS: tuple[Any, ...] = (MultivariateNormal, distributions.Categorical, distributions.Bernoulli)


def _gaussian_product(laws: Sequence[Any], powers: Sequence[float]) -> Law:
    """One expert after the other, by the gain that the next one has; a singular covariance is no obstacle."""
    mean, covariance = laws[0].mean.double(), laws[0].covariance_matrix.double() / powers[0]
    for law, power in zip(laws[1:], powers[1:], strict=True):
        other = law.covariance_matrix.double() / power
        gain, failed = torch.linalg.solve_ex(covariance + other, covariance)
        if bool((failed != 0).any()):
            raise InputError(
                "two Gaussians have no variance in the same direction, so that their product is not defined. "
                "Use predict(x), whose laws have the noise of the targets."
            )
        apart = (law.mean.double() - mean).flatten(-len(law.event_shape))
        moved = (gain.mT @ apart[..., None])[..., 0]
        mean = mean + moved.reshape(mean.shape)
        covariance = covariance - covariance @ gain
    covariance = 0.5 * (covariance + covariance.mT)
    return gaussian_law(mean.to(laws[0].mean.dtype), covariance.to(laws[0].mean.dtype))
