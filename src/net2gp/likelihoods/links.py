"""How a likelihood integrates out the Gaussian outputs of the network."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from net2gp.errors import InputError, check_count, check_positive
from net2gp.inputs import ordinary_tensors


@dataclass(frozen=True)
class Quadrature:
    """A Gauss rule for one-dimensional integrals.

    Args:
        num_points: The number of nodes, at most 128.

    Raises:
        InputError: If `num_points` is not a count from 1 to 128.

    >>> Quadrature(num_points=64)
    Quadrature(num_points=64)
    """

    num_points: int = 32

    def __post_init__(self) -> None:
        check_count(self.num_points, "num_points", example=32)
        if self.num_points > 128:
            raise InputError(
                f"num_points must be at most 128, but is {self.num_points}: longer rules lose "
                "digits in float64. The default of 32 is accurate to 1e-6."
            )


@dataclass(frozen=True)
class Probit:
    """The closed form that treats the logistic function as a rescaled probit.

    E σ(f) ≈ σ(scale · m / √(1 + π/8 · spread · v)) for f ~ N(m, v). With several classes, each logit is
    divided by its own factor. In one dimension the result is within 0.02 of the exact probability. The cost
    is O(1) per logit.

    Args:
        scale: A factor of the mean. `Contrast` says what it is for.
        novelty_var: The variance that f gains at a novel point. `Contrast` says more.
        cautious: Whether the factor of the mean is at most 1. `Contrast` says more.
        spread: A factor of the variance. `Contrast` says what it is for.

    Reference: MacKay (1992), The evidence framework applied to classification networks.
    """

    scale: float = 1.0
    novelty_var: float = 0.0
    cautious: bool = False
    spread: float = 1.0
    needs: ClassVar[Literal["variances"]] = "variances"

    def __post_init__(self) -> None:
        check_positive(self.scale, "scale")
        check_positive(self.novelty_var, "novelty_var", zero=True)
        check_positive(self.spread, "spread")

    @staticmethod
    def variances(mean: Tensor, covariance: Tensor) -> Tensor:
        """Read the variances that `shrink` needs.

        Args:
            mean: Means, (N, C).
            covariance: Covariances, (N, C, C).

        Returns:
            Var f_c, of shape (N, C).
        """
        return covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0)

    def shrink(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Compute the logits of the prediction.

        Args:
            mean: m, of any shape.
            variance: v, in the same shape.

        Returns:
            scale · m / √(1 + π/8 · spread · v), in the shape of `mean`.

        >>> Probit().shrink(torch.tensor([2.0]), torch.tensor([0.0]))
        tensor([2.])
        >>> Probit(scale=3.0, cautious=True).shrink(torch.tensor([2.0]), torch.tensor([0.0]))
        tensor([2.])
        """
        return mean * _factor(self, variance)


@dataclass(frozen=True)
class Contrast:
    """The closed form of `Probit` for the difference between each class and the class with the largest mean.

    p = softmax(g) with g_c = scale · (m_c − m_t) / √(1 + π/8 · spread · v_c), where t is the class with the
    largest mean and v_c = Var[f_c − f_t]. The class t keeps the largest probability. Softmax ignores what all
    logits have in common, and so does this link; `Probit` counts it as uncertainty. The cost is O(C) per
    point.

    Where classes can be separated, the data determine the ratio of mean and standard deviation of f, but
    hardly their common scale: training stops at some size of the logits, and the variance at that point
    belongs to larger logits. `laplace` finds the scale at which predictions on the training data are as
    certain as the network itself. Elsewhere they would be surer than the network where the variance is
    smaller, with no evidence for it but a variance of weights that are taken to be right; so a `cautious`
    link, as `laplace` makes it by default, leaves the network's logits as they are there.

    A network goes on to be sure of classes where it has seen nothing. So each logit gains the independent
    variance `novelty_var` · max(0, s/s₀ − 1) at a point where the training inputs leave the share s of the
    prior variance open, and four in five training inputs have less than s₀. `laplace` sets it to an eighth
    of the mean square of the scaled logits, so that a difference gains a quarter of it; it has an effect only
    after `laplace`, which knows s.

    Args:
        scale: A factor of the mean, which corrects a mean that is too small for its variance.
        novelty_var: The variance that a logit gains at a novel point.
        cautious: Whether the factor of the mean is at most 1, so that no prediction is surer than softmax(m).
        spread: A factor of the variance, for a covariance that is right up to its size.

    References: MacKay (1992), The evidence framework applied to classification networks; Nickisch, Rasmussen
    (2008), Approximations for binary Gaussian process classification, on mode and mean.
    """

    scale: float = 1.0
    novelty_var: float = 0.0
    cautious: bool = False
    spread: float = 1.0
    needs: ClassVar[Literal["contrasts"]] = "contrasts"

    def __post_init__(self) -> None:
        check_positive(self.scale, "scale")
        check_positive(self.novelty_var, "novelty_var", zero=True)
        check_positive(self.spread, "spread")

    @staticmethod
    def variances(mean: Tensor, covariance: Tensor) -> Tensor:
        """Compute the variances that `shrink` needs.

        Args:
            mean: Means, (N, C), or (N, …, C) with places.
            covariance: Covariances, with C × C behind them.

        Returns:
            Var[f_c − f_t], in the shape of the means.

        >>> Contrast.variances(torch.tensor([[3.0, 2.0, 0.0]]), torch.eye(3)[None])
        tensor([[0., 2., 2.]])
        """
        top = mean.argmax(-1, keepdim=True)
        own = covariance.diagonal(dim1=-2, dim2=-1)
        cross = covariance.gather(-2, top[..., None].expand(*top.shape, own.shape[-1]))[..., 0, :]
        return (own.gather(-1, top) + own - 2 * cross).clamp(min=0)

    def shrink(self, mean: Tensor, variances: Tensor) -> Tensor:
        """Compute the logits of the prediction.

        Args:
            mean: Means, (N, C).
            variances: Var[f_c − f_t], (N, C).

        Returns:
            The logits g, of shape (N, C).
        """
        distance = mean - mean.max(-1, keepdim=True).values
        return distance * _factor(self, variances)


