"""A likelihood from the law of y given f alone."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import Distribution, kl_divergence
from torch.func import grad

from net2gp.errors import InputError
from net2gp.likelihoods.integrals import mean_and_variance
from net2gp.likelihoods.integrated import Integrated, plain_average
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
        here = self.law(f.detach())

        def slope(g: Tensor) -> Tensor:
            return grad(lambda h: kl_divergence(here, self.law(h)).sum())(g).sum()

        try:
            return grad(slope)(f.detach())
        except NotImplementedError:  # torch knows no divergence of this law
            return averaged_square(self.law, f.detach())

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


LARGEST_COUNT = 100_000
"""The most values of a count that the Fisher information is summed over."""

NUM_REAL = 801
"""Nodes of an integral over a real target."""


def averaged_square(law: object, f: Tensor) -> Tensor:
    """E (∂ log p(y | f)/∂f)² under the law of y given f, by a sum over counts or an integral over reals.

    The nodes of the integral are μ + s sinh t for mean μ and standard deviation s, weighted by the density.

    >>> law = lambda f: torch.distributions.Normal(f, 2.0)
    >>> averaged_square(law, torch.zeros(1)).round(decimals=4)
    tensor([0.2500])
    """
    assert callable(law)
    here: Distribution = law(f)
    if here.support is not None and here.support.is_discrete:
        top = float((here.mean + 12 * here.stddev).max()) + 20
        if not top < LARGEST_COUNT:
            raise InputError(
                f"the law {type(here).__name__} spreads over {top:.3g} counts, too many to sum the Fisher "
                "information over. Give the likelihood a method information(f)."
            )
        t = torch.arange(int(top) + 1, dtype=f.dtype, device=f.device)
        y, log_steps = t.reshape(-1, *[1] * f.dim()).expand(-1, *f.shape), torch.zeros(())
    else:
        t = torch.linspace(-8, 8, NUM_REAL, dtype=f.dtype, device=f.device)
        t = t.reshape(-1, *[1] * f.dim())
        width = here.stddev.nan_to_num(1.0, posinf=1.0)
        y = here.mean.nan_to_num(0.0) + width * torch.sinh(t)
        log_steps = torch.cosh(t).log()
    inside = here.support.check(y) if here.support is not None else torch.ones_like(y).bool()
    y = torch.where(inside, y, here.mean)
    weights = torch.where(inside, here.log_prob(y) + log_steps.to(f), -torch.inf).softmax(0)
    slopes = grad(lambda g: law(g).log_prob(y).sum())(f.expand(y.shape))
    return (weights * slopes.square()).sum(0)
