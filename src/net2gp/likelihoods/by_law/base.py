"""A likelihood that follows from the law of y given f alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import Distribution, kl_divergence
from torch.func import grad

from net2gp.errors import InputError
from net2gp.likelihoods.by_law.integrated import Integrated, plain_average
from net2gp.likelihoods.expectations import (
    ExpectedDerivatives,
    expected_by_outputs,
    expected_derivatives,
)
from net2gp.likelihoods.integrals import mean_and_variance
from net2gp.likelihoods.targets import check_targets, shape_targets


class LawLikelihood(ABC):
    """One target per output, with the law `law(f)`. Everything else follows from it.

    Your own likelihood is a frozen dataclass that derives from this class and has the method `law`. The law
    determines the following, and you may override each method where you know a closed form:

    - log p(y | f) and its gradient, by automatic differentiation;
    - the Fisher information: the second derivative of the law's divergence if torch has a divergence for it,
      otherwise the square of the gradient, averaged over y;
    - the prediction, which integrates f out numerically (`Integrated`), with its mean and variance;
    - the targets that are allowed, which are the ones in the support of the law.

    `canonical = True` in the class says that the curvature is the negative Hessian whatever y is. If the
    class does not say it, the two are compared. A gradient costs two evaluations of the law.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Waiting(LawLikelihood):
    ...     def law(self, f):
    ...         return torch.distributions.Exponential(f.exp(), validate_args=False)
    >>> Waiting().curvature(torch.zeros(1, 1))
    tensor([[[1.]]])

    Reference: McCullagh & Nelder (1989), Generalized Linear Models.
    """

    @abstractmethod
    def law(self, f: Tensor) -> Distribution:
        """Return the law of y given f.

        Pass `validate_args=False` to torch's distributions: their checks do not run under `torch.func`.

        Args:
            f: Outputs, (…, C), with any number of leading axes.

        Returns:
            A law whose batch has the shape of f.
        """

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check that `y` is (N, C), or (N,) with one output, and lies in the support of the law.

        Raises:
            InputError: If it does not.
        """
        check_targets(f, y)
        values = shape_targets(f, y).to(f)
        support = self.law(f.detach()).support
        wrong = ~support.check(values) if support is not None else torch.zeros_like(values).bool()
        if bool(wrong.any()):
            raise InputError(
                f"y holds {values[wrong][0].item():g}, which {type(self).__name__} gives no probability: its "
                f"targets are {support}. Pass other targets, or another likelihood."
            )

    def log_density(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute log p(y | f) for each output.

        Args:
            f: Outputs, (…, C).
            y: Targets, which broadcast against f.

        Returns:
            The log densities, in the shape of f.
        """
        return self.law(f).log_prob(y)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute log p(y_n | f_n), summed over outputs: (N,)."""
        return self.log_density(f, shape_targets(f, y).to(f)).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute ∇_f log p(y_n | f_n): (N, C)."""
        return grad(lambda g: self.log_prob(g, y).sum())(f)

    def information(self, f: Tensor) -> Tensor:
        """Compute the Fisher information of each output.

        Args:
            f: Outputs, (…, C).

        Returns:
            The information, in the shape of f.
        """
        f = f.detach()
        try:
            found, seen = divergence_curvature(self.law, f)
        except NotImplementedError:  # torch has no divergence for this law
            return averaged_square(self.law, f)
        # The divergence may have a kink at f, as for the Laplace law. Automatic differentiation is then wrong
        # there, and differences show it.
        smooth = ((found - seen).abs() <= 0.01 * seen.abs()) | ~(found.isfinite() & seen.isfinite())
        return found if bool(smooth.all()) else averaged_square(self.law, f)

    def curvature(self, f: Tensor) -> Tensor:
        """Return the Fisher information as diagonal matrices: (N, C, C)."""
        return torch.diag_embed(self.information(f))

    def moments(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Compute E y and Var y for f ~ N(mean, variance).

        Args:
            mean: Means of the outputs, (N, C).
            variance: Variances of the outputs, (N, C).

        Returns:
            Mean and variance of the targets, each (N, C).
        """
        first = plain_average(lambda f: self.law(f).mean, mean, variance)
        within = plain_average(lambda f: self.law(f).variance, mean, variance)
        between = plain_average(lambda f: (self.law(f).mean - first).square(), mean, variance)
        return first, within + between

    def predict(self, f: MultivariateNormal) -> Distribution:
        """Integrate f_nc out, for each output by itself: a law of batch (N, C)."""
        return Integrated(self, *mean_and_variance(f))


@expected_derivatives.register
def _(
    likelihood: LawLikelihood, mean: Tensor, covariance: Tensor, y: Tensor
) -> ExpectedDerivatives:
    return expected_by_outputs(likelihood, mean, covariance, y)


LARGEST_COUNT = 100_000
"""The largest count up to which the Fisher information is summed."""

NUM_REAL = 801
"""The number of nodes of an integral over a real target."""


Law = Callable[[Tensor], Distribution]


def divergence_curvature(law: Law, f: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ∂²/∂g² KL(p(y | f) ‖ p(y | g)) at g = f, once by automatic differentiation and once by
    differences.

    Args:
        law: Maps outputs to the law of y.
        f: Outputs of any shape.

    Returns:
        Both values, in the shape of f.

    >>> law = lambda f: torch.distributions.Poisson(f.exp(), validate_args=False)
    >>> divergence_curvature(law, torch.zeros(1))[0]
    tensor([1.])
    """
    here, step = law(f), 1e-3

    def slope(g: Tensor) -> Tensor:
        return grad(lambda h: kl_divergence(here, law(h)).sum())(g).sum()

    wide = f.double()
    around = [kl_divergence(law(wide), law(wide + shift)) for shift in (step, -step)]
    return grad(slope)(f), ((around[0] + around[1]) / step**2).to(f.dtype)


def averaged_square(law: Law, f: Tensor) -> Tensor:
    """Compute E (∂ log p(y | f)/∂f)² under the law of y given f, by a sum over counts or an integral over
    reals.

    For mean μ and standard deviation s, the nodes of the integral are μ + s sinh t, or μ e^t if y is
    positive. They are weighted by the density.

    Args:
        law: Maps outputs to the law of y.
        f: Outputs of any shape.

    Returns:
        The Fisher information, in the shape of f.

    Raises:
        InputError: If the law has no finite mean and variance, or spreads over too many counts.

    >>> law = lambda f: torch.distributions.Normal(f, 2.0)
    >>> averaged_square(law, torch.zeros(1)).round(decimals=4)
    tensor([0.2500])
    """
    here = law(f)
    mean, std = here.mean, here.stddev
    if not bool((mean.isfinite() & std.isfinite()).all()):
        raise InputError(
            f"the law {type(here).__name__} has no finite mean and variance at these outputs, so that its "
            "Fisher information is not averaged numerically. Give the likelihood a method information(f)."
        )
    y, log_steps = _nodes(here, mean, std)
    inside = here.support.check(y) if here.support is not None else torch.ones_like(y).bool()
    # Outside the support log_prob may be NaN, whose gradient would spoil the sum even with weight zero.
    y = torch.where(inside, y, mean)
    weights = torch.where(inside, here.log_prob(y) + log_steps, -torch.inf).softmax(0)
    slopes = grad(lambda g: law(g).log_prob(y).sum())(f.expand(y.shape))
    return (weights * slopes.square()).sum(0)


def _nodes(law: Distribution, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Return targets along a first axis, and the logarithms of the distances between them."""
    lead = (-1, *[1] * mean.dim())
    if law.support is not None and law.support.is_discrete:
        top = float((mean + 30 * std).max()) + 20
        if not top < LARGEST_COUNT:
            raise InputError(
                f"the law {type(law).__name__} spreads over {top:.3g} counts, too many to sum the Fisher "
                "information over. Give the likelihood a method information(f)."
            )
        y = torch.arange(int(top) + 1, dtype=mean.dtype, device=mean.device).reshape(lead)
        return y.expand(-1, *mean.shape), torch.zeros_like(mean)
    positive = law.support is not None and not bool(law.support.check(-mean.abs() - std).any())
    ends = (-40.0, 6.0) if positive else (-8.0, 8.0)
    t = torch.linspace(*ends, NUM_REAL, dtype=mean.dtype, device=mean.device).reshape(lead)
    if positive:
        return mean * t.exp(), t
    return mean + std * torch.sinh(t), torch.cosh(t).log()