def _factor(link: Probit | Contrast, variances: Tensor) -> Tensor:
    """scale / √(1 + π/8 · spread · v), of a cautious link at most 1."""
    factor = link.scale / (1 + torch.pi / 8 * link.spread * variances).sqrt()
    return factor.clamp(max=1) if link.cautious else factor


@dataclass(frozen=True)
class LaplaceBridge:
    """The Dirichlet law whose Laplace approximation, in the basis of the logits, is the Gaussian.

    Softmax does not change when the mean of the logits is subtracted. With μ, Σ the moments of the centered
    logits, α_c = (1 − 2/C + e^{μ_c}/C² Σ_d e^{−μ_d}) / Σ_cc. The cost is O(C²) per point.

    Reference: Hobbhahn, Kristiadi, Hennig (2022), Fast predictive uncertainty for classification with
    Bayesian deep networks.
    """

    def concentration(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Compute the concentration of the Dirichlet law.

        Args:
            mean: Means of the logits, (N, C).
            covariance: Covariances of the logits, (N, C, C).

        Returns:
            α, of shape (N, C).

        >>> LaplaceBridge().concentration(torch.zeros(1, 2), torch.eye(2)[None])
        tensor([[1., 1.]])
        """
        C = mean.shape[-1]
        mean = mean - mean.mean(-1, keepdim=True)
        means = covariance.mean(-1)
        variance = covariance.diagonal(dim1=-2, dim2=-1) - 2 * means + means.mean(-1, keepdim=True)
        variance = variance.clamp(min=torch.finfo(mean.dtype).eps)
        spread = (mean + torch.logsumexp(-mean, -1, keepdim=True)).exp() / C**2
        return (1 - 2 / C + spread) / variance


@dataclass(frozen=True)
class MonteCarlo:
    """An average over scrambled Sobol points in antithetic pairs.

    The points depend on `num_samples` and `seed` alone. Results are therefore deterministic, smooth in the
    mean and the covariance, and independent of the global random state.

    Args:
        num_samples: The number S of points.
        seed: The seed of the scrambling.

    Reference: Owen (1998), Scrambling Sobol' and Niederreiter–Xing points.
    """

    num_samples: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self.num_samples, "num_samples", example=512)

    def base_sample(self, dimension: int, like: Tensor) -> Tensor:
        """Return standard normal points.

        Args:
            dimension: The dimension of a point.
            like: A tensor whose dtype and device the points take.

        Returns:
            Points of shape (S, dimension).

        >>> z = MonteCarlo(num_samples=64).base_sample(3, like=torch.zeros(1))
        >>> z.shape, bool(z.mean(0).abs().max() < 1e-6)
        (torch.Size([64, 3]), True)
        """
        return _sobol_normal(self.num_samples, dimension, self.seed).to(like)


# The cache outlives the caller, so a first call in inference mode must not fill it with inference tensors.
@lru_cache(maxsize=32)
@ordinary_tensors()
def _sobol_normal(num_samples: int, dimension: int, seed: int) -> Tensor:
    engine = SobolEngine(dimension, scramble=True, seed=seed)
    uniform = engine.draw((num_samples + 1) // 2, dtype=torch.float64)
    # Sobol points are multiples of 2⁻³⁰ and may be 0, where the normal quantile is infinite. Half a step
    # keeps them inside (0, 1).
    half = torch.special.ndtri(uniform + 2.0**-31)
    return torch.cat([half, -half])[:num_samples]
