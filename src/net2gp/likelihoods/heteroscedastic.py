"""Regression by networks that predict their own noise."""

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
    """How a raw output becomes a standard deviation s."""

    def log_std(self, raw: Tensor) -> Tensor:
        """log s(raw)."""

    def slope(self, raw: Tensor) -> Tensor:
        """d log s / d raw."""


@dataclass(frozen=True)
class SoftplusScale:
    """s = log(1 + e^raw) + floor, a standard deviation that never falls below `floor`.

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
        """log(softplus(raw) + floor)."""
        return (_softplus(raw) + self.floor).log()

    def slope(self, raw: Tensor) -> Tensor:
        """σ(raw) / (softplus(raw) + floor)."""
        return raw.sigmoid() / (_softplus(raw) + self.floor)


def _softplus(raw: Tensor) -> Tensor:
    # torch's own softplus turns linear above 20, an error of 2e-9.
    return torch.logaddexp(raw, torch.zeros_like(raw))


@dataclass(frozen=True)
class LogVariance:
    """s² = e^raw.

    >>> LogVariance().log_std(torch.tensor([2.0]))
    tensor([1.])
    """

    def log_std(self, raw: Tensor) -> Tensor:
        """raw / 2."""
        return raw / 2

    def slope(self, raw: Tensor) -> Tensor:
        """½."""
        return torch.full_like(raw, 0.5)


@dataclass(frozen=True)
class HeteroscedasticGaussian:
    """y_d ~ N(μ_d, s(r_d)²) for a network with 2·D outputs: D means μ, then D raw scales r.

    With z = (y − μ)/s and s' = ds/dr, the residual is (z/s, (z² − 1) s'/s), and the curvature is
    the Fisher information, diagonal: 1/s² for a mean, 2 (s'/s)² for a raw scale. The negative
    Hessian itself is not positive semi-definite here. Float64 inside. Cost O(N·D), and O(N·D²) for
    the curvature.

    Reference: Nix & Weigend (1994), Estimating the mean and variance of the target distribution.

    >>> HeteroscedasticGaussian(LogVariance()).curvature(torch.zeros(1, 2))
    tensor([[[1.0000, 0.0000],
             [0.0000, 0.5000]]])
    """

    scale: Scale = field(default_factory=SoftplusScale)
    quadrature: Quadrature = field(default_factory=Quadrature)
    canonical: ClassVar[bool] = False

    @staticmethod
    def num_outputs(y: Tensor) -> int:
        """Two for each target."""
        return 2 * (y.shape[1] if y.dim() > 1 else 1)

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise unless `f` is (N, 2·D) and `y` is floating and (N, D), or (N,) if D = 1."""
        check_outputs(f)
        _num_targets(f)
        check_real_targets(f, y)
        shape_targets(f, y, _num_targets(f))

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """log p(y_n | f_n): (N,)."""
        z, log_std, _ = self._standardize(f, y)
        return -(0.5 * z.square() + log_std + 0.5 * math.log(2 * math.pi)).sum(-1).to(f.dtype)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """(z/s, (z² − 1) s'/s): (N, 2·D)."""
        z, log_std, slope = self._standardize(f, y)
        return torch.cat([z * (-log_std).exp(), (z.square() - 1) * slope], -1).to(f.dtype)

    def curvature(self, f: Tensor) -> Tensor:
        """diag(1/s², 2 (s'/s)²): (N, 2·D, 2·D)."""
        raw = f[:, _num_targets(f) :].double()
        information = [(-2 * self.scale.log_std(raw)).exp(), 2 * self.scale.slope(raw).square()]
        return torch.diag_embed(torch.cat(information, -1).to(f.dtype))

    def predict(self, f: MultivariateNormal) -> Independent:
        """The law of y_n with f_n integrated out, each of the D outputs by itself.

        Given a raw scale, both μ and y are Gaussian, so y is a mixture of Gaussians over the
        Gauss–Hermite nodes of the raw scale, with μ integrated exactly and moving with the scale as
        their covariance says. Its mean E μ and variance Var μ + E s² are those of y, and log_prob
        is that of the whole law. Cost O(num_points) an output.
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
    """Raw scales at the K nodes (N, D, K), and μ given them: mean (N, D, K), variance (N, D, 1).

    The last value is the weights (K,). All in float64.
    """
    num_targets = _num_targets(mean)
    mean, covariance = mean.double(), covariance.double()
    variance = covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0)
    std = variance.clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    mean_std, raw_std = std.split(num_targets, -1)
    cross = covariance.diagonal(offset=num_targets, dim1=-2, dim2=-1)
    # |slope| ≤ sd μ by Cauchy–Schwarz; rounding of a singular covariance may say otherwise.
    slope = torch.minimum(torch.maximum(cross / raw_std, -mean_std), mean_std)
    z, weights = normal_rule(num_points, like=mean)
    raw = mean[:, num_targets:, None] + raw_std[..., None] * z
    location = mean[:, :num_targets, None] + slope[..., None] * z
    conditional = (variance[:, :num_targets] - slope.square()).clamp(min=0)[..., None]
    return raw, location, conditional, weights
