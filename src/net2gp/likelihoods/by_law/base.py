"""A likelihood from the law of y given f alone."""

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
    """One target for each output, with the law `law(f)`: everything else follows from it.

    A likelihood of your own is a frozen dataclass that derives from this class and has the method `law`. From
    the law follow, each of them a method that may be written anew where a closed form is known:

    - log p(y | f), its gradient by automatic differentiation, and its Fisher information: the second
      derivative of the law's divergence where torch has one, else the square of the gradient averaged over y;
    - the prediction, f integrated out numerically (`Integrated`), with its mean and variance;
    - the targets that are allowed: those in the support of the law.

    `canonical = True` in the class says that the curvature is the negative Hessian whatever y is; a class
    that does not say so is tried. Cost: that of the law, twice that for a gradient.

    Reference: McCullagh & Nelder (1989), Generalized Linear Models.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Waiting(LawLikelihood):
    ...     def law(self, f):
    ...         return torch.distributions.Exponential(f.exp(), validate_args=False)
    >>> Waiting().curvature(torch.zeros(1, 1))
    tensor([[[1.]]])
    """

    @abstractmethod
    def law(self, f: Tensor) -> Distribution:
        """The law of y given f (…, C): its batch has the shape of f, for any number of axes in front.

        Pass `validate_args=False` to torch's distributions: their checks do not run under `torch.func`.
        """

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise unless `y` is (N, C), or (N,) with one output, and in the support of the law."""
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
        """log p(y | f) of each output, in the shape of f."""
        return self.law(f).log_prob(y)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """log p(y_n | f_n), summed over outputs: (N,)."""
        return self.log_density(f, shape_targets(f, y).to(f)).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """∇_f log p(y_n | f_n): (N, C)."""
        return grad(lambda g: self.log_prob(g, y).sum())(f)

    def information(self, f: Tensor) -> Tensor:
        """The Fisher information of each output, in the shape of f."""
        f = f.detach()
        try:
            found, seen = divergence_curvature(self.law, f)
        except NotImplementedError:  # torch knows no divergence of this law
            return averaged_square(self.law, f)
        # a divergence with a kink, as Laplace's, has no derivative where it is needed
        smooth = ((found - seen).abs() <= 0.01 * seen.abs()) | ~(found.isfinite() & seen.isfinite())
        return found if bool(smooth.all()) else averaged_square(self.law, f)

    def curvature(self, f: Tensor) -> Tensor:
        """The Fisher information, diagonal: (N, C, C)."""
        return torch.diag_embed(self.information(f))

    def moments(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """E y and Var y for f ~ N(mean, variance), each in the shape of the mean."""
        first = plain_average(lambda f: self.law(f).mean, mean, variance)
        within = plain_average(lambda f: self.law(f).variance, mean, variance)
        between = plain_average(lambda f: (self.law(f).mean - first).square(), mean, variance)
        return first, within + between

    def predict(self, f: MultivariateNormal) -> Distribution:
        """The law of y_nc with f_nc integrated out, each output by itself: batch (N, C)."""
        return Integrated(self, *mean_and_variance(f))


@expected_derivatives.register
def _(
    likelihood: LawLikelihood, mean: Tensor, covariance: Tensor, y: Tensor
) -> ExpectedDerivatives:
    return expected_by_outputs(likelihood, mean, covariance, y)


LARGEST_COUNT = 100_000
"""The most values of a count that the Fisher information is summed over."""

NUM_REAL = 801
"""Nodes of an integral over a real target."""


Law = Callable[[Tensor], Distribution]


def divergence_curvature(law: Law, f: Tensor) -> tuple[Tensor, Tensor]:
    """∂²/∂g² KL(p(y | f) ‖ p(y | g)) at g = f, by automatic differentiation and by differences, in f's shape.

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
    """E (∂ log p(y | f)/∂f)² under the law of y given f, by a sum over counts or an integral over reals.

    The nodes of the integral are μ + s sinh t for mean μ and standard deviation s, or μ e^t for positive y,
    weighted by the density.

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
    y = torch.where(inside, y, mean)
    weights = torch.where(inside, here.log_prob(y) + log_steps, -torch.inf).softmax(0)
    slopes = grad(lambda g: law(g).log_prob(y).sum())(f.expand(y.shape))
    return (weights * slopes.square()).sum(0)


def _nodes(law: Distribution, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Targets along a first axis, and the logarithms of their distances."""
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
