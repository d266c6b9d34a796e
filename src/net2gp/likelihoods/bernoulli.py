"""Binary labels, one or several per point."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor, distributions
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from net2gp.errors import InputError
from net2gp.likelihoods.integrals import by_points, log_expected_sigmoid, mean_and_variance
from net2gp.likelihoods.links import MonteCarlo, Probit, Quadrature
from net2gp.likelihoods.targets import (
    check_targets,
    shape_targets,
    warn_of_probabilities,
    without_ignored,
)


@dataclass(frozen=True)
class Bernoulli:
    """Binary labels y_c ∈ {0, 1} with p(y_c = 1 | f) = σ(f_c), independent given the C logits f.

    log p(y | f) = Σ_c y_c f_c − log(1 + e^{f_c}). The residual is y − σ(f) and the curvature
    diag(σ(f) σ(−f)). The cost is O(N·C), and O(N·C²) for the curvature.

    Args:
        link: How `predict` integrates f out: `Quadrature()` (the default, accurate to 1e-6), `Probit()` (a
            closed form) or `MonteCarlo()`.

    Raises:
        InputError: If `link` is something else.

    >>> Bernoulli().residual(torch.zeros(1, 2), torch.tensor([[1, 0]]))
    tensor([[ 0.5000, -0.5000]])

    Reference: Rasmussen & Williams (2006), Gaussian Processes for Machine Learning, chapter 3.
    """

    link: Quadrature | Probit | MonteCarlo = field(default_factory=Quadrature)
    canonical: ClassVar[bool] = True
    classifier: ClassVar[bool] = True
    matched_link: ClassVar[type[Probit]] = Probit

    def __post_init__(self) -> None:
        if not isinstance(self.link, Quadrature | Probit | MonteCarlo):
            raise InputError(
                f"link must be Quadrature(), Probit() or MonteCarlo(), but is {self.link!r}."
            )

    @property
    def open_link(self) -> bool:
        """Whether the link is the default, which `laplace` replaces by a matched `Probit`."""
        return self.link == Quadrature()

    def with_link(self, link: Quadrature | Probit | MonteCarlo) -> Bernoulli:
        """Return the same likelihood with another link."""
        return replace(self, link=link)

    @staticmethod
    def cross_entropy(f: Tensor, logits: Tensor) -> Tensor:
        """Compute −E log p(y | logits) for labels y drawn at f, averaged over points and labels."""
        return binary_cross_entropy_with_logits(logits, f.sigmoid())

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check that `y` holds only 0 and 1, as (N, C), or (N,) with one output.

        Raises:
            InputError: If it does not, or holds the label -100 that losses ignore.
        """
        check_targets(f, y)
        shape_targets(f, y)
        wrong = (y != 0) & (y != 1)
        if bool(wrong.any()):
            raise InputError(
                without_ignored(y)
                or f"labels must be 0 or 1, but y holds {y[wrong].reshape(-1)[0].item():g}. "
                "For labels -1 and 1 pass y = y > 0; for more than two classes use Categorical()."
            )
        warn_of_probabilities(f, binary=True)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute log p(y_n | f_n), summed over labels: (N,)."""
        y = shape_targets(f, y).to(f)
        return (y * logsigmoid(f) + (1 - y) * logsigmoid(-f)).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute y − σ(f): (N, C)."""
        return shape_targets(f, y).to(f) - f.sigmoid()

    def curvature(self, f: Tensor) -> Tensor:
        """Compute diag(σ(f) σ(−f)): (N, C, C)."""
        return torch.diag_embed(f.sigmoid() * (-f).sigmoid())

    def predict(self, f: MultivariateNormal) -> distributions.Bernoulli:
        """Compute p(y_nc = 1) = E σ(f_nc) of each label, as `.probs` (N, C)."""
        mean, variance = mean_and_variance(f)
        if isinstance(self.link, Probit):
            return distributions.Bernoulli(logits=self.link.shrink(mean, variance))
        # A difference of two log probabilities keeps digits in both tails, where 1 − p rounds to 1.
        logits = self._log_expected_sigmoid(mean, variance)
        logits = logits - self._log_expected_sigmoid(-mean, variance)
        return distributions.Bernoulli(logits=logits)

    def _log_expected_sigmoid(self, mean: Tensor, variance: Tensor) -> Tensor:
        if isinstance(self.link, Quadrature):
            return log_expected_sigmoid(mean, variance, self.link.num_points)
        assert isinstance(self.link, MonteCarlo)
        num_samples, num_labels = self.link.num_samples, mean.shape[-1]
        z = self.link.base_sample(num_labels, like=mean)[:, None]

        def average(m: Tensor, v: Tensor) -> tuple[Tensor]:
            tiny = torch.finfo(v.dtype).tiny
            log_probs = logsigmoid(m + v.clamp(min=tiny).sqrt() * z)
            return (log_probs.logsumexp(0) - math.log(num_samples),)

        return by_points(average, (mean, variance), numbers=num_samples * num_labels)[0]
