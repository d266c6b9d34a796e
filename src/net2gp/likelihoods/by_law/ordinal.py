"""Labels with an order, such as grades and ratings."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor, distributions
from torch.nn.functional import logsigmoid
from torch.special import log_ndtr

from net2gp.errors import InputError
from net2gp.likelihoods.expectations import (
    ExpectedDerivatives,
    expected_by_outputs,
    expected_derivatives,
)
from net2gp.likelihoods.integrals import CROSSOVER, logistic_rule, mean_and_variance, normal_rule
from net2gp.likelihoods.targets import check_targets, shape_targets, without_ignored
from net2gp.tags import savable

NUM_POINTS = 32
"""The number of nodes of the rules for the logistic function, accurate to 1e-6 as for `Bernoulli`."""

FAR = 1e3
"""How far beyond all others the outermost cut points lie. The probability beyond them vanishes."""


@savable("ordinal.Ordinal")
@dataclass(frozen=True)
class Ordinal:
    """Ordered levels y ∈ {0, …, K − 1} of one output f: y = k where c_k < f + ε ≤ c_{k+1}.

    The K − 1 cut points c_1 < … < c_{K−1} are given, with c_0 = −∞ and c_K = ∞. Let F be the distribution
    function of ε, which is logistic or Gaussian with variance 1. Then p(y = k | f) = F(b) − F(a) with b =
    c_{k+1} − f and a = c_k − f. For the logistic F = σ, log p = log σ(b) + log σ(−a) +
    log(1 − e^{c_k − c_{k+1}}), the residual is σ(a) − σ(−b) and the negative Hessian σ'(a) + σ'(b). For the
    Gaussian the residual is (φ(a) − φ(b))/(Φ(b) − Φ(a)). The curvature is the Fisher information Σ_k p_k
    r_k², with r_k the residual at level k. log p is concave. The cost is O(N·K).

    A larger f makes higher levels more probable. The cut points fix the scale and the shift of f, so a
    network should be trained on −log p with the same cut points.

    Args:
        cut_points: K − 1 increasing numbers, for K levels.
        probit: Whether ε is Gaussian rather than logistic. `predict` is then a closed form, p(y ≤ k) =
            Φ((c_{k+1} − m)/√(1 + v)).

    Raises:
        InputError: If `cut_points` is not a tuple of finite, increasing numbers.

    >>> Ordinal((-1.0, 1.0)).predict(MultivariateNormal(torch.zeros(1, 1), torch.eye(1)[None])).probs
    tensor([[0.3033, 0.3935, 0.3033]])

    References: McCullagh (1980), Regression models for ordinal data; Chu & Ghahramani (2005), Gaussian
    processes for ordinal regression.
    """

    cut_points: tuple[float, ...]
    probit: bool = False
    canonical: ClassVar[bool] = False
    classifier: ClassVar[bool] = True

    def __post_init__(self) -> None:
        given = self.cut_points
        if isinstance(given, Tensor):
            given = given.tolist()
        if not isinstance(given, tuple | list) or not given:
            raise InputError(
                "cut_points must be a tuple of K − 1 numbers for K levels, but is "
                f"{given!r}. Pass for example Ordinal((-1.0, 0.0, 1.0)) for four levels."
            )
        cuts = tuple(float(value) for value in given)
        rising = all(low < high for low, high in itertools.pairwise(cuts))
        if not rising or not all(map(math.isfinite, cuts)):
            raise InputError(
                f"cut_points must be finite and increase, but are {cuts}. Pass for example "
                "Ordinal((-1.0, 0.0, 1.0))."
            )
        object.__setattr__(self, "cut_points", cuts)

    @property
    def num_levels(self) -> int:
        """The number K of levels."""
        return len(self.cut_points) + 1

    @staticmethod
    def num_outputs(y: Tensor) -> int:
        """Return 1, since every level depends on the same output.

        Args:
            y: Targets.

        Returns:
            One.
        """
        return 1

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check that `f` is (N, 1) and `y` holds integers from 0 to K − 1, as (N,) or (N, 1).

        Raises:
            InputError: If they do not.
        """
        check_targets(f, y)
        if f.shape[1] != 1:
            raise InputError(
                f"Ordinal needs one output, but the network has {f.shape[1]}. End it with "
                "nn.Linear(width, 1), or use Categorical() for levels without an order."
            )
        shape_targets(f, y)
        if y.is_floating_point() or y.dtype == torch.bool:
            raise InputError(f"y must hold integer levels, but is {y.dtype}. Pass y = y.long().")
        wrong = (y < 0) | (y >= self.num_levels)
        if bool(wrong.any()):
            raise InputError(
                without_ignored(y)
                or f"levels must be in 0..{self.num_levels - 1} for {len(self.cut_points)} cut points, but y "
                f"holds {int(y[wrong].reshape(-1)[0])}. Pass more cut points, or renumber the levels from 0."
            )

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute log p(y_n | f_n): (N,)."""
        level = y.reshape(-1, 1).long().expand(f.shape)
        return self._log_probs(f.double()).gather(-1, level)[:, 0].to(f.dtype)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute ∇_f log p(y_n | f_n): (N, 1)."""
        level = y.reshape(-1, 1).long().expand(f.shape)
        return self._slopes(f.double()).gather(-1, level).to(f.dtype)

    def curvature(self, f: Tensor) -> Tensor:
        """Compute Σ_k p_k r_k²: (N, 1, 1)."""
        wide = f.double()
        information = (self._log_probs(wide).exp() * self._slopes(wide).square()).sum(-1)
        return information[:, None, None].to(f.dtype)

    def predict(self, f: MultivariateNormal) -> distributions.Categorical:
        """Compute p(y_n = k) with f_n integrated out, as `.probs` (N, K)."""
        mean, variance = (value.double() for value in mean_and_variance(f))
        if self.probit:
            log_probs = _log_between(*self._ends(mean, (1 + variance).sqrt()))
        else:
            log_probs = self._integrated(mean, variance)
        return distributions.Categorical(logits=log_probs.to(f.mean.dtype))

    def _integrated(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Compute log E p(y = k | f): (N, K).

        As for `Bernoulli`, a rule over f serves small variances and a rule over the logistic ε serves large
        ones.
        """
        tiny = torch.finfo(variance.dtype).tiny
        z, z_weights = normal_rule(NUM_POINTS, like=mean)
        narrow = variance.clamp(tiny, CROSSOVER).sqrt()
        below = self._log_probs((mean + narrow * z)[..., None]) + z_weights.log()[:, None]
        t, t_weights = logistic_rule(NUM_POINTS, like=mean)
        wide = variance.clamp(min=CROSSOVER).sqrt()[..., None]
        above = _log_between(*self._ends((mean + t)[..., None], wide)) + t_weights.log()[:, None]
        return torch.where(variance < CROSSOVER, below.logsumexp(1), above.logsumexp(1))

    def _ends(self, f: Tensor, scale: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        """Return a and b of each level in units of `scale`. A last axis of size K replaces the one of f."""
        cuts = torch.tensor(self.cut_points, dtype=f.dtype, device=f.device)
        inner = (cuts - f) / scale
        # Finite outer ends, since infinite ones would give NaN gradients.
        edge = FAR + inner.detach().abs().amax(-1, keepdim=True)
        return torch.cat([-edge, inner], -1), torch.cat([inner, edge], -1)

    def _log_probs(self, f: Tensor) -> Tensor:
        """Compute log p(y = k | f) of each level: (…, K) for f (…, 1)."""
        lower, upper = self._ends(f)
        if self.probit:
            return _log_between(lower, upper)
        gaps = [math.inf, *(b - a for a, b in itertools.pairwise(self.cut_points)), math.inf]
        gap = torch.tensor(gaps, dtype=f.dtype, device=f.device)  # the same for every f
        return logsigmoid(upper) + logsigmoid(-lower) + torch.log(-torch.expm1(-gap))

    def _slopes(self, f: Tensor) -> Tensor:
        """Compute ∇_f log p(y = k | f) of each level: (…, K)."""
        lower, upper = self._ends(f)
        if not self.probit:
            return lower.sigmoid() - (-upper).sigmoid()
        scale = _log_between(lower, upper) + 0.5 * math.log(2 * math.pi)
        return (-0.5 * lower.square() - scale).exp() - (-0.5 * upper.square() - scale).exp()


def _log_between(lower: Tensor, upper: Tensor) -> Tensor:
    """Compute log(Φ(b) − Φ(a)) for a < b, in the tail where both are small.

    >>> torch.special.log_ndtr(torch.tensor(-30.0)), _log_between(torch.tensor(30.0), torch.tensor(90.0))
    (tensor(-454.3213), tensor(-454.3213))
    """
    right = lower > 0
    low, high = torch.where(right, -upper, lower), torch.where(right, -lower, upper)
    top = log_ndtr(high)
    return top + torch.log(-torch.expm1(log_ndtr(low) - top))


@expected_derivatives.register
def _(likelihood: Ordinal, mean: Tensor, covariance: Tensor, y: Tensor) -> ExpectedDerivatives:
    return expected_by_outputs(likelihood, mean, covariance, y)
