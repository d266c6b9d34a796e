"""Regression with networks that predict their own noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from net2gp.errors import InputError
from net2gp.likelihoods.integrals import normal_rule
from net2gp.likelihoods.links import Quadrature
from net2gp.likelihoods.targets import check_outputs, check_real_targets, shape_targets


class Scale(Protocol):
    """A map from a raw output to a standard deviation s."""

    def log_std(self, raw: Tensor) -> Tensor:
        """Compute log s.

        Args:
            raw: Raw outputs of any shape.

        Returns:
            log s(raw), in the shape of `raw`.
        """

    def slope(self, raw: Tensor) -> Tensor:
        """Compute the derivative of log s.

        Args:
            raw: Raw outputs of any shape.

        Returns:
            d log s / d raw, in the shape of `raw`.
        """


@dataclass(frozen=True)
class SoftplusScale:
    """The standard deviation s = log(1 + e^raw) + floor.

    Args:
        floor: The smallest standard deviation, a positive number.

    Raises:
        InputError: If `floor` is not positive and finite.

    >>> SoftplusScale(floor=0.5).log_std(torch.tensor([-1000.0])).exp()
    tensor([0.5000])
    """

    floor: float = 1e-5

    def __post_init__(self) -> None:
        if not (math.isfinite(self.floor) and self.floor > 0):
            raise InputError(
                "floor is the smallest standard deviation and must be positive, "
                f"but is {self.floor}. Pass for example SoftplusScale(floor=1e-5)."
            )

    def log_std(self, raw: Tensor) -> Tensor:
        """Compute log(softplus(raw) + floor)."""
        return (_softplus(raw) + self.floor).log()

    def slope(self, raw: Tensor) -> Tensor:
        """Compute σ(raw) / (softplus(raw) + floor)."""
        return raw.sigmoid() / (_softplus(raw) + self.floor)


def _softplus(raw: Tensor) -> Tensor:
    # torch's own softplus is replaced by a linear function above 20, which is off by 2e-9.
    return torch.logaddexp(raw, torch.zeros_like(raw))


@dataclass(frozen=True)
class LogVariance:
    """The standard deviation s with s² = e^raw.

    >>> LogVariance().log_std(torch.tensor([2.0]))
    tensor([1.])
    """

    def log_std(self, raw: Tensor) -> Tensor:
        """Compute raw / 2."""
        return raw / 2

    def slope(self, raw: Tensor) -> Tensor:
        """Return ½ everywhere."""
        return torch.full_like(raw, 0.5)


@dataclass(frozen=True)
class HeteroscedasticGaussian:
    """Regression y_d ~ N(μ_d, s(r_d)²) for a network with 2·D outputs: D means μ, then D raw scales r.

    With z = (y − μ)/s and s' = ds/dr, the residual is (z/s, (z² − 1) s'/s). The curvature is the Fisher
    information, which is diagonal: 1/s² for a mean and 2 (s'/s)² for a raw scale. The negative Hessian is
    not positive semi-definite here. Everything is computed in float64. The cost is O(N·D), and O(N·D²) for
    the curvature.

    Args:
        scale: The map from a raw scale to a standard deviation: `SoftplusScale()` (the default) or
            `LogVariance()`.
        quadrature: The rule that integrates the raw scale out in `predict`.

    >>> HeteroscedasticGaussian(LogVariance()).curvature(torch.zeros(1, 2))
    tensor([[[1.0000, 0.0000],
             [0.0000, 0.5000]]])

    Reference: Nix & Weigend (1994), Estimating the mean and variance of the target distribution.
    """

    scale: Scale = field(default_factory=SoftplusScale)
    quadrature: Quadrature = field(default_factory=Quadrature)
    canonical: ClassVar[bool] = False

    @staticmethod
    def num_outputs(y: Tensor) -> int:
        """Count the outputs that targets need.

        Args:
            y: Targets, (N,) or (N, D).

        Returns:
            Two per target, 2·D.
        """
        return 2 * (y.shape[1] if y.dim() > 1 else 1)

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check that `f` is (N, 2·D) and `y` is floating and (N, D), or (N,) if D = 1."""
        check_outputs(f)
        _num_targets(f)
        check_real_targets(f, y)
        shape_targets(f, y, _num_targets(f))

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute log p(y_n | f_n): (N,)."""
        z, log_std, _ = self._standardize(f, y)
        return -(0.5 * z.square() + log_std + 0.5 * math.log(2 * math.pi)).sum(-1).to(f.dtype)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute (z/s, (z² − 1) s'/s): (N, 2·D)."""
        z, log_std, slope = self._standardize(f, y)
        return torch.cat([z * (-log_std).exp(), (z.square() - 1) * slope], -1).to(f.dtype)

    def curvature(self, f: Tensor) -> Tensor:
        """Compute diag(1/s², 2 (s'/s)²): (N, 2·D, 2·D)."""
        raw = f[:, _num_targets(f) :].double()
        information = [(-2 * self.scale.log_std(raw)).exp(), 2 * self.scale.slope(raw).square()]
        return torch.diag_embed(torch.cat(information, -1).to(f.dtype))

    def predict(self, f: MultivariateNormal) -> Independent:
        """Integrate f_n out, for each of the D targets by itself.

        Given a raw scale, both μ and y are Gaussian. The law of y is therefore a mixture of Gaussians over
        the Gauss–Hermite nodes of the raw scale. The integral over μ is exact, and μ depends on the raw
        scale through their covariance. The mixture has the exact mean E μ, and its variance is Var μ + E s².
        The cost is O(num_points) per output.
        """
        dtype = f.mean.dtype
        raw, location, variance, weights = nodes_of_scale(
            f.mean, f.covariance_matrix, self.quadrature.num_points
        )
        std = (variance + (2 * self.scale.log_std(raw)).exp()).sqrt().to(dtype)
        parts = Normal(location.to(dtype), std.clamp(min=torch.finfo(dtype).tiny))
        mixture = Categorical(logits=weights.log().to(dtype).expand(location.shape))
        return Independent(MixtureSameFamily(mixture, parts), 1)

    def _standardize(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_targets = _num_targets(f)
        mean, raw = f.double().split(num_targets, -1)
        log_std = self.scale.log_std(raw)
        z = (shape_targets(f, y, num_targets) - mean) * (-log_std).exp()
        return z, log_std, self.scale.slope(raw)


def _num_targets(f: Tensor) -> int:
    if f.shape[1] % 2 or not f.shape[1]:
        raise InputError(
            "HeteroscedasticGaussian needs 2·D outputs, D means and D raw scales, but the network "
            f"has {f.shape[1]}. Double the last layer, nn.Linear(width, 2 * D), or use Gaussian()."
        )
    return int(f.shape[1]) // 2


def nodes_of_scale(
    mean: Tensor, covariance: Tensor, num_points: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the quadrature nodes of the raw scales and the conditional law of μ at them, in float64.

    Args:
        mean: Means of the outputs, (N, 2·D).
        covariance: Covariances of the outputs, (N, 2·D, 2·D).
        num_points: The number K of nodes.

    Returns:
        The raw scales at the nodes (N, D, K), the conditional mean of μ (N, D, K), its conditional variance
        (N, D, 1) and the weights (K,).
    """
    num_targets = _num_targets(mean)
    mean, covariance = mean.double(), covariance.double()
    variance = covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0)
    std = variance.clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    mean_std, raw_std = std.split(num_targets, -1)
    cross = covariance.diagonal(offset=num_targets, dim1=-2, dim2=-1)
    # Cauchy–Schwarz bounds |slope| by the standard deviation of μ; a singular covariance may break the bound
    # by rounding.
    slope = torch.minimum(torch.maximum(cross / raw_std, -mean_std), mean_std)
    z, weights = normal_rule(num_points, like=mean)
    raw = mean[:, num_targets:, None] + raw_std[..., None] * z
    location = mean[:, :num_targets, None] + slope[..., None] * z
    conditional = (variance[:, :num_targets] - slope.square()).clamp(min=0)[..., None]
    return raw, location, conditional, weights
