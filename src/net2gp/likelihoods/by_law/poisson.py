"""Counts without an upper bound, such as events in a time or a place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution

from net2gp.errors import InputError, check_positive
from net2gp.likelihoods.by_law.base import LawLikelihood
from net2gp.likelihoods.expectations import ExpectedDerivatives, expected_derivatives
from net2gp.likelihoods.targets import check_counts, shape_targets
from net2gp.tags import savable


@savable("poisson.Poisson")
@dataclass(frozen=True, eq=False)
class Poisson(LawLikelihood):
    """Counts y_c ∈ {0, 1, 2, …} with rate μ_c = exposure · e^{f_c}, independent given the C outputs f.

    log p(y | f) = Σ_c y_c log μ_c − μ_c − log y_c!. The residual is y − μ. The curvature diag(μ) is the
    negative Hessian, so log p is concave. For f ~ N(m, v), E y = E μ = exposure · e^{m + v/2} and Var y = E
    μ + (E μ)²(e^v − 1). The cost is O(N·C).

    If the variance of the counts clearly exceeds their mean, use `NegativeBinomial`.

    Args:
        exposure: The time, area or number of trials that the counts belong to: one positive number, or a
            tensor (C,) with one per output, or (N, 1) or (N, C) with one per point. In the last case,
            predictions need the exposures of the new points: `predict(x, likelihood=Poisson(exposure))`.

    Raises:
        InputError: If `exposure` is not positive or has more than two axes.

    >>> Poisson(exposure=2.0).residual(torch.zeros(1, 1), torch.tensor([5]))
    tensor([[3.]])

    Reference: McCullagh & Nelder (1989), Generalized Linear Models, chapter 6.
    """

    exposure: float | Tensor = 1.0
    canonical: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive(self.exposure, "exposure")
        if isinstance(self.exposure, Tensor) and self.exposure.dim() > 2:
            raise InputError(
                "exposure must be a number, (C,) for each output, or (N, 1) or (N, C) for each point, but "
                f"has shape {tuple(self.exposure.shape)}. Pass e.g. exposure=1.0."
            )

    @property
    def tied_points(self) -> int | None:
        """The number of points N, if each point has its own exposure, else None."""
        per_point = isinstance(self.exposure, Tensor) and self.exposure.dim() == 2
        return len(self.exposure) if per_point else None  # type: ignore[arg-type]

    def of_points(self, part: Tensor | slice) -> Poisson:
        """Select the exposures of some of the points.

        Args:
            part: Indices or a slice of the points.

        Returns:
            The likelihood of these points. It is the same value if the exposure does not depend on the
            point.
        """
        return self if self.tied_points is None else Poisson(self.exposure[part])  # type: ignore[index]

    def log_exposure(self, f: Tensor) -> Tensor:
        """Return log exposure, in a shape that broadcasts against f.

        Args:
            f: Outputs, (…, N, C).

        Returns:
            A tensor of at most two axes, with the dtype and device of f.

        Raises:
            InputError: If the exposure does not fit the number of points or outputs.
        """
        exposure = torch.as_tensor(self.exposure, dtype=f.dtype, device=f.device)
        if self.tied_points not in (None, f.shape[-2]):
            raise InputError(
                f"exposure holds numbers of {self.tied_points} points, but there are {f.shape[-2]} here. "
                "Pass likelihood=Poisson(exposure=...) of the new points to posterior.predict."
            )
        if exposure.dim() and exposure.shape[-1] not in (1, f.shape[-1]):
            raise InputError(
                f"exposure of shape {tuple(exposure.shape)} does not fit {f.shape[-1]} outputs. For one "
                "exposure per point, pass exposure[:, None]."
            )
        return exposure.log()

    def law(self, f: Tensor) -> Distribution:
        """Return the Poisson law of rate exposure · e^f."""
        rate = (f + self.log_exposure(f)).exp()
        return torch.distributions.Poisson(rate, validate_args=False)

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check that `y` holds counts 0, 1, 2, …, as (N, C), or (N,) with one output."""
        check_counts(f, y)
        self.log_exposure(f)

    def log_density(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute y log μ − μ − log y! for each output."""
        log_rate = f + self.log_exposure(f)
        return y * log_rate - log_rate.exp() - torch.lgamma(y + 1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute y − μ: (N, C)."""
        return shape_targets(f, y).to(f) - self.information(f)

    def information(self, f: Tensor) -> Tensor:
        """Compute μ, in the shape of f."""
        return (f + self.log_exposure(f)).exp()

    def moments(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Compute E y and Var y for f ~ N(mean, variance) in closed form."""
        rate = (mean + self.log_exposure(mean) + variance / 2).exp()
        return rate, rate + rate.square() * torch.expm1(variance)


@expected_derivatives.register
def _(likelihood: Poisson, mean: Tensor, covariance: Tensor, y: Tensor) -> ExpectedDerivatives:
    variance = covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0)
    y, offset = shape_targets(mean, y).to(mean), likelihood.log_exposure(mean)
    rate = (mean + offset + variance / 2).exp()
    log_prob = y * (mean + offset) - rate - torch.lgamma(y + 1)
    return ExpectedDerivatives(log_prob.sum(-1), y - rate, torch.diag_embed(rate))
