"""Regression with Gaussian noise of a known or learned variance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from net2gp.errors import InputError, check_positive, readable
from net2gp.likelihoods.laws import gaussian_law
from net2gp.likelihoods.targets import check_real_targets, shape_targets


@dataclass(frozen=True, eq=False)
class Gaussian:
    """Regression y = f + ε with ε ~ N(0, noise_var), independent over points and outputs.

    With v = noise_var, log p(y | f) = Σ_c −½ [(y_c − f_c)² / v_c + log 2π v_c]. The residual is (y − f) / v
    and the curvature diag(1 / v). The cost is O(N·C), and O(N·C²) for the curvature.

    Args:
        noise_var: The variance of the noise: one number, (C,) with one per output, or (N, 1) or (N, C) with
            one per point. None means that `adapt`, `laplace` or `tune` learns it. Zero is allowed where no
            density is needed; conditioning then interpolates. A tensor stays differentiable.

    Raises:
        InputError: If `noise_var` is negative or has more than two axes.

    >>> Gaussian(noise_var=0.5).residual(torch.tensor([[1.0]]), torch.tensor([2.0]))
    tensor([[2.]])

    Reference: Rasmussen & Williams (2006), Gaussian Processes for Machine Learning, chapter 2.
    """

    noise_var: float | Tensor | None = None
    canonical: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.noise_var is None:
            return
        check_positive(self.noise_var, "noise_var", zero=True)
        if isinstance(self.noise_var, Tensor) and self.noise_var.dim() > 2:
            raise InputError(
                "noise_var must be a number, (C,) for each output, or (N, 1) or (N, C) for each "
                f"point, but has shape {tuple(self.noise_var.shape)}. Pass e.g. noise_var=0.1."
            )

    def noise_variance(self, f: Tensor) -> Tensor:
        """Expand the noise variance to the shape of `f`.

        Args:
            f: Outputs, (N, C).

        Returns:
            The variance of each entry, (N, C), with the dtype and device of `f`.

        Raises:
            InputError: If the noise variance is not known yet, or does not fit the shape of `f`.

        >>> Gaussian(torch.tensor([0.1, 0.2])).noise_variance(torch.zeros(3, 2)).shape
        torch.Size([3, 2])
        """
        if self.noise_var is None:
            raise InputError(
                "Gaussian() has no noise variance yet. Pass Gaussian(noise_var=0.1), "
                "or let n2g.adapt or n2g.tune learn it."
            )
        noise = torch.as_tensor(self.noise_var, dtype=f.dtype, device=f.device)
        points, outputs = f.shape
        if noise.dim() == 1 and noise.shape[0] not in (1, outputs):
            raise InputError(
                f"noise_var of shape ({noise.shape[0]},) is read as one variance for each output, "
                f"but there are {outputs} outputs. For one variance per point, pass "
                "noise_var[:, None]."
            )
        if noise.dim() == 2 and noise.shape[0] != points:
            raise InputError(
                f"noise_var holds the noise of {noise.shape[0]} points, but there are {points} "
                "here. Pass likelihood=Gaussian(noise_var=...) with the noise of the new points to "
                "posterior.predict."
            )
        if noise.dim() == 2 and noise.shape[1] not in (1, outputs):
            raise InputError(
                f"noise_var must have shape ({points}, 1) or ({points}, {outputs}) for outputs of "
                f"shape ({points}, {outputs}), but has shape {tuple(noise.shape)}."
            )
        return noise.expand(points, outputs)

    def with_noise(self, noise_var: float | Tensor) -> Gaussian:
        """Return Gaussian noise of another variance."""
        return Gaussian(noise_var)

    @property
    def tied_points(self) -> int | None:
        """The number of points N, if each point has its own noise, else None."""
        per_point = isinstance(self.noise_var, Tensor) and self.noise_var.dim() == 2
        return len(self.noise_var) if per_point else None  # type: ignore[arg-type]

    def of_points(self, part: Tensor | slice) -> Gaussian:
        """Select the noise of some of the points.

        Args:
            part: Indices or a slice of the points.

        Returns:
            The likelihood of these points. It is the same value if the noise does not depend on the point.
        """
        return self if self.tied_points is None else Gaussian(self.noise_var[part])  # type: ignore[index]

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check that `y` is floating and (N, C), or (N,) with one output."""
        check_real_targets(f, y)
        shape_targets(f, y)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute log p(y_n | f_n): (N,)."""
        noise = self._positive_noise(f)
        squares = (shape_targets(f, y) - f).square() / noise
        return -0.5 * (squares + noise.log() + math.log(2 * math.pi)).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute (y − f) / v: (N, C)."""
        return (shape_targets(f, y) - f) / self._positive_noise(f)

    def curvature(self, f: Tensor) -> Tensor:
        """Compute diag(1 / v): (N, C, C)."""
        return torch.diag_embed(self._positive_noise(f).reciprocal())

    def curvature_root(self, f: Tensor) -> Tensor:
        """Compute a root of the curvature.

        Args:
            f: Outputs, (N, C).

        Returns:
            diag(1 / √v), of shape (N, C, C).
        """
        return torch.diag_embed(self.noise_variance(f).rsqrt())

    def predict(self, f: MultivariateNormal) -> MultivariateNormal:
        """Compute N(m_n, S_n + diag(v_n)), with batch N and event C."""
        mean = f.mean
        covariance = f.covariance_matrix + torch.diag_embed(self.noise_variance(mean))
        # The covariance stays lazy: a dense one would be factored at once, which fails if it is singular.
        return gaussian_law(mean, covariance)

    def _positive_noise(self, f: Tensor) -> Tensor:
        noise = self.noise_variance(f)
        if readable(noise) and not bool((noise > 0).all()):
            raise InputError(
                "with noise_var=0 the observation is f itself and p(y | f) has no density. "
                "Pass a positive variance, e.g. Gaussian(noise_var=1e-6)."
            )
        return noise
