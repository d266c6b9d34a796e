"""Counts that vary more than Poisson counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import logsigmoid

from net2gp.errors import InputError
from net2gp.likelihoods.by_law.base import LawLikelihood
from net2gp.likelihoods.targets import check_counts, shape_targets
from net2gp.tags import savable


@savable("negative_binomial.NegativeBinomial")
@dataclass(frozen=True)
class NegativeBinomial(LawLikelihood):
    """Counts y_c ∈ {0, 1, 2, …} with mean μ_c = e^{f_c} and variance μ_c + dispersion · μ_c².

    This is a Poisson law whose rate is μ times a Gamma variable of mean 1 and variance α = dispersion. With
    l = f + log α, log p(y | f) = Σ_c log Γ(y_c + 1/α) − log Γ(1/α) − log y_c! + y_c l_c − (y_c + 1/α)
    log(1 + e^{l_c}). The residual is y − (y + 1/α) σ(l). The curvature is the Fisher information
    diag(μ/(1 + α μ)). The negative Hessian is (y + 1/α) σ'(l), which differs, but log p is concave. The cost
    is O(N·C).

    Args:
        dispersion: α > 0, the excess of the variance over the mean in units of μ². As α → 0 the law becomes
            `Poisson()`, which should be used for α below 1e-6.

    Raises:
        InputError: If `dispersion` is not a number from 1e-6 to 1e6.

    >>> NegativeBinomial(dispersion=0.5).curvature(torch.zeros(1, 1))
    tensor([[[0.6667]]])

    Reference: Hilbe (2011), Negative Binomial Regression.
    """

    dispersion: float = 1.0
    canonical: ClassVar[bool] = False

    def __post_init__(self) -> None:
        value = self.dispersion
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-6 <= value < 1e6:
            raise InputError(
                f"dispersion must be a number from 1e-6 to 1e6, but is {value!r}. Pass for example "
                "NegativeBinomial(dispersion=0.5), or Poisson() for counts without any."
            )

    def _log_odds(self, f: Tensor) -> Tensor:
        """l = log(α μ)."""
        return f + math.log(self.dispersion)

    def law(self, f: Tensor) -> Distribution:
        """Return torch's negative binomial law with 1/α failures."""
        return torch.distributions.NegativeBinomial(
            1 / self.dispersion, logits=self._log_odds(f), validate_args=False
        )

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check that `y` holds counts 0, 1, 2, …, as (N, C), or (N,) with one output."""
        check_counts(f, y)

    def log_density(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute log p(y | f) for each output."""
        odds, size = self._log_odds(f), 1 / self.dispersion
        # y l − y log(1 + e^l) equals y log σ(l), which does not overflow.
        likely = y * logsigmoid(odds) + size * logsigmoid(-odds)
        ways = torch.lgamma(y.double() + size) - math.lgamma(size) - torch.lgamma(y.double() + 1)
        return likely + ways.to(f.dtype)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute y − (y + 1/α) σ(l): (N, C)."""
        y, odds = shape_targets(f, y).to(f), self._log_odds(f)
        return y * (-odds).sigmoid() - odds.sigmoid() / self.dispersion

    def information(self, f: Tensor) -> Tensor:
        """Compute μ/(1 + α μ) = σ(l)/α, in the shape of f."""
        return self._log_odds(f).sigmoid() / self.dispersion

    def moments(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Compute E y and Var y for f ~ N(mean, variance) in closed form."""
        rate = (mean + variance / 2).exp()
        excess = torch.expm1(variance) + self.dispersion * variance.exp()
        return rate, rate + rate.square() * excess
